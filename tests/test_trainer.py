"""The trainer against independent references: full logits, autograd, and TRL's own `GRPOTrainer`."""

import math

import pytest
import torch
from trl import GRPOTrainer

from tests.helpers.references import (
    CLIPPED,
    B,
    T,
    assert_same,
    full_logps,
    gradients,
    make_batch,
    reference_keep,
    reference_loss,
    sampled_logps,
)
from tests.helpers.trainers import make_trainer, trainer_gradients


SHAPED = [
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "luspo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "delta": 1.5},
    {"loss_type": "bnpo", "delta": 1.2},
]


@pytest.mark.parametrize(
    "loss_type, direction, divergence, threshold, ratio_max",
    [
        *((loss_type, direction, "kl", 0.15, 20.0) for loss_type in CLIPPED for direction in ("predictive", "ratio")),
        ("grpo", "predictive", "kl", 0.03, 1.2),
        ("dapo", "predictive", "tv", 0.1, None),
        ("bnpo", "predictive", "reverse_kl", 0.1, 20),
    ],
)
def test_loss_and_gradients_equal_full_logits(tmp_path, loss_type, direction, divergence, threshold, ratio_max):
    trainer = make_trainer(
        tmp_path,
        loss_type=loss_type,
        direction=direction,
        divergence=divergence,
        divergence_threshold=threshold,
        importance_ratio_max=ratio_max,
    )
    batch, mu = make_batch(trainer.model)
    keep = reference_keep(trainer.model, batch, mu, divergence=divergence, direction=direction, threshold=threshold)
    scored = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert 0 < (~keep & scored).sum() < scored.sum(), "the batch must have masked tokens and others"
    loss, actual = trainer_gradients(trainer, batch)
    expected = reference_loss(trainer.model, batch, keep, loss_type, ratio_max, 2, 2)
    assert_same(actual, gradients(trainer.model, expected), 1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 6, 12])
def test_any_top_k(tmp_path, top_k):
    trainer = make_trainer(tmp_path, divergence_top_k=top_k, divergence_threshold=0.05, loss_type="grpo")
    batch, mu = make_batch(trainer.model, top_k=top_k)
    keep = reference_keep(trainer.model, batch, mu, threshold=0.05)
    _, actual = trainer_gradients(trainer, batch)
    assert_same(actual, gradients(trainer.model, reference_loss(trainer.model, batch, keep, "grpo", 20, 2, 2)), 1e-5)


