"""Which tokens may update the policy: the mathematics of predictive divergence masks, in torch alone.

A mask has two tests. *Proximity*: is the training policy outside the trust region around the behaviour policy?
*Direction*: would the update of this token move it further out? A token is masked only where both hold.

Notation, in this file only. `mu` is the behaviour policy (it sampled the tokens), `pi = softmax(z)` the training
policy, `a` the sampled token, `A` its advantage, `r = pi_a / mu_a` its importance ratio. The vocabulary is split into
categories `c`: the support's tokens, each alone (the *head*), and one more for everything else (the *rest*). With
`h_c = dD/dpi_c` and `hbar = sum_c pi_c h_c`, the policy-gradient step of the token changes the divergence `D(mu, pi)`
over these categories, to first order, by `A * r * d`:

    d = <grad_z D, e_a - pi> = pi_a (h_a - hbar) - sum_c S_c (h_c - hbar),    S_c = sum of pi_j^2 over the tokens of c

The head's probabilities give all of it but `S_rest`, which a tail estimator supplies. The same step changes the
policy's entropy `H` at that position by `A * r * e`:

    e = <grad_z H, e_a - pi> = sum_j pi_j^2 (log pi_j + H) - pi_a (log pi_a + H)

Shapes: `batch` is any number of leading dimensions, one position each; `slots` are the candidates of a position, the
sampled token in slot 0.

Sources: the top-K and binary divergences are DPPO's (arXiv:2602.04879, Eqs. 12-16); the predictive direction and the
"uniform" and "aggregated" estimators are PDM's (arXiv:2607.10848); the "exact" estimator is this project's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor


LOGP_FLOOR = -100.0  # nats; keeps every product and difference finite, in float32 too, where mu or pi is 0
MAX_LOG_RATIO = 80.0  # nats; exp() of it, summed over a batch, is still finite in float32
MIN_REST_MASS = 1e-12  # keeps the logarithm of an empty rest finite
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
# (d, log r, A) -> a number that has the sign of A where the token's update leads outwards.
_DIRECTIONS = {
    "predictive": lambda change, log_ratio, adv: change,
    "ratio": lambda change, log_ratio, adv: log_ratio,
    "none": lambda change, log_ratio, adv: adv,  # whichever way it leads
}

DIVERGENCES = tuple(_DIVERGENCES)
SUPPORTS = tuple(_SUPPORTS)
TAIL_ESTIMATORS = tuple(_TAIL_ESTIMATORS)
PROXIMITIES = tuple(_PROXIMITIES)
DIRECTIONS = tuple(_DIRECTIONS)


@dataclass(frozen=True, eq=False)
class Evidence:
    """
    The log-probabilities of each sampled token and its candidates, under the behaviour and the training policy.

    A position holds no evidence where slot 0 is not valid (padding), where a valid slot is NaN or +inf, where the
    sampled token's behaviour log-probability is -inf, or where `policy_sum_sq` is used and NaN.

    Args:
        behavior_logps (`Tensor`, float, `"*batch slots"`):
            Log-probabilities, in nats, under the behaviour policy: slot 0 is the sampled token, the others the
            behaviour policy's top K.
        policy_logps (`Tensor`, float, `"*batch slots"`):
            Log-probabilities of the same tokens under the training policy.
        valid (`Tensor`, bool, `"*batch slots"`):
            The slots that count, which hold distinct tokens: `False` for padding, and for the top-K slot that repeats
            the sampled token. Values in slots that are not valid have no influence.
        vocab_size (`int`):
            Number of tokens of the vocabulary. Where the head holds all of them, there is no rest.
        policy_sum_sq (`Tensor`, float, `"*batch"`, *optional*):
            Sum over the whole vocabulary of the squared training probabilities, for `tail_estimator="exact"`.

    Raises:
        ValueError: A shape or dtype does not fit, or `vocab_size` is not a positive integer.
    """

    behavior_logps: Float[Tensor, "*batch slots"]
    policy_logps: Float[Tensor, "*batch slots"]
    valid: Bool[Tensor, "*batch slots"]
    vocab_size: int
    policy_sum_sq: Float[Tensor, "*batch"] | None = None

    def __post_init__(self):
        shape = self.behavior_logps.shape
        if not shape or not shape[-1] or not self.behavior_logps.is_floating_point():
            raise ValueError(f"behavior_logps is {_describe(self.behavior_logps)}. Pass floats of shape (..., K+1).")
        if self.policy_logps.shape != shape or not self.policy_logps.is_floating_point():
            raise ValueError(
                f"policy_logps is {_describe(self.policy_logps)}. Pass floats of behavior_logps' shape, {tuple(shape)}."
            )
        if self.valid.shape != shape or self.valid.dtype != torch.bool:
            raise ValueError(
                f"valid is {_describe(self.valid)}. Pass booleans of behavior_logps' shape, {tuple(shape)}."
            )
        sum_sq = self.policy_sum_sq
        if sum_sq is not None and (sum_sq.shape != shape[:-1] or not sum_sq.is_floating_point()):
            raise ValueError(f"policy_sum_sq is {_describe(sum_sq)}. Pass floats of shape {tuple(shape[:-1])}.")
        if not isinstance(self.vocab_size, int) or self.vocab_size < 1:
            raise ValueError(
                f"vocab_size is {self.vocab_size!r}. Pass the vocabulary's number of tokens, a positive integer."
            )

    @property
    def sampled(self) -> "Evidence":
        """The evidence of the sampled tokens alone, with one slot."""
        only = {name: getattr(self, name)[..., :1] for name in ("behavior_logps", "policy_logps", "valid")}
        return replace(self, **only)

    @cached_property
    @torch.no_grad()
    def log_ratio(self) -> Float[Tensor, "*batch"]:
        """`log r` of the sampled token, in nats and without gradient; 0 where there is no evidence of that token."""
        sampled = self.sampled
        log_mu, log_pi = _clean(sampled, _has_evidence(sampled)[..., None])
        return (log_pi - log_mu)[..., 0]

    @cached_property
    @torch.no_grad()
    def support_masses(self) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """The total probability of the valid slots: under the behaviour policy, and under the training policy."""
        known = self.valid & (self.behavior_logps < torch.inf) & (self.policy_logps < torch.inf)
        mu, pi = (log_p.exp().sum(-1) for log_p in _clean(self, known))
        return mu, pi


@dataclass(frozen=True, eq=False)
class TokenAssessment:
    """
    What the trust region says about each token.

    Args:
        divergence (`Tensor`, float, `"*batch"`):
            `D(mu, pi)` over the support's categories, in nats (`"kl"`, `"reverse_kl"`) or as half the L1 distance
            (`"tv"`).
        predicted_change (`Tensor`, float, `"*batch"`):
            `d`: the derivative of `divergence` along `e_a - pi` in the logits. It does not depend on `direction`.
        outside (`Tensor`, bool, `"*batch"`):
            The answer of the proximity test: whether the policy is outside the trust region.
        keep (`Tensor`, bool, `"*batch"`):
            The mask: `False` where the policy is outside and the token's update would move it further out.
        entropy_change (`Tensor`, float, `"*batch"`, *optional*):
            `e`: the derivative of the policy's entropy along `e_a - pi`. `None` where no entropy was given.
    """

    divergence: Float[Tensor, "*batch"]
    predicted_change: Float[Tensor, "*batch"]
    outside: Bool[Tensor, "*batch"]
    keep: Bool[Tensor, "*batch"]
    entropy_change: Float[Tensor, "*batch"] | None = None


@dataclass(frozen=True)
class TrustRegion:
    """
    A trust region around the behaviour policy, and which updates outside it are masked.

    | `proximity`    | `direction`    | whose mask it is                                     |
    |----------------|----------------|------------------------------------------------------|
    | `"divergence"` | `"predictive"` | PDM's                                                |
    | `"divergence"` | `"ratio"`      | DPPO's                                               |
    | `"divergence"` | `"none"`       | a symmetric one, as some trainers use                |
    | `"ratio"`      | `"ratio"`      | PPO's and GRPO's                                     |
    | `"ratio"`      | `"none"`       | IcePop's                                             |

    Args:
        threshold_low (`float`):
            Where the region ends: in the divergence, for `A < 0`; or in the ratio, below 1 (GRPO's `epsilon`).
        threshold_high (`float`):
            Where it ends: in the divergence, for `A > 0`; or in the ratio, above 1 (GRPO's `epsilon_high`).
        divergence (`str`, *optional*, defaults to `"kl"`):
            `"kl"`: KL(mu, pi). `"tv"`: total variation. `"reverse_kl"`: KL(pi, mu).
        support (`str`, *optional*, defaults to `"topk"`):
            `"topk"`: every valid slot is a category of its own. `"binary"`: only the sampled token is, and the
            predictive direction is then the ratio's.
        proximity (`str`, *optional*, defaults to `"divergence"`):
            `"divergence"`: outside where `D > threshold_low` (`A < 0`) or `D > threshold_high` (otherwise).
            `"ratio"`: outside where `r < 1 - threshold_low` or `r > 1 + threshold_high`, as in GRPO.
        direction (`str`, *optional*, defaults to `"predictive"`):
            Which updates lead outwards. `"predictive"`: those with `A * d > 0` (PDM). `"ratio"`: those with
            `A * (r - 1) > 0` (DPPO, GRPO). `"none"`: all but those with `A = 0`, so every token outside is masked.
        tail_estimator (`str`, *optional*, defaults to `"exact"`):
            What stands for the sum of squared training probabilities of the `n` tail tokens. `"exact"`:
            `policy_sum_sq` minus the head's. `"uniform"`: `pi_rest^2 / n`, the smallest it can be. `"aggregated"`:
            `pi_rest^2`, the largest it can be.

    Raises:
        ValueError: A choice is unknown, or a threshold is negative or NaN.
    """

    threshold_low: float
    threshold_high: float
    divergence: str = "kl"
    support: str = "topk"
    proximity: str = "divergence"
    direction: str = "predictive"
    tail_estimator: str = "exact"

    def __post_init__(self):
        _check_choice("divergence", self.divergence, DIVERGENCES)
        _check_choice("support", self.support, SUPPORTS)
        _check_choice("proximity", self.proximity, PROXIMITIES)
        _check_choice("direction", self.direction, DIRECTIONS)
        _check_choice("tail_estimator", self.tail_estimator, TAIL_ESTIMATORS)
        for name in ("threshold_low", "threshold_high"):
            if not getattr(self, name) >= 0:  # not "<", which lets NaN pass
                raise ValueError(f"{name} is {getattr(self, name)!r}. Pass a number that is not negative.")

    @property
    def reads(self) -> frozenset[str]:
        """The names of the fields on which the mask depends."""
        fields = {"threshold_low", "threshold_high", "proximity", "direction"}
        if self.proximity == "divergence" or self.direction == "predictive":
            fields |= {"divergence", "support"}
        if self.direction == "predictive" and self.support == "topk":
            fields |= {"tail_estimator"}
        return frozenset(fields)

    @property
    def needs_candidates(self) -> bool:
        """Whether the mask depends on the behaviour policy's top K, and not on the sampled token alone."""
        return "support" in self.reads and self.support == "topk"

    @property
    def needs_sum_sq(self) -> bool:
        """Whether the mask depends on `Evidence.policy_sum_sq`."""
        return "tail_estimator" in self.reads and self.tail_estimator == "exact"

    def scaled(self, factor: float) -> "TrustRegion":
        """The same region with both thresholds multiplied by `factor`."""
        return replace(self, threshold_low=factor * self.threshold_low, threshold_high=factor * self.threshold_high)

    def is_outside(
        self,
        divergence: Float[Tensor, "*batch"],
        log_ratio: Float[Tensor, "*batch"],
        advantages: Float[Tensor, "..."],
    ) -> Bool[Tensor, "*batch"]:
        """The proximity test: which tokens are outside. `log_ratio` is that of the sampled tokens, in nats."""
        test = _PROXIMITIES[self.proximity]
        return test(divergence, exp_ratio(log_ratio), advantages, self.threshold_low, self.threshold_high)

    @torch.no_grad()
    def assess(
        self,
        evidence: Evidence,
        advantages: Float[Tensor, "..."],
        entropy: Float[Tensor, "*batch"] | None = None,
    ) -> TokenAssessment:
        """
        Decide, for every token, whether it may update the policy.

        Pure, without gradient and without host synchronisation. It computes in float32, or float64 if any
        log-probability comes in float64.

        A token without evidence is kept. Its `divergence`, `predicted_change` and `entropy_change` are 0, and its
        ratio counts as 1.

        Log-probabilities below -100 (a probability of 4e-44), and -inf, count as -100. So a candidate with `mu_i = 0`
        adds nothing to `"kl"`. To `"reverse_kl"`, which would be infinite, it adds at most `100 * pi_i` nats.

        Args:
            evidence ([`Evidence`]):
                The two policies. Its `policy_sum_sq` may be `None` where the mask does not depend on it
                (`needs_sum_sq`). `predicted_change` is then computed with the `"uniform"` tail.
            advantages (`Tensor`, float, broadcastable to `"*batch"`):
                Advantages. Tokens with `A = 0` are kept.
            entropy (`Tensor`, float, `"*batch"`, *optional*):
                Entropy of the training policy, in nats, for `entropy_change`. There, all tokens of the tail count as
                equally probable, `S_rest / pi_rest` each. That is an estimate where the true tail is not of this kind.

        Returns:
            [`TokenAssessment`]: with tensors of shape `"*batch"`.

        Raises:
            ValueError:
                `advantages` or `entropy` do not fit the evidence, or `policy_sum_sq` is missing where it is needed.
        """
        shape = evidence.valid.shape[:-1]
        _check_advantages(advantages, shape)
        if entropy is not None and (entropy.shape != shape or not entropy.is_floating_point()):
            raise ValueError(f"entropy is {_describe(entropy)}. Pass floats of shape {tuple(shape)}.")
        if evidence.policy_sum_sq is None and self.needs_sum_sq:
            raise ValueError(
                'policy_sum_sq is None, but tail_estimator="exact" reads it on support="topk". Pass the sum of squared '
                'training probabilities, or choose tail_estimator="uniform".'
            )
        if self.support != "topk":
            evidence = evidence.sampled
        estimator, sum_sq = self.tail_estimator, None
        if estimator == "exact":
            sum_sq = evidence.policy_sum_sq
            estimator = "uniform" if sum_sq is None else "exact"

        usable = _has_evidence(evidence)
        if sum_sq is not None:
            usable = usable & ~sum_sq.isnan()
        head = evidence.valid & usable[..., None]
        # With no evidence the head is empty: both policies are all rest, so D = d = log r = 0 follows.
        log_mu, log_pi = _clean(evidence, head)

        mu, pi = log_mu.exp(), log_pi.exp()
        n_tail = evidence.vocab_size - head.sum(-1)
        # Head masses of bf16 engines can sum to more than 1. With no tail both rests are equal and tiny: they add nothing.
        mu_rest = torch.where(n_tail > 0, 1 - mu.sum(-1), 0).clamp(min=MIN_REST_MASS)
        pi_rest = torch.where(n_tail > 0, 1 - pi.sum(-1), 0).clamp(min=MIN_REST_MASS)
        n_tail = n_tail.clamp(min=1)
        largest = pi_rest.square()
        tail_sum_sq = largest if sum_sq is None else torch.where(usable, sum_sq.to(pi.dtype), 1) - pi.square().sum(-1)
        # The bounds hold mathematically (Cauchy-Schwarz), so this removes rounding only.
        s_rest = _TAIL_ESTIMATORS[estimator](pi_rest, n_tail, tail_sum_sq).clamp(min=largest / n_tail, max=largest)

        log_pi_rest = pi_rest.log()
        log_ratio = torch.cat([log_pi - log_mu, (log_pi_rest - mu_rest.log())[..., None]], dim=-1)
        collision = torch.cat([pi, (s_rest / pi_rest)[..., None]], dim=-1)  # S_c / pi_c
        mu = torch.cat([mu, mu_rest[..., None]], dim=-1)
        pi = torch.cat([pi, pi_rest[..., None]], dim=-1)
        terms, weighted_slope = _DIVERGENCES[self.divergence](mu, pi, log_ratio)
        centered = weighted_slope - pi * weighted_slope.sum(-1, keepdim=True)  # pi_c (h_c - hbar)
        div = terms.sum(-1)
        predicted_change = centered[..., 0] - (collision * centered).sum(-1)

        entropy_change = None
        if entropy is not None:
            log_collision = torch.cat([log_pi, (s_rest.log() - log_pi_rest)[..., None]], dim=-1)
            slope = pi * (log_collision + entropy.to(pi.dtype)[..., None])
            entropy_change = torch.where(usable, (collision * slope).sum(-1) - slope[..., 0], 0)

        sampled_log_ratio = log_ratio[..., 0]
        outside = self.is_outside(div, sampled_log_ratio, advantages)
        # Signs, because the product of a small advantage and a small change can underflow to 0.
        signal = _DIRECTIONS[self.direction](predicted_change, sampled_log_ratio, advantages)
        outwards = advantages.sign() * signal.sign() > 0
        return TokenAssessment(div, predicted_change, outside, ~(outside & outwards), entropy_change)


def replay_support(
    evidence: Evidence,
) -> tuple[Evidence, Bool[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """
    Renormalise the training policy over the tokens that truncated sampling (top-p, top-k, min-p) left.

    Such sampling renormalises the behaviour policy over the surviving tokens, so the survivors' probabilities sum to
    1. Where the candidates' do not, some survivors are not among them, and the evidence stays as it is.

    Args:
        evidence ([`Evidence`]):
            The two policies. Its `behavior_logps` are normalised over the survivors, as vLLM returns them.

    Returns:
        `tuple[Evidence, Tensor, Tensor]`:

        - The evidence over the survivors, without gradient.
        - `complete` (bool, `"*batch"`): whether all survivors are known.
        - `log_mass` (float, `"*batch"`): the survivors' log-probability under the training policy, in nats; 0 where
          they are not all known. It has the gradient of `policy_logps`: subtract it from the sampled token's
          log-probability to normalise that over the survivors.
    """
    behavior_logps, policy_logps, valid = evidence.behavior_logps, evidence.policy_logps, evidence.valid
    survivors = valid & (behavior_logps > LOGP_FLOOR)
    mass = torch.where(survivors, behavior_logps.exp(), 0).sum(-1)
    complete = ((mass - 1).abs() < SURVIVING_MASS_TOLERANCE) & survivors[..., 0]
    valid = torch.where(complete[..., None], survivors, valid)
    log_mass = torch.where(complete, torch.where(valid, policy_logps, -torch.inf).logsumexp(-1), 0)
    policy_logps, sum_sq = (policy_logps - log_mass[..., None]).detach(), evidence.policy_sum_sq
    if sum_sq is not None:
        squares = torch.where(valid, (2 * policy_logps).exp(), 0).sum(-1)
        sum_sq = torch.where(complete, squares, sum_sq)
    return replace(evidence, policy_logps=policy_logps, valid=valid, policy_sum_sq=sum_sq), complete, log_mass


@torch.no_grad()
def ratio_base(evidence: Evidence, ratio_max: float | None) -> Float[Tensor, "*batch"]:
    """
    The behaviour log-probabilities of the sampled tokens, raised where the ratio is truncated.

    To truncate a ratio at `C` is to raise the behaviour log-probability to at least `log pi - log C`. So the ratio of
    the training policy to what is returned is `min(r, C)`. It is 1 where the behaviour log-probability is not finite.

    Args:
        evidence ([`Evidence`]):
            The two policies.
        ratio_max (`float` or `None`):
            `C`, or `None` for no truncation.

    Returns:
        `Tensor`: in nats, of shape `"*batch"` and without gradient.
    """
    sampled, policy = evidence.behavior_logps[..., 0], evidence.policy_logps[..., 0]
    base = torch.where(sampled.isfinite(), sampled, policy)
    return base if ratio_max is None else torch.maximum(base, policy - math.log(ratio_max))


def exp_ratio(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """`exp(log_ratio)`, bounded so that its sum over a batch is finite in float32."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _has_evidence(evidence: Evidence) -> Tensor:
    usable = (evidence.behavior_logps < torch.inf) & (evidence.policy_logps < torch.inf)  # False for NaN and +inf
    sampled = evidence.valid[..., 0] & (evidence.behavior_logps[..., 0] > -torch.inf)
    return sampled & (usable | ~evidence.valid).all(-1)


def _clean(evidence: Evidence, used: Tensor) -> tuple[Tensor, Tensor]:
    """Floored log-probabilities, in float32 or better. Slots that are not `used` hold the floor, and so add nothing."""
    both = evidence.behavior_logps, evidence.policy_logps
    dtype = torch.promote_types(torch.promote_types(both[0].dtype, both[1].dtype), torch.float32)
    behavior, policy = (torch.where(used, logps.to(dtype), LOGP_FLOOR).clamp(min=LOGP_FLOOR) for logps in both)
    return behavior, policy


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}. Choose one of {', '.join(map(repr, choices))}.")


def _check_advantages(advantages: Tensor, leading: torch.Size) -> None:
    fits = advantages.ndim <= len(leading) and all(
        size in (1, target) for size, target in zip(reversed(advantages.shape), reversed(leading), strict=False)
    )
    if not fits or not advantages.is_floating_point():
        raise ValueError(
            f"advantages is {_describe(advantages)}. Pass floats that broadcast to {tuple(leading)}, one a token."
        )
