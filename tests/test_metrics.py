"""Token metrics: sums over micro-batches and processes, and forecasts held against what an update did."""

import itertools
import math

import pandas as pd
import pytest
import torch

from tests.helpers import tiny
from tests.helpers.references import batch_of_tokens, evidence_of, full_logps
from tests.helpers.trainers import TWO_STEPS, make_trainer, run
from trl_pdm.metrics import METRICS, TOKEN_METRICS, TokenMetrics, Tokens, forecasts, summarize
from trl_pdm.trust_region import TokenAssessment, TrustRegion


def test_shares_are_of_all_tokens_of_all_processes():
    # Two processes: the other one has twice the tokens of this one, all of them outside
    metrics = TokenMetrics(lambda local: torch.cat([local, 2 * local.where(local != 1, local.new_tensor(5.0))]))
    for tokens, outside, largest in ((10, 1, 0.5), (30, 1, 2.0)):
        sums = {"tokens with a behaviour logprob": tokens, "trust_region/outside": outside}
        sums = {name: torch.tensor(float(value)) for name, value in sums.items()}
        metrics.add("train", sums, {"trust_region/divergence_max": torch.tensor(largest)})
    seen = metrics.pop("train")
    assert seen["trust_region/outside"] == pytest.approx((1 + 10 + 1 + 10) / (10 + 20 + 30 + 60))
    assert seen["trust_region/divergence_max"] == 4.0
    assert metrics.pop("train") == {} and metrics.pop("eval") == {}


def test_what_is_known_of_tokens_may_change_between_two_logs():
    """As where `generation_kwargs` of the live engine come to truncate."""
    metrics = TokenMetrics(lambda local: local)
    for more in ({}, {"trust_region/log_surviving_mass": -3.0}, {}):
        sums = {"tokens with a behaviour logprob": 10.0, "trust_region/outside": 1.0} | more
        metrics.add(
            "train",
            {name: torch.tensor(value) for name, value in sums.items()},
            {"trust_region/divergence_max": torch.tensor(2.0 - len(more))},
        )
    seen = metrics.pop("train")
    assert seen["trust_region/outside"] == pytest.approx(3 / 30) and seen["trust_region/divergence_max"] == 2.0


NAN, INF = math.nan, math.inf
NAMES = {
    "tokens": "tokens trained on",
    "scored": "tokens with a behaviour logprob",
    "outside": "trust_region/outside",
    "masked": "trust_region/masked",
    "masked_positive": "trust_region/masked_positive",
    "masked_negative": "trust_region/masked_negative",
    "disagree": "trust_region/direction_disagreement",
    "divergence": "trust_region/divergence_mean",
    "topk_mass_behavior": "trust_region/topk_mass_behavior",
    "topk_mass_policy": "trust_region/topk_mass_policy",
    "ratio": "importance_ratio/mean",
    "truncated": "importance_ratio/truncated",
}


def as_tokens(inputs, mask, ratio_max, entropy=None):
    region = TrustRegion(threshold_low=0.15, threshold_high=0.15)
    evidence = evidence_of(inputs)
    assessment = region.assess(evidence, inputs["advantages"], entropy)
    return Tokens(mask, region, evidence, assessment, inputs["advantages"], ratio_max, entropy)


