"""The behaviour policy's top K, from the engine that sampled the tokens to the batch that trains on them.

An engine's answer holds, for every sampled token, the candidates that it was sampled among. TRL keeps one float a token
of that and slices, concatenates and pads these floats through multi-turn tool calls and user rollout functions. A
[`TokenLogprob`] is such a float that also points to its candidates, so they stay with their token all the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ._hooks import TRLCompatibilityError, substituted
from .weight_sync import reload_weights


if TYPE_CHECKING:
    from vllm import RequestOutput

VLLM_DEFAULT_MAX_LOGPROBS = 20


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


def from_vllm_outputs(outputs: list["RequestOutput"]) -> tuple[list[list[list[TokenLogprob]]] | None, None]:
    """TRL's `extract_logprobs` for requests with flat logprobs: the sampled token first, then its candidates.

    Returns:
        Log-probabilities of shape `(num_sequences, T, 1)`, and `None` in the place of the ids, which they carry.
    """
    sequences = []
    for completion in (completion for output in outputs for completion in output.outputs):
        if completion.logprobs is None:
            return None, None
        flat, length = completion.logprobs, len(completion.token_ids)
        shape = (length, len(flat.token_ids) // max(length, 1))
        ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)
        sequences.append(_token_logprobs(Candidates(ids, np.array(flat.logprobs, dtype=np.float32).reshape(shape))))
    return sequences, None


def from_ranked(
    completion_ids: list[list[int]], logprobs: list[list[list[float | None]]], token_ids: list[list[list[int]]]
) -> list[list[list[TokenLogprob]]]:
    """The same from a vLLM server's answer, whose entries are sorted by probability.

    Raises:
        ValueError: the sampled token is not among the entries of its position.
    """
    sequences = []
    for sampled, seq_logprobs, seq_ids in zip(completion_ids, logprobs, token_ids, strict=True):
        width = 1 + max(map(len, seq_ids), default=0)
        ids = np.full((len(sampled), width), -1, dtype=np.int32)
        logps = np.zeros((len(sampled), width), dtype=np.float32)
        for t, (token, entry_logps, entry_ids) in enumerate(zip(sampled, seq_logprobs, seq_ids, strict=True)):
            if token not in entry_ids:
                raise ValueError(f"The vLLM server sampled token {token} but returned no logprob of it.")
            ids[t, 0], ids[t, 1 : len(entry_ids) + 1] = token, entry_ids
            values = [np.nan if lp is None else lp for lp in entry_logps]
            logps[t, 0], logps[t, 1 : len(entry_ids) + 1] = values[entry_ids.index(token)], values
        sequences.append(_token_logprobs(Candidates(ids, logps)))
    return sequences


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
    mass = np.where(ids >= 0, np.exp(np.nan_to_num(logps, nan=-np.inf)), 0).sum(-1)
    if (mass > 1.01).any():
        raise ValueError(
            f"The rollout's candidates at one position have a probability of {mass.max():.3f} in all, more than 1. "
            "They must be log-probabilities, normalised over the vocabulary."
        )


class TopKVLLMGeneration(VLLMGeneration):
    """TRL's vLLM backend, but its logprobs are [`TokenLogprob`]s and its weight sync goes through vLLM's reload.

    Args:
        divergence_top_k (`int`): number of the most probable tokens to ask the engine for, besides the sampled one.
        kwargs: those of [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def __init__(self, *, divergence_top_k: int, **kwargs: Any):
        self.divergence_top_k = divergence_top_k
        super().__init__(**kwargs | {"logprobs": divergence_top_k})
        if "logprobs" in self.generation_kwargs:
            raise ValueError(
                f"`generation_kwargs` sets `logprobs` to {self.generation_kwargs['logprobs']}. Leave it out: "
                f"`divergence_top_k` ({divergence_top_k}) says how many are needed."
            )
        if self.mode == "colocate":
            # Flat logprobs spare a dictionary a token, and nobody reads the candidates' text: vLLM would detokenize
            # all of them. It needs text to find stop strings.
            flat = {"flat_logprobs": True, "detokenize": bool(self.generation_kwargs.get("stop"))}
            self.generation_kwargs = flat | self.generation_kwargs

    def _init_vllm(self) -> None:
        if self.mode != "colocate" or not hasattr(vllm_generation, "LLM"):  # without vLLM, TRL says how to install it
            return super()._init_vllm()
        engine = partial(vllm_generation.LLM, max_logprobs=max(self.divergence_top_k, VLLM_DEFAULT_MAX_LOGPROBS))
        with substituted(vllm_generation, LLM=engine):
            super()._init_vllm()

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As `VLLMGeneration.generate`, with `logprobs` of shape `(batch_size, T, 1)` that carry their candidates."""
        with substituted(vllm_generation, extract_logprobs=from_vllm_outputs):
            prompt_ids, completion_ids, logprobs, token_ids = super().generate(
                prompts, images, num_generations, profiler=profiler
            )
        if self.mode == "server":
            logprobs, token_ids = from_ranked(completion_ids, logprobs, token_ids), None
        if any(not isinstance(lp[0], TokenLogprob) for sequence in logprobs for lp in sequence[:1]):
            raise TRLCompatibilityError("TRL's vLLM backend no longer reads logprobs through `extract_logprobs`.")
        return prompt_ids, completion_ids, logprobs, token_ids

    def _iter_named_params(self):
        # Stock `sync_weights` loads what this yields, one by one, into the live modules. A colocated engine has taken
        # everything through its own reload by the time there is nothing left to yield.
        named_params = super()._iter_named_params()
        if self.mode == "server":
            yield from named_params
        else:
            reload_weights(self.llm, named_params)
