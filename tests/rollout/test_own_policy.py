"""The behaviour policy where the training model itself scores it."""

import logging
import math

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.processes import in_two_processes
from tests.helpers.references import reference_logps, reference_model, unpadded
from tests.rollout.helpers import GIVEN, Rollout, by_probability, generate, make_trainer
from trl_pdm.rollout import functions


@pytest.mark.parametrize("schedule", [dict(steps_per_generation=2), dict(steps_per_generation=1)])
def test_rollout_func_with_plain_logprobs_is_scored(tmp_path, caplog, schedule):
    rollout = Rollout()

    def with_an_unknown(prompts, trainer):
        output = rollout(prompts, trainer)
        output["logprobs"][0][0] = None
        output["logprobs"][1][1] = -math.inf
        return output

    trainer = make_trainer(tmp_path, with_an_unknown, gradient_accumulation_steps=1, **schedule)
    functions.logger.warning_once.cache_clear()  # it remembers what was said in this process
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


def score_if_any_must(rank, tmp_path, model):
    for plain_on_rank in (None, 1):
        rollout = Rollout(give=GIVEN, env_mask=True, plain_on_rank=plain_on_rank)
        trainer = make_trainer(tmp_path, rollout, model=model)
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
