"""Every metric, declared once: its name, the tokens it is over, its meaning and how it is computed.

Token metrics are summed as tensors, in the loss and over all processes. The host reads them only when they are logged.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .trust_region import Evidence, TokenAssessment, TrustRegion, exp_ratio


if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, eq=False)
class Tokens:
    """
    The tokens of a micro-batch, and what the trust region said about them. All tensors are `(B, T)`.

    Args:
        mask (`Tensor`, bool): the tokens that are trained on.
        region ([`TrustRegion`]), evidence ([`Evidence`]), assessment ([`TokenAssessment`]): as in `region.assess`.
        advantages (`Tensor`, float): broadcastable to `(B, T)`.
        ratio_max (`float`, *optional*): where the ratio is truncated.
        entropy (`Tensor`, float, *optional*): of the training policy, in nats.
        support_known (`Tensor`, bool, *optional*): whether all tokens that truncated sampling left are known.
        log_surviving_mass (`Tensor`, float, *optional*): log-probability of these tokens under the training policy, in
            nats.
        forecasts (`dict`, *optional*): what [`forecasts`] returned.

    Raises:
        ValueError: `mask` is not boolean or not of the evidence's shape.
    """

    mask: Tensor
    region: TrustRegion
    evidence: Evidence
    assessment: TokenAssessment
    advantages: Tensor
    ratio_max: float | None = None
    entropy: Tensor | None = None
    support_known: Tensor | None = None
    log_surviving_mass: Tensor | None = None
    forecasts: dict[str, Tensor] | None = None

    def __post_init__(self):
        shape = self.evidence.valid.shape[:-1]
        if self.mask.shape != shape or self.mask.dtype != torch.bool:
            raise ValueError(
                f"mask is {self.mask.dtype} of shape {tuple(self.mask.shape)}. Pass booleans of shape {tuple(shape)}."
            )

    @property
    def scored(self) -> Tensor:
        """The tokens trained on that have a behaviour logprob."""
        return self.mask & self.evidence.valid[..., 0] & self.evidence.behavior_logps[..., 0].isfinite()

    @property
    def has_candidates(self) -> bool:
        """Whether more is known than the sampled tokens' logprobs."""
        return self.evidence.valid.shape[-1] > 1

    @cached_property
    def ratio(self) -> Tensor:
        """The importance ratio, not truncated."""
        return exp_ratio(self.evidence.log_ratio)

    @property
    def disagree(self) -> Tensor | None:
        """Where the predicted change and the ratio point opposite ways; `None` without candidates."""
        opposed = self.assessment.predicted_change.sign() * self.evidence.log_ratio.sign() < 0
        return opposed if self.has_candidates else None

    def outside_at(self, factor: float) -> Tensor:
        """Which tokens would be outside at `factor` times the threshold."""
        region, log_ratio = self.region.scaled(factor), self.evidence.log_ratio
        return region.is_outside(self.assessment.divergence, log_ratio, self.advantages)

    @cached_property
    def entropy_drift(self) -> Tensor | None:
        """How each token's update would change the entropy at its position; `None` where the entropy is not known."""
        if self.assessment.entropy_change is None:
            return None
        ratio = self.ratio if self.ratio_max is None else self.ratio.clamp(max=self.ratio_max)
        return self.advantages * ratio * self.assessment.entropy_change

    def forecast(self, direction: str) -> Tensor | None:
        """What [`forecasts`] returned for `direction`; `None` where it was not asked."""
        return None if self.forecasts is None else self.forecasts[direction]


