"""Token metrics: sums over micro-batches and processes, and forecasts held against what an update did."""

import pandas as pd
import pytest
import torch

from tests import tiny
from tests.test_trainer import TEMPERATURE, make_trainer
from tests.test_trainer_run import run
from trl_pdm import trust_region
from trl_pdm.metrics import TokenMetrics, realized_alignment
from trl_pdm.trust_region import TokenAssessment


def test_shares_are_of_all_tokens_of_all_processes():
    # Two processes: the other one has twice the tokens of this one, all of them outside
    metrics = TokenMetrics(lambda local: torch.cat([local, 2 * local.where(local != 1, local.new_tensor(5.0))]))
    for tokens, outside, largest in ((10, 1, 0.5), (30, 1, 2.0)):
        sums = dict(tokens=tokens, scored=tokens, outside=outside)
        sums = {name: torch.tensor(float(value)) for name, value in sums.items()}
        metrics.add("train", sums, {"divergence_max": torch.tensor(largest)})
    seen = metrics.pop("train")
    assert seen["trust_region/outside"] == pytest.approx((1 + 10 + 1 + 10) / (10 + 20 + 30 + 60))
    assert seen["trust_region/divergence_max"] == 4.0
    assert metrics.pop("train") == {} and metrics.pop("eval") == {}


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
    batch = {}
    first = realized_alignment(batch, 5, before, log_mu, log_pi, advantages, mask)
    assert all(value == 0 for value in first.values())
    # An accumulated micro-batch that comes back before the optimizer step has measured nothing
    again = realized_alignment(batch, 5, before, log_mu, log_pi, advantages, mask)
    assert all(value == 0 for value in again.values())
    second = realized_alignment(batch, 6, after, log_mu, log_pi, advantages, mask)
    assert {name: value.item() for name, value in second.items()} == {
        "realized_predictive": 3, "aligned_predictive": 2, "realized_ratio": 3, "aligned_ratio": 2,
    }  # fmt: skip


def expected_alignment(model, batch, threshold):
    """D and both directions of every trained-on token from the model's full logits, by autograd in float64."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1][:, -length:].double()
    tokens = {}
    for b, t in batch["completion_mask"].nonzero().tolist():
        head = batch["behavior_topk_ids"][b, t]
        mu = batch["behavior_topk_logps"][b, t][head >= 0].double().exp()
        head = head[head >= 0].long()
        z = (logits[b, t] / TEMPERATURE).requires_grad_()
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
    masked, assess = {}, trust_region.assess

    def spy(*args, **kwargs):
        assessment = assess(*args, **kwargs)
        batch = trainer._batch
        texts = tiny.tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
        for text, keep, mask in zip(texts, assessment.keep.tolist(), batch["completion_mask"].tolist(), strict=True):
            masked[text] = sum(m and not k for k, m in zip(keep, mask, strict=True)) / sum(mask)
        return assessment

    monkeypatch.setattr(trust_region, "assess", spy)
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
        known = table.dropna(subset="masked")
        assert known["masked"].tolist() == pytest.approx([masked[text] for text in known["completion"]], abs=1e-4)
    if not evaluation:
        assert [table["masked"].notna().sum() for table in tables] == [4, 8, 4, 8]
    assert max(table["masked"].nunique() for table in tables) > 2