def loop_summary(result, inputs, mask, ratio_max):
    sums = dict.fromkeys(NAMES, 0.0)
    maxima = {"divergence_max": 0.0, "ratio_max": 0.0}
    advantages = inputs["advantages"].expand(mask.shape)
    for position in itertools.product(*map(range, mask.shape)):
        if not mask[position]:
            continue
        sums["tokens"] += 1
        advantage = advantages[position].item()
        behavior, policy = inputs["behavior_logps"][position].tolist(), inputs["policy_logps"][position].tolist()
        valid = inputs["valid"][position].tolist()
        sums["divergence"] += result.divergence[position].item()
        maxima["divergence_max"] = max(maxima["divergence_max"], result.divergence[position].item())
        outside, kept = result.outside[position].item(), result.keep[position].item()
        sums["outside"] += outside
        sums["masked"] += not kept
        sums["masked_positive"] += not kept and advantage > 0
        sums["masked_negative"] += not kept and advantage < 0
        if not math.isfinite(behavior[0]):
            continue
        ratio = math.exp(policy[0] - behavior[0])
        sums["scored"] += 1
        sums["ratio"] += ratio
        sums["truncated"] += ratio_max is not None and ratio > ratio_max
        sums["topk_mass_behavior"] += sum(math.exp(x) for x, ok in zip(behavior, valid, strict=True) if ok)
        sums["topk_mass_policy"] += sum(math.exp(x) for x, ok in zip(policy, valid, strict=True) if ok)
        sums["disagree"] += outside and result.predicted_change[position].item() * (ratio - 1) < 0
        maxima["ratio_max"] = max(maxima["ratio_max"], ratio)
    return sums, maxima


@pytest.mark.parametrize("ratio_max", [None, 1.5])
def test_sums_against_a_loop(ratio_max):
    inputs = batch_of_tokens(shape=(6, 50))
    inputs["advantages"][5] = 0
    inputs["behavior_logps"][0, :5, 0] = torch.tensor([NAN, INF, -INF, NAN, NAN])
    inputs["behavior_logps"][1, 0, 1] = -INF
    inputs["policy_logps"] = torch.where(inputs["valid"], inputs["policy_logps"], NAN)
    mask = torch.rand(6, 50, generator=torch.Generator().manual_seed(1)) < 0.8
    mask[0, :5] = True
    tokens = as_tokens(inputs, mask, ratio_max)
    sums, maxima = summarize(tokens)
    assert all(value.shape == () and value.dtype == torch.float32 for value in (sums | maxima).values())
    expected, expected_maxima = loop_summary(tokens.assessment, inputs, mask, ratio_max)
    assert {name: sums[key].item() for name, key in NAMES.items()} == pytest.approx(expected, rel=1e-5)
    assert maxima["trust_region/divergence_max"].item() == pytest.approx(expected_maxima["divergence_max"])
    assert maxima["importance_ratio/max"].item() == pytest.approx(expected_maxima["ratio_max"])
    assert sums["trust_region/unscored"] == 5
    # The batch has some of each, so that no count is compared at 0 only.
    counts = ["outside", "masked_positive", "masked_negative", "disagree"] + ["truncated"] * (ratio_max is not None)
    assert all(expected[name] > 0 for name in counts)
    assert expected["masked"] == expected["masked_positive"] + expected["masked_negative"] < expected["outside"]


@pytest.mark.parametrize("shape", [(3, 4), (3, 0)])
def test_sums_without_tokens_are_0(shape):
    inputs = batch_of_tokens()
    if not shape[1]:
        inputs = {name: x if name == "vocab_size" else x[:, :0] for name, x in inputs.items()}
    inputs["advantages"] = torch.ones(3, 1)
    for reduced in summarize(as_tokens(inputs, torch.zeros(shape, dtype=torch.bool), 20.0)):
        assert all(value.item() == 0 for value in reduced.values())


def test_sums_read_neither_nan_nor_padding():
    inputs = batch_of_tokens(shape=(1, 4))
    inputs["behavior_logps"][0, 0, 1] = inputs["policy_logps"][0, 1, 0] = inputs["policy_logps"][0, 1, 2] = NAN
    inputs["behavior_logps"][0, 2], inputs["valid"][0, 2] = 1e30, False
    inputs["behavior_logps"][0, 3, 0], inputs["policy_logps"][0, 3, 0] = -100.0, 0.0
    sums, maxima = summarize(as_tokens(inputs, torch.ones(1, 4, dtype=torch.bool), None))
    assert all(value.isfinite() for value in [*sums.values(), *maxima.values()])
    assert sums["tokens trained on"] == 4 and sums["tokens with a behaviour logprob"] == 3


