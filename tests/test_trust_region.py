"""The mathematics of the mask, against vectors made by autograd elsewhere and against plain code written here."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from tests.helpers.references import batch_of_tokens as batch
from tests.helpers.references import evidence_of
from tests.helpers.shapes import shapes_checked
from trl_pdm.trust_region import (
    DIRECTIONS,
    DIVERGENCES,
    PROXIMITIES,
    SUPPORTS,
    TAIL_ESTIMATORS,
    Evidence,
    TrustRegion,
    exp_ratio,
)


CASES = json.loads((Path(__file__).parent / "data" / "trust_region.json").read_text())["cases"]
GOLDEN = sorted(set(CASES[0]["expected"]) - {"ratio"})  # the divergences of which there are vectors
DEFAULTS = {
    "divergence": "kl",
    "support": "topk",
    "proximity": "divergence",
    "direction": "predictive",
    "tail_estimator": "exact",
    "threshold_low": 0.15,
    "threshold_high": 0.15,
}
# Largest error: the absolute or the relative bound, whichever allows more.
TOLERANCE = {torch.float64: {"abs": 1e-9, "rel": 1e-9}, torch.float32: {"abs": 2e-6, "rel": 1e-5}}
NAN, INF = math.nan, math.inf
INTERPRETATIONS = list(itertools.product(DIVERGENCES, SUPPORTS, PROXIMITIES, DIRECTIONS, TAIL_ESTIMATORS))


def make_inputs(behavior_logits, policy_logits, sampled, top_ids, dtype=torch.float64):
    """One token's inputs, as the rollout would lay them out, with NaN in the slot that repeats the sampled token."""
    ids = [sampled, *top_ids]
    log_mu, log_pi = (torch.tensor(z, dtype=torch.float64).log_softmax(-1) for z in (behavior_logits, policy_logits))
    valid = torch.tensor([True] + [i != sampled for i in top_ids])
    behavior_logps, policy_logps = (torch.where(valid, x[ids], NAN).to(dtype) for x in (log_mu, log_pi))
    return {
        "behavior_logps": behavior_logps,
        "policy_logps": policy_logps,
        "valid": valid,
        "policy_sum_sq": (2 * log_pi).exp().sum().to(dtype),
        "vocab_size": len(behavior_logits),
        "advantages": torch.tensor(1.0, dtype=dtype),
    }


def call(inputs, **changes):
    """`inputs`: the fields of the evidence, and `advantages`; `changes` of them or of the region."""
    values = {**inputs, **DEFAULTS, **changes}
    region = TrustRegion(**{name: values.pop(name) for name in DEFAULTS})
    advantages, entropy = values.pop("advantages"), values.pop("entropy", None)
    return region.assess(Evidence(**values), advantages, entropy)


def assert_sound(result, shape):
    for name in ("divergence", "predicted_change"):
        value = getattr(result, name)
        assert value.shape == shape and value.isfinite().all(), (name, value)
    for name in ("outside", "keep"):
        value = getattr(result, name)
        assert value.shape == shape and value.dtype == torch.bool


# The vectors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_golden_vectors(case, dtype):
    inputs = make_inputs(case["behavior_logits"], case["policy_logits"], case["sampled"], case["top_ids"], dtype)
    everything = [i for i in range(case["vocab_size"]) if i != case["sampled"]]
    complete = make_inputs(case["behavior_logits"], case["policy_logits"], case["sampled"], everything, dtype)
    close = TOLERANCE[dtype]

    for name, expected in case["expected"].items():
        if name == "ratio":
            continue
        for estimator, change in expected["predicted_change"].items():
            result = call(inputs, divergence=name, tail_estimator=estimator)
            assert result.divergence.dtype == dtype
            assert result.divergence.item() == pytest.approx(expected["divergence"], **close)
            assert result.predicted_change.item() == pytest.approx(change, **close)

            # The head is the whole vocabulary: no tail to estimate.
            result = call(complete, divergence=name, tail_estimator=estimator)
            assert result.divergence.item() == pytest.approx(expected["full_vocabulary"]["divergence"], **close)
            change = expected["full_vocabulary"]["predicted_change"]
            assert result.predicted_change.item() == pytest.approx(change, **close)

        result = call(inputs, divergence=name, support="binary")
        assert result.divergence.item() == pytest.approx(expected["binary"]["divergence"], **close)
        assert result.predicted_change.item() == pytest.approx(expected["binary"]["predicted_change"], **close)


