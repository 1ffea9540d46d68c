"""The behaviour policy's top K on its way from the engine into the trainer's batch.

What must come out is written down in plain Python here, or is the whole vocabulary's log-softmax of the very weights
that the engine was given.
"""

import copy
import gc
import json
import logging
import math
import os
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.trainer.utils import pad

from tests import tiny
from tests.test_distributed import free_port, in_two_processes
from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer
from trl_pdm import rollout as rollout_module
from trl_pdm.rollout import (
    Candidates,
    TokenLogprob,
    TopKVLLMGeneration,
    collate,
    fill_in,
    from_lists,
    from_vllm_outputs,
)


V = 50
ENGINE_NOISE = 0.02  # mean, in nats: a bf16 engine against a float32 trainer


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


# ---- Rollout functions


def make_trainer(tmp_path, rollout_func=None, model=None, **args):
    defaults = dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        divergence_top_k=6,
        **tiny.ON_CPU,
    )
    return PDMGRPOTrainer(
        model or tiny.save(tmp_path / "model"),
        reward_funcs=tiny.count_ones,
        args=PDMGRPOConfig(**defaults | args),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout_func,
    )


def reference_model(trainer):
    """The architecture's own forward, with the trainer's weights."""
    model = tiny.model(trainer.model.config.vocab_size, seed=99)
    model.load_state_dict(trainer.model.state_dict())
    return model.eval()


