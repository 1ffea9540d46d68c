"""The alignment study: its measurements against autograd, full logits and brute force, and its command line."""

import math
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.helpers import tiny
from tests.helpers.processes import InThisProcess, forked


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import alignment_study as study  # noqa: E402


# From torch's own losses, not from the study's formulas.
DIVERGENCES = {
    "kl": lambda log_mu, log_pi: F.kl_div(log_pi, log_mu, reduction="none", log_target=True).sum(-1),
    "tv": lambda log_mu, log_pi: F.l1_loss(log_pi.exp(), log_mu.exp(), reduction="none").sum(-1) / 2,
    "reverse_kl": lambda log_mu, log_pi: F.kl_div(log_mu, log_pi, reduction="none", log_target=True).sum(-1),
}


@pytest.fixture
def policies():
    """Logits of both policies `(200, 37)` and sampled tokens, in float64."""
    torch.manual_seed(0)
    z_mu = 2 * torch.randn(200, 37, dtype=torch.float64)
    return z_mu.log_softmax(-1), z_mu + 0.7 * torch.randn_like(z_mu), torch.randint(37, (200,))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_prediction_is_the_derivative_along_the_step(policies, name):
    log_mu, z, sampled = policies
    z = z.clone().requires_grad_()
    div = DIVERGENCES[name](log_mu, z.log_softmax(-1))
    (grad,) = torch.autograd.grad(div.sum(), z)
    step = F.one_hot(sampled, z.shape[-1]) - z.detach().softmax(-1)
    measured, slope = study.full_divergences(log_mu, z.detach().log_softmax(-1), [name])[name]
    predicted = study.full_prediction(slope, z.detach().softmax(-1), sampled)
    torch.testing.assert_close(measured, div.detach())
    torch.testing.assert_close(predicted, (grad * step).sum(-1))
    assert 0 < (predicted > 0).double().mean() < 1


def test_logit_step_is_that_of_each_token_alone(policies):
    _, z, sampled = policies
    sizes = torch.randn(len(z), dtype=torch.float64)
    stepped = study.logit_step(z.log_softmax(-1), sampled, sizes)
    for row, token, size, after in zip(z.tolist(), sampled.tolist(), sizes.tolist(), stepped, strict=True):
        total = sum(map(math.exp, row))
        moved = [math.exp(x + size * ((j == token) - math.exp(x) / total)) for j, x in enumerate(row)]
        torch.testing.assert_close(after.exp(), torch.tensor([x / sum(moved) for x in moved], dtype=torch.float64))


def batch_of(model, temperature, seed=0):
    """Two left-padded prompts with completions, one of which ended early, and their logits without padding."""
    torch.manual_seed(seed)
    ids = torch.randint(2, model.config.vocab_size, (2, 9))
    attention = torch.ones_like(ids)
    attention[0, :2] = 0  # its prompt has 2 tokens, the other's 4
    attention[1, -1] = 0  # its completion has 4, the other's 5
    mask = attention[:, 4:].bool()
    rows = dict(ids=ids, attention=attention, mask=mask, advantage=torch.tensor([1.5, -0.5]))
    with torch.enable_grad():
        logits = torch.cat([model(ids[:1, 2:]).logits[0, 1:-1], model(ids[1:, :-1]).logits[0, 3:-1]])
    return rows, torch.cat([ids[0, 4:], ids[1, 4:-1]]), logits / temperature


ARGS = Namespace(divergences=list(DIVERGENCES), top_k=[3, 5], temperature=1.3)