def test_sums_read_no_value_on_the_host():
    # A meta tensor has no values: whatever would wait for an accelerator (item(), bool(), boolean indexing) raises.
    inputs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch_of_tokens().items()}
    tokens = as_tokens(
        inputs, torch.ones(3, 4, dtype=torch.bool, device="meta"), 20.0, entropy=torch.ones(3, 4, device="meta")
    )
    for reduced in summarize(tokens):
        assert all(value.is_meta and value.shape == () for value in reduced.values())


def test_a_mask_of_another_shape_or_dtype_is_refused():
    for mask in (torch.ones(3, 4), torch.ones(3, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match="mask is torch"):
            as_tokens(batch_of_tokens(), mask, None)


def test_every_metric_is_declared_once_with_its_meaning():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.kind in ("share", "mean", "max", "value") and metric.meaning
        assert (metric.kind == "value") == (metric not in TOKEN_METRICS)


def test_without_candidates_nothing_is_said_of_a_top_k():
    inputs = batch_of_tokens()
    inputs |= {name: inputs[name][..., :1] for name in ("behavior_logps", "policy_logps", "valid")}
    sums, _ = summarize(as_tokens(inputs, torch.ones(3, 4, dtype=torch.bool), None))
    assert not {"trust_region/topk_mass_behavior", "trust_region/direction_disagreement"} & set(sums)


def test_metrics_that_a_trainer_logs_are_declared(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, **TWO_STEPS)
    logged = {name for log in run(trainer) for name in log}
    ours = {name for name in logged if name.split("/")[0] in ("trust_region", "importance_ratio", "weight_sync")}
    assert ours and ours <= {metric.name for metric in METRICS}


def test_forecasts_are_held_against_the_next_divergence():
    def assessment(divergence, change=0.0, outside=True, keep=True):
        shape = torch.ones(len(divergence))
        return TokenAssessment(
            torch.tensor(divergence), shape * torch.tensor(change), shape.bool() & torch.tensor(outside),
            shape.bool() & torch.tensor(keep),
        )  # fmt: skip

    #                     right  right  wrong   still  inside  masked  A = 0  not in the mask
    before = assessment(
        [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
        change=[-2.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        outside=[True, True, True, True, False, True, True, True],
        keep=[True, True, True, True, True, False, True, True],
    )
    after = assessment([0.2, 0.2, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2])
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    mask = torch.tensor([True] * 7 + [False])
    log_mu = torch.zeros(8, 1)
    log_pi = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None]  # right, wrong, right
    batch, log_ratio = {}, (log_pi - log_mu)[:, 0]

    def count(step, assessment):
        found = forecasts(batch, step, assessment, log_ratio, advantages, mask)
        return {name: ((x != 0).sum().item(), (x > 0).sum().item()) for name, x in found.items()}

    nothing = {"predictive": (0, 0), "ratio": (0, 0)}
    assert count(5, before) == nothing
    # An accumulated micro-batch that comes back before the optimizer step has measured nothing
    assert count(5, before) == nothing
    assert count(6, after) == {"predictive": (3, 2), "ratio": (3, 2)}


def expected_alignment(model, batch, threshold):
    """D and both directions of every trained-on token from the model's full logits, by autograd in float64."""
    with torch.no_grad():
        logps = full_logps(model, batch).double()
    tokens = {}
    for b, t in batch["completion_mask"].nonzero().tolist():
        head = batch["behavior_topk_ids"][b, t]
        mu = batch["behavior_topk_logps"][b, t][head >= 0].double().exp()
        head = head[head >= 0].long()
        z = logps[b, t].clone().requires_grad_()
        pi = z.softmax(-1)
        mu, pi_head = (torch.cat([p, 1 - p.sum()[None]]) for p in (mu, pi[head]))
        divergence = (mu * (mu / pi_head).log()).sum()
        (gradient,) = torch.autograd.grad(divergence, z)
        sampled, advantage = batch["completion_ids"][b, t], batch["advantages"][b].item()
        change = gradient[sampled] - (pi.detach() * gradient).sum()
        predictive, ratio = (advantage * x.sign().item() for x in (change, pi[sampled].detach() - mu[0]))
        updated = divergence > threshold and not predictive > 0
        tokens[b, t] = divergence.item(), bool(updated), predictive, ratio
    return tokens


def test_a_run_measures_what_full_logits_say(tmp_path):
    threshold = 1e-3
    trainer = make_trainer(
        tmp_path, gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=6, max_steps=24,
        learning_rate=3e-3, lr_scheduler_type="constant", divergence_threshold=threshold, log_realized_alignment=True,
        logging_steps=24,
    )  # fmt: skip
    seen, compute_loss = [], trainer.compute_loss

    def watched(model, inputs, *args, **kwargs):
        seen.append((id(inputs), expected_alignment(model, inputs, threshold)))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
    (log,) = [log for log in run(trainer) if "reward" in log]
    right, all_of_them = [0, 0], [0, 0]
    for (batch, before), (next_batch, after) in zip(seen[:-1], seen[1:], strict=True):
        for token in before if batch == next_batch else ():
            divergence, updated, *forecasts = before[token]
            moved = after[token][0] - divergence
            for i, forecast in enumerate(forecasts):
                all_of_them[i] += updated and forecast != 0
                right[i] += updated and forecast * moved > 0
    assert min(all_of_them) > 10 and right[0] != right[1], "a test of nothing"
    assert log["trust_region/realized_alignment_predictive"] == pytest.approx(right[0] / all_of_them[0])
    assert log["trust_region/realized_alignment_ratio"] == pytest.approx(right[1] / all_of_them[1])


@pytest.mark.parametrize("args", [dict(num_iterations=1, log_realized_alignment=True), dict(num_iterations=2)])
def test_nothing_is_logged_where_nothing_comes_back_or_nobody_asked(tmp_path, args):
    trainer = make_trainer(
        tmp_path, gradient_accumulation_steps=1, steps_per_generation=2, max_steps=4, learning_rate=2e-2, **args
    )
    logs = run(trainer)
    assert any("trust_region/outside" in log for log in logs)
    assert not any("realized" in name for log in logs for name in log)


@pytest.mark.parametrize(
    "evaluation",
    [{}, dict(eval_strategy="steps", eval_steps=1, eval_dataset=tiny.prompts(1), per_device_eval_batch_size=2)],
)
def test_completions_table_says_what_was_masked(tmp_path, monkeypatch, evaluation):
    """By the completion's text, as rows and micro-batches are in different orders; evaluations come in between."""
    masked, assess = {}, TrustRegion.assess

    def spy(*args, **kwargs):
        assessment = assess(*args, **kwargs)
        batch = trainer._loss.batch
        texts = tiny.tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
        for text, keep, mask in zip(texts, assessment.keep.tolist(), batch["completion_mask"].tolist(), strict=True):
            masked[text] = sum(m and not k for k, m in zip(keep, mask, strict=True)) / sum(mask)
        return assessment

    monkeypatch.setattr(TrustRegion, "assess", spy)
    trainer = make_trainer(
        tmp_path,
        log_completions=True,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        max_steps=4,
        learning_rate=1e-3,
        divergence_threshold=0.005,
        **evaluation,
    )
    run(trainer)
    tables = [pd.read_parquet(tmp_path / "completions" / f"completions_0000{step}.parquet") for step in (1, 2, 3, 4)]
    for table in tables:
        known = table.dropna(subset="trust_region/masked")
        assert known["trust_region/masked"].tolist() == pytest.approx(
            [masked[text] for text in known["completion"]], abs=1e-4
        )
    if not evaluation:
        assert [table["trust_region/masked"].notna().sum() for table in tables] == [4, 8, 4, 8]
    assert max(table["trust_region/masked"].nunique() for table in tables) > 2
