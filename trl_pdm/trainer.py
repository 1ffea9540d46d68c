"""`PDMGRPOTrainer`: TRL's `GRPOTrainer`, with predictive divergence masks on which tokens may update the policy."""

import logging
import math
import textwrap
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from . import noise
from ._hooks import TRLCompatibilityError, not_seen
from .metrics import MaskedColumn, TokenMetrics, Tokens, forecasts, summarize
from .report.records import TokenRecords, write_settings
from .rollout.trainer import TopKRolloutTrainer
from .topk_head import show_bias_of_trained_rows, topk_head
from .trust_region import Evidence, ratio_base, replay_support
from .weight_sync.check import SyncCheck
from .weight_sync.parameters import quiet_bitsandbytes


logger = logging.getLogger(__name__)


@dataclass
class _Loss:
    """What is known of a micro-batch while TRL computes its loss."""

    model: Any
    batch: dict[str, Any]  # the micro-batch, the same object each time it is trained on
    given: dict[str, Any]  # what TRL is given of it
    scored: bool = False


class PDMGRPOTrainer(TopKRolloutTrainer):
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

    # A step runs through these hooks in this order:
    # 1. `_generate_and_score_completions`: a batch with a behaviour policy, from `TopKRolloutTrainer`.
    # 2. `compute_loss` announces a loss and holds the advantages back.
    # 3. `_get_per_token_logps_and_entropies`, within it, scores the candidates too and hands over masked advantages.
    # 4. `log` adds what was counted.
    # Any other call of the third, whoever makes it, is passed on as it is.

    _loss: _Loss | None = None

    @wraps(GRPOTrainer.__init__, assigned=())  # type: ignore[misc]  # for its signature
    def __init__(self, *init_args, **kwargs):
        quiet_bitsandbytes()
        super().__init__(*init_args, **kwargs)
        show_bias_of_trained_rows(self.model)
        args = self.args
        if self.is_world_process_zero():
            args.warn_of_options_without_effect()
            logger.info(f"Trust region: {args.bounds}.")
        self._region, self._needs_sum_sq = args.trust_region, args.needs_sum_sq
        self._ratio_max = args.importance_ratio_max if args.mask_replaces_clipping else None
        if args.mask_replaces_clipping:
            self.epsilon_low = self.epsilon_high = math.inf
        self._token_metrics = TokenMetrics(self.accelerator.gather)
        self._masked_column = MaskedColumn(self._logs["extra"], self.accelerator, self.log_completions)
        self._token_records = TokenRecords(args, writes=self.is_world_process_zero())
        noise.warn_of(found := noise.sources(self.model, args.neftune_noise_alpha))
        self._sync_check: SyncCheck | None = None
        if self.use_vllm and self.rollout_func is None:
            steps, threshold = args.sync_check_steps, args.sync_check_threshold
            self._sync_check = SyncCheck(steps, threshold, self.accelerator.gather, self.vllm_generation, found)

    def train(self, *args, **kwargs):
        """As `GRPOTrainer.train`. It also writes the run's settings for its report, and `resume_from_checkpoint=True`
        takes the newest checkpoint that is complete."""
        if self.is_world_process_zero():
            model, processes = self.model.config.name_or_path, self.accelerator.num_processes
            write_settings(self.args, model=model, reward_funcs=self.reward_func_names, processes=processes)
        return super().train(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self._token_records.tag(self._mode, batch, self._logs["rewards"], self.reward_weights)
        self._masked_column.tag(batch)
        return batch

    # ---- Loss: the mask, as token-level advantages for TRL's own `_compute_loss`

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "behavior_topk_ids" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The advantages are held back until the forward has told which tokens may update: were they read earlier, the
        # loss would train without the mask.
        given = {name: value for name, value in inputs.items() if name not in ("advantages", "old_per_token_logps")}
        with self._during("_loss", _Loss(model, inputs, given)) as loss:
            try:
                value = super().compute_loss(model, given, return_outputs, num_items_in_batch)
            except KeyError as error:
                if error.args != ("advantages",):
                    raise
                raise not_seen(type(self), loss.scored) from error
        if not loss.scored:
            raise TRLCompatibilityError("`GRPOTrainer._compute_loss` no longer scores the batch it trains on.")
        return value

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        loss, arguments = self._loss, (model, input_ids, attention_mask, logits_to_keep, batch_size)
        if loss is None or loss.scored or model is not loss.model:
            return super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        loss.scored = True
        evidence, logps, entropy, *others = self._gather_evidence(loss, *arguments, **kwargs)

        def again(weights=nullcontext) -> Evidence:
            with torch.no_grad(), noise.silenced(model), weights():
                return self._gather_evidence(loss, *arguments, **kwargs)[0]

        mask = self._trained_on(loss.given)
        # Until the first update after a rollout vLLM and the trainer hold the same weights
        if self._sync_check and self.model.training:
            apart = self._sync_check(self.state.global_step, self._sampled_at, evidence, mask, again)
            for name, value in apart.items():
                self._metrics["train"][name].append(value)
        return self._apply_trust_region(loss, evidence, logps, entropy, mask), entropy, *others

    def _gather_evidence(self, loss, model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs):
        """Score a micro-batch. Returns its [`Evidence`], followed by what TRL's own method returns."""
        ids = loss.given["behavior_topk_ids"]
        with topk_head(
            attention_mask,
            logits_to_keep,
            batch_size,
            ids=ids,
            with_sum_sq=self._needs_sum_sq,
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
        """Mask a micro-batch: add to `loss.given` what TRL's loss is to use, each `(B, T)`.

        - `advantages`: 0 where masked.
        - `old_per_token_logps`: the behaviour logprobs, raised where the ratio is truncated.
        - `sampling_per_token_logps`: the behaviour logprobs as they are, for `off_policy_mask_threshold`.

        Returns the training policy's logprobs. With `sampling_support="replay"` they are normalised over the tokens that
        truncated sampling left.
        """
        advantages, known = loss.batch["advantages"], dict[str, Any]()
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        replays = self.args.sampling_support == "replay"
        # Candidates of a rollout function may be those of a sampler that truncates, of which the config knows nothing
        if self.use_vllm and (self.vllm_generation.truncates or (replays and self.rollout_func is not None)):
            replayed, complete, log_mass = replay_support(evidence)
            known |= dict(support_known=complete, log_surviving_mass=log_mass.detach())
            if replays:
                # The entropy at hand is the whole vocabulary's. The step changes that of the surviving tokens
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
            known["forecasts"] = forecasts(loss.batch, step, assessment, evidence.log_ratio, advantages, mask)
        tokens = Tokens(mask, self._region, evidence, assessment, advantages, self._ratio_max, entropy, **known)
        self._token_metrics.add(self._mode, *summarize(tokens))
        self._masked_column.add(loss.batch, assessment.keep, mask)
        self._token_records.keep(self._mode, loss.batch, assessment, evidence, advantages, mask)
        return logps

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._masked_column.fill_in()
        self._token_records.write(self._mode, self.state.global_step, self.processing_class)
        metrics = self._token_metrics.pop(self._mode)
        self._metrics[self._mode].update({name: [value] for name, value in metrics.items()})
        if self.use_vllm:
            self.vllm_generation.tell_of_sampling(metrics, self.args.sampling_support)
        super().log(logs, start_time)
