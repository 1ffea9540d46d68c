"""What the report says in words, against logs whose means were taken by hand."""

import json

import pytest

from tests.report.runs import write_log
from trl_pdm.report.runs import load_run
from trl_pdm.report.words import told


def sentences(folder, **series):
    """What is told of a run that logged `series` at each step, with `/` written as `__`."""
    rows = zip(*series.values(), strict=True)
    names = [name.replace("__", "/") for name in series]
    log = [dict(zip(names, row, strict=True)) | {"step": step} for step, row in enumerate(rows, start=1)]
    return told(load_run(write_log(folder, log), "run"))


def text(folder, **series):
    return " ".join(sentence.text for sentence in sentences(folder, **series))


@pytest.mark.parametrize(
    "values, says, notice",
    [
        # The tenths are two steps each: 0.1 and 0.3, then 0.7 and 0.9
        (
            [0.1, 0.3, *[0.5] * 16, 0.7, 0.9],
            "rose from 0.2 over the first tenth of the run to 0.8 over the last",
            False,
        ),
        (
            [0.9, 0.7, *[0.5] * 16, 0.3, 0.1],
            "fell from 0.8 over the first tenth of the run to 0.2 over the last",
            True,
        ),
        # 0.05 apart, with two standard errors of 0.28: each half's deviation is 0.141, its mean's 0.1
        ([0.4, 0.6, *[0.5] * 16, 0.45, 0.65], "stayed about where it was: 0.5 over the first tenth", False),
        ([1.0, 2.0], "rose from 1 over the first tenth of the run to 2 over the last", False),
    ],
)
def test_the_reward_from_its_first_to_its_last_tenth(tmp_path, values, says, notice):
    first, *_ = sentences(tmp_path, reward=values)
    assert f"The reward {says}" in first.text and first.notice == notice


@pytest.mark.parametrize(
    "shares, says",
    [
        ([0.0, 0.1, 0.4, 0.5], "25.00% of the tokens were masked, on average over the steps. From step 3 on more than a third"),
        ([0.0, 0.4, 0.0, 0.4], "20.00% of the tokens were masked, on average over the steps. At 2 of 4 steps, first at 2, more"),
        ([0.0, 0.0, 0.0, 0.0], "No token was masked"),
    ],
)  # fmt: skip
def test_the_share_masked_and_since_when_it_is_large(tmp_path, shares, says):
    assert says in text(tmp_path, trust_region__masked=shares, trust_region__outside=shares)


def test_no_more_than_a_third_is_not_much(tmp_path):
    assert "third" not in text(tmp_path, trust_region__masked=[0.33, 0.33], trust_region__outside=[0, 0])


@pytest.mark.parametrize("planned, told_of", [(300, True), (2, False), (-1, False)])
def test_a_run_that_ended_early_is_said_to(tmp_path, planned, told_of):
    folder = write_log(tmp_path, [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}])
    (folder / "run_settings.json").write_text(json.dumps({"max_steps": planned}))
    found = [sentence.text for sentence in told(load_run(folder, "run")) if "ends at step 2 of 300" in sentence.text]
    assert len(found) == told_of


def test_nothing_logged_of_the_trust_region_is_said(tmp_path):
    assert "no token can be masked" in text(tmp_path, reward=[0.0, 1.0])


@pytest.mark.parametrize(
    "series, says, notice",
    [
        (dict(trust_region__outside=[0.04, 0.0]), "Already at step 1, 4.0% of the tokens were outside", True),
        (dict(entropy=[0.9, 0.3]), "entropy fell from 0.9 nats over the first tenth of the run to 0.3 nats", False),
        (
            dict(trust_region__entropy_drift=[-0.001, -0.003], trust_region__entropy_drift_unmasked=[-0.005, -0.003]),
            "The mask pushed the entropy upwards: to first order a token's update moved it by -0.002 per unit of step, "
            "and by -0.004 if nothing",
            False,
        ),
        (
            dict(trust_region__entropy_drift=[0.001], trust_region__entropy_drift_unmasked=[0.002]),
            "The mask pushed the entropy downwards",
            False,
        ),
        (
            dict(trust_region__entropy_drift=[0.0066], trust_region__entropy_drift_unmasked=[0.0064]),
            "The mask hardly moved the entropy",
            False,
        ),
        (
            dict(weight_sync__logp_difference_mean=[0.002, 0.004]),
            "by 0.003 nats on average, which is precision.",
            False,
        ),
        (dict(weight_sync__logp_difference_mean=[0.1, 0.3]), "by 0.2 nats on average: more than precision", True),
        (
            dict(trust_region__direction_disagreement=[0.0, 0.01]),
            "opposite ways at 0.50% of the tokens outside",
            False,
        ),
        (dict(trust_region__topk_mass_behavior=[0.7, 0.5]), "The top K held only 60% of", True),
        (dict(trust_region__unscored=[0.0, 0.02]), "vLLM gave no logprob for 0.01 of the tokens", True),
        (
            dict(importance_ratio__truncated=[0.0, 0.002]),
            "one token in a thousand, at 1 of 2 steps, first at 2.",
            True,
        ),
    ],
)
def test_what_else_is_told(tmp_path, series, says, notice):
    (found,) = [sentence for sentence in sentences(tmp_path, **series) if says in sentence.text]
    assert found.notice == notice


@pytest.mark.parametrize(
    "step, gap, later, says",
    [
        (1, 0.001, 0.0, "engine and trainer disagree"),
        (4, 0.2, 0.0, "engine and trainer disagree"),
        (4, 0.001, 0.04, "so the updates led there. The policy has left its rollout"),
        (4, 0.001, 0.02, "so the updates led there. Later it was 2.0%."),
    ],
)
def test_why_tokens_are_outside_at_first(tmp_path, step, gap, later, says):
    """The entry of step 4 is a mean over four updates, which may have left a rollout that started right."""
    log = [{"step": step, "trust_region/outside": 0.05, "weight_sync/logp_difference_mean": gap}]
    log += [{"step": step + 4, "trust_region/outside": later}]
    (found,) = [s for s in told(load_run(write_log(tmp_path, log), "run")) if "Already at step" in s.text]
    assert says in found.text and found.notice == ("Later it was" not in says)


@pytest.mark.parametrize(
    "series",
    [
        dict(trust_region__outside=[0.02, 0.5]),
        dict(trust_region__direction_disagreement=[0.1]),
        dict(trust_region__topk_mass_behavior=[0.9]),
        dict(trust_region__unscored=[0.0]),
        dict(importance_ratio__truncated=[0.0005]),
    ],
)
def test_what_is_as_it_should_be_is_not_told(tmp_path, series):
    told_without = len(sentences(tmp_path, loss=[0.0]))
    expected = told_without - ("trust_region__outside" in series)  # which says that nothing was logged
    assert len(sentences(tmp_path, **series)) == expected
