"""Every knob of PDM, what it means, and what is refused."""

import logging
import math
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from .trust_region import DIRECTIONS, DIVERGENCES, PROXIMITIES, SUPPORTS, TAIL_ESTIMATORS, TrustRegion
from .weight_sync import ENGINE_DTYPES, WEIGHT_ROUNDINGS, WEIGHT_SYNCS


logger = logging.getLogger(__name__)


_CHOICES = {
    "divergence": tuple(DIVERGENCES),
    "divergence_support": tuple(SUPPORTS),
    "proximity": tuple(PROXIMITIES),
    "direction": tuple(DIRECTIONS),
    "tail_estimator": tuple(TAIL_ESTIMATORS),
    "sampling_support": ("full", "replay"),
    "vllm_weight_sync": WEIGHT_SYNCS,
    "vllm_weight_rounding": WEIGHT_ROUNDINGS,
    "vllm_dtype": ENGINE_DTYPES,
}


# The field of each choice of the trust region
_OF_THE_REGION = {
    "divergence": "divergence",
    "support": "divergence_support",
    "proximity": "proximity",
    "direction": "direction",
    "tail_estimator": "tail_estimator",
}
# The fields that only an engine reads
_OF_VLLM = (
    "sync_check_steps",
    "sync_check_threshold",
    "vllm_weight_sync",
    "vllm_weight_rounding",
    "vllm_dtype",
    "vllm_quantization",
)

# Where `divergence_threshold` is not set. For total variation it is what Pinsker's inequality makes of the KL
# divergence's, sqrt(KL / 2).
RADII = {"kl": 0.15, "reverse_kl": 0.15, "tv": 0.27}
# With these losses the mask takes the place of TRL's clipping. The others shape the ratio by design.
LOSSES_WITHOUT_SHAPING = ("grpo", "bnpo", "dr_grpo", "dapo")
# These shape it by other means than `epsilon`.
LOSSES_WITHOUT_EPSILON = ("sapo", "vespo")


