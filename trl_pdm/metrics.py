"""Metrics over tokens: summed as tensors in the loss, over all processes, and read only when they are logged."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .trust_region import DIRECTIONS, TokenAssessment


if TYPE_CHECKING:
    from accelerate import Accelerator

# Each is a ratio of two sums over tokens, or (with `None`) a maximum: see `trust_region.summarize`
METRICS = {
    "trust_region/outside": ("outside", "scored"),
    "trust_region/masked": ("masked", "scored"),
    "trust_region/masked_positive": ("masked_positive", "scored"),
    "trust_region/masked_negative": ("masked_negative", "scored"),
    "trust_region/direction_disagreement": ("disagree", "outside"),
    "trust_region/realized_alignment_predictive": ("aligned_predictive", "realized_predictive"),
    "trust_region/realized_alignment_ratio": ("aligned_ratio", "realized_ratio"),
    "trust_region/divergence_mean": ("divergence", "scored"),
    "trust_region/divergence_max": ("divergence_max", None),
    "trust_region/topk_mass_behavior": ("topk_mass_behavior", "scored"),
    "trust_region/topk_mass_policy": ("topk_mass_policy", "scored"),
    "trust_region/unscored": ("unscored", "tokens"),
    "trust_region/support_unknown": ("support_unknown", "tokens"),
    "trust_region/log_surviving_mass": ("log_surviving_mass", "support_known"),
    "importance_ratio/mean": ("ratio", "scored"),
    "importance_ratio/max": ("ratio_max", None),
    "importance_ratio/truncated": ("truncated", "scored"),
}


class TokenMetrics:
    """Accumulates sums and maxima, token-weighted over micro-batches and processes.

    Args:
        gather (`Callable`): concatenates a tensor of all processes along the first dimension.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]):
        self._gather = gather
        self._totals: dict[str, tuple[list[str], Tensor, Tensor]] = {}

    def add(self, mode: str, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """Record 0-dim tensors of one micro-batch, on every process."""
        local = torch.stack([value.float() for value in (*sums.values(), *maxima.values())])
        gathered = self._gather(local[None])
        total, largest = gathered[:, : len(sums)].sum(0), gathered[:, len(sums) :].amax(0)
        if mode in self._totals:
            _, before, largest_before = self._totals[mode]
            total, largest = before + total, torch.maximum(largest_before, largest)
        self._totals[mode] = [*sums, *maxima], total, largest

    def pop(self, mode: str) -> dict[str, float]:
        """The metrics of everything recorded since the last call. A share of no tokens is left out."""
        if mode not in self._totals:
            return {}
        names, sums, maxima = self._totals.pop(mode)
        total = dict(zip(names, torch.cat([sums, maxima]).tolist(), strict=True)) | {None: 1.0}
        total["unscored"] = total["tokens"] - total["scored"]
        return {
            name: total[numerator] / total[denominator]
            for name, (numerator, denominator) in METRICS.items()
            if numerator in total and total[denominator]
        }


class MaskedColumn:
    """
    The column `masked` of TRL's table of completions: which share of a completion's tokens its last update left out.

    TRL logs completions with their rollout. They are trained on later and in another order, so each takes the number of
    its row along; until then, and if it never is, the entry is `None`.

    Args:
        columns (`dict`): TRL's extra columns, of the completions of all processes.
        accelerator ([`~accelerate.Accelerator`]): the trainer's.
        enabled (`bool`): whether completions are logged.
    """

    def __init__(self, columns: dict[str, deque], accelerator: "Accelerator", enabled: bool):
        self._columns, self._accelerator, self._enabled = columns, accelerator, enabled
        self._rows = 0  # so far; TRL keeps the last ones
        self._shares: list[tuple[Tensor, Tensor]] = []  # read from the device only when they are logged

    def tag(self, batch: dict[str, Any]) -> None:
        """Add the rows of a rollout, before it is shuffled."""
        if self._enabled:
            ids = batch["completion_ids"]
            n, processes = len(ids), self._accelerator.num_processes
            batch["row"] = self._rows + self._accelerator.process_index * n + torch.arange(n, device=ids.device)
            self._rows += n * processes
            self._columns["masked"].extend([None] * n * processes)

    def add(self, batch: dict[str, Any], keep: Tensor, mask: Tensor) -> None:
        """Note a micro-batch, on every process. `keep`, `mask` `(B, T)`: tokens that update, tokens that could."""
        if "row" in batch:
            share = (mask & ~keep).sum(1) / mask.sum(1)
            self._shares.append((self._accelerator.gather(batch["row"]), self._accelerator.gather(share)))

    def fill_in(self) -> None:
        """Enter what was noted, before TRL writes its table."""
        shares, self._shares = self._shares, []
        for row, value in (entry for part in shares for entry in zip(*(x.tolist() for x in part), strict=True)):
            column = self._columns["masked"]
            if row >= self._rows - len(column):  # evaluations push a rollout's rows out before its last update
                column[row - self._rows] = round(value, 4)


@torch.no_grad()
def realized_alignment(
    batch: dict[str, Any],
    step: int,
    assessment: TokenAssessment,
    behavior_logps: Tensor,
    policy_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> dict[str, Tensor]:
    """
    Count how often each direction was right, where a batch comes back after its update: the scores it is trained on then
    measure what happened since.

    Counted are the tokens that updated the policy from outside the trust region. What happened is all optimizer steps
    until they come back, with all their tokens.

    Args:
        batch (`dict`):
            The micro-batch, the same object each time it is trained on. Holds the forecast for its return.
        step (`int`):
            Optimizer steps taken so far.
        assessment, behavior_logps, policy_logps, advantages, mask:
            As in [`~trust_region.summarize`].

    Returns:
        `dict[str, Tensor]`: 0-dim sums for each direction: `realized_{direction}`, the tokens of which it said
        something and whose divergence moved, and `aligned_{direction}`, those where it was right. 0 on first sight.
    """
    made_at, tokens, before, forecasts = batch.get("forecast", (step, None, None, None))
    updated = mask & assessment.outside & assessment.keep
    log_ratio = policy_logps[..., 0] - behavior_logps[..., 0]
    signs = (advantages * change.sign() for change in (assessment.predicted_change, log_ratio))
    batch["forecast"] = step, updated, assessment.divergence, dict(zip(DIRECTIONS, signs, strict=True))
    sums = {}
    for name in DIRECTIONS:
        if made_at == step:  # nothing to measure
            agreement = torch.zeros_like(assessment.divergence)
        else:
            agreement = torch.where(tokens, forecasts[name] * (assessment.divergence - before).sign(), 0)
        sums[f"realized_{name}"], sums[f"aligned_{name}"] = (agreement != 0).sum(), (agreement > 0).sum()
    return sums