def test_thresholds_by_advantage_sign(tmp_path):
    trainer = make_trainer(tmp_path, divergence_threshold=1e-6, divergence_threshold_high=100.0, loss_type="grpo")
    batch, mu = make_batch(trainer.model)
    keep = reference_keep(trainer.model, batch, mu, threshold=1e-6) | (batch["advantages"][:, None] > 0)
    _, actual = trainer_gradients(trainer, batch)
    assert_same(actual, gradients(trainer.model, reference_loss(trainer.model, batch, keep, "grpo", 20, 2, 2)), 1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_ratio_proximity_and_direction_are_grpo(tmp_path, loss_type):
    clip = dict(loss_type=loss_type, epsilon=0.1, epsilon_high=0.25)
    ours = make_trainer(tmp_path / "a", proximity="ratio", direction="ratio", importance_ratio_max=None, **clip)
    stock = make_trainer(tmp_path / "b", GRPOTrainer, **clip)
    batch, _ = make_batch(ours.model)
    _, actual = trainer_gradients(ours, batch)
    _, expected = trainer_gradients(stock, batch, pdm=False)
    assert_same(actual, expected, 1e-6)
    _, unclipped = trainer_gradients(
        make_trainer(tmp_path / "c", GRPOTrainer, **clip | {"epsilon": 1e6}), batch, False
    )
    assert (unclipped - expected).norm() > 0.01 * expected.norm(), "clipping must act on this batch"


@pytest.mark.parametrize("shape", SHAPED, ids=lambda shape: "-".join(map(str, shape.values())))
def test_shaped_losses_are_stocks_times_the_mask(tmp_path, shape):
    stock = make_trainer(tmp_path / "stock", GRPOTrainer, **shape)
    wide = make_trainer(tmp_path / "wide", divergence_threshold=1e6, **shape)
    batch, mu = make_batch(stock.model, drift=0.3)
    _, expected = trainer_gradients(stock, batch, pdm=False)
    assert_same(trainer_gradients(wide, batch)[1], expected, 1e-6)

    narrow = make_trainer(tmp_path / "narrow", divergence_threshold=0.01, **shape)
    keep = reference_keep(stock.model, batch, mu, threshold=0.01)
    # Stock takes token-level advantages from subclasses: zero ones are what a masked token is. Where a sequence has one
    # ratio, its logprob is a constant there.
    masked, score = (
        {**batch, "advantages": batch["advantages"][:, None] * keep},
        stock._get_per_token_logps_and_entropies,
    )

    def detached(*args, **kwargs):
        logps, *others = score(*args, **kwargs)
        return torch.where(keep, logps, logps.detach()), *others

    stock._get_per_token_logps_and_entropies = detached
    _, expected_masked = trainer_gradients(stock, masked, pdm=False)
    assert_same(trainer_gradients(narrow, batch)[1], expected_masked, 1e-6)
    assert (expected_masked - expected).norm() > 0.01 * expected.norm(), "the mask must act on this batch"


@pytest.mark.parametrize(
    "shape",
    [
        *({"loss_type": loss_type} for loss_type in [*CLIPPED, "cispo", "sapo", "vespo", "luspo"]),
        *(
            {"loss_type": loss_type, "importance_sampling_level": "sequence"}
            for loss_type in [*CLIPPED, "sapo", "luspo"]
        ),
        {"loss_type": "vespo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "delta": 1.5},
        {"loss_type": "grpo", "top_entropy_quantile": 0.5},
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.5},
        {"loss_type": "bnpo", "importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
def test_a_masked_token_updates_nothing(tmp_path, shape, monkeypatch):
    if shape["loss_type"] == "cispo":
        shape = shape | {"epsilon_high": 5.0}
    trainer = make_trainer(tmp_path, divergence_threshold=0.01, **shape)
    batch, mu = make_batch(trainer.model, drift=0.3)
    keep = reference_keep(trainer.model, batch, mu, threshold=0.01)
    scored = (batch["completion_mask"] * batch["tool_mask"]).bool()
    seen, score = [], GRPOTrainer._get_per_token_logps_and_entropies

    def watched(*args, **kwargs):
        logps, *others = score(*args, **kwargs)
        logps.retain_grad()
        seen.append(logps)
        return logps, *others

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", watched)
    trainer_gradients(trainer, batch)
    (gradient,) = (logps.grad for logps in seen)
    assert (~keep & scored).sum() > 3
    assert (gradient[~keep] == 0).all()
    assert (gradient[keep & scored] != 0).any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("regularizer", [{"beta": 0.5}, {"entropy_coef": 0.3}])
def test_a_masked_token_keeps_the_gradient_of_the_regularizers(tmp_path, level, regularizer):
    """Where every token is masked, what is left is the regularizer's own gradient: that of stock without advantages."""
    # With the bias correction, the weight of a sequence's KL term is that of its policy term: without gradient too
    options = dict(loss_type="grpo", importance_sampling_level=level, use_bias_correction_kl=level == "token")
    options |= regularizer
    ours = make_trainer(tmp_path / "a", divergence_threshold=1e-9, direction="none", **options)
    stock = make_trainer(tmp_path / "b", GRPOTrainer, **options)
    batch, _ = make_batch(ours.model)
    batch["ref_per_token_logps"] = batch["behavior_topk_logps"][..., 0] - 0.5
    _, actual = trainer_gradients(ours, batch)
    _, expected = trainer_gradients(stock, {**batch, "advantages": torch.zeros(B)}, pdm=False)
    assert_same(actual, expected, 1e-6)


def test_every_token_masked_gives_zero_gradient(tmp_path):
    trainer = make_trainer(tmp_path, divergence_threshold=1e-9, loss_type="grpo")
    batch, mu = make_batch(trainer.model)
    # Advantages that push every token outwards, as far as the reference can tell
    up = reference_keep(trainer.model, {**batch, "advantages": torch.ones(B)}, mu, threshold=1e-9)
    batch["advantages"] = torch.where(up, -1.0, 1.0)
    loss, actual = trainer_gradients(trainer, batch)
    assert actual.norm() == 0 and loss == 0


OPTIONS = {
    "kl_to_reference": {"beta": 0.5},
    "bias_corrected_kl": {"beta": 0.5, "use_bias_correction_kl": True},
    "off_policy_sequence_mask": {"off_policy_mask_threshold": 0.01},
    "entropy_bonus": {"entropy_coef": 0.3},
    "adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_target": 10.0},
    "entropy_mask": {"top_entropy_quantile": 0.4},
    "moe_auxiliary_loss": {"router_aux_loss_coef": 0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_grpo_options_act_as_in_stock(tmp_path, option):
    options = OPTIONS[option]
    moe = option == "moe_auxiliary_loss"
    common = dict(loss_type="dapo", model=dict(moe=moe))
    ours = make_trainer(tmp_path / "a", divergence_threshold=1e6, importance_ratio_max=None, **common, **options)
    stock = make_trainer(tmp_path / "b", GRPOTrainer, epsilon=1e6, **common, **options)
    plain = make_trainer(
        tmp_path / "c", GRPOTrainer, epsilon=1e6, **common, **({"router_aux_loss_coef": 0.0} if moe else {})
    )
    for trainer in (ours, stock):
        trainer._last_world_entropy = 0.0  # the adaptive bonus waits for a first measurement
    batch, _ = make_batch(ours.model)
    batch["ref_per_token_logps"] = batch["behavior_topk_logps"][..., 0] - 0.5
    _, actual = trainer_gradients(ours, batch)
    _, expected = trainer_gradients(stock, batch, pdm=False)
    assert_same(actual, expected, 1e-6)
    _, without = trainer_gradients(plain, batch, pdm=False)
    assert (without - expected).norm() > 1e-3 * expected.norm(), "the option must act on this batch"


def test_unscored_tokens_are_kept_with_ratio_one(tmp_path):
    trainer = make_trainer(tmp_path, divergence_threshold=1e-9, loss_type="grpo")
    batch, mu = make_batch(trainer.model)
    unscored = torch.zeros(B, T, dtype=torch.bool)
    unscored[0, 1] = unscored[2, 3] = True
    batch["behavior_topk_logps"][..., 0][unscored] = math.nan
    keep = reference_keep(trainer.model, batch, mu, threshold=1e-9) | unscored
    with torch.no_grad():
        own = sampled_logps(trainer.model, batch)
    known = {**batch, "behavior_topk_logps": batch["behavior_topk_logps"].clone()}
    known["behavior_topk_logps"][..., 0][unscored] = own[unscored]
    expected = gradients(trainer.model, reference_loss(trainer.model, known, keep, "grpo", 20, 2, 2))
    assert_same(trainer_gradients(trainer, batch)[1], expected, 1e-5)
    logs = {}
    trainer.log(logs)
    assert logs["trust_region/unscored"] == pytest.approx(2 / 17)


@pytest.mark.parametrize("unknown", [math.nan, -200.0])
def test_padding_is_no_part_of_the_loss_however_improbable_its_token(tmp_path, unknown):
    trainer = make_trainer(tmp_path, temperature=0.02)
    batch, _ = make_batch(trainer.model)
    padding = ~batch["completion_mask"].bool()
    at_padding = full_logps(trainer.model, batch) / 0.02
    assert at_padding.log_softmax(-1)[padding][:, batch["completion_ids"][padding]].min() < -100
    batch["behavior_topk_logps"][..., 0][padding] = unknown
    loss, _ = trainer_gradients(trainer, batch)
    assert loss.isfinite()


def test_metrics_equal_a_count_by_hand(tmp_path):
    trainer = make_trainer(tmp_path, divergence_threshold=0.1, importance_ratio_max=1.3)
    totals = dict.fromkeys(
        ["outside", "masked", "positive", "negative", "disagree", "divergence", "ratio", "cut"], 0.0
    )
    count, mass_behavior, mass_policy, divergences, ratios = 0, 0.0, 0.0, [], []
    for seed in (0, 1):  # two micro-batches of different length are weighted by their tokens
        batch, mu = make_batch(trainer.model, seed=seed)
        if seed:
            batch["completion_mask"][:, 3:] = 0
        trainer_gradients(trainer, batch)
        keep = reference_keep(trainer.model, batch, mu, threshold=0.1)
        inside = reference_keep(trainer.model, {**batch, "advantages": torch.ones(B)}, mu, threshold=0.1)
        inside &= reference_keep(trainer.model, {**batch, "advantages": -torch.ones(B)}, mu, threshold=0.1)
        by_ratio = reference_keep(trainer.model, batch, mu, threshold=0.1, direction="ratio")
        with torch.no_grad():
            pi = full_logps(trainer.model, batch).double().exp()
        for b, t in (batch["completion_mask"] * batch["tool_mask"]).nonzero().tolist():
            head = sorted({i.item() for i in batch["behavior_topk_ids"][b, t] if i >= 0})
            p, q = mu[b, t].double().exp()[head], pi[b, t][head]
            p_rest, q_rest = 1 - p.sum(), 1 - q.sum()
            divergences.append(((p * (p / q).log()).sum() + p_rest * (p_rest / q_rest).log()).item())
            sampled = batch["completion_ids"][b, t]
            ratios.append((pi[b, t, sampled] / mu[b, t, sampled].double().exp()).item())
            count += 1
            totals["outside"] += not inside[b, t]
            totals["masked"] += not keep[b, t]
            totals["positive"] += not keep[b, t] and batch["advantages"][b].item() > 0
            totals["negative"] += not keep[b, t] and batch["advantages"][b].item() < 0
            totals["disagree"] += (not inside[b, t]) and keep[b, t].item() != by_ratio[b, t].item()
            totals["cut"] += ratios[-1] > 1.3
            mass_behavior += p.sum().item()
            mass_policy += q.sum().item()
    logs = {}
    trainer.log(logs)
    assert 0 < totals["masked"] < totals["outside"] < count and totals["disagree"] and totals["cut"]
    expected = {
        "trust_region/outside": totals["outside"] / count,
        "trust_region/masked": totals["masked"] / count,
        "trust_region/masked_positive": totals["positive"] / count,
        "trust_region/masked_negative": totals["negative"] / count,
        "trust_region/direction_disagreement": totals["disagree"] / totals["outside"],
        "trust_region/divergence_mean": sum(divergences) / count,
        "trust_region/divergence_max": max(divergences),
        "trust_region/topk_mass_behavior": mass_behavior / count,
        "trust_region/topk_mass_policy": mass_policy / count,
        "trust_region/unscored": 0.0,
        "importance_ratio/mean": sum(ratios) / count,
        "importance_ratio/max": max(ratios),
        "importance_ratio/truncated": totals["cut"] / count,
    }
    assert {name: logs[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_entropy_metrics_equal_a_count_by_hand(tmp_path):
    """Entropy and its change along each token's own step by autograd on full logits, at the sampling temperature."""
    trainer = make_trainer(tmp_path, divergence_threshold=0.1, importance_ratio_max=1.3, model=dict(seed=0))
    batch, mu = make_batch(trainer.model)
    # All tokens are candidates: nothing of the entropy is estimated
    vocab = trainer.model.config.vocab_size
    ids = torch.arange(vocab).expand(*batch["completion_ids"].shape, vocab)
    sampled = batch["completion_ids"][..., None]
    batch["behavior_topk_ids"] = torch.cat([sampled, ids.masked_fill(ids == sampled, -1)], -1).int()
    batch["behavior_topk_logps"] = torch.cat([mu.gather(-1, sampled), mu], -1)
    trainer_gradients(trainer, batch)
    logs = {}
    trainer.log(logs)

    z = full_logps(trainer.model, batch).detach().double().requires_grad_()
    log_pi = z.log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    (gradient,) = torch.autograd.grad(entropy.sum(), z)
    pi, entropy = log_pi.detach().exp(), entropy.detach()
    step = torch.nn.functional.one_hot(batch["completion_ids"], vocab) - pi
    ratio = (pi / mu.double().exp()).gather(-1, sampled)[..., 0]
    drift = batch["advantages"][:, None] * ratio.clamp(max=1.3) * (gradient * step).sum(-1)
    # The forward KL over the whole vocabulary, and its change (pi_a - mu_a) + sum_j pi_j (mu_j - pi_j)
    mu = mu.double().exp()
    divergence = (mu * (mu.log() - log_pi.detach())).sum(-1)
    change = (pi - mu).gather(-1, sampled)[..., 0] + (pi * (mu - pi)).sum(-1)
    inside = divergence <= 0.1
    keep = inside | (batch["advantages"][:, None] * change <= 0)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    expected = {
        "entropy_masked": entropy[mask & ~keep].mean(),
        "entropy_kept": entropy[mask & ~inside & keep].mean(),
        "entropy_drift": (drift * keep)[mask].mean(),
        "entropy_drift_unmasked": drift[mask].mean(),
    }
    assert {name: logs[f"trust_region/{name}"] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-4
    )
    for name, factor in (("half", 0.5), ("double", 2.0)):
        share = (divergence[mask] > 0.1 * factor).double().mean().item()
        assert logs[f"trust_region/outside_{name}"] == pytest.approx(share)