@torch.no_grad()
def reference_logps(model, prompt_ids, completion_ids, temperature=1.0):
    """Log-probabilities of the whole vocabulary where each completion token was sampled: `(T, V)`."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *completion_ids]])).logits[0].float()
    return (logits / temperature).log_softmax(-1)[len(prompt_ids) - 1 : -1]


def unpadded(batch):
    """`(prompt ids, completion ids, candidate ids, candidate logprobs)` of each row."""
    for row in range(len(batch["prompt_ids"])):
        length = batch["completion_mask"][row].sum()
        yield (
            batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist(),
            batch["completion_ids"][row, :length].tolist(),
            batch["behavior_topk_ids"][row, :length],
            batch["behavior_topk_logps"][row, :length],
        )


class Rollout:
    """A rollout function that knows another policy's probabilities, and hands out what it is asked to.

    Args:
        give: fields to return besides the required ones.
        env_mask: whether the second token of each completion is the environment's.
        drop_sampled: whether the candidates are K tokens without the sampled one.
        plain_on_rank: a process that returns the required fields only.
    """

    def __init__(self, give=(), env_mask=False, drop_sampled=False, plain_on_rank=None, top_k=6):
        self.policy = tiny.model(len(tiny.tokenizer()), seed=7).eval()
        self.give, self.env_mask, self.drop_sampled = give, env_mask, drop_sampled
        self.plain_on_rank, self.top_k = plain_on_rank, top_k
        self.rng = random.Random(7)

    def __call__(self, prompts, trainer):
        give = () if trainer.accelerator.process_index == self.plain_on_rank else self.give
        names = ["prompt_ids", "completion_ids", "logprobs", *give, *(["env_mask"] if self.env_mask else [])]
        rows = [self.row(trainer.processing_class(prompt)["input_ids"], 3 + n % 4) for n, prompt in enumerate(prompts)]
        return {name: [row[name] for row in rows] for name in names} | {"difficulty": list(range(len(prompts)))}

    def row(self, prompt_ids, length):
        completion_ids = [self.rng.randrange(2, 41) for _ in range(length)]
        mask = [0 if self.env_mask and t == 1 else 1 for t in range(length)]
        logprobs, ids, logps = [], [], []
        full = reference_logps(self.policy, prompt_ids, completion_ids)
        for own, token, logp in zip(mask, completion_ids, full, strict=True):
            top = logp.topk(self.top_k).indices.tolist()
            top = [i for i in top if i != token] if self.drop_sampled else sorted({token, *top})
            logprobs.append(logp[token].item() if own else 0.0)
            ids.append(top if own else [])
            logps.append(logp[top].tolist() if own else [])
        return dict(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            env_mask=mask,
            topk_token_ids=ids,
            topk_logprobs=logps,
        )


GIVEN = ("topk_token_ids", "topk_logprobs")


def generate(trainer, n=8):
    trainer.model.train()
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(n // 2)) for _ in range(2)]
    return trainer._generate_and_score_completions(rows)


@pytest.mark.parametrize("env_mask", [False, True])
def test_rollout_func_with_top_k_fields(tmp_path, env_mask):
    rollout = Rollout(give=GIVEN, env_mask=env_mask)
    trainer = make_trainer(tmp_path, rollout, max_steps=2)
    seen = {}
    trainer.reward_funcs = [lambda completions, **kwargs: seen.update(kwargs) or tiny.count_ones(completions)]
    trainer._score_behavior = lambda batch: pytest.fail("nothing is missing")
    batch = generate(trainer)
    assert seen["difficulty"] == list(range(8)), "other fields still reach the reward functions"
    assert not set(GIVEN) & set(seen)
    for prompt_ids, completion_ids, ids, logps in unpadded(batch):
        full = reference_logps(rollout.policy, prompt_ids, completion_ids)
        for t, token in enumerate(completion_ids):
            if env_mask and t == 1:
                assert ids[t].tolist() == [-1] * 7
                continue
            ranked = by_probability(full[t], {token, *full[t].topk(6).indices.tolist()})[:6]
            assert ids[t].tolist() == [token] + [-1 if i == token else i for i in ranked]
            filled = ids[t] >= 0
            torch.testing.assert_close(logps[t][filled], full[t][ids[t][filled].long()], rtol=1e-4, atol=1e-5)
    trainer.train()


def by_probability(full, ids):
    return sorted(ids, key=lambda i: -full[i].item())


def test_rollout_func_with_k_candidates_and_the_sampled_token_elsewhere(tmp_path):
    """K entries without the sampled token: its own logprob comes from `logprobs`."""
    rollout = Rollout(give=GIVEN, drop_sampled=True)

    def without_likely_ones(prompts, trainer):
        output = rollout(prompts, trainer)
        for b, sequence in enumerate(output["topk_token_ids"]):
            for t, entries in enumerate(sequence):
                if len(entries) == 5:  # it was one of the K, so it must be listed
                    entries.insert(2, output["completion_ids"][b][t])
                    output["topk_logprobs"][b][t].insert(2, None)
        return output

    batch = generate(make_trainer(tmp_path, without_likely_ones))
    outside = 0
    for prompt_ids, completion_ids, ids, logps in unpadded(batch):
        full = reference_logps(rollout.policy, prompt_ids, completion_ids)
        torch.testing.assert_close(logps[:, 0], full.gather(1, torch.tensor(completion_ids)[:, None])[:, 0])
        for t, token in enumerate(completion_ids):
            outside += token not in full[t].topk(6).indices
            assert set(ids[t].tolist()) - {-1} == {token, *full[t].topk(6).indices.tolist()}
    assert outside


def name_a_foreign_token(output):
    entries, sampled = output["topk_token_ids"][0][0], output["completion_ids"][0][0]
    entries[[i for i, token in enumerate(entries) if token != sampled][0]] = 41


def change_output(tmp_path, change):
    rollout = Rollout(give=GIVEN)

    def changed(prompts, trainer):
        output = rollout(prompts, trainer)
        return change(output) or output

    return lambda: generate(make_trainer(tmp_path, changed))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: o["topk_token_ids"].pop() and None, "`topk_token_ids` do not fit its `completion_ids`"),
        (lambda o: o["topk_logprobs"][3].pop() and None, "`topk_logprobs` do not fit its `completion_ids`"),
        (lambda o: o["logprobs"][2].append(-1.0), "`logprobs` do not fit its `completion_ids`"),
        (lambda o: o["topk_token_ids"][1][2].pop() and None, "completion 1 do not fit its 4 tokens"),
        (
            lambda o: {k: v for k, v in o.items() if k != "topk_logprobs"},
            "`topk_token_ids` and `topk_logprobs`, or neither",
        ),
        (lambda o: {k: v for k, v in o.items() if k not in ("logprobs", *GIVEN)}, r"must return keys \['logprobs'\]"),
        (lambda o: {k: v for k, v in o.items() if k != "completion_ids"}, r"must return keys \['completion_ids'\]"),
        (
            lambda o: o | {name: [s[1:] + s[:1] for s in o[name]] for name in GIVEN},
            r"completion \d are not those of its tokens: at position \d, token \d+ was sampled",
        ),
        (name_a_foreign_token, "token id 41, beyond .* vocabulary of 41"),
    ],
    ids="sequences tokens logprobs entries half no-logprobs no-completions off-by-one vocabulary".split(),
)
def test_rollout_func_that_does_not_fit_together(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        change_output(tmp_path, change)()


@pytest.mark.parametrize("schedule", [dict(steps_per_generation=2), dict(steps_per_generation=1)])
def test_rollout_func_with_plain_logprobs_is_scored(tmp_path, caplog, schedule):
    rollout = Rollout()

    def with_an_unknown(prompts, trainer):
        output = rollout(prompts, trainer)
        output["logprobs"][0][0] = None
        output["logprobs"][1][1] = -math.inf
        return output

    trainer = make_trainer(tmp_path, with_an_unknown, gradient_accumulation_steps=1, **schedule)
    rollout_module.logger.warning_once.cache_clear()  # it remembers what was said in this process
    with caplog.at_level(logging.WARNING, logger="trl_pdm"):
        batch = generate(trainer)
        generate(trainer)
    said = [record.message for record in caplog.records if "logprobs without their candidates" in record.message]
    assert len(said) == 1
    model = reference_model(trainer)
    for row, (prompt_ids, completion_ids, ids, logps) in enumerate(unpadded(batch)):
        own = reference_logps(model, prompt_ids, completion_ids)
        given = reference_logps(rollout.policy, prompt_ids, completion_ids)
        for t, token in enumerate(completion_ids):
            top = by_probability(own[t], own[t].topk(6).indices.tolist())
            assert ids[t].tolist() == [token] + [-1 if i == token else i for i in top]
            unknown = (row, t) in [(0, 0), (1, 1)]
            assert logps[t, 0].item() == pytest.approx((own if unknown else given)[t, token].item(), abs=1e-4)
            filled = ids[t] >= 0
            filled[0] = False
            torch.testing.assert_close(logps[t][filled], own[t][ids[t][filled].long()], rtol=1e-4, atol=1e-4)


def test_tokens_of_the_environment_do_not_count_as_missing(tmp_path):
    trainer = make_trainer(tmp_path, Rollout(give=GIVEN, env_mask=True))
    trainer._score_behavior = lambda batch: pytest.fail("only tokens of the environment lack candidates")
    batch = generate(trainer)
    assert (batch["behavior_topk_ids"][:, 1, 0] == -1).all() and (batch["tool_mask"][:, 1] == 0).all()


def test_fill_in_leaves_known_tokens_alone():
    ids = torch.tensor([[[3, 4], [-1, -1], [-1, -1]]], dtype=torch.int32)
    logps = torch.tensor([[[-1.0, -2.0], [math.nan, 0.0], [math.nan, 0.0]]])
    scored = torch.tensor([[[9, 8], [7, 6], [5, 2]]]), torch.tensor([[[-9.0, -8.0], [-7.0, -6.0], [-5.0, -4.0]]])
    fill_in((ids, logps), scored, torch.tensor([[-3.0, -0.5, math.nan]]))
    assert ids.tolist() == [[[3, 4], [7, 6], [5, 2]]] and ids.dtype == torch.int32
    assert logps.tolist() == [[[-1.0, -2.0], [-0.5, -6.0], [-5.0, -4.0]]]


# ---- vLLM in this process: one engine for all of these tests


ENGINE_TOP_K = 30  # above vLLM's default of 20, below the vocabulary of 41
ENGINE = dict(
    use_vllm=True,
    divergence_top_k=ENGINE_TOP_K,
    temperature=0.8,
    max_completion_length=12,
    per_device_train_batch_size=6,
    num_generations=3,
    vllm_gpu_memory_utilization=0.3,
    vllm_max_model_length=64,
)


def sync(trainer):
    trainer.state.global_step += 1  # TRL syncs when a training step has been made
    return trainer


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A trainer with a vLLM engine, whose weights have moved since the engine loaded them."""
    trainer = make_trainer(tmp_path_factory.mktemp("engine"), **ENGINE)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(parameter.std() * 0.3 * torch.randn_like(parameter))
    return sync(trainer)