@pytest.mark.parametrize("logits_at_once", [2**23, 1])
def test_measurement_equals_full_logits(monkeypatch, logits_at_once):
    monkeypatch.setattr(study, "LOGITS_AT_ONCE", logits_at_once)
    behavior, model = tiny.model(41, seed=0), tiny.model(41, seed=1)
    rows, sampled, z_mu = batch_of(behavior, ARGS.temperature)
    _, _, z = batch_of(model, ARGS.temperature)
    log_mu, z = z_mu.detach().log_softmax(-1), z.detach()
    log_pi, hot = z.log_softmax(-1), F.one_hot(sampled, 41)
    records = study.measure(behavior, model, rows, ARGS)
    close = {"rtol": 1e-3, "atol": 1e-5}
    advantages = torch.tensor([1.5] * 5 + [-0.5] * 4)
    weight = advantages * ((log_pi - log_mu) * hot).sum(-1).exp().clamp(max=study.RATIO_MAX)
    torch.testing.assert_close(records["weight"], weight, **close)
    torch.testing.assert_close(records["sum_sq"], log_pi.exp().square().sum(-1), **close)
    torch.testing.assert_close(records["behavior"][:, 0], (log_mu * hot).sum(-1), **close)
    torch.testing.assert_close(records["behavior"][:, 1:], log_mu.sort(-1, descending=True).values[:, :5], **close)
    for name, divergence in DIVERGENCES.items():
        before = divergence(log_mu, log_pi)
        after = divergence(log_mu, (z + study.ETA * weight[:, None] * (hot - log_pi.exp())).log_softmax(-1))
        torch.testing.assert_close(records[f"D_{name}"], before, **close)
        torch.testing.assert_close(records[f"alone_{name}"], after - before, rtol=1e-3, atol=1e-4)


def test_update_descends_the_objective():
    model = tiny.model(41)
    rows, sampled, logits = batch_of(model, ARGS.temperature)
    weight = torch.linspace(-1, 1, len(sampled)) / 100  # so small that the gradient is not clipped
    loss = (weight * F.cross_entropy(logits, sampled, reduction="none")).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.cat([grad.flatten() for grad in expected]).norm() < 1
    before = [p.detach().clone() for p in model.parameters()]
    study.update(model, torch.optim.SGD(model.parameters(), lr=1.0), rows, weight, ARGS)
    for old, new, grad in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), grad, rtol=1e-2, atol=1e-5)


def test_interval_of_a_known_distribution():
    """300 of 1000 seeds right once each: resampled, that is Binomial(1000, 0.3) / 1000. The reference lacks 100."""
    right = (np.arange(1000) < 300).astype(int)
    reference = right - (np.arange(1000) < 100)
    value, low, high, gain, gain_low, gain_high = study.interval(right, np.ones(1000, int), reference)
    assert (value, gain) == pytest.approx((0.3, 0.1))
    for p, found in ((0.3, (low, high)), (0.1, (gain_low, gain_high))):
        cumulative = np.cumsum([math.comb(1000, k) * p**k * (1 - p) ** (1000 - k) for k in range(1001)])
        quantiles = np.searchsorted(cumulative, [0.025, 0.975]) / 1000
        assert found == pytest.approx(quantiles, abs=0.0025)  # a 90 % interval would be off by 0.003 and more


def test_interval_keeps_seeds_together():
    """A seed's tokens are one draw: two seeds, one all right, one all wrong, leave everything open."""
    assert study.interval(np.array([1000, 0]), np.array([1000, 1000]), np.array([1000, 0]))[:3] == [0.5, 0, 1]
    assert np.isnan(study.interval(np.zeros(2), np.zeros(2), np.zeros(2))).all()


def test_counts_by_hand():
    """Binary vocabulary of three tokens and K = 2: decisions follow from the ratio alone and can be written down."""
    mu, pi = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    ids = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 0, 1]])
    records = {
        "behavior": mu.log()[ids].numpy(),
        "policy": pi.log()[ids].numpy(),
        "valid": np.array([[True, False, True], [True, True, False], [True, False, True]]),
        "sum_sq": np.full(3, pi.square().sum().item(), np.float32),
        "advantage": np.array([1.0, 1.0, 0.0], np.float32),  # the third makes no update
        "d_kl": np.array([-0.1, 0.1, 0.1], np.float32),
        "alone_kl": np.array([0.02, 0.02, 0.02], np.float32),
        "seed": np.array([7, 8, 8]),
    }
    counts = study.count(records, 3, "alone", True, "kl", 0.1, 2)
    ratio = counts[(counts.direction == "ratio") & (counts.subset == "all")].set_index("seed")
    # Seed 7: r < 1 and A > 0, so kept, though the divergence grew. Seed 8: r > 1 and A > 0, so masked, and it grew.
    assert ratio[["tokens", "widened", "widened_kept", "agree"]].values.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]
    assert counts[counts.subset == "differ"].groupby("direction").tokens.sum()["full"] == 0
    assert study.count(records, 3, "alone", True, "kl", 0.5, 2).tokens.sum() == 0