@pytest.mark.parametrize("case", CASES)
def test_golden_tail_collision_and_ratio(case):
    inputs = make_inputs(case["behavior_logits"], case["policy_logits"], case["sampled"], case["top_ids"])
    head = (2 * inputs["policy_logps"][inputs["valid"]]).exp().sum()
    inputs["policy_sum_sq"] = head + case["tail_collision"]
    for name in GOLDEN:
        expected = case["expected"][name]["predicted_change"]["exact"]
        assert call(inputs, divergence=name).predicted_change.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    ratio = exp_ratio(evidence_of(inputs).log_ratio)
    assert ratio.item() == pytest.approx(case["expected"]["ratio"], rel=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("estimator", TAIL_ESTIMATORS)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_mask(name, estimator, sign):
    for case in CASES:
        expected = case["expected"][name]
        inputs = make_inputs(case["behavior_logits"], case["policy_logits"], case["sampled"], case["top_ids"])
        inputs["advantages"] = torch.tensor(sign, dtype=torch.float64)
        options = {"divergence": name, "tail_estimator": estimator}
        for threshold in (expected["divergence"] * 0.9, expected["divergence"] * 1.1 + 1e-12):
            outside = expected["divergence"] > threshold
            thresholds = {"threshold_low": threshold, "threshold_high": threshold}
            result = call(inputs, **options, **thresholds)
            assert result.outside.item() == outside
            assert result.keep.item() == (not (outside and sign * expected["predicted_change"][estimator] > 0))
            result = call(inputs, **options, **thresholds, direction="ratio")
            assert result.predicted_change.item() == pytest.approx(expected["predicted_change"][estimator], rel=1e-9)
            assert result.keep.item() == (not (outside and sign * (case["expected"]["ratio"] - 1) > 0))


# Autograd through a full softmax, with no closed form

# A category's term of each divergence, from its definition
TERMS = {
    "kl": lambda mu, pi: mu * (mu / pi).log(),
    "reverse_kl": lambda mu, pi: pi * (pi / mu).log(),
    "tv": lambda mu, pi: (mu - pi).abs() / 2,
}


def divergence_over_categories(name, log_mu, log_pi, head):
    rest = [i for i in range(len(log_mu)) if i not in head]
    total = 0.0
    for category in [[i] for i in head] + ([rest] if rest else []):
        total = total + TERMS[name](log_mu[category].exp().sum(), log_pi[category].exp().sum())
    return total


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_exact_is_the_derivative_of_the_divergence(name, support):
    generator = torch.Generator().manual_seed(0)
    for vocab_size, top_k in [(2, 1), (5, 2), (30, 4), (30, 29), (30, 30)]:
        for scale in (0.3, 2.0, 6.0):
            behavior = scale * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            policy = behavior + torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            policy.requires_grad_()
            sampled = int(torch.randint(vocab_size, (), generator=generator))
            top_ids = behavior.topk(top_k).indices.tolist()
            head = [sampled] if support == "binary" else list(dict.fromkeys([sampled, *top_ids]))

            log_pi = policy.log_softmax(-1)
            expected = divergence_over_categories(name, behavior.log_softmax(-1), log_pi, head)
            (gradient,) = torch.autograd.grad(expected, policy)
            step = torch.nn.functional.one_hot(torch.tensor(sampled), vocab_size) - log_pi.exp()

            inputs = make_inputs(behavior.tolist(), policy.tolist(), sampled, top_ids)
            result = call(inputs, divergence=name, support=support)
            assert result.divergence.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
            change = (gradient * step).sum().item()
            assert result.predicted_change.item() == pytest.approx(change, rel=1e-9, abs=1e-12)


# The entropy


def random_policies(n, vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 4 + 0.5
    behavior = scale * torch.randn(n, vocab_size, generator=generator, dtype=torch.float64)
    policy = behavior + torch.randn(n, vocab_size, generator=generator, dtype=torch.float64)
    sampled = torch.multinomial(behavior.softmax(-1), 1, generator=generator)[:, 0]
    return behavior, policy, sampled


def entropy_change_by_autograd(policy, sampled):
    """<grad_z H, e_a - pi> on full logits, and H."""
    z = policy.clone().requires_grad_()
    log_pi = z.log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    (gradient,) = torch.autograd.grad(entropy.sum(), z)
    step = torch.nn.functional.one_hot(sampled, policy.shape[-1]) - log_pi.detach().exp()
    return (gradient * step).sum(-1), entropy.detach()


@pytest.mark.parametrize("estimator", TAIL_ESTIMATORS)
def test_the_entropys_change_is_its_derivative_along_the_step(estimator):
    behavior, policy, sampled = random_policies(200, 30)
    expected, entropy = entropy_change_by_autograd(policy, sampled)
    for i in range(200):
        inputs = make_inputs(behavior[i].tolist(), policy[i].tolist(), int(sampled[i]), range(30))
        result = call({**inputs, "entropy": entropy[i]}, tail_estimator=estimator)
        assert result.entropy_change.item() == pytest.approx(expected[i].item(), rel=1e-9, abs=1e-12)


def test_the_entropys_change_over_a_top_k_has_the_right_sign_and_size():
    behavior, policy, sampled = random_policies(200, 400, seed=1)
    expected, entropy = entropy_change_by_autograd(policy, sampled)
    found, tails = [], []
    for i in range(200):
        top_ids = behavior[i].topk(20).indices.tolist()
        inputs = make_inputs(behavior[i].tolist(), policy[i].tolist(), int(sampled[i]), top_ids)
        found.append(call({**inputs, "entropy": entropy[i]}).entropy_change)
        tails.append(1 - policy[i].softmax(-1)[list({int(sampled[i]), *top_ids})].sum())
    found = torch.stack(found)
    assert torch.stack(tails).median() > 0.2, "a tail that could go wrong"
    clear = expected.abs() > 0.03
    assert clear.sum() > 100 and torch.equal(found[clear].sign(), expected[clear].sign())
    error = (found - expected).abs()  # what the tail costs, whose probabilities are known by their mean alone
    assert error.max() < 0.03 and error.median() < 0.02 * expected.abs().median()


def test_without_an_entropy_nothing_is_said_of_it_and_a_wrong_shape_is_refused():
    assert call(batch()).entropy_change is None
    for entropy in (torch.ones(3, 1), torch.ones(3, 4, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"entropy is torch.*\(3, 4\)"):
            call(batch(), entropy=entropy)
    inputs = batch()
    inputs["behavior_logps"][0, 0, 0] = NAN
    assert call(inputs, entropy=torch.ones(3, 4)).entropy_change[0, 0] == 0


# Properties


@st.composite
def tokens(draw, bound=8.0):
    """Logits of both policies, the sampled token and the behaviour policy's top K."""
    vocab_size = draw(st.integers(2, 9))
    logits = st.lists(st.floats(-bound, bound), min_size=vocab_size, max_size=vocab_size)
    behavior, policy = draw(logits), draw(logits)
    top_ids = sorted(range(vocab_size), key=lambda i: -behavior[i])[: draw(st.integers(1, vocab_size))]
    return behavior, policy, draw(st.integers(0, vocab_size - 1)), top_ids


@given(tokens(), st.sampled_from(DIVERGENCES), st.sampled_from(TAIL_ESTIMATORS), st.sampled_from([1.0, -1.0]))
def test_binary_support_predicts_what_the_ratio_says(token, name, estimator, advantage):
    inputs = make_inputs(*token)
    inputs["advantages"] = torch.tensor(advantage, dtype=torch.float64)
    log_ratio = (inputs["policy_logps"] - inputs["behavior_logps"])[0].item()
    assume(abs(log_ratio) > 1e-6)
    options = {"divergence": name, "support": "binary", "tail_estimator": estimator}
    by_prediction = call(inputs, **options, threshold_low=0.0, threshold_high=0.0)
    by_ratio = call(inputs, **options, threshold_low=0.0, threshold_high=0.0, direction="ratio")
    assert by_prediction.predicted_change.sign().item() == math.copysign(1, log_ratio)
    assert by_prediction.keep.item() == by_ratio.keep.item() == (advantage * log_ratio < 0)


@pytest.mark.parametrize("name", GOLDEN)
def test_binary_support_needs_no_sum_of_squares(name):
    for case in CASES:
        inputs = make_inputs(case["behavior_logits"], case["policy_logits"], case["sampled"], case["top_ids"])
        inputs["policy_sum_sq"] = None
        result = call(inputs, divergence=name, support="binary")
        expected = case["expected"][name]["binary"]
        assert result.divergence.item() == pytest.approx(expected["divergence"], rel=1e-9, abs=1e-9)
        assert result.predicted_change.sign().item() == math.copysign(1, expected["predicted_change"])


@given(tokens(), st.sampled_from(INTERPRETATIONS), st.sampled_from([1.0, -1.0]))
def test_every_token_inside_the_region_is_kept(token, choices, advantage):
    name, support, _, direction, estimator = choices
    inputs = make_inputs(*token)
    inputs["advantages"] = torch.tensor(advantage, dtype=torch.float64)
    options = {"divergence": name, "support": support, "direction": direction, "tail_estimator": estimator}
    divergence = max(call(inputs, **options).divergence.item(), 0.0)
    result = call(inputs, **options, threshold_low=divergence, threshold_high=divergence)
    assert not result.outside.item() and result.keep.item()


@given(tokens(), st.sampled_from(DIVERGENCES))
def test_exact_lies_between_uniform_and_aggregated(token, name):
    inputs = make_inputs(*token)
    low, exact, high = (
        call(inputs, divergence=name, tail_estimator=estimator).predicted_change.item()
        for estimator in ("uniform", "exact", "aggregated")
    )
    assert min(low, high) - 1e-12 <= exact <= max(low, high) + 1e-12


@given(tokens(), st.sampled_from(DIVERGENCES), st.sampled_from([0.0, 1e6]))
def test_a_wrong_sum_of_squares_is_held_to_what_a_tail_can_be(token, name, sum_sq):
    inputs = make_inputs(*token)
    bound = call(inputs, divergence=name, tail_estimator="aggregated" if sum_sq else "uniform").predicted_change
    inputs["policy_sum_sq"] = torch.tensor(sum_sq, dtype=torch.float64)
    assert call(inputs, divergence=name).predicted_change.item() == pytest.approx(bound.item(), rel=1e-9, abs=1e-15)


@given(tokens(), st.sampled_from(DIVERGENCES))
def test_with_the_whole_vocabulary_the_estimators_agree(token, name):
    behavior, policy, sampled, _ = token
    inputs = make_inputs(behavior, policy, sampled, range(len(behavior)))
    log_mu, log_pi = (torch.tensor(z, dtype=torch.float64).log_softmax(-1) for z in (behavior, policy))
    expected = divergence_over_categories(name, log_mu, log_pi, range(len(behavior)))
    results = [call(inputs, divergence=name, tail_estimator=estimator) for estimator in TAIL_ESTIMATORS]
    for result in results:
        assert result.divergence.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
        assert result.predicted_change.item() == pytest.approx(results[0].predicted_change.item(), abs=1e-15)
    # Nothing is left for a rest whose masses are rounding: K = V, V + 1 tokens in the head, or a count beyond that.
    for vocab_size in (1, len(behavior) - 1):
        result = call({**inputs, "vocab_size": vocab_size}, divergence=name)
        assert result.divergence.item() == results[0].divergence.item()


def test_a_head_of_the_whole_vocabulary_has_no_rest_even_if_its_masses_fall_short():
    behavior, policy = torch.tensor([0.5, 0.48]), torch.tensor([0.3, 0.69])
    inputs = {
        "behavior_logps": behavior.log(),
        "policy_logps": policy.log(),
        "valid": torch.tensor([True, True]),
        "policy_sum_sq": torch.tensor(0.6),
        "vocab_size": 2,
        "advantages": torch.tensor(1.0),
    }
    for name, expected in {
        "kl": 0.5 * math.log(0.5 / 0.3) + 0.48 * math.log(0.48 / 0.69),
        "reverse_kl": 0.3 * math.log(0.3 / 0.5) + 0.69 * math.log(0.69 / 0.48),
        "tv": (0.2 + 0.21) / 2,
    }.items():
        results = [call(inputs, divergence=name, tail_estimator=estimator) for estimator in TAIL_ESTIMATORS]
        assert all(result.divergence.item() == pytest.approx(expected, abs=1e-6) for result in results)
        assert len({result.predicted_change.item() for result in results}) == 1


@pytest.mark.parametrize("estimator", ["uniform", "aggregated"])
def test_only_the_exact_estimator_needs_the_sum_of_squares(estimator):
    for case in CASES:
        inputs = make_inputs(case["behavior_logits"], case["policy_logits"], case["sampled"], case["top_ids"])
        inputs["policy_sum_sq"] = None
        result = call(inputs, tail_estimator=estimator)
        expected = case["expected"]["kl"]["predicted_change"][estimator]
        assert result.predicted_change.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def reference_keep(result, log_ratio, advantage, choices, low, high):
    _, _, proximity, direction, _ = choices
    if proximity == "divergence":
        outside = result.divergence.item() > (low if advantage < 0 else high)
    else:
        outside = log_ratio < math.log(1 - low) or log_ratio > math.log(1 + high)
    if direction == "none":
        return not outside or advantage == 0
    signal = {"predictive": result.predicted_change.item(), "ratio": log_ratio}[direction]
    return not (outside and advantage * signal > 0)


@given(tokens(), st.sampled_from(INTERPRETATIONS), st.sampled_from([0.3, 0.0, -2.0]))
@settings(max_examples=200)
def test_every_combination_of_choices(token, choices, advantage):
    name, support, proximity, direction, estimator = choices
    inputs = make_inputs(*token)
    inputs["advantages"] = torch.tensor(advantage, dtype=torch.float64)
    log_ratio = (inputs["policy_logps"] - inputs["behavior_logps"])[0].item()
    options = {"divergence": name, "support": support, "proximity": proximity, "direction": direction}
    result = call(inputs, **options, tail_estimator=estimator, threshold_low=0.1, threshold_high=0.3)
    assert_sound(result, torch.Size())
    assert result.keep.item() == reference_keep(result, log_ratio, advantage, choices, 0.1, 0.3)
    if advantage == 0:
        assert result.keep.item()


# Numbers at the edge


logps = st.one_of(st.floats(-100, 0), st.sampled_from([-100.0, -1e-7, -1e-30, -0.0, 0.0, 1e-3, -INF]))


@pytest.mark.slow
@given(
    st.lists(st.tuples(logps, logps, st.booleans()), min_size=1, max_size=5),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(1, 8),
)
@settings(max_examples=200)
def test_nothing_is_nan_or_infinite(slots, sum_sq, dtype, vocab_size):
    inputs = {
        "behavior_logps": torch.tensor([s[0] for s in slots], dtype=dtype),
        "policy_logps": torch.tensor([s[1] for s in slots], dtype=dtype),
        "valid": torch.tensor([s[2] for s in slots]),
        "policy_sum_sq": torch.tensor(sum_sq, dtype=dtype),
        "vocab_size": vocab_size,
        "advantages": torch.tensor(1.0),
    }
    for name, support, estimator in itertools.product(DIVERGENCES, SUPPORTS, TAIL_ESTIMATORS):
        result = call(inputs, divergence=name, support=support, tail_estimator=estimator)
        assert_sound(result, torch.Size())
        assert result.divergence.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_behaviour_probability_of_zero():
    # Three tokens of five survive top-p sampling; the engine pads its top K with tokens it cannot sample.
    mu, pi = [0.5, 0.3, 0.2, 0.0, 0.0], [0.3, 0.3, 0.3, 0.06, 0.04]
    inputs = {
        "behavior_logps": torch.tensor(mu[:4]).log(),
        "policy_logps": torch.tensor(pi[:4]).log(),
        "valid": torch.ones(4, dtype=torch.bool),
        "policy_sum_sq": torch.tensor(sum(x * x for x in pi)),
        "vocab_size": 5,
        "advantages": torch.tensor(1.0),
    }
    expected = 0.5 * math.log(0.5 / 0.3) + 0.2 * math.log(0.2 / 0.3)
    assert call(inputs, divergence="kl").divergence.item() == pytest.approx(expected, abs=1e-6)
    # d of the forward KL is (pi_a - mu_a) + sum_j pi_j (mu_j - pi_j).
    change = (pi[0] - mu[0]) + sum(p * (m - p) for m, p in zip(mu, pi, strict=True))
    assert call(inputs, divergence="kl").predicted_change.item() == pytest.approx(change, abs=1e-6)
    assert call(inputs, divergence="tv").divergence.item() == pytest.approx(0.2, abs=1e-6)
    # Infinite in truth: capped at 100 nats for the listed token, at the log of a rest mass of 1e-12 for the other.
    result = call(inputs, divergence="reverse_kl")
    capped = 0.3 * math.log(0.3 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.06 * (math.log(0.06) + 100)
    assert capped < result.divergence.item() < capped + 0.04 * (math.log(0.04) + 28)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_of_far_policies_keeps_its_size(name):
    inputs = {
        "behavior_logps": torch.tensor([math.log(0.5), math.log(0.5)]),
        "policy_logps": torch.tensor([-100.0, 0.0]),
        "valid": torch.tensor([True, True]),
        "policy_sum_sq": torch.tensor(1.0),
        "vocab_size": 1000,
        "advantages": torch.tensor(-1.0),
    }
    result = call(inputs, divergence=name)
    expected = {"kl": 0.5 * (math.log(0.5) + 100) + 0.5 * math.log(0.5), "tv": 0.5, "reverse_kl": math.log(2)}[name]
    assert result.divergence.item() == pytest.approx(expected, rel=1e-5)
    assert result.outside.item()
    if name == "kl":  # the others' derivative vanishes with the token
        assert result.predicted_change.item() == pytest.approx(-0.5 - 0.5, rel=1e-5) and not result.keep.item()


def test_head_masses_above_one():
    masses = torch.tensor([0.6, 0.401])
    inputs = {
        "behavior_logps": masses.log(),
        "policy_logps": torch.tensor([0.402, 0.599]).log(),
        "valid": torch.tensor([True, True]),
        "policy_sum_sq": torch.tensor(0.402**2 + 0.599**2),
        "vocab_size": 1000,
        "advantages": torch.tensor(-1.0),
    }
    for name, expected in {
        "kl": 0.6 * math.log(0.6 / 0.402) + 0.401 * math.log(0.401 / 0.599),
        "reverse_kl": 0.402 * math.log(0.402 / 0.6) + 0.599 * math.log(0.599 / 0.401),
        "tv": (0.198 + 0.198) / 2,
    }.items():
        for estimator in TAIL_ESTIMATORS:
            result = call(inputs, divergence=name, tail_estimator=estimator, threshold_low=0.05)
            assert_sound(result, torch.Size())
            assert result.divergence.item() == pytest.approx(expected, abs=1e-6)
            assert result.predicted_change.item() < 0 and not result.keep.item()


def test_a_small_advantage_times_a_small_change_does_not_underflow():
    inputs = {
        "behavior_logps": torch.tensor([-60.0]),
        "policy_logps": torch.tensor([-50.0]),
        "valid": torch.tensor([True]),
        "policy_sum_sq": torch.tensor(0.5),
        "vocab_size": 100,
        "advantages": torch.tensor(1e-30),
    }
    assert not call(inputs, proximity="ratio").keep.item()


# Positions without evidence, slots without meaning


def spoiled(index, which, value):
    """A batch of two tokens outside the region that would be masked; the first one has one entry replaced."""
    inputs = {
        "behavior_logps": torch.tensor([[0.2, 0.5, 0.1]] * 2).log(),
        "policy_logps": torch.tensor([[0.7, 0.1, 0.1]] * 2).log(),
        "valid": torch.ones(2, 3, dtype=torch.bool),
        "policy_sum_sq": torch.full((2,), 0.52),
        "vocab_size": 10,
        "advantages": torch.ones(2),
    }
    inputs[which][index] = value
    return inputs


@pytest.mark.parametrize(
    ("which", "index", "value"),
    [("behavior_logps", (0, 0), -INF), ("policy_sum_sq", (0,), NAN), ("valid", (0, 0), False), ("valid", (0,), False)]
    + [(w, (0, i), v) for w in ("behavior_logps", "policy_logps") for i in (0, 2) for v in (NAN, INF)],
)
@pytest.mark.parametrize("proximity", PROXIMITIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_evidence_keeps_the_token(which, index, value, proximity, direction, name):
    options = {"divergence": name, "proximity": proximity, "direction": direction}
    result = call(spoiled(index, which, value), **options)
    assert_sound(result, (2,))
    assert result.divergence[0] == 0 and result.predicted_change[0] == 0
    assert result.outside.tolist() == [False, True]
    assert result.keep.tolist() == [True, False]


@pytest.mark.parametrize("value", [NAN, INF])
def test_the_binary_support_and_other_estimators_ignore_what_they_do_not_read(value):
    for which in ("behavior_logps", "policy_logps"):
        assert call(spoiled((0, 1), which, value), support="binary").keep.tolist() == [False, False]
    for estimator in ("uniform", "aggregated"):
        result = call(spoiled((0,), "policy_sum_sq", NAN), tail_estimator=estimator)
        assert result.keep.tolist() == [False, False]


@given(
    tokens(),
    st.lists(st.sampled_from([0.0, -1.0, 5.0, 1e30, NAN, INF, -INF]), min_size=2, max_size=2),
    st.sampled_from(INTERPRETATIONS),
)
def test_invalid_slots_have_no_influence(token, values, choices):
    options = dict(zip(("divergence", "support", "proximity", "direction", "tail_estimator"), choices, strict=True))
    inputs = make_inputs(*token)
    plain = call(
        {**inputs, **{k: inputs[k][inputs["valid"]] for k in ("behavior_logps", "policy_logps", "valid")}}, **options
    )
    padding = torch.tensor([values[0]] * 2, dtype=torch.float64), torch.tensor([values[1]] * 2, dtype=torch.float64)
    padded = dict(inputs)
    for name, value in zip(("behavior_logps", "policy_logps"), padding, strict=True):
        padded[name] = torch.cat([torch.where(inputs["valid"], inputs[name], value[0]), value])
    padded["valid"] = torch.cat([inputs["valid"], torch.tensor([False, False])])
    result = call(padded, **options)
    # Sums over more slots round otherwise: 1e-16 in a rest mass, which its logarithm multiplies
    assert result.divergence.item() == pytest.approx(plain.divergence.item(), rel=1e-9, abs=1e-12)
    assert result.predicted_change.item() == pytest.approx(plain.predicted_change.item(), rel=1e-9, abs=1e-12)
    assert result.outside.item() == plain.outside.item()
    if abs(plain.predicted_change.item()) > 1e-12:
        assert result.keep.item() == plain.keep.item()


# Thresholds


@pytest.mark.parametrize(("low", "high", "outside"), [(0.1, 10.0, [True, False]), (10.0, 0.1, [False, True])])
def test_the_threshold_follows_the_sign_of_the_advantage(low, high, outside):
    # D = 0.2 log(0.2/0.7) + 0.5 log(0.5/0.1) + 0.2 log(0.2/0.1), about 0.69 nats.
    inputs = spoiled((0, 0), "valid", True)
    inputs["advantages"] = torch.tensor([-1.0, 1.0])
    result = call(inputs, threshold_low=low, threshold_high=high)
    assert result.divergence.tolist() == pytest.approx([0.693] * 2, abs=1e-3)
    assert result.outside.tolist() == outside
    assert result.keep.tolist() == [True, not outside[1]]  # d > 0: only the positive advantage moves outwards


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 3.0), (INF, INF)])
def test_ratio_tests_are_the_clip_of_grpo(low, high):
    ratio, advantages = torch.meshgrid(torch.linspace(0.005, 5.0, 333), torch.tensor([-1.5, 0.5]), indexing="ij")
    ratio = ratio.clone().requires_grad_()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)

    behavior_logps = torch.full((*ratio.shape, 1), math.log(0.1))
    evidence = Evidence(
        behavior_logps=behavior_logps,
        policy_logps=behavior_logps + ratio.detach().log()[..., None],
        valid=torch.ones_like(behavior_logps, dtype=torch.bool),
        vocab_size=100,
    )
    region = TrustRegion(
        support="binary", proximity="ratio", direction="ratio", threshold_low=low, threshold_high=high
    )
    result = region.assess(evidence, advantages)
    assert torch.equal(result.keep, gradient != 0)


# What a region reads, and masks of every direction


@pytest.mark.parametrize("proximity", PROXIMITIES)
def test_without_a_direction_every_token_outside_is_masked(proximity):
    inputs = batch(shape=(6, 50))
    inputs["advantages"] = inputs["advantages"].expand(6, 50).clone()
    inputs["advantages"][:, ::7] = 0
    result = call(inputs, proximity=proximity, direction="none")
    mu, pi = (inputs[name][..., 0].exp() for name in ("behavior_logps", "policy_logps"))
    for i, j in itertools.product(range(6), range(50)):
        if proximity == "ratio":
            outside = not 0.85 <= (pi[i, j] / mu[i, j]).item() <= 1.15
            assert result.outside[i, j].item() == outside
        expected = not result.outside[i, j].item() or inputs["advantages"][i, j].item() == 0
        assert result.keep[i, j].item() == expected
    assert 0 < result.keep.sum() < 300
    directed = call(inputs, proximity=proximity, direction="ratio")
    assert (directed.keep | ~result.keep).all() and not torch.equal(directed.keep, result.keep)


@pytest.mark.parametrize(
    ("choices", "unread", "candidates", "sum_sq"),
    [
        ({}, set(), True, True),
        ({"tail_estimator": "uniform"}, set(), True, False),
        ({"direction": "ratio"}, {"tail_estimator"}, True, False),
        ({"direction": "none"}, {"tail_estimator"}, True, False),
        ({"support": "binary"}, {"tail_estimator"}, False, False),
        ({"proximity": "ratio"}, set(), True, True),
        ({"proximity": "ratio", "direction": "ratio"}, {"tail_estimator", "divergence", "support"}, False, False),
        ({"proximity": "ratio", "direction": "none"}, {"tail_estimator", "divergence", "support"}, False, False),
    ],
)
def test_a_region_names_what_its_mask_reads_and_needs(choices, unread, candidates, sum_sq):
    region = TrustRegion(**{**DEFAULTS, **choices})
    assert set(DEFAULTS) - region.reads == unread
    assert (region.needs_candidates, region.needs_sum_sq) == (candidates, sum_sq)
    # What is not read changes no mask, and what is not needed may be missing
    inputs = batch(shape=(6, 50))
    keep = region.assess(evidence_of(inputs), inputs["advantages"]).keep
    others = {"divergence": DIVERGENCES, "support": SUPPORTS, "tail_estimator": TAIL_ESTIMATORS}
    for name, value in ((field, value) for field in unread for value in others[field]):
        changed = TrustRegion(**{**DEFAULTS, **choices, name: value})
        assert torch.equal(changed.assess(evidence_of(inputs), inputs["advantages"]).keep, keep)
    if not sum_sq:
        evidence = evidence_of({**inputs, "policy_sum_sq": None})
        assert torch.equal(region.assess(evidence, inputs["advantages"]).keep, keep)
    if not candidates:
        evidence = evidence_of(inputs).sampled
        assert torch.equal(region.assess(evidence, inputs["advantages"]).keep, keep)


def test_a_scaled_region_has_scaled_thresholds():
    inputs = batch(shape=(6, 50))
    for factor in (0.5, 2.0):
        region = TrustRegion(**{**DEFAULTS, "threshold_low": 0.3, "threshold_high": 0.6}).scaled(factor)
        result = region.assess(evidence_of(inputs), inputs["advantages"])
        limit = torch.where(inputs["advantages"] < 0, 0.3, 0.6) * factor
        assert torch.equal(result.outside, result.divergence > limit)


# Shapes, dtypes, devices, errors


def test_a_batch_is_its_tokens():
    inputs = batch()
    for choices in INTERPRETATIONS:
        options = dict(
            zip(("divergence", "support", "proximity", "direction", "tail_estimator"), choices, strict=True)
        )
        result = call(inputs, **options)
        assert_sound(result, (3, 4))
        for i, j in ((0, 0), (1, 3), (2, 2)):
            token = {k: v[i, j] for k, v in inputs.items() if k not in ("vocab_size", "advantages")}
            alone = call({**inputs, **token, "advantages": inputs["advantages"][i, 0]}, **options)
            assert result.divergence[i, j].item() == pytest.approx(alone.divergence.item(), abs=1e-6)
            assert result.predicted_change[i, j].item() == pytest.approx(alone.predicted_change.item(), abs=1e-6)
            assert result.keep[i, j] == alone.keep


def test_nothing_is_differentiated_or_changed():
    inputs = batch()
    before = {k: v.clone() for k, v in inputs.items() if k != "vocab_size"}
    inputs["policy_logps"] = inputs["policy_logps"].requires_grad_()
    result = call(inputs)
    assert not result.divergence.requires_grad and not result.predicted_change.requires_grad
    assert all(torch.equal(inputs[k], v) for k, v in before.items())


def test_no_value_is_read_on_the_host():
    # A meta tensor has no values: whatever would wait for an accelerator (item(), bool(), boolean indexing) raises.
    inputs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch().items()}
    for choices in INTERPRETATIONS:
        options = dict(
            zip(("divergence", "support", "proximity", "direction", "tail_estimator"), choices, strict=True)
        )
        result = call(inputs, **options)
        assert result.keep.shape == (3, 4) and result.keep.is_meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "js"}, "divergence is 'js'.*'kl', 'tv', 'reverse_kl'"),
        ({"support": "full"}, "support is 'full'.*'topk', 'binary'"),
        ({"proximity": "kl"}, "proximity is 'kl'.*'divergence', 'ratio'"),
        ({"direction": "up"}, "direction is 'up'.*'predictive', 'ratio', 'none'"),
        ({"tail_estimator": "none"}, "tail_estimator is 'none'.*'exact', 'uniform', 'aggregated'"),
        ({"policy_sum_sq": None}, 'policy_sum_sq is None.*tail_estimator="uniform"'),
        ({"policy_sum_sq": torch.ones(3, 1)}, r"policy_sum_sq is torch.float32 of shape \(3, 1\).*\(3, 4\)"),
        ({"policy_sum_sq": torch.ones(3, 4, dtype=torch.long)}, "policy_sum_sq is torch.int64"),
        ({"behavior_logps": torch.tensor(0.0)}, r"behavior_logps is .*\(\).*\(\.\.\., K\+1\)"),
        ({"behavior_logps": torch.ones(3, 4, 0)}, r"behavior_logps is .*\(3, 4, 0\)"),
        ({"behavior_logps": torch.ones(3, 4, 6, dtype=torch.long)}, "behavior_logps is torch.int64"),
        ({"policy_logps": torch.ones(3, 4, 5)}, r"policy_logps is .*\(3, 4, 5\).*\(3, 4, 6\)"),
        ({"policy_logps": torch.ones(3, 4, 6, dtype=torch.long)}, "policy_logps is torch.int64"),
        ({"valid": torch.ones(3, 4, dtype=torch.bool)}, r"valid is .*\(3, 4\).*\(3, 4, 6\)"),
        ({"valid": torch.ones(3, 4, 6)}, "valid is torch.float32.*booleans"),
        ({"advantages": torch.ones(3)}, r"advantages is .*\(3,\).*\(3, 4\)"),
        ({"advantages": torch.ones(1, 3, 4)}, r"advantages is .*\(1, 3, 4\)"),
        ({"advantages": torch.ones(3, 1, dtype=torch.long)}, "advantages is torch.int64"),
        ({"vocab_size": 0}, "vocab_size is 0.*positive"),
        ({"vocab_size": 40.0}, "vocab_size is 40.0.*integer"),
        ({"threshold_low": -0.1}, "threshold_low is -0.1.*not negative"),
        ({"threshold_high": NAN}, "threshold_high is nan"),
    ],
)
def test_errors_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        call(batch(), **changes)


def test_shapes_are_those_of_the_signatures():
    with shapes_checked("trl_pdm.trust_region") as checked:
        inputs = batch()
        evidence = checked.Evidence(**{name: value for name, value in inputs.items() if name != "advantages"})
        region = checked.TrustRegion(**DEFAULTS)
        region.assess(evidence, inputs["advantages"], torch.ones(3, 4))
        checked.replay_support(evidence), checked.ratio_base(evidence, 2.0)
        checked.exp_ratio(evidence.log_ratio), evidence.support_masses
        with pytest.raises(TypeCheckError):
            region.is_outside(torch.ones(3, 4), torch.ones(3, 5), torch.ones(3, 1))