@pytest.fixture
def on_engine(engine, tmp_path, monkeypatch):
    """Other trainers, with the same weights and on the running engine."""

    def make(rollout_func=None, **args):
        monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: engine.vllm_generation.llm)
        trainer = make_trainer(tmp_path, rollout_func, **ENGINE | args)
        trainer.model.load_state_dict(engine.model.state_dict())
        return sync(trainer)

    return make


def assert_is_the_engines_policy(trainer, batch):
    """The engine got the trainer's weights and returned its top K, each beside the token it was sampled among."""
    model = reference_model(trainer)
    errors, outside, unlikely = [], 0, 0
    for prompt_ids, completion_ids, ids, logps in unpadded(batch):
        full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)
        assert ids[:, 0].tolist() == completion_ids
        for t, token in enumerate(completion_ids):
            listed = ids[t][ids[t] >= 0].long()
            assert len(set(listed.tolist())) == len(listed)
            errors += (logps[t][ids[t] >= 0] - full[t][listed]).abs().tolist()
            left_out = full[t].clone()
            left_out[listed] = -math.inf
            # Top K but for noise: nothing that was left out is more probable than a candidate
            assert left_out.max() <= full[t][listed[1:]].min() + 0.3
            outside += len(listed) == ENGINE_TOP_K + 1
            unlikely += token != full[t].argmax()
            assert len(listed) in (ENGINE_TOP_K, ENGINE_TOP_K + 1)
    assert len(errors) > 500 and np.mean(errors) < ENGINE_NOISE
    assert unlikely > 10, "tokens other than the most probable one must be sampled too"
    return outside


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_batch_is_the_policy_that_sampled(engine):
    batch = generate_on(engine)
    lengths = batch["completion_mask"].sum(1)
    assert len(set(lengths.tolist())) > 1, "completions of several lengths"
    assert batch["behavior_topk_ids"].shape == (12, lengths.max(), ENGINE_TOP_K + 1)
    assert batch["behavior_topk_ids"].dtype == torch.int32 and batch["behavior_topk_logps"].dtype == torch.float32
    padding = batch["completion_mask"] == 0
    assert (batch["behavior_topk_ids"][padding] == -1).all()
    assert batch["behavior_topk_logps"][padding][:, 0].isnan().all()
    for group in batch["prompt_ids"].view(4, 3, -1):  # generations of one prompt stay together
        assert (group == group[0]).all()
    assert len({tuple(row) for row in batch["completion_ids"].tolist()}) > 6
    torch.testing.assert_close(
        batch["sampling_per_token_logps"][~padding], batch["behavior_topk_logps"][..., 0][~padding]
    )
    assert assert_is_the_engines_policy(engine, batch) > 0, "some tokens must be sampled from outside the top K"


