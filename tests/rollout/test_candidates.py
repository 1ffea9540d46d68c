"""A logprob that carries its candidates, from an engine's answer into the trainer's batch.

What must come out is written down in plain Python here.
"""

import copy
import gc
import math
import pickle
import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import pad

from trl_pdm.rollout import (
    Candidates,
    TokenLogprob,
    collate,
    from_lists,
    from_vllm_outputs,
)


V = 50


# ---- Random rollouts, as plain lists


def random_token(rng, entries, never_listed=0.3):
    """A sampled token and the candidates it was sampled among, most probable first: `(id, logprob)` each."""
    weights = sorted((rng.expovariate(1) + 1e-3 for _ in range(V)), reverse=True)
    total = sum(weights)
    ids = rng.sample(range(V), V)
    ranked = [(i, math.log(w / total)) for i, w in zip(ids, weights, strict=True)]
    # Any candidate may be the sampled one, or one that is none of them
    rank = rng.randrange(entries, V) if rng.random() < never_listed else rng.randrange(entries)
    sampled, top = ranked[rank], ranked[:entries]
    if rng.random() < 0.1:  # sampling from a nucleus: all but a few have no probability
        kept = rng.randrange(1, entries + 1)
        top = [(i, lp if n < kept else -math.inf) for n, (i, lp) in enumerate(top)]
        sampled = top[rng.randrange(kept)]
    if rng.random() < 0.1:  # the engine could not say how probable the token was
        top = [(i, math.nan if i == sampled[0] else lp) for i, lp in top]
        sampled = (sampled[0], math.nan)
    return sampled, top


def by_rank(entries):
    """Most probable first and NaN last, as TRL's server client returns them."""
    return sorted(entries, key=lambda entry: (math.isnan(entry[1]), -entry[1] if not math.isnan(entry[1]) else 0))


def expected_row(sampled, top, top_k):
    """`top_k + 1` slots: the sampled token, then the candidates in order; `None` where empty."""
    slots = [sampled] + [None if entry[0] == sampled[0] else entry for entry in top]
    return (slots + [None] * (top_k + 1))[: top_k + 1]


def through_flat(tokens):
    """A real answer of a colocated vLLM has these two lists, the sampled token first at each position."""
    rows = [[sampled, *top] for sampled, top in tokens]
    flat = SimpleNamespace(
        token_ids=[i for row in rows for i, _ in row], logprobs=[lp for row in rows for _, lp in row]
    )
    completion = SimpleNamespace(logprobs=flat, token_ids=[sampled[0] for sampled, _ in tokens])
    (sequence,), ids = from_vllm_outputs([SimpleNamespace(outputs=[completion])])
    assert ids is None
    return [lp for (lp,) in sequence]


def through_lists(tokens):
    """Lists hold the sampled token among its candidates, and `None` for NaN."""
    ids = [[i for i, _ in entries] for _, entries in tokens]
    logps = [[None if math.isnan(lp) else lp for _, lp in entries] for _, entries in tokens]
    return [lp for (lp,) in from_lists([[sampled[0] for sampled, _ in tokens]], [ids], [logps])[0]]


def random_sequence(rng, length):
    """Runs of tokens from several engine calls, with the floats of tool tokens and unknown ones in between."""
    sampled_ids, logprobs, rows = [], [], []
    while len(sampled_ids) < length:
        run = min(rng.randrange(1, 5), length - len(sampled_ids))
        kind = rng.choice(["flat", "ranked", "shuffled", "plain", "none"])
        entries = rng.randrange(1, 9)
        tokens = [random_token(rng, entries if kind == "flat" else rng.randrange(1, 9)) for _ in range(run)]
        sampled_ids += [sampled[0] for sampled, _ in tokens]
        if kind in ("plain", "none"):
            logprobs += [0.0 if kind == "plain" else None] * run
            rows += [None] * run
            continue
        if kind == "flat":
            carried = through_flat(tokens)
        else:  # ranked in a server's answer, in any order in a rollout's
            tokens = [(sampled, top if sampled[0] in dict(top) else [*top, sampled]) for sampled, top in tokens]
            order = by_rank if kind == "ranked" else lambda entries: rng.sample(entries, len(entries))
            tokens = [(sampled, order(entries)) for sampled, entries in tokens]
            carried = through_lists(tokens)
            tokens = [(sampled, by_rank(entries)) for sampled, entries in tokens]
        cut = rng.randrange(run + 1)
        logprobs += carried[:cut] + carried[cut:]  # TRL slices and concatenates
        rows += tokens
    return sampled_ids, logprobs, rows


