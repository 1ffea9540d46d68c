"""The behaviour policy's top K, from the engine that sampled the tokens to the batch that trains on them.

An engine's answer holds, for every sampled token, the candidates that it was sampled among. TRL keeps one float a token
of that and slices, concatenates and pads these floats through multi-turn tool calls and user rollout functions. A
[`TokenLogprob`] is such a float that also points to its candidates, so they stay with their token all the way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import chain, groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from ._hooks import TRLCompatibilityError, substituted
from .topk_head import topk_head
from .weight_sync.check import differing_tensors
from .weight_sync.engine import unquantized_view
from .weight_sync.parameters import is_bnb_quantized, lora_model_params
from .weight_sync.strategies import FullSync, SyncRecord, choose_sync


if TYPE_CHECKING:
    from vllm import RequestOutput

logger = get_logger(__name__)  # of the main process, and it can say a thing once

VLLM_DEFAULT_MAX_LOGPROBS = 20
# nats; a sampled token this much more probable than a candidate must be a candidate too, whatever the rounding
OUTSIDE_TOLERANCE = 0.1
# nats; on average over a rollout, only another policy (or temperature) explains that a token's two logprobs differ more
CONTRADICTION_TOLERANCE = 0.5
MASS_TOLERANCE = 0.01  # engines round

# What comes between the weights and the sampled logprobs, besides temperature. Truncation renormalises them over the
# tokens that it leaves ...
_TRUNCATION = {"structured_outputs", "bad_words", "allowed_token_ids", "min_tokens", "thinking_token_budget"}
# ... and these make them those of another policy
_RESHAPING = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "extra_args"}


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of one sampled sequence.

    Attributes:
        ids (`numpy.ndarray`): `(T, K+1)`, int32. Slot 0 is the sampled token, then the behaviour policy's most probable
            tokens; `-1` where a slot is empty, also for the one that would repeat the sampled token.
        logps (`numpy.ndarray`): `(T, K+1)`, float32, log-probabilities in nats under the behaviour policy.
    """

    ids: np.ndarray
    logps: np.ndarray

    def __post_init__(self):
        self.ids[:, 1:][self.ids[:, 1:] == self.ids[:, :1]] = -1


class TokenLogprob(float):
    """Log-probability of a sampled token that also points to the candidates it was sampled among.

    Attributes:
        candidates ([`Candidates`]): those of its whole sequence.
        position (`int`): its own row there.
    """

    __slots__ = ("candidates", "position")
    candidates: Candidates
    position: int

    def __new__(cls, logprob: float, candidates: Candidates, position: int):
        self = super().__new__(cls, logprob)
        self.candidates = candidates
        self.position = position
        return self

    def __reduce__(self):  # on its way to another process a token takes its own row along, not the sequence
        row = slice(self.position, self.position + 1)
        return type(self), (float(self), Candidates(self.candidates.ids[row], self.candidates.logps[row]), 0)


def _token_logprobs(candidates: Candidates) -> list[list[TokenLogprob]]:
    # One entry a position, where TRL takes the sampled token's logprob from
    return [[TokenLogprob(lp, candidates, t)] for t, lp in enumerate(candidates.logps[:, 0].tolist())]


def from_vllm_outputs(outputs: list["RequestOutput"]) -> tuple[list[list[list[TokenLogprob]]], None]:
    """TRL's `extract_logprobs` for requests with flat logprobs: the sampled token first, then its candidates.

    Returns:
        Log-probabilities of shape `(num_sequences, T, 1)`, and `None` in the place of the ids, which they carry.
    """
    sequences = []
    for completion in (completion for output in outputs for completion in output.outputs):
        flat, length = completion.logprobs, len(completion.token_ids)
        shape = (length, len(flat.token_ids) // length if length else 1)
        ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)
        sequences.append(_token_logprobs(Candidates(ids, np.array(flat.logprobs, dtype=np.float32).reshape(shape))))
    return sequences, None