def _unless_none(value: Tensor | None, then: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if value is None else then(value)


@dataclass(frozen=True)
class Population:
    """
    The tokens that a metric is over.

    Args:
        meaning (`str`): a few words.
        mask (`Callable`): finds them: bool, `(B, T)`, or `None` where the metric is not logged.
    """

    meaning: str
    mask: Callable[[Tokens], Tensor | None]


TRAINED = Population("tokens trained on", lambda t: t.mask)
SCORED = Population("tokens with a behaviour logprob", lambda t: t.scored)
OUTSIDE = Population("tokens outside", lambda t: t.mask & t.assessment.outside)
KEPT_OUTSIDE = Population("tokens outside that update", lambda t: t.mask & t.assessment.outside & t.assessment.keep)
MASKED = Population("masked tokens", lambda t: t.mask & ~t.assessment.keep)
SURVIVORS_KNOWN = Population(
    "tokens where all that sampling left are known", lambda t: _unless_none(t.support_known, lambda x: x & t.mask)
)
FORETOLD = Population(
    "tokens that updated from outside and came back, judged by the prediction",
    lambda t: _unless_none(t.forecast("predictive"), lambda x: x != 0),
)
FORETOLD_BY_RATIO = Population(
    "tokens that updated from outside and came back, judged by the ratio",
    lambda t: _unless_none(t.forecast("ratio"), lambda x: x != 0),
)


@dataclass(frozen=True)
class Metric:
    """
    A number that is logged.

    Args:
        name (`str`): as the loggers show it.
        kind (`str`): `"share"`, `"mean"` or `"max"` over a population of tokens, or `"value"`, a number of its own.
        meaning (`str`): one line.
    """

    name: str
    kind: str
    meaning: str


@dataclass(frozen=True)
class TokenMetric(Metric):
    """
    A metric over tokens.

    Args:
        over ([`Population`]): whose share, mean or maximum it is.
        value (`Callable`): computes it for each token, `(B, T)`; `None` where the metric is not logged.
    """

    over: Population
    value: Callable[[Tokens], Tensor | None]


# What is logged of a weight sync, and of the check after it
SYNC_SECONDS, SYNC_BYTES = "weight_sync/seconds", "weight_sync/bytes"
SYNC_DIFFERENCE_MEAN, SYNC_DIFFERENCE_MAX = "weight_sync/logp_difference_mean", "weight_sync/logp_difference_max"

# fmt: off
METRICS: tuple[Metric, ...] = (
    TokenMetric("trust_region/outside", "share", "outside the trust region", SCORED, lambda t: t.assessment.outside),
    TokenMetric("trust_region/outside_half", "share", "outside if the threshold were half as large", SCORED,
                lambda t: t.outside_at(0.5)),
    TokenMetric("trust_region/outside_double", "share", "outside if the threshold were twice as large", SCORED,
                lambda t: t.outside_at(2.0)),
    TokenMetric("trust_region/masked", "share", "masked: outside, and the update would lead further out", SCORED,
                lambda t: ~t.assessment.keep),
    TokenMetric("trust_region/masked_positive", "share", "masked, with a positive advantage", SCORED,
                lambda t: ~t.assessment.keep & (t.advantages > 0)),
    TokenMetric("trust_region/masked_negative", "share", "masked, with a negative advantage", SCORED,
                lambda t: ~t.assessment.keep & (t.advantages < 0)),
    TokenMetric("trust_region/direction_disagreement", "share", "prediction and ratio point opposite ways", OUTSIDE,
                lambda t: t.disagree),
    TokenMetric("trust_region/divergence_mean", "mean", "divergence of the training from the behaviour policy", SCORED,
                lambda t: t.assessment.divergence),
    TokenMetric("trust_region/divergence_max", "max", "the largest divergence", TRAINED, lambda t: t.assessment.divergence),
    TokenMetric("trust_region/topk_mass_behavior", "mean", "probability of the top K under the behaviour policy", SCORED,
                lambda t: t.evidence.support_masses[0] if t.has_candidates else None),
    TokenMetric("trust_region/topk_mass_policy", "mean", "probability of the same tokens under the training policy", SCORED,
                lambda t: t.evidence.support_masses[1] if t.has_candidates else None),
    TokenMetric("trust_region/unscored", "share", "the engine gave no logprob: kept, at a ratio of 1", TRAINED,
                lambda t: ~t.scored),
    TokenMetric("trust_region/entropy_masked", "mean", "the policy's entropy where the mask acts, in nats", MASKED,
                lambda t: t.entropy),
    TokenMetric("trust_region/entropy_kept", "mean", "the policy's entropy where a token outside updates, in nats",
                KEPT_OUTSIDE, lambda t: t.entropy),
    TokenMetric("trust_region/entropy_drift", "mean",
                "how a token's update changes the policy's entropy there, to first order and per unit of step; 0 if masked",
                TRAINED,
                lambda t: _unless_none(t.entropy_drift, lambda drift: drift * t.assessment.keep)),
    TokenMetric("trust_region/entropy_drift_unmasked", "mean", "the same if nothing were masked", TRAINED,
                lambda t: t.entropy_drift),
    TokenMetric("trust_region/realized_alignment_predictive", "share",
                "the divergence moved as the prediction said (`log_realized_alignment`)", FORETOLD,
                lambda t: _unless_none(t.forecast("predictive"), lambda x: x > 0)),
    TokenMetric("trust_region/realized_alignment_ratio", "share",
                "the divergence moved as the ratio said (`log_realized_alignment`)", FORETOLD_BY_RATIO,
                lambda t: _unless_none(t.forecast("ratio"), lambda x: x > 0)),
    TokenMetric("trust_region/support_unknown", "share",
                "truncated sampling left tokens that the top K does not contain", TRAINED,
                lambda t: _unless_none(t.support_known, torch.logical_not)),
    TokenMetric("trust_region/log_surviving_mass", "mean",
                "log-probability of what truncated sampling left, under the training policy, in nats", SURVIVORS_KNOWN,
                lambda t: t.log_surviving_mass),
    TokenMetric("importance_ratio/mean", "mean", "ratio of the training to the behaviour policy", SCORED,
                lambda t: t.ratio),
    TokenMetric("importance_ratio/max", "max", "the largest ratio", SCORED, lambda t: t.ratio),
    TokenMetric("importance_ratio/truncated", "share", "the ratio is truncated at `importance_ratio_max`", SCORED,
                lambda t: t.ratio > (torch.inf if t.ratio_max is None else t.ratio_max)),
    Metric(SYNC_SECONDS, "value", "seconds that the last weight sync took"),
    Metric(SYNC_BYTES, "value", "bytes that the last weight sync moved"),
    Metric(SYNC_DIFFERENCE_MEAN, "value",
           "mean difference of vLLM's logprobs from the trainer's right after a sync, in nats"),
    Metric(SYNC_DIFFERENCE_MAX, "value", "the largest of these differences, in nats"),
)
# fmt: on
TOKEN_METRICS = tuple(metric for metric in METRICS if isinstance(metric, TokenMetric))


@torch.no_grad()
def summarize(tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """
    Reduce a micro-batch to the sums and maxima of its metrics, for [`TokenMetrics`].

    Pure and without host synchronisation.

    Returns:
        `tuple[dict[str, Tensor], dict[str, Tensor]]`: sums and maxima, each a 0-dim tensor of the assessment's dtype. The
        sums are the numerators, under their metric's name, and the sizes of the populations, under their meaning.
        Maxima are 0 where there is no token.
    """
    populations = {over: over.mask(tokens) for over in dict.fromkeys(metric.over for metric in TOKEN_METRICS)}
    sums = {over.meaning: mask for over, mask in populations.items() if mask is not None}
    maxima: dict[str, Tensor] = {}
    for metric in TOKEN_METRICS:
        mask, value = populations[metric.over], metric.value(tokens)
        if mask is not None and value is not None:
            (maxima if metric.kind == "max" else sums)[metric.name] = torch.where(mask, value, 0)
    dtype = tokens.assessment.divergence.dtype
    columns = torch.stack([value.to(dtype).flatten() for value in (*sums.values(), *maxima.values())])
    totals = columns[: len(sums)].sum(1)
    largest = torch.nn.functional.pad(columns[len(sums) :], (0, 1)).amax(1)
    return dict(zip(sums, totals.unbind(), strict=True)), dict(zip(maxima, largest.unbind(), strict=True))


class TokenMetrics:
    """Accumulates metrics over micro-batches and processes, in which each token weighs the same.

    Args:
        gather (`Callable`): concatenates a tensor of all processes along the first dimension.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]):
        self._gather = gather
        # By mode and names, as what is known of tokens can change from one micro-batch to the next
        self._totals: dict[tuple[str, tuple[str, ...], tuple[str, ...]], tuple[Tensor, Tensor]] = {}

    def add(self, mode: str, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """Add what [`summarize`] returned of a micro-batch. Every process must call it, with the same names."""
        local = torch.stack([value.float() for value in (*sums.values(), *maxima.values())])
        gathered = self._gather(local[None])
        total, largest = gathered[:, : len(sums)].sum(0), gathered[:, len(sums) :].amax(0)
        key = mode, tuple(sums), tuple(maxima)
        if key in self._totals:
            before, largest_before = self._totals[key]
            total, largest = before + total, torch.maximum(largest_before, largest)
        self._totals[key] = total, largest

    def pop(self, mode: str) -> dict[str, float]:
        """The metrics of all that was added since the last call. A share or mean of no tokens is left out."""
        total, seen = dict[str, float](), dict[str, float]()
        for key in [key for key in self._totals if key[0] == mode]:
            values = torch.cat(self._totals.pop(key)).tolist()
            summed, largest = values[: len(key[1])], values[len(key[1]) :]
            total |= {name: total.get(name, 0) + value for name, value in zip(key[1], summed, strict=True)}
            total |= {name: max(total.get(name, 0), value) for name, value in zip(key[2], largest, strict=True)}
        for metric in TOKEN_METRICS:
            count = 1 if metric.kind == "max" else total.get(metric.over.meaning)
            if metric.name in total and count:
                seen[metric.name] = total[metric.name] / count
        return seen


class MaskedColumn:
    """
    The column `trust_region/masked` of TRL's table of completions: the share of a completion's tokens that was masked.

    TRL logs completions with their rollout. They are trained on later and in another order, so each carries the number
    of its row. Its entry is `None` until it is trained on, and then the share in its last update.

    Args:
        columns (`dict`): TRL's extra columns, with the completions of all processes.
        accelerator ([`~accelerate.Accelerator`]): the trainer's.
        enabled (`bool`): whether completions are logged.
    """

    def __init__(self, columns: dict[str, deque], accelerator: "Accelerator", enabled: bool):
        self._columns, self._accelerator, self._enabled = columns, accelerator, enabled
        self._rows = 0  # so far; TRL keeps the last ones
        self._shares: list[tuple[Tensor, Tensor]] = []  # read from the device only when they are logged

    def tag(self, batch: dict[str, Any]) -> None:
        """Number the completions of a rollout, before TRL shuffles it: `batch` gets `row`, `(B,)`."""
        if self._enabled:
            ids = batch["completion_ids"]
            n, processes = len(ids), self._accelerator.num_processes
            batch["row"] = self._rows + self._accelerator.process_index * n + torch.arange(n, device=ids.device)
            self._rows += n * processes
            self._columns["trust_region/masked"].extend([None] * n * processes)

    def add(self, batch: dict[str, Any], keep: Tensor, mask: Tensor) -> None:
        """Note a micro-batch. Every process must call it. `keep` and `mask` `(B, T)` are those of [`Tokens`]."""
        if "row" in batch:
            share = (mask & ~keep).sum(1) / mask.sum(1)
            self._shares.append((self._accelerator.gather(batch["row"]), self._accelerator.gather(share)))

    def fill_in(self) -> None:
        """Write what was noted into TRL's column, before TRL writes its table."""
        shares, self._shares = self._shares, []
        for row, value in (entry for part in shares for entry in zip(*(x.tolist() for x in part), strict=True)):
            column = self._columns["trust_region/masked"]
            if row >= self._rows - len(column):  # evaluations push a rollout's rows out before its last update
                column[row - self._rows] = round(value, 4)


@torch.no_grad()
def forecasts(
    batch: dict[str, Any],
    step: int,
    assessment: TokenAssessment,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> dict[str, Tensor]:
    """
    Tell whether each direction was right about the tokens of a micro-batch, once that is trained on again.

    A direction was right about a token if the divergence then moved as it had said. Only tokens that updated the
    policy from outside the trust region count. All optimizer steps since, with all their tokens, have moved the
    divergence. It is known once the micro-batch is scored to be trained on, so no forward pass is added.

    Args:
        batch (`dict`):
            The micro-batch, the same object each time it is trained on. It keeps what the directions say now, until
            the next time.
        step (`int`):
            Optimizer steps taken so far.
        assessment, advantages, mask:
            As in [`Tokens`].
        log_ratio (`Tensor`, float, `(B, T)`):
            Of the sampled tokens, in nats.

    Returns:
        `dict[str, Tensor]`: for `"predictive"` and `"ratio"`, `(B, T)` each: 1 where the direction was right, -1 where
        it was wrong, 0 where it said nothing, where the divergence did not move, or at the micro-batch's first time.
    """
    made_at, tokens, before, made = batch.get("forecast", (step, None, None, None))
    updated = mask & assessment.outside & assessment.keep
    signals = {"predictive": assessment.predicted_change, "ratio": log_ratio}
    said = {direction: (advantages * signal.sign()).sign() for direction, signal in signals.items()}
    batch["forecast"] = step, updated, assessment.divergence, said
    if made_at == step:  # nothing to measure
        return {direction: torch.zeros_like(assessment.divergence) for direction in said}
    moved = (assessment.divergence - before).sign()
    return {direction: torch.where(tokens, made[direction] * moved, 0) for direction in said}
