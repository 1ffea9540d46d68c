"""The rollout half of the trainer: `GRPOTrainer`, whose batches carry the behaviour policy's top K."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from .. import preflight
from .._hooks import TRLCompatibilityError, substituted
from ..checkpoint import last_complete_checkpoint
from ..config import PDMGRPOConfig
from ..metrics import SYNC_BYTES, SYNC_SECONDS
from .candidates import collate
from .functions import fill_in, lack_candidates, with_candidates
from .own_policy import score_behavior
from .vllm import TopKVLLMGeneration


@dataclass
class _Rollout:
    """What is known of a rollout while TRL makes it."""

    expects_scoring: bool  # TRL will ask for the policy's scores once more, which PDM does not use
    sampled: bool = False
    declined: bool = False
    logprobs: Any = None  # the behaviour policy's, one float a token


class TopKRolloutTrainer(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose batches hold the behaviour policy's candidates at each token, and whose vLLM always
    samples from the trainer's current weights.

    A batch gets `behavior_topk_ids` (int32) and `behavior_topk_logps` (float32, in nats), `(B, T, K+1)` each, with the
    sampled token in slot 0. It gets neither where the policy that is trained is sure to be the one that sampled.

    A rollout runs through these hooks in this order:

    1. `_generate_and_score_completions` announces it, and adds the behaviour policy to TRL's batch.
    2. `_generate`, within it, notes the logprobs that the engine returned, which carry their candidates.
    3. `_get_per_token_logps_and_entropies`, still within it, declines to score the policy that has just sampled.

    All other calls of the last two, whoever makes them, are passed on to TRL as they are.
    """

    args: PDMGRPOConfig
    _rollout: _Rollout | None = None
    _sampled_at: int | None = None  # the step of the rollout that is trained on

    @wraps(GRPOTrainer.__init__, assigned=())  # type: ignore[misc]  # for its signature
    def __init__(self, model, reward_funcs=None, args=None, *other_args, **kwargs):
        def vllm_generation(**vllm_kwargs):
            preflight.check(self)  # before the engine takes its time to start
            return TopKVLLMGeneration.of(self.args, ends=lambda: self.eos_token_ids, **vllm_kwargs)

        with substituted(grpo_trainer, VLLMGeneration=vllm_generation, GRPOConfig=PDMGRPOConfig):
            super().__init__(model, reward_funcs, PDMGRPOConfig.from_grpo(args), *other_args, **kwargs)
        if not self.use_vllm:
            preflight.check(self)
        elif not isinstance(self.vllm_generation, TopKVLLMGeneration):
            raise TRLCompatibilityError(
                "`GRPOTrainer.__init__` no longer builds its vLLM backend as `VLLMGeneration`."
            )
        if self.rollout_func is not None:
            self.rollout_func = with_candidates(self.rollout_func)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    # ---- Weights that move between two rollouts

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """As `GRPOTrainer.train`, but `resume_from_checkpoint=True` takes the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        # A rollout that an interrupted training left is of other weights and another step
        self._step, self._buffered_inputs = 0, None
        self._forget_sync()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        # Callbacks may put other weights in for an evaluation and take them out again, all within one step
        self._forget_sync()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._forget_sync()

    def _forget_sync(self) -> None:
        """Have vLLM take the weights before it samples again.

        TRL syncs once a step. But weights also change in between: by users, by callbacks, and when a checkpoint or the
        best model is loaded.
        """
        self._last_loaded_step = -1

    # ---- A rollout

    @contextmanager
    def _during(self, name: str, phase: Any) -> Iterator[Any]:
        """A block in which the attribute `name` is `phase`."""
        before = getattr(self, name)
        setattr(self, name, phase)
        try:
            yield phase
        finally:
            setattr(self, name, before)

    def _generate_and_score_completions(self, inputs):
        # TRL scores the rollout a second time where several optimizer steps use it. PDM knows the behaviour policy
        # from the engine, or scores it below together with its top K.
        steps_per_rollout = self.args.steps_per_generation * self.num_iterations
        several_steps = self.args.gradient_accumulation_steps % steps_per_rollout != 0
        with self._during("_rollout", _Rollout(expects_scoring=several_steps)) as rollout:
            batch = super()._generate_and_score_completions(inputs)
        if self._mode == "train":
            self._sampled_at = self.state.global_step
        if not rollout.sampled:
            raise TRLCompatibilityError("`GRPOTrainer` no longer generates by `_generate`.")
        reference_in_turn = (self.beta != 0.0) == ("ref_per_token_logps" in batch)
        if rollout.declined != several_steps or not reference_in_turn:
            raise TRLCompatibilityError("`GRPOTrainer` no longer scores a rollout's policy first, then its reference.")

        behavior, needs_scores = None, several_steps
        if rollout.logprobs is not None:
            vocab_size = self.model.config.get_text_config().vocab_size
            behavior = collate(rollout.logprobs, batch["completion_ids"], self.args.num_candidates, vocab_size)
            needs_scores = False
        if self.rollout_func is not None:
            needs_scores = needs_scores or lack_candidates(behavior, batch, self._trained_on(batch))
            # Scoring is collective where the model is sharded: all processes do it, or none
            needs_scores = self.accelerator.gather(torch.tensor([needs_scores], device=self.accelerator.device)).any()
        if needs_scores:
            behavior = fill_in(behavior, self._score_behavior(batch), batch)
        if behavior is None and self.use_vllm and self.rollout_func is None:
            raise TRLCompatibilityError("`GRPOTrainer._generate` no longer returns the logprobs that vLLM sampled.")
        if behavior is not None:  # otherwise the batch trains the very policy that sampled it: no token can be outside
            batch["behavior_topk_ids"], batch["behavior_topk_logps"] = behavior
        return batch

    def _generate(self, prompts: list):
        if not self.use_vllm:
            output = super()._generate(prompts)
        else:
            output = self._generate_in_sync(super()._generate, prompts)
        if not isinstance(output, tuple) or len(output) != 8:
            raise TRLCompatibilityError("`GRPOTrainer._generate` no longer returns 8 values, logprobs in fifth place.")
        if self.use_vllm and self.rollout_func is None:
            self.vllm_generation.check_not_all_nan(output[4])
        if self._rollout and not self._rollout.sampled:  # a reward function may generate too
            self._rollout.sampled, self._rollout.logprobs = True, output[4]
        return output

    def _generate_in_sync(self, generate, prompts: list):
        engine = self.vllm_generation
        engine.check_settings(self)
        synced, must_sync = engine.last_sync, self._last_loaded_step != self.state.global_step
        output = generate(prompts)
        if engine.last_sync is not synced:
            self._metrics[self._mode][SYNC_SECONDS].append(engine.last_sync.seconds)
            self._metrics[self._mode][SYNC_BYTES].append(engine.last_sync.bytes)
        elif must_sync:
            raise TRLCompatibilityError("`GRPOTrainer` no longer syncs vLLM's weights by `_last_loaded_step`.")
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        rollout = self._rollout
        if rollout and rollout.expects_scoring and rollout.sampled and not rollout.declined:
            rollout.declined = True
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _score_behavior(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        score, args = super()._get_per_token_logps_and_entropies, self.args
        batch_size = getattr(args, f"per_device_{self._mode}_batch_size")
        return score_behavior(
            score, self.model, batch, batch_size, args.num_candidates, args.gradient_checkpointing_kwargs
        )

    @staticmethod
    def _trained_on(batch: dict[str, Any]) -> Tensor:
        return (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