def from_lists(
    completion_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[Sequence[int]]],
    logprobs: Sequence[Sequence[Sequence[float | None]]],
    sampled_logprobs: Sequence[Sequence[float | None]] | None = None,
) -> list[list[list[TokenLogprob]]]:
    """The same from lists: K or K+1 candidates a token, in any order, with `None` for NaN.

    Args:
        completion_ids: `(num_sequences, T)`, the sampled tokens.
        token_ids: `(num_sequences, T, K or K+1)`, their candidates.
        logprobs: those of the candidates, in the shape of `token_ids`.
        sampled_logprobs: `(num_sequences, T)`, those of the sampled tokens, used where finite. Without them, the
            sampled token must be one of its candidates.

    Raises:
        ValueError: the lists do not fit together, hold something else than token ids and logprobs, contradict each
            other, or a sampled token should be among its candidates and is not.
    """
    if not len(completion_ids) == len(token_ids) == len(logprobs):
        raise ValueError(
            f"There are {len(completion_ids)} completions, but token ids of the candidates of {len(token_ids)} and "
            f"logprobs of {len(logprobs)}."
        )
    if sampled_logprobs is not None and _lengths(sampled_logprobs) != _lengths(completion_ids):
        raise ValueError("The logprobs of the sampled tokens do not fit the completions: there must be one per token.")
    sequences, apart = [], []
    for b, (sampled, seq_ids, seq_logps) in enumerate(zip(completion_ids, token_ids, logprobs, strict=True)):
        lengths = _lengths(seq_ids)
        if lengths is None or len(lengths) != len(sampled) or lengths != _lengths(seq_logps):
            raise ValueError(
                f"The candidates of completion {b} do not fit its {len(sampled)} tokens: there must be one list of "
                "token ids and one of logprobs for each of them, of equal length."
            )
        lengths = np.array(lengths, dtype=int)
        listed = np.arange(lengths.max(initial=1)) < lengths[:, None]
        ids = np.full(listed.shape, -1, dtype=np.int32)
        logps = np.full(listed.shape, np.nan, dtype=np.float32)
        ids[listed] = _numbers(list(chain.from_iterable(seq_ids)), np.int32, "candidates' token ids", b)
        logps[listed] = _numbers(list(chain.from_iterable(seq_logps)), np.float32, "candidates' logprobs", b)
        order = np.argsort(-logps, axis=1, kind="stable")  # the most probable first, NaN last
        ids, logps = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logps, order, axis=1)

        sampled = _numbers(sampled, np.int32, "tokens", b)
        is_sampled = ids == sampled[:, None]
        absent = ~is_sampled.any(1)
        if (is_sampled.sum(1) > 1).any():
            t = (is_sampled.sum(1) > 1).argmax()
            raise ValueError(
                f"The candidates of completion {b} hold token {sampled[t]} twice at position {t}; they must be distinct."
            )
        own = np.where(absent, np.nan, logps[np.arange(len(ids)), is_sampled.argmax(1)])
        if sampled_logprobs is not None:
            given = _numbers(sampled_logprobs[b], np.float32, "logprobs", b)
            apart += [difference for difference in np.abs(given - own).tolist() if math.isfinite(difference)]
            own = np.where(np.isfinite(given), given, own)
            # One that was less probable than all K of them may be
            absent &= (lengths > 0) & (given > np.fmin.reduce(logps, axis=1, initial=np.inf) + OUTSIDE_TOLERANCE)
        if absent.any():
            t = absent.argmax()
            raise ValueError(
                f"The candidates of completion {b} are not those of its tokens: at position {t}, token {sampled[t]} "
                "was sampled and must be one of them."
            )
        candidates = Candidates(np.column_stack([sampled, ids]), np.column_stack([own, logps]).astype(np.float32))
        sequences.append(_token_logprobs(candidates))
    if apart and sum(apart) / len(apart) > CONTRADICTION_TOLERANCE:
        raise ValueError(
            f"The rollout's sampled tokens have two logprobs, their own and one among their candidates, which differ by "
            f"{sum(apart) / len(apart):.3f} nats on average: the candidates are those of another policy or temperature."
        )
    return sequences


def _lengths(field: Any) -> list[int] | None:
    try:
        return [len(entries) for entries in field]
    except TypeError:  # of something that is no list of lists
        return None