def generate_on(trainer):
    trainer.model.train()
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(4)) for _ in range(3)]
    return trainer._generate_and_score_completions(rows)


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_batch_stays_aligned_when_trl_shuffles_and_splits(on_engine):
    trainer = on_engine()
    trainer.model.train()
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(4)) for _ in range(3)]
    trainer._prepare_inputs(rows)
    assert len(trainer._buffered_inputs) == 2
    for batch in trainer._buffered_inputs:
        assert batch["behavior_topk_ids"].shape[0] == 6
        assert_is_the_engines_policy(trainer, batch)


@pytest.mark.vllm
@pytest.mark.slow
def test_rollout_func_that_uses_the_trainers_engine(on_engine):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        _, completion_ids, logprobs, _ = trainer.vllm_generation.generate(prompt_ids, None, 3)
        # Two turns, with a token of the environment between them
        again = [p + c + [5] for p, c in zip(prompt_ids, completion_ids, strict=True)]
        _, more_ids, more_logprobs, _ = trainer.vllm_generation.generate(again, None, 1)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a + [5] + b for a, b in zip(completion_ids, more_ids, strict=True)],
            "logprobs": [
                [lp[0] for lp in a] + [0.0] + [lp[0] for lp in b] for a, b in zip(logprobs, more_logprobs, strict=True)
            ],
            "env_mask": [[1] * len(a) + [0] + [1] * len(b) for a, b in zip(completion_ids, more_ids, strict=True)],
        }

    trainer = on_engine(rollout)
    trainer._score_behavior = lambda batch: pytest.fail("every sampled token has its candidates")
    batch = generate_on(trainer)
    model = reference_model(trainer)
    errors = []
    for (prompt_ids, completion_ids, ids, logps), mask in zip(unpadded(batch), batch["tool_mask"], strict=True):
        full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)
        for t, token in enumerate(completion_ids):
            if mask[t] == 0:
                assert token == 5 and (ids[t] == -1).all()
                continue
            filled = ids[t] >= 0
            assert ids[t, 0] == token and filled.sum() >= ENGINE_TOP_K
            errors += (logps[t][filled] - full[t][ids[t][filled].long()]).abs().tolist()
    assert np.mean(errors) < ENGINE_NOISE