def run_study(monkeypatch, folder, *flags):
    monkeypatch.setattr(sys, "argv", ["alignment_study.py", "--output_dir", *map(str, (folder, *flags))])
    study.main(study.parse_args())


@pytest.mark.slow
def test_given_model_and_prompts(tmp_path, monkeypatch):
    model, size = tiny.save(tmp_path / "model"), len(tiny.tokenizer())
    (tmp_path / "prompts.txt").write_text("\n".join(f"{i} sheep and {i} " for i in range(12)))
    flags = ("--model_name_or_path", model, "--prompts", tmp_path / "prompts.txt", "--seeds", 2)
    flags += ("--prompts_per_seed", 8, "--num_generations", 4, "--steps", 4, "--max_completion_length", 6)
    flags += ("--learning_rate", 3e-3, "--top_k", size, 3, "--thresholds", 0.05)
    monkeypatch.setattr(study, "multiprocessing", SimpleNamespace(get_context=lambda method: forked()))
    run_study(monkeypatch, tmp_path / "2", *flags, "--processes", 2)
    monkeypatch.setattr(study, "ProcessPoolExecutor", InThisProcess)
    run_study(monkeypatch, tmp_path / "1", *flags)
    for name in ("alignment.csv", "summary.csv"):  # the same seeds, the same numbers
        first, second = ((tmp_path / processes / name).read_bytes() for processes in "12")
        assert first == second and len(first) > 10_000

    summary = pd.read_csv(tmp_path / "1" / "summary.csv")
    rows = summary[(summary.subset == "all") & (summary.breakdown == "headline") & (summary.rate == "full_sign")]
    rows = rows.set_index("direction")
    # The head is the whole vocabulary: there is no tail, and all estimators are the full prediction.
    assert rows.n.min() > 20
    assert (rows.loc[["exact", "uniform", "aggregated"], "value"] > 0.98).all()
    assert (rows.loc["ratio", "value"] < 0.98).any()
    counts = pd.read_csv(tmp_path / "1" / "alignment.csv")
    assert set(counts.seed) == {0, 1} and (counts.widened + counts.shrunk <= counts.tokens).all()
    assert set(counts[counts.breakdown == "top_k"].level.astype(str)) == {str(size), "3"}


@pytest.mark.slow
def test_default_run(tmp_path, monkeypatch, capsys):
    flags = ("--seeds", 2, "--tiny_models", 1, "--warm_start_accuracy", 0.1)
    monkeypatch.setattr(study, "ProcessPoolExecutor", InThisProcess)
    run_study(monkeypatch, tmp_path, *flags, "--prompts_per_seed", 32, "--learning_rate", 3e-3, "--thresholds", 0.05)
    output = capsys.readouterr().out
    assert all(truth in output for truth in study.TRUTHS)
    summary = pd.read_csv(tmp_path / "summary.csv").set_index(["subset", "truth", "rate", "direction"])
    headline = summary[summary.breakdown == "headline"].value
    # A small step of a token alone is what the prediction is the derivative for.
    assert headline["all", "token alone", "agreement", "full"] > 0.9
    assert headline["all", "token alone", "rank_correlation", "full"] > 0.9
    assert headline["all", "token alone", "full_sign", "full"] == 1
    assert Image.open(tmp_path / "alignment.png").size[0] > 1000
