"""Logprobs of tokens that carry the tokens' candidates, and the layout of the candidates beside a batch.

Of an engine's answer TRL keeps one float per token. It slices, concatenates and pads these floats through multi-turn
tool calls and user rollout functions. A [`TokenLogprob`] is such a float that also points to the candidates it was
sampled among, so they stay with their token all the way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor


# nats; a sampled token this much more probable than a candidate must be a candidate too, whatever the rounding
OUTSIDE_TOLERANCE = 0.1
# nats; if the two logprobs of a rollout's tokens differ by more on average, they are of two policies or temperatures
CONTRADICTION_TOLERANCE = 0.5
MASS_TOLERANCE = 0.01  # engines round


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates at each token of one sampled sequence.

    Attributes:
        ids (`numpy.ndarray`): `(T, K+1)`, int32. Slot 0 has the sampled token, the others the behaviour policy's most
            probable tokens. An empty slot is `-1`, and so is one that would repeat the sampled token.
        logps (`numpy.ndarray`): `(T, K+1)`, float32, their log-probabilities under the behaviour policy, in nats.
    """

    ids: np.ndarray
    logps: np.ndarray

    def __post_init__(self):
        self.ids[:, 1:][self.ids[:, 1:] == self.ids[:, :1]] = -1


class TokenLogprob(float):
    """The log-probability of a sampled token, which also points to the candidates it was sampled among.

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


def token_logprobs(candidates: Candidates) -> list[list[TokenLogprob]]:
    """The logprobs of a sequence's sampled tokens, `(T, 1)`. TRL takes the sampled one from the first place."""
    return [[TokenLogprob(lp, candidates, t)] for t, lp in enumerate(candidates.logps[:, 0].tolist())]


def from_lists(
    completion_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[Sequence[int]]],
    logprobs: Sequence[Sequence[Sequence[float | None]]],
    sampled_logprobs: Sequence[Sequence[float | None]] | None = None,
) -> list[list[list[TokenLogprob]]]:
    """Make [`TokenLogprob`]s of lists, which hold K or K+1 candidates per token in any order, and `None` for NaN.

    Args:
        completion_ids: `(num_sequences, T)`, the sampled tokens.
        token_ids: `(num_sequences, T, K or K+1)`, their candidates.
        logprobs: those of the candidates in nats, in the shape of `token_ids`.
        sampled_logprobs (*optional*): `(num_sequences, T)`, those of the sampled tokens in nats, used where finite.
            Without them, each sampled token must be one of its candidates.

    Returns:
        `list[list[list[TokenLogprob]]]`: `(num_sequences, T, 1)`.

    Raises:
        ValueError: The lists do not fit together, contradict each other, or hold something else than token ids and
            logprobs; or a sampled token should be among its candidates and is not.
    """
    if not len(completion_ids) == len(token_ids) == len(logprobs):
        raise ValueError(
            f"There are {len(completion_ids)} completions, but token ids of the candidates of {len(token_ids)} and "
            f"logprobs of {len(logprobs)}."
        )
    if sampled_logprobs is not None and lengths_of(sampled_logprobs) != lengths_of(completion_ids):
        raise ValueError("The logprobs of the sampled tokens do not fit the completions: there must be one per token.")
    sequences, apart = [], []
    for b, (sampled, seq_ids, seq_logps) in enumerate(zip(completion_ids, token_ids, logprobs, strict=True)):
        lengths = lengths_of(seq_ids)
        if lengths is None or len(lengths) != len(sampled) or lengths != lengths_of(seq_logps):
            raise ValueError(
                f"The candidates of completion {b} do not fit its {len(sampled)} tokens: there must be one list of "
                "token ids and one of logprobs for each of them, of equal length."
            )
        lengths = np.array(lengths, dtype=int)
        listed = np.arange(lengths.max(initial=1)) < lengths[:, None]
        ids = np.full(listed.shape, -1, dtype=np.int32)
        logps = np.full(listed.shape, np.nan, dtype=np.float32)
        ids[listed] = checked_numbers(list(chain.from_iterable(seq_ids)), np.int32, "candidates' token ids", b)
        logps[listed] = checked_numbers(list(chain.from_iterable(seq_logps)), np.float32, "candidates' logprobs", b)
        order = np.argsort(-logps, axis=1, kind="stable")  # the most probable first, NaN last
        ids, logps = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logps, order, axis=1)

        sampled = checked_numbers(sampled, np.int32, "tokens", b)
        is_sampled = ids == sampled[:, None]
        absent = ~is_sampled.any(1)
        if (is_sampled.sum(1) > 1).any():
            t = (is_sampled.sum(1) > 1).argmax()
            raise ValueError(
                f"The candidates of completion {b} hold token {sampled[t]} twice at position {t}; they must be distinct."
            )
        own = np.where(absent, np.nan, logps[np.arange(len(ids)), is_sampled.argmax(1)])
        if sampled_logprobs is not None:
            given = checked_numbers(sampled_logprobs[b], np.float32, "logprobs", b)
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
        sequences.append(token_logprobs(candidates))
    if apart and sum(apart) / len(apart) > CONTRADICTION_TOLERANCE:
        raise ValueError(
            f"The rollout's sampled tokens have two logprobs, their own and one among their candidates, which differ by "
            f"{sum(apart) / len(apart):.3f} nats on average: the candidates are those of another policy or temperature."
        )
    return sequences


def lengths_of(field: Any) -> list[int] | None:
    """The lengths of the lists in `field`; `None` where it is no list of lists."""
    try:
        return [len(entries) for entries in field]
    except TypeError:
        return None


def checked_numbers(values: Sequence, dtype: type, what: str, b: int) -> np.ndarray:
    """Make an array of a list: int32 token ids, or float32 logprobs with `None` as NaN.

    Args:
        values (`Sequence`): the list.
        dtype (`type`): `numpy.int32` for token ids, `numpy.float32` for logprobs.
        what, b: what the list holds, and of which completion, for errors.

    Raises:
        ValueError: The list is not flat, a token id is negative, too large or no integer, or a logprob is that of a
            probability above 1.
    """
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


def collate(
    logprobs: Sequence[Sequence[float | None]], completion_ids: Tensor, top_k: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Lay the candidates of a batch out as tensors, beside its completions.

    Args:
        logprobs: one list per completion, with a [`TokenLogprob`] for each token whose candidates are known.
        completion_ids (`torch.Tensor`, int): `(B, T)`, padded on the right.
        top_k (`int`): `K`. Candidates beyond it are left out; missing ones are empty slots.
        vocab_size (`int`): size of the training policy's vocabulary.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: on the device of `completion_ids`, `(B, T, K+1)` each. The ids, int32, are
        `-1` where a slot is empty. The log-probabilities, float32, are NaN in slot 0 where nothing is known of a
        token.

    Raises:
        ValueError: The candidates are not those of the completions' tokens, or are no distribution over the
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