def watch_generation(trainer, monkeypatch):
    """What the engine is asked and what it answers."""
    llm, calls = trainer.vllm_generation.llm, []
    generate = llm.generate

    def watched(*args, sampling_params, **kwargs):
        outputs = generate(*args, sampling_params=sampling_params, **kwargs)
        calls.append((sampling_params, [completion for output in outputs for completion in output.outputs]))
        return outputs

    monkeypatch.setattr(llm, "generate", watched)
    return calls


@pytest.mark.vllm
@pytest.mark.slow
def test_nothing_is_detokenized_without_stop_strings(on_engine, monkeypatch):
    trainer = on_engine(generation_kwargs={"flat_logprobs": False, "seed": 3})
    calls = watch_generation(trainer, monkeypatch)
    generate_on(trainer)
    ((params, completions),) = calls
    assert params.flat_logprobs and not params.detokenize and params.logprobs == ENGINE_TOP_K and params.seed == 3
    assert {completion.text for completion in completions} == {""}
    assert {text for completion in completions for text in completion.logprobs.decoded_tokens} == {None}


@pytest.mark.vllm
@pytest.mark.slow
def test_stop_strings(on_engine, monkeypatch):
    stop = list("0123456789abcdefg")
    trainer = on_engine(generation_kwargs={"stop": stop})
    calls = watch_generation(trainer, monkeypatch)
    batch = generate_on(trainer)
    assert calls[0][0].detokenize
    stopped = 0
    for _, completion_ids, ids, _ in unpadded(batch):
        text = trainer.processing_class.decode(completion_ids)
        assert not set(text[:-1]) & set(stop), "generation goes on after a stop string"
        stopped += text[-1] in stop
        assert ids[:, 0].tolist() == completion_ids
    assert stopped


@pytest.mark.vllm
@pytest.mark.slow
def test_structured_outputs(on_engine):
    trainer = on_engine(vllm_structured_outputs_regex="[0-9]{3}")
    batch = generate_on(trainer)
    model = reference_model(trainer)
    digits = torch.tensor(trainer.processing_class("0123456789")["input_ids"])
    for prompt_ids, completion_ids, ids, logps in unpadded(batch):
        text = trainer.processing_class.decode(completion_ids, skip_special_tokens=True)
        assert len(text) == 3 and text.isdigit()
        assert ids[:, 0].tolist() == completion_ids
        # The policy that samples is the model's, restricted to what the expression allows
        full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)[:3, digits]
        allowed = full.log_softmax(-1)
        for t in range(3):
            finite = logps[t] > -1e4
            assert set(ids[t][finite & (ids[t] >= 0)].tolist()) == set(digits.tolist())
            for i, lp in zip(ids[t][finite].tolist(), logps[t][finite].tolist(), strict=True):
                if i >= 0:
                    assert lp == pytest.approx(allowed[t][digits.tolist().index(i)].item(), abs=0.1)


@pytest.mark.vllm
@pytest.mark.slow
def test_nucleus_sampling_leaves_candidates_without_probability(on_engine):
    trainer = on_engine(top_p=0.5)
    batch = generate_on(trainer)
    known = batch["completion_mask"].bool()
    logps = batch["behavior_topk_logps"][known]
    valid = batch["behavior_topk_ids"][known] >= 0
    assert logps[:, 0].isfinite().all() and (logps[valid] == -math.inf).any()
    mass = torch.where(valid, logps, -math.inf).exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=0.01)


