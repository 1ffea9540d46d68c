"""`PDMGRPOTrainer`: TRL's `GRPOTrainer`, with predictive divergence masks on which tokens may update the policy."""

import math
import textwrap
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from . import preflight, rollout, trust_region
from ._hooks import TRLCompatibilityError, substituted
from .checkpoint import last_complete_checkpoint
from .config import PDMGRPOConfig
from .metrics import MaskedColumn, TokenMetrics, realized_alignment
from .report.records import TokenRecords, write_settings
from .topk_head import topk_head
from .weight_sync.check import SyncCheck
from .weight_sync.parameters import quiet_bitsandbytes


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
                year         = 2026,
                eprint       = {arXiv:2607.10848},
            }"""),
    }

    @wraps(GRPOTrainer.__init__, assigned=())  # type: ignore[misc]  # for its signature
    def __init__(self, model, reward_funcs=None, args=None, *other_args, **kwargs):
        quiet_bitsandbytes()
        self._batch: Any = None  # the micro-batch, in `compute_loss`
        self._loss_inputs: dict[str, Any] | None = None  # what TRL is given of it, until its forward has run
        self._behavior_logprobs: Any = None  # the last rollout's, one float per token
        self._skip_scoring = False
        self._sampled_at: int | None = None  # the step of the rollout that is trained on

        def vllm_generation(**vllm_kwargs):
            self.args.check_vocabulary(self._vocab_size)  # before the engine takes its time to start
            return rollout.TopKVLLMGeneration(
                divergence_top_k=self.args.divergence_top_k,
                weight_sync=self.args.vllm_weight_sync,
                quantization=self.args.vllm_quantization,
                **vllm_kwargs,
            )

        with substituted(grpo_trainer, VLLMGeneration=vllm_generation, GRPOConfig=PDMGRPOConfig):
            super().__init__(model, reward_funcs, PDMGRPOConfig.from_grpo(args), *other_args, **kwargs)
        self.args.check_vocabulary(self._vocab_size)
        if self.use_vllm and not isinstance(self.vllm_generation, rollout.TopKVLLMGeneration):
            raise TRLCompatibilityError(
                "`GRPOTrainer.__init__` no longer builds its vLLM backend as `VLLMGeneration`."
            )
        if self.rollout_func is not None:
            self.rollout_func = rollout.with_candidates(self.rollout_func)

        args = self.args
        self._ratio_max = args.importance_ratio_max if args.mask_replaces_clipping else None
        if args.mask_replaces_clipping:
            self.epsilon_low = self.epsilon_high = math.inf
        self._sampling_is_truncated = self.use_vllm and self.vllm_generation.truncates
        self._token_metrics = TokenMetrics(self.accelerator.gather)
        self._masked_column = MaskedColumn(self._logs["extra"], self.accelerator, self.log_completions)
        self._sync_check = SyncCheck(args.sync_check_steps, args.sync_check_threshold, self.accelerator.gather)
        self._token_records = TokenRecords(args, writes=self.is_world_process_zero())
        preflight.warn_of_noise(self.model, args.neftune_noise_alpha)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

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
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # ---- Rollout: the behaviour policy's top K, into TRL's batch

    def _generate(self, prompts: list):
        synced = self.vllm_generation.last_sync if self.use_vllm else None
        output = super()._generate(prompts)
        if self.use_vllm and (sync := self.vllm_generation.last_sync) is not synced:
            self._metrics[self._mode]["weight_sync/seconds"].append(sync.seconds)
            self._metrics[self._mode]["weight_sync/bytes"].append(sync.bytes)
        if not isinstance(output, tuple) or len(output) != 8:
            raise TRLCompatibilityError("`GRPOTrainer._generate` no longer returns 8 values, logprobs in fifth place.")
        self._behavior_logprobs = output[4]
        if self.use_vllm:
            rollout.check_not_all_nan(self._behavior_logprobs)
        return output

    def _generate_and_score_completions(self, inputs):
        # TRL scores the rollout a second time where several optimizer steps use it. PDM knows the behaviour policy
        # from the engine, or scores it below together with its top K.
        several_steps = (
            self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0
        )
        self._skip_scoring = several_steps
        batch = super()._generate_and_score_completions(inputs)
        if self._mode == "train":
            self._sampled_at = self.state.global_step
        if self._skip_scoring or (self.beta != 0.0) != ("ref_per_token_logps" in batch):
            raise TRLCompatibilityError("`GRPOTrainer` no longer scores a rollout's policy first, then its reference.")
        self._token_records.tag(self._mode, batch, self._logs["rewards"], self.reward_weights)
        self._masked_column.tag(batch)

        logprobs, self._behavior_logprobs = self._behavior_logprobs, None
        behavior, needs_scores = None, several_steps
        if logprobs is not None:
            behavior = rollout.collate(logprobs, batch["completion_ids"], self.args.divergence_top_k, self._vocab_size)
            needs_scores = self.rollout_func is not None and rollout.lack_candidates(
                behavior[0], self._trained_on(batch)
            )
        if self.rollout_func is not None:
            # Scoring is collective where the model is sharded: all processes do it, or none
            needs_scores = self.accelerator.gather(torch.tensor([needs_scores], device=self.accelerator.device)).any()
        if needs_scores:
            scored = self._score_behavior(batch)
            if behavior is None:
                behavior = scored
            else:
                rollout.fill_in(behavior, scored, batch["sampling_per_token_logps"])
        if behavior is not None:  # otherwise the batch trains the very policy that sampled it: no token can be outside
            batch["behavior_topk_ids"], batch["behavior_topk_logps"] = behavior
        return batch

    def _score_behavior(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        score, args = super()._get_per_token_logps_and_entropies, self.args
        batch_size = getattr(args, f"per_device_{self._mode}_batch_size")
        return rollout.score_behavior(
            score, self.model, batch, batch_size, args.divergence_top_k, args.gradient_checkpointing_kwargs
        )

    @staticmethod
    def _trained_on(batch: dict[str, Any]) -> Tensor:
        return (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()

    # ---- Loss: the mask, as token-level advantages for TRL's own `_compute_loss`

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "behavior_topk_ids" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The advantages are held back until the forward has told which tokens may update: were TRL to read them
        # earlier, it would fail instead of training without the mask.
        held_back = ("advantages", "old_per_token_logps")
        self._loss_inputs = {name: value for name, value in inputs.items() if name not in held_back}
        self._batch = inputs
        try:
            loss = super().compute_loss(model, self._loss_inputs, return_outputs, num_items_in_batch)
            if self._loss_inputs is not None:
                raise TRLCompatibilityError("`GRPOTrainer._compute_loss` no longer scores the batch it trains on.")
            return loss
        except KeyError as error:
            if error.args != ("advantages",):
                raise
            raise TRLCompatibilityError("`GRPOTrainer._compute_loss` reads the advantages before scoring.") from error
        finally:
            self._loss_inputs = self._batch = None

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        score = super()._get_per_token_logps_and_entropies
        inputs, self._loss_inputs = self._loss_inputs, None
        if inputs is None and self._skip_scoring:
            self._skip_scoring = False
            return None, None, None
        if inputs is None:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        with topk_head(
            attention_mask,
            logits_to_keep,
            batch_size,
            ids=inputs["behavior_topk_ids"],
            with_sum_sq=self.args.tail_estimator == "exact" and self.args.divergence_support == "topk",
            with_grad=self.args.sampling_support == "replay",
        ) as scores:
            logps, *others = score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        valid = inputs["behavior_topk_ids"] >= 0
        valid[..., 0] = True  # an empty slot 0 is a token without evidence, not the absence of a token
        evidence = trust_region.Evidence(inputs["behavior_topk_logps"], scores.logps, valid, scores.sum_sq)
        mask, sums = self._trained_on(inputs), {}
        replayed, complete = evidence, mask
        if self._sampling_is_truncated:
            replayed, complete, log_mass = trust_region.replay_support(*evidence)
            sums = trust_region.summarize_support(complete, log_mass, mask)
            if self.args.sampling_support == "replay":
                evidence, logps = replayed, logps - log_mass
        self._check_sync(replayed, mask & complete)
        inputs.update(self._apply_trust_region(evidence, scores.vocab_size, mask, sums))
        return logps, *others

    def _apply_trust_region(
        self, evidence: trust_region.Evidence, vocab_size: int, mask: Tensor, sums: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What TRL's loss is to use, all `(B, T)`: `advantages`, zero where masked, and the behaviour logprobs, truncated
        as `old_per_token_logps` and as they are for the sequence mask of `off_policy_mask_threshold`."""
        advantages = self._batch["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        assessment = trust_region.assess(*evidence, vocab_size, advantages, **self.args.assessment)
        token_sums, maxima = trust_region.summarize(assessment, *evidence[:3], advantages, mask, self._ratio_max)
        if self.args.log_realized_alignment:
            token_sums |= realized_alignment(
                self._batch, self.state.global_step, assessment, *evidence[:2], advantages, mask
            )
        self._token_metrics.add(self._mode, token_sums | sums, maxima)
        self._masked_column.add(self._batch, assessment.keep, mask)
        self._token_records.keep(self._mode, self._batch, assessment, evidence, advantages, mask)
        return {
            "advantages": advantages * assessment.keep,
            # At padding TRL's own are 0, and so must be what they are compared with: exp(0 - logp) may be infinite
            "old_per_token_logps": torch.where(
                self._batch["completion_mask"].bool(), trust_region.ratio_base(*evidence[:2], self._ratio_max), 0
            ),
            "sampling_per_token_logps": evidence.behavior_logps[..., 0],
        }

    def _check_sync(self, evidence: trust_region.Evidence, mask: Tensor) -> None:
        """Until the first update after a rollout vLLM and the trainer hold the same weights: do they agree on tokens?"""
        comparable = self.use_vllm and self.model.training and self.rollout_func is None
        if not (comparable and self.vllm_generation.samples_from_the_policy):
            return
        if self._sync_check.is_due(step := self.state.global_step, self._sampled_at):
            apart = self._sync_check.run(step, *evidence[:2], mask, self.vllm_generation.suspects)
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
        super().log(logs, start_time)