def random_rollout(rng, batch_size=3, longest=12):
    sequences = [random_sequence(rng, rng.randrange(longest + 1)) for _ in range(batch_size)]
    width = max(1, *(len(ids) for ids, _, _ in sequences))
    completion_ids = torch.zeros(batch_size, width, dtype=torch.long)
    for b, (ids, _, _) in enumerate(sequences):
        completion_ids[b, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    return completion_ids, [logprobs for _, logprobs, _ in sequences], [rows for _, _, rows in sequences]


@settings(max_examples=150)
@given(seed=st.integers(0, 10**9), top_k=st.integers(1, 10))
def test_collate_equals_plain_python(seed, top_k):
    completion_ids, logprobs, rows = random_rollout(random.Random(seed))
    ids, logps = collate(logprobs, completion_ids, top_k, V)
    assert ids.dtype == torch.int32 and logps.dtype == torch.float32
    assert ids.shape == logps.shape == (*completion_ids.shape, top_k + 1)
    for b in range(completion_ids.shape[0]):
        for t in range(completion_ids.shape[1]):
            row = rows[b][t] if t < len(rows[b]) else None
            if row is None:  # padding, tool tokens and plain floats: nothing is known
                assert ids[b, t].tolist() == [-1] * (top_k + 1) and logps[b, t, 0].isnan()
                continue
            for slot, entry in enumerate(expected_row(*row, top_k)):
                assert ids[b, t, slot] == (-1 if entry is None else entry[0])
                if entry is not None:
                    assert logps[b, t, slot].item() == pytest.approx(entry[1], rel=1e-6, nan_ok=True)


def known_positions(rows):
    return [(b, t) for b, sequence in enumerate(rows) for t, row in enumerate(sequence) if row is not None]


def corrupt(logprobs, b, t, change):
    """Replace one token's candidates by a changed copy, and leave the others of its sequence alone."""
    lp = pickle.loads(pickle.dumps(logprobs[b][t]))
    ids, logps = lp.candidates.ids.copy(), lp.candidates.logps.copy()
    change(ids[0], logps[0])
    logprobs[b][t] = TokenLogprob(float(logps[0, 0]), Candidates(ids, logps), 0)


def beyond_vocabulary(ids, logps):
    ids[-1] = V + 3


def twice(ids, logps):
    ids[1], ids[2] = (ids[0] + 1) % V, (ids[0] + 1) % V


def unnormalised(ids, logps):
    logps[:] = 0.0


def of_another_token(ids, logps):
    ids[0] = (ids[0] + 1) % V


@pytest.mark.parametrize(
    "change, message",
    [
        (of_another_token, r"not aligned with its tokens: position {t} holds token {token}, its logprob belongs to"),
        (beyond_vocabulary, r"token id 53, beyond the training model's vocabulary of 50"),
        (twice, r"a token twice at one position"),
        (unnormalised, r"a probability of [\d.]+ in all, more than 1"),
    ],
)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_wrong_candidates_are_refused(change, message, seed):
    rng = random.Random(seed)
    tokens = [[random_token(rng, 5, never_listed=1.0) for _ in range(rng.randrange(3, 9))] for _ in range(3)]
    logprobs = [through_flat(sequence) for sequence in tokens]
    completion_ids = torch.zeros(3, max(map(len, tokens)), dtype=torch.long)
    for b, sequence in enumerate(tokens):
        completion_ids[b, : len(sequence)] = torch.tensor([sampled[0] for sampled, _ in sequence])
    collate(logprobs, completion_ids, 5, V)
    b, t = rng.choice(known_positions(tokens))
    corrupt(logprobs, b, t, change)
    with pytest.raises(ValueError, match=message.format(t=t, token=completion_ids[b, t])):
        collate(logprobs, completion_ids, 5, V)


@given(seed=st.integers(0, 10**9), shift=st.sampled_from([-1, 1]))
def test_logprobs_off_by_one_are_refused(seed, shift):
    rng = random.Random(seed)
    tokens = [random_token(rng, 4) for _ in range(8)]
    sampled = [sampled[0] for sampled, _ in tokens]
    if sampled == sampled[shift:] + sampled[:shift]:
        return  # one token over and over: nothing is out of place
    carried = through_flat(tokens)
    with pytest.raises(ValueError, match="not aligned with its tokens"):
        collate([carried[shift:] + carried[:shift]], torch.tensor([sampled]), 4, V)


# ---- The float that carries its candidates


def carried_sequence(length=6, entries=4):
    """The sampled token is the second most probable one, or none of the candidates."""
    tops = [[(t + n, -1.0 - n / 2) for n in range(entries)] for t in range(length)]
    tokens = [(top[1] if t % 2 else (t + 40, -7.0), top) for t, top in enumerate(tops)]
    return tokens, through_flat(tokens)


def row_of(lp):
    return lp.candidates.ids[lp.position].tolist(), lp.candidates.logps[lp.position].tolist()


@pytest.mark.parametrize(
    "send",
    [
        lambda lps: lps[2:] and lps[:2] + lps[2:],
        lambda lps: sum(([lp] for lp in lps), []),
        copy.deepcopy,
        copy.copy,
        lambda lps: pickle.loads(pickle.dumps(lps)),
        lambda lps: [pickle.loads(pickle.dumps(lp)) for lp in lps],
        lambda lps: [pair[0] for pair in [[lp] for lp in lps]],
        lambda lps: np.array(lps, dtype=object).tolist(),
    ],
    ids=["slice", "concatenate", "deepcopy", "copy", "pickle", "pickle-each", "nested", "object-array"],
)
def test_token_logprobs_keep_their_candidates(send):
    tokens, lps = carried_sequence()
    arrived = send(lps)
    assert len(arrived) == len(tokens)
    for lp, (sampled, top) in zip(arrived, tokens, strict=True):
        assert type(lp) is TokenLogprob and isinstance(lp, float)
        expected = expected_row(sampled, top, len(top))
        ids, logps = row_of(lp)
        assert float(lp) == pytest.approx(sampled[1], rel=1e-6)
        assert ids == [-1 if entry is None else entry[0] for entry in expected]
        assert [lp for i, lp in zip(ids, logps, strict=True) if i >= 0] == pytest.approx(
            [entry[1] for entry in expected if entry is not None], rel=1e-6
        )
    ids, _ = collate([arrived], torch.tensor([[sampled[0] for sampled, _ in tokens]]), 4, V)
    assert ids[0, :, 0].tolist() == [sampled[0] for sampled, _ in tokens]


def test_token_logprobs_make_tensors_as_floats_do():
    tokens, lps = carried_sequence()
    expected = torch.tensor([sampled[1] for sampled, _ in tokens])
    torch.testing.assert_close(torch.tensor(lps), expected)
    padded = pad([torch.tensor(lps), torch.tensor(lps[:2])], padding_value=0.0, padding_side="right")
    torch.testing.assert_close(padded[1], torch.cat([expected[:2], torch.zeros(4)]))
    assert lps[0] + 1 == pytest.approx(expected[0].item() + 1, rel=1e-6) and sorted(lps) == sorted(map(float, lps))


def test_a_pickled_token_takes_its_own_row_along():
    _, lps = carried_sequence(length=2000, entries=20)
    alone = len(pickle.dumps(lps[1234]))
    assert alone < 600 + 8 * 21
    assert len(pickle.dumps(lps[:100])) < 100 * (250 + 8 * 21)


@pytest.mark.parametrize("route", [through_flat, through_lists])
@pytest.mark.parametrize("top_k", [20, 100])
def test_memory_per_token(route, top_k):
    """8 bytes a slot and a constant: no list of candidates lives on."""
    length = 500
    ids = [[i + 1 for i in range(top_k)] for _ in range(length)]
    tokens = [((1, -2.0), [(i, -1.0 - i) for i in row]) for row in ids]
    route(tokens[:2])
    gc.collect()
    tracemalloc.start()
    try:
        lps = route(tokens)
        gc.collect()
        per_token = tracemalloc.get_traced_memory()[0] / length
    finally:
        tracemalloc.stop()
    assert len(lps) == length
    assert per_token <= 8 * (top_k + 1) + 256


# ---- From lists: what does not fit together is refused, with the reason


def test_from_lists_without_the_sampled_token():
    with pytest.raises(ValueError, match="completion 1 are not those .*: at position 1, token 9 was sampled"):
        from_lists([[5], [6, 9]], [[[5, 1]], [[6, 1], [2, 3]]], [[[-1, -2]], [[-1, -2], [-1, -2]]])


@pytest.mark.parametrize(
    "token_ids, logprobs",
    [
        ([[[5], [6]]], [[[-1.0]]]),
        ([[[5]]], [[[-1.0], [-1.0]]]),
        ([[[5], [6, 7]]], [[[-1.0], [-1.0]]]),
    ],
)
def test_from_lists_of_other_lengths(token_ids, logprobs):
    with pytest.raises(ValueError, match="completion 0 do not fit its 2 tokens"):
        from_lists([[5, 6]], token_ids, logprobs)


def test_no_tokens_at_all():
    assert from_lists([[]], [[]], [[]]) == [[]]
    completion = SimpleNamespace(logprobs=SimpleNamespace(token_ids=[], logprobs=[]), token_ids=[])
    assert from_vllm_outputs([SimpleNamespace(outputs=[completion])]) == ([[]], None)
    ids, _ = collate([[]], torch.zeros(1, 3, dtype=torch.long), 2, V)
    assert (ids == -1).all()
