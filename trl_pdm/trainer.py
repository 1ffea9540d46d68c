"""`PDMGRPOTrainer`: TRL's `GRPOTrainer`, with predictive divergence masks on which tokens may update the policy."""

import math
import textwrap
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from . import noise, preflight, rollout
from ._hooks import TRLCompatibilityError, substituted
from .checkpoint import last_complete_checkpoint
from .config import PDMGRPOConfig
from .metrics import MaskedColumn, TokenMetrics, Tokens, forecasts, summarize
from .report.records import TokenRecords, write_settings
from .topk_head import topk_head
from .trust_region import Evidence, ratio_base, replay_support
from .weight_sync.check import SyncCheck
from .weight_sync.parameters import quiet_bitsandbytes


@dataclass
class _Rollout:
    """While TRL makes a batch of completions."""

    expects_scoring: bool  # TRL will ask for the policy's scores once more, which PDM does not use
    sampled: bool = False
    declined: bool = False
    logprobs: Any = None  # the behaviour policy's, one float a token


@dataclass
class _Loss:
    """While TRL computes the loss of a micro-batch."""

    model: Any
    batch: dict[str, Any]  # the micro-batch, the same object each time it is trained on
    given: dict[str, Any]  # what TRL is given of it
    scored: bool = False


class PDMGRPOTrainer(GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization with predictive divergence masks (PDM), a drop-in replacement for
    [`~trl.GRPOTrainer`]. Takes the same arguments; `args` is a [`PDMGRPOConfig`], or a [`~trl.GRPOConfig`] for PDM's
    defaults.

    A token does not update the policy when the training policy has left the trust region around the policy that
    sampled the tokens, and the update is predicted to move it further out. Everything else is `GRPOTrainer`'s.

    Example:

    ```python
    >>> from trl.rewards import accuracy_reward
    >>> from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer
    >>> from datasets import load_dataset

    >>> trainer = PDMGRPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=PDMGRPOConfig(output_dir="Qwen3-0.6B-PDM", use_vllm=True),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Raises:
        TRLCompatibilityError: The installed TRL is not one this package can build on.
        TypeError: `args` is of a subclass of `GRPOConfig` that is not one of `PDMGRPOConfig`.
        ValueError: A field of `args` is out of range or does not suit the model.
        WeightSyncError: While training: vLLM does not hold the trainer's weights.
    """

    _tag_names = ["trl", "grpo", "pdm"]
    _name = "PDM"
    _paper = {
        "title": "Predictive Divergence Masks for LLM RL",
        "id": "2607.10848",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{predictive2026divergence,
                title        = {{Predictive Divergence Masks for LLM RL}},
                author       = {Xiangxin Zhou and Jiarui Yao and Penghui Qi and Bowen Ping and Jiaqi Tang and Haonan Wang and
                                Tianyu Pang},
                year         = 2026,
                eprint       = {arXiv:2607.10848},
            }"""),
    }

    @wraps(GRPOTrainer.__init__, assigned=())  # type: ignore[misc]  # for its signature
    def __init__(self, model, reward_funcs=None, args=None, *other_args, **kwargs):
        quiet_bitsandbytes()
        self._phase: _Rollout | _Loss | None = None
        self._sampled_at: int | None = None  # the step of the rollout that is trained on

        def vllm_generation(**vllm_kwargs):
            preflight.check(self)  # before the engine takes its time to start
            return rollout.TopKVLLMGeneration(
                divergence_top_k=self.args.candidates,
                weight_sync=self.args.vllm_weight_sync,
                quantization=self.args.vllm_quantization,
                dtype=self.args.vllm_dtype,
                weight_rounding=self.args.vllm_weight_rounding,
                seed=self.args.seed,
                ends=lambda: self.eos_token_ids,
                **vllm_kwargs,
            )

        with substituted(grpo_trainer, VLLMGeneration=vllm_generation, GRPOConfig=PDMGRPOConfig):
            super().__init__(model, reward_funcs, PDMGRPOConfig.from_grpo(args), *other_args, **kwargs)
        if not self.use_vllm:
            preflight.check(self)
        elif not isinstance(self.vllm_generation, rollout.TopKVLLMGeneration):
            raise TRLCompatibilityError(
                "`GRPOTrainer.__init__` no longer builds its vLLM backend as `VLLMGeneration`."
            )
        if self.rollout_func is not None:
            self.rollout_func = rollout.with_candidates(self.rollout_func)

        args = self.args
        args.warn_of_options_without_effect()
        self._region = args.trust_region
        self._ratio_max = args.importance_ratio_max if args.mask_replaces_clipping else None
        if args.mask_replaces_clipping:
            self.epsilon_low = self.epsilon_high = math.inf
        self._token_metrics = TokenMetrics(self.accelerator.gather)
        self._masked_column = MaskedColumn(self._logs["extra"], self.accelerator, self.log_completions)
        self._sync_check = SyncCheck(args.sync_check_steps, args.sync_check_threshold, self.accelerator.gather)
        self._token_records = TokenRecords(args, writes=self.is_world_process_zero())
        self._noise = noise.sources(self.model, args.neftune_noise_alpha)
        noise.warn_of(self._noise)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _embeddings_needed(self) -> int:
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        # Some tokenizers of text models know a placeholder for images that their text models have no row for
        placeholders = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("image", "audio", "video")}
        return 1 + max(set(tokenizer.get_vocab().values()) - placeholders, default=-1)

    @property
    def _vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        if self.is_world_process_zero():
            write_settings(
                self.args,
                model=self.model.config.name_or_path,
                reward_funcs=self.reward_func_names,
                processes=self.accelerator.num_processes,
            )
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
        """Have vLLM take the weights before it samples again. TRL has it once a step, but not only steps move weights: so
        do users, callbacks, and the loading of a checkpoint or of the best model."""
        self._last_loaded_step = -1

    # A step runs through these hooks in this order:
    # 1. `_generate_and_score_completions` announces a rollout and makes TRL's batch a batch with a behaviour policy.
    # 2. `_generate`, within it, takes down the logprobs that the engine sampled, which carry their candidates.
    # 3. `_get_per_token_logps_and_entropies`, still within it, declines to score the policy that has just sampled.
    # 4. `compute_loss` announces a loss and holds the advantages back.
    # 5. `_get_per_token_logps_and_entropies`, within it, scores the candidates too and hands over masked advantages.
    # Any other call of theirs, whoever makes it, is passed on to TRL as it is.

    @contextmanager
    def _during(self, phase):
        self._phase = phase
        try:
            yield phase
        finally:
            self._phase = None

    # ---- Rollout: the behaviour policy's top K, into TRL's batch

    def _generate_and_score_completions(self, inputs):
        # TRL scores the rollout a second time where several optimizer steps use it. PDM knows the behaviour policy
        # from the engine, or scores it below together with its top K.
        steps_per_rollout = self.args.steps_per_generation * self.num_iterations
        several_steps = self.args.gradient_accumulation_steps % steps_per_rollout != 0
        with self._during(_Rollout(expects_scoring=several_steps)) as rolled_out:
            batch = super()._generate_and_score_completions(inputs)
        if self._mode == "train":
            self._sampled_at = self.state.global_step
        if not rolled_out.sampled:
            raise TRLCompatibilityError("`GRPOTrainer` no longer generates by `_generate`.")
        reference_in_turn = (self.beta != 0.0) == ("ref_per_token_logps" in batch)
        if rolled_out.declined != several_steps or not reference_in_turn:
            raise TRLCompatibilityError("`GRPOTrainer` no longer scores a rollout's policy first, then its reference.")
        self._token_records.tag(self._mode, batch, self._logs["rewards"], self.reward_weights)
        self._masked_column.tag(batch)

        behavior, needs_scores = None, several_steps
        if rolled_out.logprobs is not None:
            behavior = rollout.collate(
                rolled_out.logprobs, batch["completion_ids"], self.args.candidates, self._vocab_size
            )
            needs_scores = False
        if self.rollout_func is not None:
            needs_scores = needs_scores or rollout.lack_candidates(behavior, batch, self._trained_on(batch))
            # Scoring is collective where the model is sharded: all processes do it, or none
            needs_scores = self.accelerator.gather(torch.tensor([needs_scores], device=self.accelerator.device)).any()
        if needs_scores:
            behavior = rollout.fill_in(behavior, self._score_behavior(batch), batch)
        if behavior is None and self.use_vllm and self.rollout_func is None:
            raise TRLCompatibilityError("`GRPOTrainer._generate` no longer returns the logprobs that vLLM sampled.")
        if behavior is not None:  # otherwise the batch trains the very policy that sampled it: no token can be outside
            batch["behavior_topk_ids"], batch["behavior_topk_logps"] = behavior
        return batch

    def _generate(self, prompts: list):
        synced = self.vllm_generation.last_sync if self.use_vllm else None
        if self.use_vllm:
            self.vllm_generation.check_settings(self)
        must_sync = self.use_vllm and self._last_loaded_step != self.state.global_step
        output = super()._generate(prompts)
        if must_sync and self.vllm_generation.last_sync is synced:
            raise TRLCompatibilityError("`GRPOTrainer` no longer syncs vLLM's weights by `_last_loaded_step`.")
        if self.use_vllm and (sync := self.vllm_generation.last_sync) is not synced:
            self._metrics[self._mode]["weight_sync/seconds"].append(sync.seconds)
            self._metrics[self._mode]["weight_sync/bytes"].append(sync.bytes)
        if not isinstance(output, tuple) or len(output) != 8:
            raise TRLCompatibilityError("`GRPOTrainer._generate` no longer returns 8 values, logprobs in fifth place.")
        if self.use_vllm:
            rollout.check_not_all_nan(output[4])
        if isinstance(self._phase, _Rollout):
            self._phase.sampled, self._phase.logprobs = True, output[4]
        return output

    def _score_behavior(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        score, args = super()._get_per_token_logps_and_entropies, self.args
        batch_size = getattr(args, f"per_device_{self._mode}_batch_size")
        return rollout.score_behavior(
            score, self.model, batch, batch_size, args.candidates, args.gradient_checkpointing_kwargs
        )

    @property
    def _replays_rollout_func(self) -> bool:
        """Whether candidates may be those of a sampler that truncates, of which the config knows nothing."""
        return self.rollout_func is not None and self.args.sampling_support == "replay"

    @staticmethod
    def _trained_on(batch: dict[str, Any]) -> Tensor:
        return (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()

    # ---- Loss: the mask, as token-level advantages for TRL's own `_compute_loss`

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "behavior_topk_ids" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The advantages are held back until the forward has told which tokens may update: were they read earlier, the
        # loss would train without the mask.
        given = {name: value for name, value in inputs.items() if name not in ("advantages", "old_per_token_logps")}
        with self._during(_Loss(model, inputs, given)) as loss:
            try:
                value = super().compute_loss(model, given, return_outputs, num_items_in_batch)
            except KeyError as error:
                if error.args != ("advantages",) or loss.scored:
                    raise
                raise self._read_too_early() from error
        if not loss.scored:
            raise TRLCompatibilityError("`GRPOTrainer._compute_loss` no longer scores the batch it trains on.")
        return value

    def _read_too_early(self) -> Exception:
        overrides = [cls for cls in type(self).__mro__ if "_compute_loss" in vars(cls)]
        if overrides[0] is GRPOTrainer:
            return TRLCompatibilityError("`GRPOTrainer._compute_loss` reads the advantages before scoring.")
        return RuntimeError(
            f"`{overrides[0].__name__}._compute_loss` reads `inputs['advantages']` before the forward pass, which decides "
            "which tokens may update. Read them after `self._get_per_token_logps_and_entropies(...)`, masked and of shape "
            "(B, T), or override `compute_loss`, whose `inputs['advantages']` are those of the rollout."
        )

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        score, phase = super()._get_per_token_logps_and_entropies, self._phase
        arguments = model, input_ids, attention_mask, logits_to_keep, batch_size
        if isinstance(phase, _Rollout) and phase.expects_scoring and phase.sampled and not phase.declined:
            phase.declined = True
            return None, None, None
        if not (isinstance(phase, _Loss) and not phase.scored and model is phase.model):
            return score(*arguments, **kwargs)
        phase.scored = True
        evidence, logps, entropy, *others = self._gather_evidence(phase, *arguments, **kwargs)

        def again(weights=nullcontext) -> Evidence:
            with torch.no_grad(), noise.silenced(model), weights():
                return self._gather_evidence(phase, *arguments, **kwargs)[0]

        mask = self._trained_on(phase.given)
        self._check_sync(evidence, mask, again)
        return self._apply_trust_region(phase, evidence, logps, entropy, mask), entropy, *others

    def _gather_evidence(self, loss, model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs):
        """The two policies at the tokens of a micro-batch, before what TRL's own forward yields."""
        ids = loss.given["behavior_topk_ids"]
        with topk_head(
            attention_mask,
            logits_to_keep,
            batch_size,
            ids=ids,
            with_sum_sq=self.args.needs_sum_sq,
            with_grad=self.args.sampling_support == "replay",
        ) as scores:
            outputs = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )
        valid = ids >= 0
        valid[..., 0] = True  # an empty slot 0 is a token without evidence, not the absence of a token
        evidence = Evidence(
            behavior_logps=loss.given["behavior_topk_logps"],
            policy_logps=scores.logps,
            valid=valid,
            vocab_size=scores.vocab_size,
            policy_sum_sq=scores.sum_sq,
        )
        return evidence, *outputs

    def _apply_trust_region(self, loss, evidence, logps, entropy, mask) -> Tensor:
        """Add to `loss.given` what TRL's loss is to use, all `(B, T)`: `advantages`, zero where masked, and the behaviour
        logprobs, truncated as `old_per_token_logps` and as they are for the sequence mask of
        `off_policy_mask_threshold`. Returns the training policy's logprobs, over the tokens that sampling left."""
        advantages, known = loss.batch["advantages"], dict[str, Any]()
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        if self.use_vllm and (self.vllm_generation.truncates or self._replays_rollout_func):
            replayed, complete, log_mass = replay_support(evidence)
            known |= dict(support_known=complete, log_surviving_mass=log_mass.detach())
            if self.args.sampling_support == "replay":
                # The entropy is that of the whole vocabulary: not of what the step changes then
                evidence, logps, entropy = replayed, logps - log_mass, None
        assessment = self._region.assess(evidence, advantages, entropy)
        base = ratio_base(evidence, self._ratio_max)
        # At padding TRL's own are 0, and so must be what they are compared with: exp(0 - logp) may be infinite
        base = torch.where(loss.given["completion_mask"].bool(), base, 0)
        if self.importance_sampling_level == "sequence":
            # A token's logprob is in the ratio of its whole sequence. A masked one stays in its value and leaves its
            # gradient: taken away here and not in the logprob itself, which `beta` still regularizes.
            base = base + torch.where(assessment.keep, 0, logps - logps.detach())
        loss.given["advantages"] = advantages * assessment.keep
        loss.given["old_per_token_logps"] = base
        loss.given["sampling_per_token_logps"] = evidence.behavior_logps[..., 0]

        if self.args.log_realized_alignment:
            step = self.state.global_step
            known["forecasts"] = forecasts(loss.batch, step, assessment, evidence.log_ratio(), advantages, mask)
        tokens = Tokens(mask, self._region, evidence, assessment, advantages, self._ratio_max, entropy, **known)
        self._token_metrics.add(self._mode, *summarize(tokens))
        self._masked_column.add(loss.batch, assessment.keep, mask)
        self._token_records.keep(self._mode, loss.batch, assessment, evidence, advantages, mask)
        return logps

    def _check_sync(self, evidence: Evidence, mask: Tensor, again: Callable[..., Evidence]) -> None:
        """Until the first update after a rollout vLLM and the trainer hold the same weights: do they agree on tokens?"""
        comparable = self.use_vllm and self.model.training and self.rollout_func is None
        if not (comparable and self.vllm_generation.samples_from_the_policy):
            return
        if not self._sync_check.is_due(step := self.state.global_step, self._sampled_at):
            return
        engine = self.vllm_generation
        if self._noise:
            evidence = again()
        if engine.truncates:
            evidence, complete, _ = replay_support(evidence)
            mask = mask & complete

        def with_rounded_weights() -> Tensor:
            rounded = again(engine.rounding.rounded_trainer)
            return (replay_support(rounded)[0] if engine.truncates else rounded).policy_logps

        logps = evidence.behavior_logps, evidence.policy_logps
        apart = self._sync_check.run(step, *logps, mask, engine.suspects)
        self._sync_check.tell_why(apart, logps[1], mask, engine.rounding, with_rounded_weights)
        for name, value in apart.items():
            self._metrics["train"][f"weight_sync/{name}"].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._masked_column.fill_in()
        self._token_records.write(self._mode, self.state.global_step, self.processing_class)
        metrics = self._token_metrics.pop(self._mode)
        self._metrics[self._mode].update({name: [value] for name, value in metrics.items()})
        bias = metrics.get("trust_region/log_surviving_mass")
        if bias is not None and self.args.sampling_support == "full":
            self.vllm_generation.tell_of_truncation(bias)
        unknown = metrics.get("trust_region/support_unknown")
        if unknown is not None and self.args.sampling_support == "replay":
            self.vllm_generation.tell_of_unknown_support(unknown)
        super().log(logs, start_time)
