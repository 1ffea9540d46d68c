"""Which tokens may update the policy: the mathematics of predictive divergence masks, in torch alone.

A mask has two tests. *Proximity*: is the training policy outside the trust region around the behaviour policy?
*Direction*: would the update of this token move it further out? A token is dropped only where both hold.

Notation, in this file only. `mu` is the behaviour policy (it sampled the tokens), `pi = softmax(z)` the training
policy, `a` the sampled token, `A` its advantage, `r = pi_a / mu_a` its importance ratio. The vocabulary is split into
categories `c`: the support's tokens, each alone (the *head*), and one more for everything else (the *rest*). With
`h_c = dD/dpi_c` and `hbar = sum_c pi_c h_c`, the policy-gradient step of the token changes the divergence `D(mu, pi)`
over these categories, to first order, by `A * r * d`:

    d = <grad_z D, e_a - pi> = pi_a (h_a - hbar) - sum_c S_c (h_c - hbar),    S_c = sum of pi_j^2 over the tokens of c

All of it is known from the head's probabilities, except `S_rest`, which is what a tail estimator supplies.

Sources: the top-K and binary divergences are DPPO's (arXiv:2602.04879, Eqs. 12-16); the predictive direction and the
"uniform" and "aggregated" estimators are PDM's (arXiv:2607.10848); the "exact" estimator is this project's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


LOGP_FLOOR = -100.0  # nats; keeps every product and difference finite, in float32 too, where mu or pi is 0
MAX_LOG_RATIO = 80.0  # nats; exp() of it, summed over a batch, is still finite in float32
MIN_REST_MASS = 1e-12
SURVIVING_MASS_TOLERANCE = 1e-4  # the sum of K float32 probabilities is far closer to 1 than a tail worth its name

# (mu, pi, log(pi/mu)) -> the terms of D(mu, pi), and pi * h. The product stays bounded where h itself overflows. h is
# needed up to a constant only, because d sees h - hbar: the constants here make hbar 0 (kl) and D (reverse_kl).
_DIVERGENCES = {
    "kl": lambda mu, pi, log_ratio: (-mu * log_ratio, pi - mu),
    "tv": lambda mu, pi, log_ratio: ((pi - mu).abs() / 2, pi * log_ratio.sign() / 2),
    "reverse_kl": lambda mu, pi, log_ratio: (pi * log_ratio, pi * log_ratio),
}
# The slots that make up the head.
_SUPPORTS = {"topk": slice(None), "binary": slice(1)}
# (pi_rest, number of tail tokens, sum of squares minus the head's) -> S_rest.
_TAIL_ESTIMATORS = {
    "exact": lambda pi_rest, n_tail, tail_sum_sq: tail_sum_sq,
    "uniform": lambda pi_rest, n_tail, tail_sum_sq: pi_rest.square() / n_tail,
    "aggregated": lambda pi_rest, n_tail, tail_sum_sq: pi_rest.square(),
}
# (D, r, A, threshold_low, threshold_high) -> outside the trust region.
_PROXIMITIES = {
    "divergence": lambda div, ratio, adv, low, high: torch.where(adv < 0, div > low, div > high),
    "ratio": lambda div, ratio, adv, low, high: (ratio < 1 - low) | (ratio > 1 + high),
}
# (d, log r) -> a number with the sign of the move that a positive advantage makes: outwards if positive.
_DIRECTIONS = {"predictive": lambda change, log_ratio: change, "ratio": lambda change, log_ratio: log_ratio}

DIVERGENCES = tuple(_DIVERGENCES)
SUPPORTS = tuple(_SUPPORTS)
TAIL_ESTIMATORS = tuple(_TAIL_ESTIMATORS)
PROXIMITIES = tuple(_PROXIMITIES)
DIRECTIONS = tuple(_DIRECTIONS)


@dataclass(frozen=True, eq=False)
class TokenAssessment:
    """
    What the trust region says about each token.

    Args:
        divergence (`Tensor`, float, `"..."`):
            `D(mu, pi)` over the support's categories, in nats (`"kl"`, `"reverse_kl"`) or as half the L1 distance
            (`"tv"`).
        predicted_change (`Tensor`, float, `"..."`):
            `d`: the directional derivative of `divergence` along `e_a - pi` in the logits, whatever `direction` is.
        outside (`Tensor`, bool, `"..."`):
            The proximity test's answer: the policy is outside the trust region.
        keep (`Tensor`, bool, `"..."`):
            The mask: `False` where the policy is outside and the token's update would move it further out.
    """

    divergence: Tensor
    predicted_change: Tensor
    outside: Tensor
    keep: Tensor


@torch.no_grad()
def assess(
    behavior_logps: Tensor,
    policy_logps: Tensor,
    valid: Tensor,
    policy_sum_sq: Tensor | None,
    vocab_size: int,
    advantages: Tensor,
    *,
    divergence: str,
    support: str,
    proximity: str,
    direction: str,
    tail_estimator: str,
    threshold_low: float,
    threshold_high: float,
) -> TokenAssessment:
    """
    Decide, for every token, whether it may update the policy.

    Pure, without gradient and without host synchronisation. It computes in float32, or float64 if any log-probability
    comes in float64.

    Some positions hold no evidence: slot 0 is not valid (padding), a valid slot of the support is NaN or +inf, the
    sampled token's behaviour log-probability is -inf, or `policy_sum_sq` is NaN where it is used. There `divergence`
    and `predicted_change` are 0, the ratio counts as 1, and the token is kept.

    Log-probabilities under -100 (a probability of 4e-44), -inf included, count as -100. So `mu_i = 0` adds nothing to
    `"kl"`, and to `"reverse_kl"`, where it would be infinite, at most 100 nats times `pi_i`.

    Args:
        behavior_logps (`Tensor`, float, `"... K+1"`):
            Log-probabilities, in nats, under the behaviour policy: slot 0 is the sampled token, the others the
            behaviour policy's top K.
        policy_logps (`Tensor`, float, `"... K+1"`):
            Log-probabilities of the same tokens under the training policy.
        valid (`Tensor`, bool, `"... K+1"`):
            The slots that count. `False` for padding and for the top-K slot that repeats the sampled token, so that
            the valid slots are distinct tokens. Values in the other slots have no influence.
        policy_sum_sq (`Tensor`, float, `"..."`, or `None`):
            Sum over the whole vocabulary of the squared training probabilities. Read by `tail_estimator="exact"` only.
            With `support="binary"` it may be `None`: the sign of `predicted_change` does not depend on it there, and
            its size is then that of `"aggregated"`.
        vocab_size (`int`):
            Number of tokens of the vocabulary. Where the head holds all of them, there is no rest.
        advantages (`Tensor`, float, broadcastable to `"..."`):
            Advantages. Tokens with `A = 0` are kept.
        divergence (`str`):
            `"kl"`, KL(mu, pi); `"tv"`, total variation; or `"reverse_kl"`, KL(pi, mu).
        support (`str`):
            `"topk"`: every valid slot is a category. `"binary"`: the sampled token against everything else, where the
            predictive direction is the ratio's.
        proximity (`str`):
            `"divergence"`: outside where `D` is above `threshold_low` (`A < 0`) or `threshold_high` (otherwise).
            `"ratio"`: outside where `r < 1 - threshold_low` or `r > 1 + threshold_high`, as in GRPO.
        direction (`str`):
            `"predictive"`: outwards where `A * d > 0` (PDM). `"ratio"`: where `A * (r - 1) > 0` (DPPO, GRPO).
        tail_estimator (`str`):
            The sum of squared training probabilities of the `n` tail tokens: `"exact"`, from `policy_sum_sq`;
            `"uniform"`, `pi_rest^2 / n`, the smallest it can be; or `"aggregated"`, `pi_rest^2`, the largest.
        threshold_low (`float`):
            Threshold for `A < 0`: on the divergence, or on the ratio (GRPO's `epsilon`).
        threshold_high (`float`):
            Threshold for `A > 0`: on the divergence, or on the ratio (GRPO's `epsilon_high`).

    Returns:
        [`TokenAssessment`]: with tensors of shape `"..."`.

    Raises:
        ValueError:
            If a choice is unknown, a shape or dtype does not fit, `vocab_size` is not a positive integer, a threshold
            is negative or NaN, or `policy_sum_sq` is missing where it is needed.
    """
    _check_choice("divergence", divergence, DIVERGENCES)
    _check_choice("support", support, SUPPORTS)
    _check_choice("proximity", proximity, PROXIMITIES)
    _check_choice("direction", direction, DIRECTIONS)
    _check_choice("tail_estimator", tail_estimator, TAIL_ESTIMATORS)
    _check_tensors(behavior_logps, policy_logps, valid, advantages)
    shape = valid.shape[:-1]
    if policy_sum_sq is None:
        if tail_estimator == "exact" and support == "topk":
            raise ValueError(
                'policy_sum_sq is None, but tail_estimator="exact" reads it on support="topk". Pass the sum of squared '
                'training probabilities, or choose tail_estimator="uniform".'
            )
    elif policy_sum_sq.shape != shape or not policy_sum_sq.is_floating_point():
        raise ValueError(f"policy_sum_sq is {_describe(policy_sum_sq)}. Pass floats of shape {tuple(shape)}.")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size!r}. Pass the vocabulary's number of tokens, a positive integer.")
    for name, threshold in (("threshold_low", threshold_low), ("threshold_high", threshold_high)):
        if not threshold >= 0:  # not "<", which lets NaN pass
            raise ValueError(f"{name} is {threshold!r}. Pass a number that is not negative.")

    slots = _SUPPORTS[support]
    head = valid[..., slots]
    sum_sq = policy_sum_sq if tail_estimator == "exact" else None
    evidence = _has_evidence(behavior_logps[..., slots], policy_logps[..., slots], head)
    if sum_sq is not None:
        evidence = evidence & ~sum_sq.isnan()
    head = head & evidence[..., None]
    # With no evidence the head is empty: both policies are all rest, so D = d = log r = 0 follows.
    log_mu, log_pi = _clean(behavior_logps[..., slots], policy_logps[..., slots], head)

    mu, pi = log_mu.exp(), log_pi.exp()
    n_tail = vocab_size - head.sum(-1)
    # Head masses of bf16 engines can sum to more than 1. With no tail both rests are equal and tiny: they add nothing.
    mu_rest = torch.where(n_tail > 0, 1 - mu.sum(-1), 0).clamp(min=MIN_REST_MASS)
    pi_rest = torch.where(n_tail > 0, 1 - pi.sum(-1), 0).clamp(min=MIN_REST_MASS)
    n_tail = n_tail.clamp(min=1)
    if sum_sq is None:
        tail_sum_sq = pi_rest.square()
    else:
        tail_sum_sq = torch.where(evidence, sum_sq.to(pi.dtype), 1) - pi.square().sum(-1)
    s_rest = _TAIL_ESTIMATORS[tail_estimator](pi_rest, n_tail, tail_sum_sq)
    # The bounds hold mathematically (Cauchy-Schwarz), so this removes rounding only.
    s_rest = s_rest.clamp(min=pi_rest.square() / n_tail, max=pi_rest.square())

    log_ratio = torch.cat([log_pi - log_mu, (pi_rest.log() - mu_rest.log())[..., None]], dim=-1)
    collision = torch.cat([pi, (s_rest / pi_rest)[..., None]], dim=-1)  # S_c / pi_c
    mu = torch.cat([mu, mu_rest[..., None]], dim=-1)
    pi = torch.cat([pi, pi_rest[..., None]], dim=-1)
    terms, weighted_slope = _DIVERGENCES[divergence](mu, pi, log_ratio)
    centered = weighted_slope - pi * weighted_slope.sum(-1, keepdim=True)  # pi_c (h_c - hbar)
    div = terms.sum(-1)
    predicted_change = centered[..., 0] - (collision * centered).sum(-1)

    sampled_log_ratio = log_ratio[..., 0]
    outside = _PROXIMITIES[proximity](div, _exp_ratio(sampled_log_ratio), advantages, threshold_low, threshold_high)
    # Signs, because the product of a small advantage and a small change can underflow to 0.
    outwards = advantages.sign() * _DIRECTIONS[direction](predicted_change, sampled_log_ratio).sign() > 0
    return TokenAssessment(div, predicted_change, outside, keep=~(outside & outwards))


@torch.no_grad()
def summarize(
    assessment: TokenAssessment,
    behavior_logps: Tensor,
    policy_logps: Tensor,
    valid: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ratio_max: float | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """
    Reduce an assessment to sums and maxima, which processes can add up and compare before they divide.

    Pure and without host synchronisation.

    Args:
        assessment ([`TokenAssessment`]):
            What [`assess`] returned.
        behavior_logps, policy_logps, valid, advantages (`Tensor`):
            What [`assess`] was given.
        mask (`Tensor`, bool, `"..."`):
            The tokens to count.
        ratio_max (`float` or `None`):
            The constant `C` at which the ratio is truncated, `None` for no truncation.

    Returns:
        `tuple[dict[str, Tensor], dict[str, Tensor]]`: sums and maxima, each a 0-dim tensor of the assessment's dtype.

        Sums over the tokens of `mask`: `tokens`; `scored`, those whose sampled token has a finite behaviour
        log-probability; `outside`; `masked`, with `masked_positive` and `masked_negative` by the advantage's sign;
        `disagree`, outside with `d` and `r - 1` of opposite signs; `divergence`. Over the scored tokens:
        `topk_mass_behavior` and `topk_mass_policy`, the masses in the valid slots; `ratio`; `truncated`, the number
        with `r > ratio_max`. Maxima: `divergence_max` over the tokens of `mask` and `ratio_max` over the scored ones,
        0 where there is none.

    Raises:
        ValueError:
            If a shape or dtype does not fit.
    """
    _check_tensors(behavior_logps, policy_logps, valid, advantages)
    if mask.shape != valid.shape[:-1] or mask.dtype != torch.bool:
        raise ValueError(f"mask is {_describe(mask)}. Pass booleans of shape {tuple(valid.shape[:-1])}.")

    scored = mask & valid[..., 0] & behavior_logps[..., 0].isfinite()
    behavior, policy, known = (x[..., :1] for x in (behavior_logps, policy_logps, valid))
    log_mu, log_pi = _clean(behavior, policy, _has_evidence(behavior, policy, known)[..., None])
    log_ratio = (log_pi - log_mu)[..., 0]
    ratio = _exp_ratio(log_ratio)
    known = valid & (behavior_logps < torch.inf) & (policy_logps < torch.inf)
    mu, pi = (log_p.exp() for log_p in _clean(behavior_logps, policy_logps, known))
    masked = mask & ~assessment.keep
    opposed = assessment.predicted_change.sign() * log_ratio.sign() < 0
    div = torch.where(mask, assessment.divergence, 0)
    scored_ratio = torch.where(scored, ratio, 0)
    sums = {
        "tokens": mask,
        "scored": scored,
        "outside": mask & assessment.outside,
        "masked": masked,
        "masked_positive": masked & (advantages > 0),
        "masked_negative": masked & (advantages < 0),
        "disagree": mask & assessment.outside & opposed,
        "divergence": div,
        "topk_mass_behavior": scored * mu.sum(-1),
        "topk_mass_policy": scored * pi.sum(-1),
        "ratio": scored_ratio,
        "truncated": scored & (ratio > (torch.inf if ratio_max is None else ratio_max)),
    }
    maxima = {"divergence_max": div, "ratio_max": scored_ratio}
    dtype = assessment.divergence.dtype
    return (
        {name: value.sum(dtype=dtype) for name, value in sums.items()},
        {name: torch.nn.functional.pad(value.flatten(), (0, 1)).amax() for name, value in maxima.items()},
    )


class Evidence(NamedTuple):
    """What [`assess`] knows of a token's two policies: its first four arguments."""

    behavior_logps: Tensor
    policy_logps: Tensor
    valid: Tensor
    policy_sum_sq: Tensor | None


def replay_support(
    behavior_logps: Tensor, policy_logps: Tensor, valid: Tensor, policy_sum_sq: Tensor | None
) -> tuple[Evidence, Tensor, Tensor]:
    """
    Renormalise the training policy over the tokens that truncated sampling (top-p, top-k, min-p) left.

    Such sampling renormalises the behaviour policy over the surviving tokens, so their probabilities sum to 1; where
    those of the candidates do not, some survivors are not among them, and the evidence stays as it is.

    Args:
        behavior_logps, policy_logps, valid, policy_sum_sq (`Tensor`):
            As in [`assess`].

    Returns:
        `tuple[Evidence, Tensor, Tensor]`: the evidence over the survivors, without gradient; `complete` (bool,
        `"..."`), whether all survivors are known; and `log_mass` (float, `"..."`), the log-probability in nats of the
        survivors under the training policy, 0 where they are not all known. It carries the gradient of
        `policy_logps`: the sampled token's log-probability over the survivors is its own minus this.
    """
    survivors = valid & (behavior_logps > LOGP_FLOOR)
    mass = torch.where(survivors, behavior_logps.exp(), 0).sum(-1)
    complete = ((mass - 1).abs() < SURVIVING_MASS_TOLERANCE) & survivors[..., 0]
    valid = torch.where(complete[..., None], survivors, valid)
    log_mass = torch.where(complete, torch.where(valid, policy_logps, -torch.inf).logsumexp(-1), 0)
    policy_logps = (policy_logps - log_mass[..., None]).detach()
    if policy_sum_sq is not None:
        squares = torch.where(valid, (2 * policy_logps).exp(), 0).sum(-1)
        policy_sum_sq = torch.where(complete, squares, policy_sum_sq)
    return Evidence(behavior_logps, policy_logps, valid, policy_sum_sq), complete, log_mass


@torch.no_grad()
def summarize_support(complete: Tensor, log_mass: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums, 0-dim, over the tokens of `mask` (bool, `"..."`) of what [`replay_support`] said: `support_known` and
    `support_unknown`, their numbers, and `log_surviving_mass`, in nats, over the known ones."""
    known = mask & complete
    return {
        "support_known": known.sum(),
        "support_unknown": (mask & ~complete).sum(),
        "log_surviving_mass": torch.where(known, log_mass, 0).sum(),
    }


@torch.no_grad()
def ratio_base(behavior_logps: Tensor, policy_logps: Tensor, ratio_max: float | None) -> Tensor:
    """
    The log-probability `(...)` against which the sampled token's ratio is `min(r, ratio_max)`, and 1 without evidence.

    A ratio truncated at `C` is one against a behaviour log-probability of at least `log pi - log C`.

    Args:
        behavior_logps, policy_logps (`Tensor`):
            As in [`assess`].
        ratio_max (`float` or `None`):
            The constant `C`, `None` for no truncation.
    """
    sampled, policy = behavior_logps[..., 0], policy_logps[..., 0]
    base = torch.where(sampled.isfinite(), sampled, policy)
    return base if ratio_max is None else torch.maximum(base, policy - math.log(ratio_max))


def _has_evidence(behavior_logps: Tensor, policy_logps: Tensor, valid: Tensor) -> Tensor:
    usable = (behavior_logps < torch.inf) & (policy_logps < torch.inf)  # False for NaN and +inf
    return valid[..., 0] & (behavior_logps[..., 0] > -torch.inf) & (usable | ~valid).all(-1)


def _clean(behavior_logps: Tensor, policy_logps: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Floored log-probabilities, in float32 or better. A slot not used holds the floor in both: it adds nothing."""
    dtype = torch.promote_types(torch.promote_types(behavior_logps.dtype, policy_logps.dtype), torch.float32)
    behavior, policy = (
        torch.where(used, logps.to(dtype), LOGP_FLOOR).clamp(min=LOGP_FLOOR)
        for logps in (behavior_logps, policy_logps)
    )
    return behavior, policy


def _exp_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}. Choose one of {', '.join(map(repr, choices))}.")


def _check_tensors(behavior_logps: Tensor, policy_logps: Tensor, valid: Tensor, advantages: Tensor) -> None:
    shape = behavior_logps.shape
    if not shape or not shape[-1] or not behavior_logps.is_floating_point():
        raise ValueError(f"behavior_logps is {_describe(behavior_logps)}. Pass floats of shape (..., K+1).")
    if policy_logps.shape != shape or not policy_logps.is_floating_point():
        raise ValueError(
            f"policy_logps is {_describe(policy_logps)}. Pass floats of behavior_logps' shape, {tuple(shape)}."
        )
    if valid.shape != shape or valid.dtype != torch.bool:
        raise ValueError(f"valid is {_describe(valid)}. Pass booleans of behavior_logps' shape, {tuple(shape)}.")
    leading = shape[:-1]
    fits = advantages.ndim <= len(leading) and all(
        size in (1, target) for size, target in zip(reversed(advantages.shape), reversed(leading), strict=False)
    )
    if not fits or not advantages.is_floating_point():
        raise ValueError(
            f"advantages is {_describe(advantages)}. Pass floats that broadcast to {tuple(leading)}, one a token."
        )