def _numbers(values: Sequence, dtype: type, what: str, b: int) -> np.ndarray:
    """As an array: token ids without wrapping or truncating them, or logprobs with `None` as NaN."""
    are_ids = dtype is np.int32
    must = f"The {what} of completion {b} must be {'whole numbers from 0' if are_ids else 'numbers, or `None`'}"
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
            numbers = np.array(values, dtype=None if are_ids and len(values) else dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{must}: {error}.") from error
    if numbers.ndim != 1:
        raise ValueError(f"{must}, in a flat list.")
    largest = np.iinfo(np.int32).max
    if are_ids and (numbers.dtype.kind not in "iu" or ((numbers < 0) | (numbers > largest)).any()):
        wrong = (value for value in values if not isinstance(value, (int, np.integer)) or not 0 <= value <= largest)
        raise ValueError(f"{must}, got {next(wrong, values[0])!r}.")
    if not are_ids and (numbers > MASS_TOLERANCE).any():
        raise ValueError(
            f"The {what} of completion {b} hold {np.nanmax(numbers):.3g}, which is a probability of more than 1. They "
            "must be log-probabilities, in nats."
        )
    return numbers.astype(dtype)


def with_candidates(rollout_func: Callable[[list, Any], dict[str, Any]]) -> Callable[[list, Any], dict[str, Any]]:
    """A rollout function whose logprobs carry what it returns as `topk_token_ids` and `topk_logprobs`, if it does.

    Both are lists, per completion, of one list a token: the K most probable tokens, with or without the sampled one,
    in any order. It is empty for a token that the policy did not sample.

    Raises:
        ValueError: what the rollout function returns does not fit together.
    """

    @wraps(rollout_func)
    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        output = rollout_func(prompts, trainer)
        if not isinstance(output, Mapping):
            raise ValueError(f"The rollout function must return a dictionary, got {type(output).__name__}.")
        output = dict(output)
        if "completion_ids" not in output:
            return output  # TRL says what is missing
        token_ids, topk_logprobs = output.pop("topk_token_ids", None), output.pop("topk_logprobs", None)
        completion_ids, logprobs = output["completion_ids"], output.get("logprobs")
        fields = {"logprobs": logprobs, "topk_token_ids": token_ids, "topk_logprobs": topk_logprobs}
        for name, field in fields.items():
            if field is not None and (_lengths(field) is None or _lengths(field) != _lengths(completion_ids)):
                raise ValueError(
                    f"The rollout function's `{name}` do not fit its `completion_ids`: there must be one list per "
                    "completion, with one entry per token."
                )
        if 0 in (lengths := _lengths(completion_ids) or []):  # TRL would fail with an IndexError
            raise ValueError(
                f"The rollout function's completion {lengths.index(0)} is empty. A completion has at least one token, "
                "be it the end of the sequence."
            )
        if (token_ids is None) != (topk_logprobs is None):
            raise ValueError("A rollout function must return `topk_token_ids` and `topk_logprobs`, or neither.")
        for b, sequence in enumerate(() if logprobs is None else logprobs):
            _numbers(sequence, np.float32, "logprobs", b)
        if token_ids is not None:
            carrying = from_lists(completion_ids, token_ids, topk_logprobs, logprobs)
            output["logprobs"] = [
                [lp[0] if len(entries) else float(lp[0]) for lp, entries in zip(*sequence, strict=True)]
                for sequence in zip(carrying, token_ids, strict=True)
            ]
        return output

    return rollout


def collate(
    logprobs: Sequence[Sequence[float | None]], completion_ids: Tensor, top_k: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Lay the candidates of a batch out beside its completions.

    Args:
        logprobs: one sequence a completion, of [`TokenLogprob`] where the behaviour policy's candidates are known.
        completion_ids (`torch.Tensor`): `(B, T)`, padded on the right.
        top_k (`int`): `K`. Candidates beyond it are left out; missing ones are empty slots.
        vocab_size (`int`): size of the training policy's vocabulary.

    Returns:
        `behavior_topk_ids` `(B, T, K+1)`, int32, `-1` where a slot is empty, and `behavior_topk_logps` `(B, T, K+1)`,
        float32, NaN in slot 0 where nothing is known of a token. Both on the device of `completion_ids`.

    Raises:
        ValueError: the candidates are not those of the completions' tokens, or are no distribution over the
            vocabulary.
    """
    if len(logprobs) != len(completion_ids) or any(len(sequence) > completion_ids.shape[1] for sequence in logprobs):
        raise ValueError(
            f"The rollout holds logprobs of {len(logprobs)} completions of {max(map(len, logprobs), default=0)} tokens at "
            f"most, the batch {len(completion_ids)} of {completion_ids.shape[1]}."
        )
    shape = (*completion_ids.shape, top_k + 1)
    ids = np.full(shape, -1, dtype=np.int32)
    logps = np.zeros(shape, dtype=np.float32)
    logps[..., 0] = np.nan
    for b, sequence in enumerate(logprobs):
        known = [(t, lp) for t, lp in enumerate(sequence) if isinstance(lp, TokenLogprob)]
        for _, run in groupby(known, key=lambda item: id(item[1].candidates)):
            columns, entries = zip(*run, strict=True)
            rows = [lp.position for lp in entries]
            width = min(shape[-1], entries[0].candidates.ids.shape[1])
            ids[b, columns, :width] = entries[0].candidates.ids[rows, :width]
            logps[b, columns, :width] = entries[0].candidates.logps[rows, :width]
    _check(ids, logps, completion_ids.cpu().numpy(), vocab_size)
    device = completion_ids.device
    return torch.from_numpy(ids).to(device), torch.from_numpy(logps).to(device)


def score_behavior(
    score: Callable[..., Any],
    model: Any,
    batch: dict[str, Any],
    batch_size: int,
    top_k: int,
    gradient_checkpointing_kwargs: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """
    The behaviour policy where it is the trainer's own, before it is updated.

    Args:
        score (`Callable`): TRL's `_get_per_token_logps_and_entropies`.
        model: the model that is trained.
        batch (`dict`): TRL's, of a rollout.
        batch_size (`int`): sequences in one forward pass.
        top_k (`int`): K.
        gradient_checkpointing_kwargs (`dict`, *optional*): of the trainer's arguments.

    Returns:
        `tuple[Tensor, Tensor]`: ids (int32) and log-probabilities (float32) as those of [`collate`].
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits_to_keep = batch["completion_ids"].size(1)
    multimodal = {name: batch[name] for name in signature(score).parameters if name in batch}
    with (
        torch.no_grad(),
        grpo_trainer.disable_gradient_checkpointing(model, gradient_checkpointing_kwargs),
        topk_head(attention_mask, logits_to_keep, batch_size, top_k=top_k) as scores,
    ):
        score(model, ids, attention_mask, logits_to_keep, batch_size=batch_size, **multimodal)
    return scores.ids, scores.logps


def lack_candidates(behavior_ids: Tensor, mask: Tensor) -> bool:
    """Whether a rollout function left the candidates of some tokens in `mask` out; it is told so once."""
    lacking = bool((mask & (behavior_ids[..., 0] < 0)).any())
    if lacking:
        logger.warning_once(
            "`rollout_func` returns logprobs without their candidates, so the training model scores the behaviour "
            "policy's top K: the trust region does not see how the sampling engine differs from it. Return the "
            "logprobs as `trainer.vllm_generation.generate` gives them, or `topk_token_ids` and `topk_logprobs`."
        )
    return lacking


def fill_in(behavior: tuple[Tensor, Tensor], scored: tuple[Tensor, Tensor], sampled_logps: Tensor) -> None:
    """Give the tokens of `behavior` without candidates those of `scored`, keeping their own logprob where finite.

    Args:
        behavior, scored: ids and log-probabilities, each `(B, T, K+1)`; `behavior` is changed.
        sampled_logps (`torch.Tensor`): `(B, T)`, what the rollout says of its sampled tokens.
    """
    (ids, logps), (scored_ids, scored_logps) = behavior, scored
    missing = ids[..., 0] < 0
    ids[missing], logps[missing] = scored_ids[missing].to(ids.dtype), scored_logps[missing].to(logps.dtype)
    logps[..., 0] = torch.where(missing & sampled_logps.isfinite(), sampled_logps, logps[..., 0])


def _check(ids: np.ndarray, logps: np.ndarray, completion_ids: np.ndarray, vocab_size: int) -> None:
    sampled = ids[..., 0]
    if (misplaced := (sampled >= 0) & (sampled != completion_ids)).any():
        b, t = np.argwhere(misplaced)[0]
        raise ValueError(
            f"The logprobs of completion {b} are not aligned with its tokens: position {t} holds token "
            f"{completion_ids[b, t]}, its logprob belongs to token {sampled[b, t]}. A rollout function must return one "
            "logprob per completion token, in the same order."
        )
    if ids.max(initial=-1) >= vocab_size:
        raise ValueError(
            f"The rollout's candidates hold token id {ids.max()}, beyond the training model's vocabulary of "
            f"{vocab_size}. Engine and trainer must load the same model and tokenizer."
        )
    ordered = np.sort(ids, axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ValueError("The rollout's candidates hold a token twice at one position; they must be distinct.")
    with np.errstate(over="ignore"):  # what float32 cannot hold is more than 1, too
        mass = np.where(ids >= 0, np.exp(np.nan_to_num(logps, nan=-np.inf)), 0).sum(-1)
    if (mass > 1 + MASS_TOLERANCE).any():
        raise ValueError(
            f"The rollout's candidates at one position have a probability of {mass.max():.3f} in all, more than 1. "
            "They must be log-probabilities, normalised over the vocabulary."
        )


def warn_of_noise(model: Any, neftune_noise_alpha: float | None) -> None:
    """Say where the training policy differs from the one that sampled before any update."""
    dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    in_attention = getattr(model.config.get_text_config(), "attention_dropout", 0)
    if dropout or in_attention or neftune_noise_alpha:
        logger.warning(
            "The model trains with dropout or NEFTune, which move its logprobs at random: the trust region takes that for "
            "divergence and masks tokens for it, before any update. Set `disable_dropout=True`, the model's "
            "`attention_dropout` to 0, and no `neftune_noise_alpha`."
        )


def check_not_all_nan(logprobs: Sequence[Sequence[float]] | None) -> None:
    """Refuse a rollout of an engine with NaN weights.

    Raises:
        ValueError: Every logprob is NaN.
    """
    is_nan = (lp != lp for sequence in logprobs or () for lp in sequence)
    if next(is_nan, False) and all(is_nan):
        raise ValueError(
            "Every logprob that vLLM returned is NaN, so its weights are, and what it sampled is not worth training on. "
            "Resume from a checkpoint, with a lower `learning_rate` or `max_grad_norm`."
        )


class TopKVLLMGeneration(VLLMGeneration):
    """TRL's vLLM backend, but its logprobs are [`TokenLogprob`]s and its weights come through [`choose_sync`].

    Args:
        divergence_top_k (`int`): number of the most probable tokens to ask the engine for, besides the sampled one.
        weight_sync (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"full"` or `"adapter"`.
        quantization (`str`, *optional*): vLLM's quantization of a colocated engine.
        kwargs: those of [`~trl.generation.vllm_generation.VLLMGeneration`].

    Attributes:
        last_sync ([`SyncRecord`] or `None`): what the last weight sync moved, and how long it took.
    """

    def __init__(
        self, *, divergence_top_k: int, weight_sync: str = "auto", quantization: str | None = None, **kwargs: Any
    ):
        self.divergence_top_k = divergence_top_k
        self.weight_sync = weight_sync
        self.quantization = quantization
        self.last_sync: SyncRecord | None = None
        self._told_of_truncation = False
        generation_kwargs = kwargs.get("generation_kwargs") or {}
        if "logprobs" in generation_kwargs:
            raise ValueError(
                f"`generation_kwargs` sets `logprobs` to {generation_kwargs['logprobs']}. Leave it out: "
                f"`divergence_top_k` ({divergence_top_k}) says how many are needed."
            )
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if name in generation_kwargs:
                raise ValueError(
                    f"`generation_kwargs` sets `{name}` to {generation_kwargs[name]}, of which the loss would not know. "
                    f"Set the field `{name}` of the config instead."
                )
        super().__init__(**kwargs | {"logprobs": divergence_top_k})
        if not self.samples_from_the_policy:
            logger.warning(
                "vLLM samples with penalties or biases (`repetition_penalty`, or one of "
                f"{', '.join(f'`{name}`' for name in sorted(_RESHAPING))} in `generation_kwargs`), of which the training "
                "policy knows nothing: ratio and divergence measure them along with the updates, and the sync check is "
                "off."
            )
        if self.mode == "colocate":
            # Flat logprobs spare a dictionary a token, and nobody reads the candidates' text: vLLM would detokenize
            # all of them. It needs text to find stop strings.
            text = {"detokenize": bool(self.generation_kwargs.get("stop"))}
            self.generation_kwargs = text | self.generation_kwargs | {"flat_logprobs": True}
        elif self.accelerator.is_main_process:
            self._check_server()

    def _init_vllm(self) -> None:
        if not hasattr(vllm_generation, "LLM"):  # without vLLM, TRL says how to install it
            return super()._init_vllm()
        self._sync = choose_sync(
            self.weight_sync,
            self.model,
            super()._iter_named_params,
            colocated=self.mode == "colocate",
            sharded=self._dist.is_zero3 or self._dist.is_fsdp,
            base_every_time=self.enable_sleep_mode,
        )
        if self.mode != "colocate":
            return super()._init_vllm()
        ours: dict[str, Any] = {"max_logprobs": max(self.divergence_top_k, VLLM_DEFAULT_MAX_LOGPROBS)}
        ours |= self._sync.engine_kwargs
        if self.quantization is not None:
            ours["quantization"] = self.quantization
        LLM, model = vllm_generation.LLM, self.model
        if is_bnb_quantized(model):
            self.model, of_quantized = unquantized_view(model)
            ours |= of_quantized
        try:
            with substituted(vllm_generation, LLM=lambda **kwargs: LLM(**kwargs | ours)):
                super()._init_vllm()
        finally:
            self.model = model

    def _check_server(self) -> None:
        config = self.vllm_client.get_server_info()["model_config"]
        most, mode = config["max_logprobs"], config["logprobs_mode"]
        if 0 <= most < self.divergence_top_k:  # -1 is no limit
            raise ValueError(
                f"`divergence_top_k` is {self.divergence_top_k}, but the vLLM server returns at most {most} logprobs a "
                f"token. Restart it with `--max-logprobs {self.divergence_top_k}`, or lower `divergence_top_k`."
            )
        if mode != "processed_logprobs":
            logger.warning(
                f"The vLLM server runs with `--logprobs-mode {mode}`, so its logprobs are not those of the policy that "
                "samples the tokens, and the trust region is measured from the wrong place. Restart it with "
                "`--logprobs-mode processed_logprobs`."
            )

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As `VLLMGeneration.generate`, with `logprobs` of shape `(batch_size, T, 1)` that carry their candidates."""
        with substituted(vllm_generation, extract_logprobs=from_vllm_outputs):
            prompt_ids, completion_ids, logprobs, token_ids = super().generate(
                prompts, images, num_generations, profiler=profiler
            )
        if self.mode == "server":
            logprobs, token_ids = from_lists(completion_ids, token_ids, logprobs), None
        if any(not isinstance(lp[0], TokenLogprob) for sequence in logprobs for lp in sequence[:1]):
            raise TRLCompatibilityError("TRL's vLLM backend no longer reads logprobs through `extract_logprobs`.")
        return prompt_ids, completion_ids, logprobs, token_ids

    @property
    def truncates(self) -> bool:
        """Some tokens cannot be sampled, and the logprobs of the others are higher for it."""
        by_probability = self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
        return by_probability or bool(self.structured_outputs_regex or _TRUNCATION & set(self.generation_kwargs))

    @property
    def samples_from_the_policy(self) -> bool:
        """Nothing but temperature and truncation comes between the weights and the sampled logprobs."""
        return self.repetition_penalty == 1 and not _RESHAPING & set(self.generation_kwargs)

    def tell_of_truncation(self, bias: float) -> None:
        """Say once what truncation does to the log-ratio of a policy that is not renormalised: `bias`, in nats."""
        if not self._told_of_truncation:
            self._told_of_truncation = True
            logger.warning(
                "vLLM's sampling is truncated (`top_p`, `top_k`, `min_p`, structured outputs and the like), which "
                "renormalises its logprobs over the tokens that survive; the training policy's are not. Here that adds "
                f"{bias:+.3f} nats to a token's log-ratio on average, and its like to the divergence. "
                "`sampling_support='replay'` removes it."
            )

    def suspects(self) -> list[str]:
        """Names of the tensors in which a colocated engine differs from the trainer. Nothing is known of a server, of an
        engine that sleeps, and so has no weights, nor of one whose layers are in parts."""
        if self.mode != "colocate" or self.enable_sleep_mode or self.tensor_parallel_size > 1:
            return []
        # The base, where the adapter is served beside it
        sync = self._sync
        params = sync.params() if isinstance(sync, FullSync) else lora_model_params(self.model, merged=False)
        return differing_tensors(self.llm, params)

    def sync_weights(self) -> None:
        """As `VLLMGeneration.sync_weights`; `last_sync` tells what it took.

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
        for name, param in self._sync.params():
            self._moved += param.nbytes
            yield name, param
