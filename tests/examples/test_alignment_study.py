"""The alignment study: its measurements against autograd, full logits and brute force, and its command line."""

import copy
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
    study.update(model, torch.optim.SGD(model.parameters(), lr=1.0), study.weighted(rows, weight), ARGS)
    for old, new, grad in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), grad, rtol=1e-2, atol=1e-5)


def stepped(tied=False, trained="", lr=0.03, scale=1.0):
    """A policy in float64, one step of SGD on the parameters whose names hold `trained`: what `first_order` says of it."""
    behavior, model = (tiny.model(41, seed=seed, hidden_size=32, tie_word_embeddings=tied).double() for seed in (0, 1))
    rows, sampled, z_mu = batch_of(behavior, ARGS.temperature)
    before, weight = copy.deepcopy(model), scale * torch.linspace(-1, 1, len(sampled))
    rows = study.weighted(rows, weight)
    step = [parameter for name, parameter in model.named_parameters() if trained in name]
    study.update(model, torch.optim.SGD(step, lr=lr), rows, ARGS)
    found = study.first_order(behavior, model, study.parameters(before), rows, ARGS)
    return SimpleNamespace(
        before=before, after=model, sampled=sampled, weight=weight, log_mu=z_mu.detach().log_softmax(-1), found=found
    )


@pytest.mark.parametrize("tied", [False, True])
def test_jvp_is_the_slope_of_the_divergence_along_the_step(tied):
    case = stepped(tied)
    shifted, size = copy.deepcopy(case.before), 0.01

    def divergences_at(share):
        points = zip(shifted.parameters(), case.before.parameters(), case.after.parameters(), strict=True)
        for parameter, start, end in points:
            parameter.data = (start + share * (end - start)).detach()
        log_pi = batch_of(shifted, ARGS.temperature)[2].detach().log_softmax(-1)
        return {name: divergence(case.log_mu, log_pi) for name, divergence in DIVERGENCES.items()}

    ahead, behind = divergences_at(size), divergences_at(-size)
    for name in DIVERGENCES:
        slope = (ahead[name] - behind[name]) / (2 * size)
        assert slope.min() < -1e-3 and slope.max() > 1e-3
        torch.testing.assert_close(case.found[f"jvp_{name}"].double(), slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tied, logits_at_once", [(False, 2**23), (False, 1), (True, 1)])
def test_lm_head_says_what_tokens_with_like_hidden_states_pull(monkeypatch, tied, logits_at_once):
    """The logits of a token move by the pulls of all tokens, each times the product of the two hidden states."""
    monkeypatch.setattr(study, "LOGITS_AT_ONCE", logits_at_once)
    case = stepped(tied)
    _, _, z = batch_of(case.before, ARGS.temperature)
    hidden = torch.linalg.lstsq(case.before.lm_head.weight, z.detach().T * ARGS.temperature).solution.T
    z = z.detach().requires_grad_()
    pull = case.weight[:, None] / len(z) * (F.one_hot(case.sampled, 41) - z.detach().softmax(-1))
    moved = hidden @ hidden.T @ pull / ARGS.temperature**2
    for name, divergence in DIVERGENCES.items():
        (slope,) = torch.autograd.grad(divergence(case.log_mu, z.log_softmax(-1)).sum(), z)
        expected = (slope * moved).sum(-1)
        assert expected.min() < 0 < expected.max()
        torch.testing.assert_close(case.found[f"lm_head_{name}"].double(), expected, rtol=1e-3, atol=1e-5)


def test_lm_head_is_the_jvp_where_only_the_head_is_trained():
    found = stepped(trained="lm_head", lr=1.0, scale=0.01).found  # so small that the gradient is not clipped
    for name in DIVERGENCES:
        assert found[f"jvp_{name}"].abs().max() > 1e-4
        torch.testing.assert_close(found[f"jvp_{name}"], found[f"lm_head_{name}"], rtol=1e-3, atol=1e-7)


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
        "full_kl": np.array([-0.1, 0.1, 0.0], np.float32),
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
    # A small step of all parameters is what the Jacobian-vector product is the derivative for.
    for truth in ("optimizer step", "step without mask"):
        assert headline["all", truth, "agreement", "jvp"] > 0.85
        assert headline["all", truth, "rank_correlation", "jvp"] > 0.7
    assert not {"jvp", "lm_head"} & set(summary.loc["all", "token alone"].index.get_level_values("direction"))
    assert Image.open(tmp_path / "alignment.png").size[0] > 1000


# ---- The page


COLUMNS = {
    "ratio": "ratio",
    "aggregated": "aggregated",
    "uniform": "uniform",
    "exact": "exact",
    "whole vocabulary": "full",
    "LM head": "lm_head",
    "JVP": "jvp",
}


def test_table_of_the_tiny_models_is_what_the_study_found():
    """`examples/results/alignment_tiny.csv` is the summary.csv of the command above the table."""
    page = (ROOT / "docs" / "evidence.md").read_text()
    caption, _, table = page.partition("\nTiny models, ")[2].partition("\n\n")
    head, _, *lines = (line.strip("|").split("|") for line in table.partition("\n\n")[0].splitlines())
    assert [cell.strip() for cell in head[2:]] == list(COLUMNS)
    found = pd.read_csv(ROOT / "examples" / "results" / "alignment_tiny.csv")
    found = found[(found.breakdown == "headline") & (found.subset == "all")]
    values = found.set_index(["truth", "rate", "direction"]).value.to_dict()
    truth, shown, expected = None, {}, {}
    for happened, rate, *cells in lines:
        truth, rate = happened.strip() or truth, rate.strip().replace(" ", "_")
        for direction, cell in zip(COLUMNS.values(), cells, strict=True):
            value = values.get((truth, rate, direction))
            shown[truth, rate, direction] = cell.strip().strip("*")
            expected[truth, rate, direction] = "" if value is None else f"{value:.3f}".lstrip("0")
    assert shown == expected
    assert {key[:2] for key in shown} == {(truth, rate) for truth, rate, _ in values if rate != "full_sign"}
    tokens = found[(found.truth == "token alone") & (found.rate == "agreement")].n.unique()
    assert caption == f"61 seeds, {tokens.item():,} tokens outside:"