@pytest.mark.vllm
@pytest.mark.slow
def test_training_on_the_engines_rollouts(on_engine):
    trainer = on_engine(max_steps=4, learning_rate=3e-3, divergence_threshold=0.02)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "trust_region/divergence_mean" in log]
    assert len(logs) == 4
    for log in logs:
        assert log["trust_region/unscored"] == 0
        assert 0.9 < log["trust_region/topk_mass_behavior"] <= 1.001
    on_policy, off_policy = logs[0::2], logs[1::2]
    for log in on_policy:  # the engine's noise is all that sets the two policies apart
        assert log["importance_ratio/mean"] == pytest.approx(1, abs=0.03)
        assert log["trust_region/divergence_mean"] < 0.005
    assert max(log["trust_region/divergence_max"] for log in off_policy) > 0.02


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_users_number_of_logprobs_is_refused(mode):
    with pytest.raises(ValueError, match=r"`generation_kwargs` sets `logprobs` to 3. .* `divergence_top_k` \(20\)"):
        TopKVLLMGeneration(divergence_top_k=20, mode=mode, generation_kwargs={"logprobs": 3})


# ---- A vLLM server


class StandInServer:
    """A stand-in for `vllm serve`, on the loopback interface: what TRL's `VLLMClient` asks, in the server's format.

    The real one is tested once, below, and slow to start. This one samples from a model here, and is made to show what a
    real answer may hold: a sampled token that is not the most probable, K or K+1 entries a position, and NaN.
    """

    def __init__(self, top_k, max_logprobs=20, logprobs_mode="processed_logprobs"):
        self.model = tiny.model(len(tiny.tokenizer()), seed=5).eval()
        self.info = {
            "model_config": {"max_logprobs": max_logprobs, "logprobs_mode": logprobs_mode},
            "weight_transfer_config": {"backend": "nccl"},
        }
        self.requests, self.nan_at = [], (1, 2)
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def reply(self, answer):
                body = json.dumps(answer).encode()  # NaN as the literal that TRL's client reads
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                path = self.path.split("?")[0]
                models = {"data": [{"id": "tiny"}]}
                self.reply({"/health": {}, "/v1/models": models, "/server_info": {"vllm_config": stand_in.info}}[path])

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                self.reply(stand_in.complete(request) if self.path == "/v1/completions" else {"success": True})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def complete(self, request):
        from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionResponseChoice

        self.requests.append(request)
        assert request["return_token_ids"] and request["return_tokens_as_token_ids"]
        choices = []
        for prompt in request["prompt"]:
            for _ in range(request["n"]):
                index = len(choices)
                token_ids, logprobs, tops = [], [], []
                for t in range(2 + index % 3):
                    full = reference_logps(self.model, prompt, [*token_ids, 0], request["temperature"])[-1]
                    token = int(full.argsort(descending=True)[(index + t) % 9])  # of any rank, 0 included
                    top = full.topk(request["logprobs"]).indices.tolist()
                    lp = math.nan if (index, t) == self.nan_at else full[token].item()
                    entries = {f"token_id:{token}": lp}  # as the real server: the sampled one, then the top K
                    entries |= {f"token_id:{i}": full[i].item() for i in top if i != token}
                    token_ids.append(token)
                    logprobs.append(lp)
                    tops.append(entries)
                content = CompletionLogProbs(
                    text_offset=[0] * len(token_ids),
                    token_logprobs=logprobs,
                    tokens=[f"token_id:{i}" for i in token_ids],
                    top_logprobs=tops,
                )
                choice = CompletionResponseChoice(
                    index=index, text="", logprobs=content, token_ids=token_ids, prompt_token_ids=prompt
                )
                choices.append(choice.model_dump())
        return {"choices": choices}


