"""What a rollout function may return, and what is refused."""

import math

import numpy as np
import pytest
import torch

from tests.helpers import tiny
from tests.helpers.references import reference_logps, unpadded
from tests.rollout.helpers import GIVEN, Rollout, by_probability, generate, make_trainer
from trl_pdm.rollout import all_nan, fill_in


NAN = math.nan


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


def test_tokens_of_the_environment_do_not_count_as_missing(tmp_path):
    trainer = make_trainer(tmp_path, Rollout(give=GIVEN, env_mask=True))
    trainer._score_behavior = lambda batch: pytest.fail("only tokens of the environment lack candidates")
    batch = generate(trainer)
    assert (batch["behavior_topk_ids"][:, 1, 0] == -1).all() and (batch["tool_mask"][:, 1] == 0).all()


def test_fill_in_leaves_known_tokens_alone():
    ids = torch.tensor([[[3, 4], [-1, -1], [-1, -1]]], dtype=torch.int32)
    logps = torch.tensor([[[-1.0, -2.0], [math.nan, 0.0], [math.nan, 0.0]]])
    scored = torch.tensor([[[9, 8], [7, 6], [5, 2]]]), torch.tensor([[[-9.0, -8.0], [-7.0, -6.0], [-5.0, -4.0]]])
    fill_in((ids, logps), scored, {"sampling_per_token_logps": torch.tensor([[-3.0, -0.5, math.nan]])})
    assert ids.tolist() == [[[3, 4], [7, 6], [5, 2]]] and ids.dtype == torch.int32
    assert logps.tolist() == [[[-1.0, -2.0], [-0.5, -6.0], [-5.0, -4.0]]]


def test_a_reward_function_may_generate_too(tmp_path):
    """As one that asks the policy for its opinion: the batch keeps the behaviour policy of its own tokens."""
    rollout = Rollout(give=GIVEN)
    trainer = make_trainer(tmp_path, rollout)

    def judged(prompts, completions, **kwargs):
        trainer._generate(prompts)
        return tiny.count_ones(completions)

    trainer.reward_funcs = [judged]
    for prompt_ids, completion_ids, _, logps in unpadded(generate(trainer)):
        full = reference_logps(rollout.policy, prompt_ids, completion_ids)
        torch.testing.assert_close(logps[:, 0], full.gather(1, torch.tensor(completion_ids)[:, None])[:, 0])


@pytest.mark.parametrize(
    "logprobs, refused", [([[NAN, 1.0]], False), ([[NAN, NAN]], True), ([[]], False), (None, False)]
)
@pytest.mark.parametrize("kind", [list, np.array])
def test_an_engine_that_says_nan_of_every_token_is_refused(kind, logprobs, refused):
    assert all_nan(None if logprobs is None else kind(logprobs)) == refused
