"""What vLLM is asked for, and what it answers: for every sampled token, the candidates that it was sampled among."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.logging import get_logger
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from .._hooks import TRLCompatibilityError, substituted
from ..weight_sync.check import differing_tensors, named
from ..weight_sync.engine import engine_kwargs_for, exceptional_dtypes, leaving_classes_alone, unquantized_view
from ..weight_sync.parameters import is_bnb_quantized
from ..weight_sync.rounding import AUTOCAST_DTYPES, WeightRounding
from ..weight_sync.strategies import FullSync, SyncRecord, choose_sync
from .candidates import Candidates, TokenLogprob, from_lists, token_logprobs
from .rendezvous import rendezvous


if TYPE_CHECKING:
    from vllm import RequestOutput

    from ..config import PDMGRPOConfig

logger = get_logger(__name__)  # of the main process

VLLM_DEFAULT_MAX_LOGPROBS = 20
MUCH_UNKNOWN = 0.5  # of the tokens: above it, replaying leaves more of them as they are than it changes
# What TRL's trainer hands to its vLLM backend once
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")

# What comes between the weights and the sampled logprobs, besides temperature. Truncation renormalises them over the
# tokens that it leaves ...
_TRUNCATION = {"structured_outputs", "bad_words", "allowed_token_ids", "min_tokens", "thinking_token_budget"}
# ... and these make them those of another policy
_RESHAPING = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "extra_args"}


def from_vllm_outputs(outputs: list["RequestOutput"]) -> tuple[list[list[list[TokenLogprob]]], None]:
    """Read [`TokenLogprob`]s from vLLM's answers, in the place of TRL's `extract_logprobs`.

    Args:
        outputs (`list[RequestOutput]`): with flat logprobs, the sampled token's before those of its candidates.

    Returns:
        `tuple[list[list[list[TokenLogprob]]], None]`: logprobs of shape `(num_sequences, T, 1)`, and `None` in place
        of the ids, which they carry.
    """
    sequences = []
    for completion in (completion for output in outputs for completion in output.outputs):
        flat, length = completion.logprobs, len(completion.token_ids)
        shape = (length, len(flat.token_ids) // length if length else 1)
        ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)
        sequences.append(token_logprobs(Candidates(ids, np.array(flat.logprobs, dtype=np.float32).reshape(shape))))
    return sequences, None


def all_nan(logprobs: Sequence[Sequence[float]] | None) -> bool:
    """Whether there are logprobs, and each of them is NaN."""
    is_nan = (lp != lp for sequence in (() if logprobs is None else logprobs) for lp in sequence)
    return next(is_nan, False) and all(is_nan)


class TopKVLLMGeneration(VLLMGeneration):
    """TRL's vLLM backend, but its logprobs are [`TokenLogprob`]s and its weights come through [`choose_sync`].

    Args:
        num_candidates (`int`): how many of the most probable tokens to ask the engine for, besides the sampled one.
        weight_sync (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"full"` or `"adapter"`.
        quantization (`str`, *optional*): vLLM's quantization of a colocated engine.
        dtype (`str`, *optional*, defaults to `"auto"`): of a colocated engine; `"auto"` is vLLM's choice.
        weight_rounding (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"nearest"` or `"stochastic"`.
        seed (`int`, *optional*, defaults to `0`): of stochastic rounding, the same on all processes.
        ends (`Callable`, *optional*): returns the ids of the tokens that end a completion for the trainer. An engine
            knows only the checkpoint's.
        kwargs: those of [`~trl.generation.vllm_generation.VLLMGeneration`].

    Attributes:
        last_sync ([`SyncRecord`] or `None`): what the last weight sync moved, and how long it took.

    Raises:
        ValueError: vLLM cannot be given the model's weights, a server returns too few logprobs, or `generation_kwargs`
            set what has a field of its own.
    """

    def __init__(
        self,
        *,
        num_candidates: int,
        weight_sync: str = "auto",
        quantization: str | None = None,
        dtype: str = "auto",
        weight_rounding: str = "auto",
        seed: int = 0,
        ends: Callable[[], Sequence[int]] = tuple,
        **kwargs: Any,
    ):
        self.num_candidates = num_candidates
        self.weight_sync = weight_sync
        self.quantization = quantization
        self.dtype = dtype
        self.weight_rounding = weight_rounding
        self.seed = seed
        self.ends = ends
        self.last_sync: SyncRecord | None = None
        self._told_of_truncation = self._told_of_unknown_support = False
        self._check_generation_kwargs(kwargs.get("generation_kwargs") or {})
        super().__init__(**kwargs | {"logprobs": num_candidates})
        if not self.samples_from_the_policy:
            logger.warning(
                "vLLM samples with penalties or biases (`repetition_penalty`, or one of "
                f"{', '.join(f'`{name}`' for name in sorted(_RESHAPING))} in `generation_kwargs`), of which the training "
                "policy knows nothing: ratio and divergence measure them along with the updates, and the sync check is "
                "off."
            )
        self._built_for = self.temperature
        if self.mode == "server" and self.accelerator.is_main_process:
            self._check_server()

    @classmethod
    def of(cls, args: "PDMGRPOConfig", **kwargs: Any) -> "TopKVLLMGeneration":
        """Make the backend that a trainer's `args` ask for. `kwargs` are those that TRL builds it with."""
        return cls(
            num_candidates=args.num_candidates,
            weight_sync=args.vllm_weight_sync,
            quantization=args.vllm_quantization,
            dtype=args.vllm_dtype,
            weight_rounding=args.vllm_weight_rounding,
            seed=args.seed,
            **kwargs,
        )

    def _init_vllm(self) -> None:
        if not hasattr(vllm_generation, "LLM"):  # without vLLM, TRL says how to install it
            return super()._init_vllm()
        self._sync = choose_sync(
            self.weight_sync,
            self.model,
            super()._iter_named_params,
            colocated=self.mode == "colocate",
            sharded=self._is_sharded,
            base_every_time=self.enable_sleep_mode,
            rounding=self.weight_rounding,
            autocast=AUTOCAST_DTYPES.get(self.accelerator.mixed_precision),
            seed=self.seed,
        )
        if self.mode != "colocate":
            return super()._init_vllm()
        ours: dict[str, Any] = {"max_logprobs": max(self.num_candidates, VLLM_DEFAULT_MAX_LOGPROBS)}
        ours |= self._sync.engine_kwargs
        ours |= engine_kwargs_for(self.model, self.model_impl, self.trust_remote_code)
        if self.quantization is not None:
            ours["quantization"] = self.quantization
        if self.dtype != "auto":
            ours["dtype"] = self.dtype
        LLM, model = vllm_generation.LLM, self.model
        if is_bnb_quantized(model):
            self.model = unquantized_view(model)
        try:
            starting = substituted(vllm_generation, LLM=lambda **kwargs: LLM(**kwargs | ours))
            with starting, leaving_classes_alone(), rendezvous(self.accelerator.num_processes):
                super()._init_vllm()
        finally:
            self.model = model
        config = self.llm.llm_engine.model_config
        self._settle_precision(config.dtype, config.quantization)
        (self._sync.rounding.exceptions,) = self.llm.apply_model(partial(exceptional_dtypes, usual=config.dtype))

    def _settle_precision(self, dtype: torch.dtype, quantization: str | None) -> None:
        self._sync.rounding.dtype = dtype
        if quantization is not None and self.weight_rounding != "nearest":
            logger.warning(
                f"The engine is quantized ({quantization}), which rounds its weights to nearest after "
                f"`vllm_weight_rounding={self.weight_rounding!r}` has rounded them to {str(dtype).removeprefix('torch.')}: "
                "what training changes by less than the spacing of quantized weights does not reach the engine."
            )

    def _check_server(self) -> None:
        config = self.vllm_client.get_server_info()["model_config"]
        most, mode = config["max_logprobs"], config["logprobs_mode"]
        self._settle_precision(getattr(torch, config["dtype"].removeprefix("torch.")), config["quantization"])
        if 0 <= most < self.num_candidates:  # -1 is no limit
            raise ValueError(
                f"`divergence_top_k` is {self.num_candidates}, but the vLLM server returns at most {most} logprobs a "
                f"token. Restart it with `--max-logprobs {self.num_candidates}`, or lower `divergence_top_k`."
            )
        if mode != "processed_logprobs":
            logger.warning(
                f"The vLLM server runs with `--logprobs-mode {mode}`, so its logprobs are not those of the policy that "
                "samples the tokens, and the trust region is measured from the wrong place. Restart it with "
                "`--logprobs-mode processed_logprobs`."
            )

    def _check_generation_kwargs(self, generation_kwargs: Mapping[str, Any]) -> None:
        if "logprobs" in generation_kwargs:
            raise ValueError(
                f"`generation_kwargs` sets `logprobs` to {generation_kwargs['logprobs']}. Leave it out: as many are asked "
                f"for as the mask reads, here {self.num_candidates}. `divergence_top_k` sets that number."
            )
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if name in generation_kwargs:
                raise ValueError(
                    f"`generation_kwargs` sets `{name}` to {generation_kwargs[name]}, of which the loss would not know. "
                    f"Set the field `{name}` of the config instead."
                )

    def _request_kwargs(self) -> dict[str, Any]:
        """What every request has: the user's `generation_kwargs`, as they are now, and what this class adds."""
        asked = dict(self.generation_kwargs or {})
        self._check_generation_kwargs(asked)
        if self.temperature != self._built_for:
            raise ValueError(
                f"`temperature` of `trainer.vllm_generation` was set to {self.temperature} after construction, of which "
                f"the loss would not know: it was built for {self._built_for}. Set the field `temperature` of the config, "
                "and build the trainer anew."
            )
        if not asked.get("ignore_eos"):
            asked["stop_token_ids"] = sorted({*(asked.get("stop_token_ids") or ()), *self.ends()})
            # Those of the checkpoint end a completion only where they are the trainer's too, or a grammar needs one
            grammar = self.structured_outputs_regex or asked.get("structured_outputs")
            asked["ignore_eos"] = bool(self.ends()) and not grammar
        if self.mode == "colocate":
            # Flat logprobs spare a dictionary a token, and nobody reads the candidates' text: vLLM would detokenize
            # all of them. It needs text to find stop strings.
            asked = {"detokenize": bool(asked.get("stop"))} | asked | {"flat_logprobs": True}
        return asked

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As `VLLMGeneration.generate`, with `logprobs` of shape `(batch_size, T, 1)` that carry their candidates.

        Raises:
            ValueError: A prompt is empty, or a setting was changed of which the loss would not know.
        """
        if 0 in (lengths := [len(prompt) for prompt in prompts]):
            raise ValueError(
                f"Prompt {lengths.index(0)} of a rollout holds no token, and vLLM samples from none. Leave its row out, or "
                "let it begin with a token of your choice."
            )
        asked, self.generation_kwargs = self.generation_kwargs, self._request_kwargs()
        try:
            with substituted(vllm_generation, extract_logprobs=from_vllm_outputs):
                prompt_ids, completion_ids, logprobs, token_ids = super().generate(
                    prompts, images, num_generations, profiler=profiler
                )
        finally:
            self.generation_kwargs = asked
        if self.mode == "server":
            logprobs, token_ids = from_lists(completion_ids, token_ids, logprobs), None
        if any(not isinstance(lp[0], TokenLogprob) for sequence in logprobs for lp in sequence[:1]):
            raise TRLCompatibilityError("TRL's vLLM backend no longer reads logprobs through `extract_logprobs`.")
        return prompt_ids, completion_ids, logprobs, token_ids

    @property
    def truncates(self) -> bool:
        """Whether sampling is truncated: some tokens cannot be sampled, which raises the logprobs of the others."""
        by_probability = self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
        return by_probability or bool(self.structured_outputs_regex or _TRUNCATION & set(self.generation_kwargs or ()))

    @property
    def samples_from_the_policy(self) -> bool:
        """Whether nothing but temperature and truncation comes between the weights and the sampled logprobs."""
        return self.repetition_penalty == 1 and not _RESHAPING & set(self.generation_kwargs or ())

    def check_settings(self, trainer: Any) -> None:
        """Refuse sampling settings that were changed on the live trainer, as they would not reach vLLM.

        Raises:
            ValueError: One of them was changed. The message names it.
        """
        for name in SETTINGS:
            theirs, ours = getattr(trainer, name), getattr(self, name)
            if theirs not in (ours, getattr(trainer.args, name)):
                raise ValueError(
                    f"`trainer.{name}` was set to {theirs} after construction, but vLLM samples with {ours}. Set the field "
                    f"`{name}` of the config, and build the trainer anew."
                )

    def tell_of_sampling(self, metrics: Mapping[str, float], sampling_support: str) -> None:
        """Warn once of what truncated sampling does to the log-ratio, or that replaying its support does little.

        Args:
            metrics (`Mapping`): what is logged. Where sampling is truncated, it has `trust_region/log_surviving_mass`,
                in nats, and `trust_region/support_unknown`, a share of the tokens.
            sampling_support (`str`): of the config.
        """
        bias, unknown = (metrics.get(f"trust_region/{name}") for name in ("log_surviving_mass", "support_unknown"))
        if sampling_support == "full" and bias is not None and not self._told_of_truncation:
            self._told_of_truncation = True
            logger.warning(
                "vLLM's sampling is truncated (`top_p`, `top_k`, `min_p`, structured outputs and the like), which "
                "renormalises its logprobs over the tokens that survive; the training policy's are not. Here that adds "
                f"{bias:+.3f} nats to a token's log-ratio on average, and its like to the divergence. "
                "`sampling_support='replay'` removes it (see docs/rollouts-and-tools.md)."
            )
        if sampling_support == "replay" and (unknown or 0) > MUCH_UNKNOWN and not self._told_of_unknown_support:
            self._told_of_unknown_support = True
            logger.warning(
                f"`sampling_support='replay'` left {unknown:.0%} of the tokens as they are, because not all tokens that "
                "sampling could choose from are among their candidates. Raise `divergence_top_k` "
                f"({self.num_candidates}), or lower `top_p` or `top_k`."
            )

    def suspects(self) -> list[str]:
        """The names of a colocated engine's layers that differ from the trainer's.

        There are none of a server, of an engine that sleeps (it has no weights then), nor of a tensor-parallel one,
        because these cannot be asked.
        """
        if self.mode != "colocate" or self.enable_sleep_mode or self.tensor_parallel_size > 1:
            return []
        return differing_tensors(self.llm, self._sync.tensors())  # the base, where the adapter is served beside it

    def check_not_all_nan(self, logprobs: Sequence[Sequence[float]] | None) -> None:
        """Refuse a rollout of an engine with NaN weights, and say where they come from, if the trainer's are at hand.

        A single NaN is no evidence: its token is kept, with a ratio of 1, and counted in `trust_region/unscored`.

        Raises:
            ValueError: Every logprob is NaN.
        """
        if not all_nan(logprobs):
            return
        cause = "Resume from a checkpoint, with a lower `learning_rate` or `max_grad_norm`."
        # Of sharded weights a process cannot ask alone
        if not self._is_sharded and all(param.isfinite().all() for param in self.model.parameters()):
            cause = (
                "The trainer's own are finite: either they overflow in the engine's dtype (set `vllm_dtype='float32'`), or "
                f"some did not reach the engine (report it, or set `use_vllm=False`). {named(self.suspects)}"
            )
        raise ValueError(
            "Every logprob that vLLM returned is NaN, so its weights are, and what it sampled is not worth training on. "
            + cause
        )

    @property
    def _is_sharded(self) -> bool:
        return self._dist.is_zero3 or self._dist.is_fsdp

    @property
    def rounding(self) -> WeightRounding:
        """How weights are rounded on their way to the engine."""
        return self._sync.rounding

    def sync_weights(self) -> None:
        """As `VLLMGeneration.sync_weights`, and sets `last_sync`.

        Raises:
            TRLCompatibilityError: TRL no longer asks for the weights where this class hands them over.
        """
        self._moved: int | None = None
        start = perf_counter()
        super().sync_weights()
        if self._moved is None:
            raise TRLCompatibilityError("`VLLMGeneration.sync_weights` no longer calls `_iter_named_params`.")
        self.last_sync = SyncRecord(self._sync.mode, self._moved, perf_counter() - start)

    def _iter_named_params(self):
        # Stock `sync_weights` loads what this yields, one by one, into the live modules. A colocated engine has taken
        # everything through its own reload by the time there is nothing left to yield.
        if self.mode == "colocate":
            self._moved = self._sync.push(self.llm)
            return
        assert isinstance(self._sync, FullSync), "a server takes nothing else"
        self._moved = 0
        for name, param in self._sync.tensors():
            self._moved += param.nbytes
            yield name, param