@pytest.fixture
def without_nccl(monkeypatch):
    """The two calls of TRL's client that need NCCL do nothing: no weights are sent."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda self, metadata, params: list(params))


@pytest.fixture
def stand_in(without_nccl):
    servers = []

    def start(**kwargs):
        servers.append(StandInServer(**kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def server_trainer(tmp_path, url, **args):
    server = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
    return make_trainer(tmp_path, **dict(sync_check_steps=0) | args | server)  # no check: no weights are sent


@pytest.mark.vllm
@pytest.mark.parametrize("top_k", [1, 6])
def test_server_answers(tmp_path, stand_in, top_k):
    server = stand_in(top_k=top_k)
    trainer = server_trainer(tmp_path, server.url, divergence_top_k=top_k, temperature=0.7, max_steps=2)
    batch = generate(trainer)
    assert [request["logprobs"] for request in server.requests] == [top_k]
    inside, unlikely = set(), 0
    for row, (prompt_ids, completion_ids, ids, logps) in enumerate(unpadded(batch)):
        full = reference_logps(server.model, prompt_ids, completion_ids, 0.7)
        assert len(completion_ids) == 2 + row % 3
        for t, token in enumerate(completion_ids):
            top = full[t].topk(top_k).indices.tolist()
            inside.add(token in top)
            unlikely += token != top[0]
            filled = ids[t] >= 0
            assert ids[t, 0] == token
            if (row, t) == server.nan_at:
                assert logps[t, 0].isnan()
                filled[0] = False
            assert set(ids[t].tolist()) - {-1} == {token, *top}
            torch.testing.assert_close(logps[t][filled], full[t][ids[t][filled].long()], rtol=1e-4, atol=1e-5)
    assert inside == {True, False} and unlikely > 5
    trainer.train()
    unscored = [log["trust_region/unscored"] for log in trainer.state.log_history if "trust_region/unscored" in log]
    assert len(unscored) == 2 and sum(unscored) > 0


@pytest.mark.vllm
def test_server_that_returns_too_few_logprobs(tmp_path, stand_in):
    server = stand_in(top_k=21, max_logprobs=20)
    with pytest.raises(ValueError, match=r"`divergence_top_k` is 21, .* at most 20 .* `--max-logprobs 21`"):
        server_trainer(tmp_path, server.url, divergence_top_k=21)
    server_trainer(tmp_path, server.url, divergence_top_k=20)
    server_trainer(tmp_path, stand_in(top_k=41, max_logprobs=-1).url, divergence_top_k=41)  # no limit


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_server_whose_logprobs_are_not_the_samplers(tmp_path, stand_in, caplog, mode):
    with caplog.at_level(logging.WARNING, logger="trl_pdm"):
        server_trainer(tmp_path, stand_in(top_k=6, logprobs_mode=mode).url)
    assert ("Restart it with `--logprobs-mode processed_logprobs`" in caplog.text) == (mode == "raw_logprobs")


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_server(tmp_path, without_nccl):
    """vLLM's own, on the CPU, with the weights that the trainer starts from: all but the weight transfer is real."""
    model, port = tiny.save(tmp_path / "model"), free_port()
    options = f"--host 127.0.0.1 --port {port} --max-logprobs {ENGINE_TOP_K} --logprobs-mode processed_logprobs"
    options += " --max-model-len 64 --max-num-seqs 16 --enforce-eager"
    environment = dict(os.environ, VLLM_SERVER_DEV_MODE="1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a colocated engine's, from other tests
        environment.pop(name, None)
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options.split()],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        trainer = server_trainer(tmp_path, url, **ENGINE | dict(model=model, sync_check_steps=1, max_steps=1))
        assert_is_the_engines_policy(trainer, generate_on(trainer))
        trainer.train()
    finally:
        server.terminate()
        server.wait()


# ---- Several processes


def score_if_any_must(rank, tmp_path, model):
    for plain_on_rank in (None, 1):
        rollout = Rollout(give=GIVEN, env_mask=True, plain_on_rank=plain_on_rank)
        trainer = make_trainer(tmp_path, rollout, model)
        assert trainer.accelerator.num_processes == 2
        scored, score = [], trainer._score_behavior
        trainer._score_behavior = lambda batch, scored=scored, score=score: scored.append(1) or score(batch)
        batch = generate(trainer)
        assert len(scored) == (plain_on_rank is not None)
        trained_on = (batch["tool_mask"] * batch["completion_mask"]).bool()
        assert (batch["behavior_topk_ids"][trained_on][:, 0] >= 0).all()


@pytest.mark.slow
def test_all_processes_score_the_behaviour_policy_or_none_does(tmp_path):
    """Where one process lacks candidates: with a sharded model, scoring on that one alone would wait for ever."""
    in_two_processes(score_if_any_must, tmp_path, tiny.save(tmp_path / "model"))


def share_an_engine(rank, tmp_path, model):
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    trainer = make_trainer(tmp_path, model=model, **ENGINE, vllm_tensor_parallel_size=2)
    with torch.no_grad():
        torch.manual_seed(3)  # the same weights in both
        for parameter in trainer.model.parameters():
            parameter.add_(parameter.std() * 0.3 * torch.randn_like(parameter))
    assert_is_the_engines_policy(trainer, generate_on(sync(trainer)))


@pytest.mark.vllm
@pytest.mark.slow
def test_tensor_parallel_engine(tmp_path):
    in_two_processes(share_an_engine, tmp_path, tiny.save(tmp_path / "model"))