@dataclass
class PDMGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`PDMGRPOTrainer`].

    It has every parameter of [`~trl.GRPOConfig`] and, in addition, those of the trust region. A token is masked, which
    means that it does not update the policy, where two things hold. The training policy is outside the trust region
    around the behaviour policy (*proximity*), and the update would move it further out (*direction*):

    | `proximity`    | `direction`    | the mask of                                                                  |
    |----------------|----------------|------------------------------------------------------------------------------|
    | `"divergence"` | `"predictive"` | PDM ([arXiv:2607.10848](https://huggingface.co/papers/2607.10848))           |
    | `"divergence"` | `"ratio"`      | DPPO ([arXiv:2602.04879](https://huggingface.co/papers/2602.04879))          |
    | `"divergence"` | `"none"`       | no paper: a symmetric mask, as some trainers use                             |
    | `"ratio"`      | `"ratio"`      | PPO and GRPO: with `importance_ratio_max=None`, TRL's own gradients          |
    | `"ratio"`      | `"none"`       | IcePop                                                                       |
    | `"ratio"`      | `"predictive"` | PPO's region with the predictive direction                                   |

    A masked token updates nothing: the gradient of the policy's loss with respect to its log-probability is exactly 0.
    Regularizers still see it: the KL term with a `beta` other than 0, the entropy bonus and the router's auxiliary loss.
    (There is one exception. With `use_bias_correction_kl` and a sequence-level ratio, the weight of the KL term is the
    sequence's ratio, in which a masked token has no gradient.) What the mask does in each loss:

    | loss                                                     | ratio                               | a masked token                     |
    |----------------------------------------------------------|-------------------------------------|------------------------------------|
    | `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`                 | `min(ratio, importance_ratio_max)`; the mask takes the place of TRL's clipping | adds 0, and counts in the number of tokens by which the loss divides |
    | the same with `delta`, `"cispo"`                          | clipped by `epsilon` or `delta`, as in TRL | the same                      |
    | `"sapo"`                                                 | shaped, as in TRL                   | the same                           |
    | `"vespo"`                                                | weight of its whole sequence, which has no gradient | adds 0, and stays in that weight |
    | `"luspo"`, or any with `importance_sampling_level="sequence"` | of its whole sequence, clipped, as in TRL | adds 0, stays in the value of the sequence's ratio, and enters it without gradient |

    With `off_policy_mask_threshold` and `top_entropy_quantile` a token updates where TRL's mask and this one both let
    it.

    In all of them the ratio is that of the training policy to the behaviour policy, which sampled the tokens. So
    `vllm_importance_sampling_correction`, which would correct for their difference a second time, is switched off.

    `epsilon` and `epsilon_high` have two uses. They bound the region of `proximity="ratio"`, and they clip in the losses
    that keep their own shaping. Such a loss together with `proximity="ratio"` is refused, because they would mean both.

    Parameters:
        > Parameters that control the trust region

        divergence (`str`, *optional*, defaults to `"kl"`):
            Divergence of the training policy from the behaviour policy, one of `"kl"` (forward KL, in nats), `"tv"`
            (total variation) or `"reverse_kl"` (in nats).
        divergence_support (`str`, *optional*, defaults to `"topk"`):
            Tokens that the divergence tells apart: `"topk"`, the behaviour policy's `divergence_top_k` most probable
            tokens and the sampled one, or `"binary"`, the sampled token only. All other tokens form one category.
        divergence_top_k (`int`, *optional*, defaults to `20`):
            Number of the behaviour policy's most probable tokens in the `"topk"` support. At most the size of the
            vocabulary.
        divergence_threshold (`float`, *optional*):
            Radius of the trust region of `proximity="divergence"`: a token is outside where the divergence exceeds
            it. Used for tokens with a negative advantage, and with a positive one unless `divergence_threshold_high`
            is set. Defaults to `0.15` nats for the KL divergences and `0.27` for total variation; `docs/evidence.md`
            says why, and where that is too wide.
        divergence_threshold_high (`float`, *optional*):
            Radius for tokens with a positive advantage. Defaults to `divergence_threshold`.
        proximity (`str`, *optional*, defaults to `"divergence"`):
            Measure that tells whether a token is outside the trust region: `"divergence"`, the divergence, bounded by
            `divergence_threshold`, or `"ratio"`, the importance ratio, bounded by `epsilon` and `epsilon_high`.
        direction (`str`, *optional*, defaults to `"predictive"`):
            Measure that tells whether an update moves the policy further out: `"predictive"`, the predicted change of
            the divergence, or `"ratio"`, whether the ratio is above or below 1. With `"none"` every token outside is
            masked, wherever its update leads.
        tail_estimator (`str`, *optional*, defaults to `"exact"`):
            How the predicted change treats the tokens outside the support: `"exact"` (from the training policy's
            whole distribution), `"uniform"` (spread evenly) or `"aggregated"` (as one token, the paper's default).
        importance_ratio_max (`float` or `None`, *optional*, defaults to `20.0`):
            Upper bound of the importance ratio in the loss. `None` disables the truncation.

        > Parameters that control the logging

        log_realized_alignment (`bool`, *optional*, defaults to `False`):
            Whether to log how often each direction was right about the tokens that updated the policy from outside the
            trust region: whether their divergence then moved as it had said. This needs `num_iterations` above 1, so
            that the same tokens come back. It adds no forward pass.
        log_token_assessments (`int`, *optional*, defaults to `0`):
            Number of completions to record, with every token, each time the run logs. They are a random sample of the
            main process's last micro-batch. They go to `output_dir/token_assessments`, and `python -m trl_pdm.report`
            shows them. `0` records none.

        > Parameters that control vLLM

        sampling_support (`str`, *optional*, defaults to `"full"`):
            Tokens over which the training policy is normalised when vLLM samples with `top_p`, `top_k`, `min_p` or
            structured outputs. vLLM then normalises the behaviour policy over the tokens that survive. `"full"`: the
            whole vocabulary, so that ratio and divergence contain the logarithm of the surviving probability.
            `"replay"`: the same surviving tokens, wherever the top K contains them all.
        sync_check_steps (`int`, *optional*, defaults to `50`):
            Number of steps between two checks of the weights in vLLM. The first check follows the first sync. A check
            compares the logprobs that vLLM sampled with the training policy's, on the same weights. `0` disables it.
            There is none with a rollout function, nor where penalties or biases shape what vLLM samples.
        sync_check_threshold (`float`, *optional*, defaults to `0.5`):
            Mean absolute difference of logprobs, in nats, above which the check stops the run. Only wrong weights
            explain so large a difference.
        vllm_weight_sync (`str`, *optional*, defaults to `"auto"`):
            How updated weights reach vLLM: `"full"` (all weights, with an adapter merged into them), `"adapter"` (a
            colocated engine serves the base and the live LoRA adapter, and only the adapter moves) or `"auto"`
            (`"adapter"` where vLLM can serve it, otherwise `"full"`).
        vllm_weight_rounding (`str`, *optional*, defaults to `"auto"`):
            How weights are rounded to vLLM's dtype where the trainer's is finer. `"nearest"` hides updates that are
            smaller than the spacing of vLLM's dtype. `"stochastic"` rounds at random, so that the expectation is the
            trainer's weight. `"auto"` decides for each weight: `"nearest"` if it is used under autocast (`bf16`,
            `fp16`) or not trained, `"stochastic"` otherwise, and always if an adapter is merged into it.
        vllm_dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of a colocated engine: `"bfloat16"`, `"float16"`, `"float32"` or `"auto"`, vLLM's choice (that of the
            checkpoint, and `"bfloat16"` or `"float16"` for a float32 one).
        vllm_quantization (`str`, *optional*):
            Quantization of a colocated engine, as in `vllm.LLM(quantization=...)`, e.g. `"fp8"`. Weights are quantized
            again at each sync, to nearest.
    """

    divergence: str = field(
        default="kl",
        metadata={
            "help": "Divergence of the training policy from the behaviour policy, one of 'kl' (forward KL, in nats), "
            "'tv' (total variation) or 'reverse_kl' (in nats).",
            "choices": list(DIVERGENCES),
        },
    )
    divergence_support: str = field(
        default="topk",
        metadata={
            "help": "Tokens that the divergence tells apart: 'topk', the behaviour policy's `divergence_top_k` most "
            "probable tokens and the sampled one, or 'binary', the sampled token only. All other tokens form one "
            "category.",
            "choices": list(SUPPORTS),
        },
    )
    divergence_top_k: int = field(
        default=20,
        metadata={
            "help": "Number of the behaviour policy's most probable tokens in the 'topk' support. At most the size of "
            "the vocabulary."
        },
    )
    divergence_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Radius of the trust region of `proximity='divergence'`: a token is outside where the divergence "
            "exceeds it. Used for tokens with a negative advantage, and with a positive one unless "
            "`divergence_threshold_high` is set. Defaults to 0.15 nats for the KL divergences and 0.27 for total "
            "variation; docs/evidence.md says why, and where that is too wide."
        },
    )
    divergence_threshold_high: float | None = field(
        default=None,
        metadata={"help": "Radius for tokens with a positive advantage. Defaults to `divergence_threshold`."},
    )
    proximity: str = field(
        default="divergence",
        metadata={
            "help": "Measure that tells whether a token is outside the trust region: 'divergence', the divergence, "
            "bounded by `divergence_threshold`, or 'ratio', the importance ratio, bounded by `epsilon` and "
            "`epsilon_high`.",
            "choices": list(PROXIMITIES),
        },
    )
    direction: str = field(
        default="predictive",
        metadata={
            "help": "Measure that tells whether an update moves the policy further out: 'predictive', the predicted "
            "change of the divergence, or 'ratio', whether the ratio is above or below 1. With 'none' every token "
            "outside is masked, wherever its update leads.",
            "choices": list(DIRECTIONS),
        },
    )
    tail_estimator: str = field(
        default="exact",
        metadata={
            "help": "How the predicted change treats the tokens outside the support: 'exact' (from the training "
            "policy's whole distribution), 'uniform' (spread evenly) or 'aggregated' (as one token, the paper's "
            "default).",
            "choices": list(TAIL_ESTIMATORS),
        },
    )
    importance_ratio_max: float | None = field(
        default=20.0,
        metadata={"help": "Upper bound of the importance ratio in the loss. `None` disables the truncation."},
    )
    log_realized_alignment: bool = field(
        default=False,
        metadata={
            "help": "Whether to log how often each direction was right about the tokens that updated the policy from "
            "outside the trust region: whether their divergence then moved as it had said. This needs "
            "`num_iterations` above 1, so that the same tokens come back. It adds no forward pass."
        },
    )
    log_token_assessments: int = field(
        default=0,
        metadata={
            "help": "Number of completions to record, with every token, each time the run logs. They are a random "
            "sample of the main process's last micro-batch. They go to `output_dir/token_assessments`, and "
            "`python -m trl_pdm.report` shows them. `0` records none."
        },
    )
    sampling_support: str = field(
        default="full",
        metadata={
            "help": "Tokens over which the training policy is normalised when vLLM samples with `top_p`, `top_k`, "
            "`min_p` or structured outputs. vLLM then normalises the behaviour policy over the tokens that survive. "
            "'full': the whole vocabulary, so that ratio and divergence contain the logarithm of the surviving "
            "probability. 'replay': the same surviving tokens, wherever the top K contains them all.",
            "choices": ["full", "replay"],
        },
    )
    sync_check_steps: int = field(
        default=50,
        metadata={
            "help": "Number of steps between two checks of the weights in vLLM. The first check follows the first sync. "
            "A check compares the logprobs that vLLM sampled with the training policy's, on the same weights. `0` "
            "disables it."
        },
    )
    sync_check_threshold: float = field(
        default=0.5,
        metadata={
            "help": "Mean absolute difference of logprobs, in nats, above which the check stops the run. Only wrong "
            "weights explain so large a difference."
        },
    )
    vllm_weight_sync: str = field(
        default="auto",
        metadata={
            "help": "How updated weights reach vLLM: 'full' (all weights, with an adapter merged into them), 'adapter' "
            "(a colocated engine serves the base and the live LoRA adapter, and only the adapter moves) or 'auto' "
            "('adapter' where vLLM can serve it, otherwise 'full').",
            "choices": list(WEIGHT_SYNCS),
        },
    )
    vllm_weight_rounding: str = field(
        default="auto",
        metadata={
            "help": "How weights are rounded to vLLM's dtype where the trainer's is finer. 'nearest' hides updates that "
            "are smaller than the spacing of vLLM's dtype. 'stochastic' rounds at random, so that the expectation is "
            "the trainer's weight. 'auto' decides for each weight: 'nearest' if it is used under autocast (`bf16`, "
            "`fp16`) or not trained, 'stochastic' otherwise, and always if an adapter is merged into it.",
            "choices": list(WEIGHT_ROUNDINGS),
        },
    )
    vllm_dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype of a colocated engine: 'bfloat16', 'float16', 'float32' or 'auto', vLLM's choice (that of "
            "the checkpoint, and 'bfloat16' or 'float16' for a float32 one).",
            "choices": list(ENGINE_DTYPES),
        },
    )
    vllm_quantization: str | None = field(
        default=None,
        metadata={
            "help": "Quantization of a colocated engine, as in `vllm.LLM(quantization=...)`, e.g. 'fp8'. Weights are "
            "quantized again at each sync, to nearest."
        },
    )

    @property
    def mask_replaces_clipping(self) -> bool:
        """Whether the mask takes the place of TRL's clipping: where TRL's loss does nothing else to the ratio."""
        only_clips = self.loss_type in LOSSES_WITHOUT_SHAPING and self.importance_sampling_level == "token"
        return only_clips and self.delta is None

    @property
    def clips_by_epsilon(self) -> bool:
        """Whether TRL's loss clips the ratio by `epsilon`, besides the mask."""
        return not self.mask_replaces_clipping and self.loss_type not in LOSSES_WITHOUT_EPSILON

    @property
    def radius(self) -> float:
        """`divergence_threshold`, or where it is not set the default for `divergence`, in its unit."""
        return RADII[self.divergence] if self.divergence_threshold is None else self.divergence_threshold

    @property
    def bounds(self) -> str:
        """Where the trust region ends, in words."""
        region = self.trust_region
        low, high = f"{region.threshold_low:g}", f"{region.threshold_high:g}"
        if self.proximity == "ratio":
            return f"an importance ratio within -{low} and +{high} of 1"
        unit = "total variation" if self.divergence == "tv" else "nats"
        return f"a divergence of {low} {unit}" + (f", {high} with a positive advantage" if high != low else "")

    @property
    def trust_region(self) -> TrustRegion:
        """The [`TrustRegion`] that these fields describe, made anew."""
        low, high = {
            "divergence": (self.radius, self.divergence_threshold_high),
            "ratio": (self.epsilon, self.epsilon_high),
        }[self.proximity]
        choices = {name: getattr(self, field_name) for name, field_name in _OF_THE_REGION.items()}
        return TrustRegion(threshold_low=low, threshold_high=low if high is None else high, **choices)

    @property
    def num_candidates(self) -> int:
        """How many of the behaviour policy's most probable tokens are needed, besides the sampled one: K, or 0."""
        wanted = self.trust_region.needs_candidates or self.sampling_support == "replay"
        return self.divergence_top_k if wanted else 0

    @property
    def needs_sum_sq(self) -> bool:
        """Whether the sum of squared training probabilities is needed, by the mask or for the logs."""
        region = self.trust_region
        logged = self.log_realized_alignment and region.needs_candidates and region.tail_estimator == "exact"
        return region.needs_sum_sq or logged

    def without_effect(self) -> dict[str, str]:
        """The fields that differ from their defaults and change nothing in this configuration, each with the reason."""
        idle: dict[str, str] = {}

        def note(reason: str, *names: str) -> None:
            idle.update(dict.fromkeys(names, reason))

        region = self.trust_region
        the_mask = f"with `proximity={self.proximity!r}` and `direction={self.direction!r}` the mask does not read it"
        if region.support == "binary" and "support" in region.reads:
            the_mask = "with `divergence_support='binary'` the mask does not read it"
        note(the_mask, *(_OF_THE_REGION[name] for name in set(_OF_THE_REGION) - region.reads))
        if self.needs_sum_sq:
            idle.pop("tail_estimator", None)
        if not self.num_candidates:
            note(the_mask, "divergence_top_k")
        if self.proximity == "ratio":
            note("`proximity='ratio'` is bounded by `epsilon`", "divergence_threshold", "divergence_threshold_high")
        elif not self.clips_by_epsilon:
            reason = (
                "the mask takes the place of clipping" if self.mask_replaces_clipping else "the loss does not clip"
            )
            note(
                f"with `proximity='divergence'` and `loss_type={self.loss_type!r}` {reason}", "epsilon", "epsilon_high"
            )
        if not self.mask_replaces_clipping:
            note("the loss keeps its own shaping of the ratio", "importance_ratio_max")
        if self.num_iterations == 1:
            note("`num_iterations` is 1, so no token comes back", "log_realized_alignment")
        if self.sync_check_steps == 0:
            note("`sync_check_steps` is 0", "sync_check_threshold")
        if not self.use_vllm:
            note("`use_vllm` is `False`", *_OF_VLLM)
        defaults = {f.name: f.default for f in fields(self)}
        return {name: reason for name, reason in sorted(idle.items()) if getattr(self, name) != defaults[name]}

    def warn_of_options_without_effect(self) -> None:
        """Warn of the options that were set and change nothing, each with the reason."""
        if idle := self.without_effect():
            reasons = "; ".join(f"`{name}={getattr(self, name)!r}`, as {reason}" for name, reason in idle.items())
            logger.warning(f"These options have no effect here: {reasons}.")

    def check_vocabulary(self, vocab_size: int, tokens: int = 0) -> None:
        """Refuse a tokenizer or a top K that is larger than the model's vocabulary.

        Args:
            vocab_size (`int`): of the model.
            tokens (`int`, *optional*, defaults to `0`): number of ids that the tokenizer may produce.

        Raises:
            ValueError: `tokens` is above `vocab_size`, or so is `divergence_top_k`, where it is needed.
        """
        if tokens > vocab_size:
            raise ValueError(
                f"The tokenizer of `processing_class` has token ids up to {tokens - 1}, but the model embeds {vocab_size} "
                f"(`vocab_size`). Call `model.resize_token_embeddings({tokens})`, or use the model's own tokenizer."
            )
        if self.num_candidates > vocab_size:
            raise ValueError(
                f"`divergence_top_k` must be at most the model's vocabulary of {vocab_size} tokens, got "
                f"{self.divergence_top_k}."
            )

    def __post_init__(self):
        super().__post_init__()
        self._settle_trust_region()

    @classmethod
    def from_grpo(cls, args: GRPOConfig | None) -> "PDMGRPOConfig | None":
        """Make a `PDMGRPOConfig` of a plain [`~trl.GRPOConfig`]: all that it sets, and PDM's defaults.

        A `PDMGRPOConfig` is checked again and returned, `None` is returned.

        Raises:
            TypeError: `args` is of another subclass of `GRPOConfig`, whose behaviour would be lost.
            ValueError: A field is out of range, or does not go with another.
        """
        if args is None:
            return None
        if isinstance(args, cls):
            args._settle_trust_region()  # once more, since fields may have been set after construction
            return args
        if type(args) is not GRPOConfig:
            raise TypeError(
                f"`args` is a `{type(args).__name__}`. Pass a `PDMGRPOConfig` or a `GRPOConfig`, or let "
                f"`{type(args).__name__}` inherit from `PDMGRPOConfig`."
            )
        # Not `cls(**...)`: `GRPOConfig.__post_init__` derives fields from others and refuses to see both set.
        config = cls.__new__(cls)
        config.__dict__.update(args.__dict__)
        for new in {f.name for f in fields(cls)} - {f.name for f in fields(GRPOConfig)}:
            setattr(config, new, cls.__dataclass_fields__[new].default)
        config._settle_trust_region()
        return config

    def _settle_trust_region(self) -> None:
        def refuse(name: str, must: str) -> None:
            raise ValueError(f"`{name}` must be {must}, got {getattr(self, name)!r}.")

        def is_positive(value: Any) -> bool:
            return (
                isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
            )

        # In TRL's earlier releases `None` was the default of both
        self.top_k = 0 if self.top_k is None else self.top_k
        self.top_p = 1.0 if self.top_p is None else self.top_p
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                refuse(name, f"one of {', '.join(map(repr, choices))}")
        if self.divergence_threshold is not None and not is_positive(self.divergence_threshold):
            refuse("divergence_threshold", "a positive, finite number, or `None` for the default of `divergence`")
        if self.divergence_threshold_high is not None and not is_positive(self.divergence_threshold_high):
            refuse("divergence_threshold_high", "a positive, finite number, or `None` for `divergence_threshold`")
        if self.proximity == "ratio":
            for name in ("epsilon", "epsilon_high"):
                bound = getattr(self, name)
                if bound is not None and not bound >= 0:  # not "<", which lets NaN pass
                    refuse(name, "a number that is not negative, with `proximity='ratio'`")
        if self.importance_ratio_max is not None and not (
            is_positive(self.importance_ratio_max) and self.importance_ratio_max >= 1
        ):
            refuse("importance_ratio_max", "a finite number of at least 1, or `None` for no truncation")
        if self.proximity == "ratio" and self.clips_by_epsilon:
            if self.delta is not None:
                name, remedy = "delta", "`None`"
            elif self.importance_sampling_level == "sequence":
                name, remedy = "importance_sampling_level", "'token'"
            else:
                name, remedy = "loss_type", f"one of {', '.join(map(repr, LOSSES_WITHOUT_SHAPING))}"
            raise ValueError(
                f"`proximity='ratio'` does not go with `{name}={getattr(self, name)!r}`, a loss that clips by `epsilon` "
                f"itself: `epsilon` would mean two things. Set `{name}` to {remedy}, or `proximity='divergence'`."
            )
        if self.sampling_support == "replay" and not self.use_vllm:
            refuse("sampling_support", '"full" without `use_vllm`, which alone reports the tokens that survive')
        if self.sampling_support == "replay" and self.beta != 0.0:
            refuse("sampling_support", '"full" with a `beta` other than 0, as the reference is not renormalised')
        if not isinstance(self.log_token_assessments, int) or self.log_token_assessments < 0:
            refuse("log_token_assessments", "a number of completions, or 0 for none")
        if self.vllm_dtype != "auto" and self.vllm_mode != "colocate":
            refuse(
                "vllm_dtype",
                "'auto' with a vLLM server, whose dtype is set by its own `--dtype` (see docs/weight-sync-and-lora.md)",
            )
        if self.vllm_quantization is not None and self.vllm_mode != "colocate":
            refuse("vllm_quantization", "`None` with a vLLM server, which is quantized by its own flags")
        if not isinstance(self.sync_check_steps, int) or self.sync_check_steps < 0:
            refuse("sync_check_steps", "a number of steps, or 0 for no check")
        if not is_positive(self.sync_check_threshold):
            refuse("sync_check_threshold", "a positive, finite number of nats (0.5 is a good start)")
        if not isinstance(self.divergence_top_k, int) or self.divergence_top_k < 1:
            refuse("divergence_top_k", "an integer of at least 1 (20 is a good start)")
        if (
            self.sampling_support == "replay"
            and self.top_k > self.divergence_top_k
            and self.top_p == 1
            and not self.min_p
        ):
            refuse("divergence_top_k", f"at least `top_k` ({self.top_k}) for `sampling_support='replay'`")
        if self.vllm_importance_sampling_correction:
            # The attribute, not a copy: TRL's trainer reads it to decide on a third, recomputed policy.
            self.vllm_importance_sampling_correction = False
            if self.use_vllm:
                logger.info(
                    "`vllm_importance_sampling_correction` is switched off: PDM's importance ratio is already taken "
                    "against the policy that sampled the tokens, so the correction would be applied twice."
                )
