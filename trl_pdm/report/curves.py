"""A run's curves, drawn with matplotlib."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .runs import BAND, ReportError, Run


# Okabe and Ito's palette, which colour-blind readers can tell apart. Of a single run, each metric has its colour. Of
# several, each run has its colour, and each metric its line style.
COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    "dark": ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00"),
}
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MAX_RUNS = len(COLOURS["light"])
THEMES = {
    "light": dict(page="#ffffff", ink="#1f2328", muted="#59636e", line="#d1d9e0", out="#cfe8fb", mask="#ffd8b5")
    | {"out-edge": "#0072b2", "mask-edge": "#b34700"},
    "dark": dict(page="#14171c", ink="#e6e9ee", muted="#9aa4b0", line="#39414b", out="#12395a", mask="#5c2a08")
    | {"out-edge": "#6cbcf0", "mask-edge": "#ff9c57"},
}
# Narrow, so that its letters can be read where the page is as wide as a phone
SIZE, DPI = (5.0, 3.4), 200
THRESHOLD_LINE = dict(linewidth=1, linestyle=(0, (1, 3)))
MANY_STEPS = 40  # a line of this many points has no markers
MAX_NAME = 30

UNITS = {"kl": "KL divergence (nats)", "reverse_kl": "reverse KL divergence (nats)", "tv": "total variation"}


# Of TRL's metrics. This package's own declare what they mean.
MEANINGS = {
    "reward": "mean reward of the completions trained on",
    "eval_reward": "mean reward of the completions of the evaluation",
    "entropy": "the policy's entropy, mean over the tokens",
    "step_time": "seconds of an optimizer step, with its share of the rollout",
}


@dataclass
class Curves:
    """One plot. `metrics` are its lines, with their names in the legend. With several runs `of_one_run` is left out."""

    unit: str
    metrics: dict[str, str]
    percent: bool = False
    log: bool = False
    of_one_run: frozenset[str] = frozenset()

    def logged(self, runs: list[Run]) -> list[str]:
        metrics = [name for name in self.metrics if len(runs) == 1 or name not in self.of_one_run]
        return [name for name in metrics if any(run.series(name)[0] for run in runs)]


@dataclass
class Figure:
    """A title over one or more plots, which share the axis of steps."""

    title: str
    plots: tuple[Curves, ...]


# fmt: off
FIGURES = {name: Figure(title, tuple(plots)) for name, title, *plots in (
    ("reward", "Reward", Curves("reward", {"reward": "training", "eval_reward": "evaluation"})),
    ("divergence", "Divergence from the behaviour policy", Curves("divergence", {
        "trust_region/divergence_mean": "mean", "trust_region/divergence_max": "max"}, log=True)),
    ("mask", "Outside the trust region, and masked", Curves("% of tokens", {
        "trust_region/outside": "outside", "trust_region/masked_positive": "masked, advantage > 0",
        "trust_region/masked_negative": "masked, advantage < 0",
        "trust_region/outside_half": "outside half the threshold",
        "trust_region/outside_double": "outside twice the threshold"}, percent=True,
        of_one_run=frozenset({"trust_region/outside_half", "trust_region/outside_double"}))),
    ("entropy", "Entropy of the policy",
        Curves("nats", {"entropy": "entropy"}),
        Curves("drift a token", {
            "trust_region/entropy_drift": "with the mask",
            "trust_region/entropy_drift_unmasked": "if nothing were masked"})),
    ("disagreement", "Predicted change and ratio point opposite ways", Curves("% of tokens outside", {
        "trust_region/direction_disagreement": "opposite"}, percent=True)),
    ("alignment", "Right about where the divergence went", Curves("% of tokens updated from outside", {
        "trust_region/realized_alignment_predictive": "by the predicted change",
        "trust_region/realized_alignment_ratio": "by the ratio"}, percent=True)),
    ("ratio", "Importance ratio", Curves("ratio", {
        "importance_ratio/mean": "mean", "importance_ratio/max": "max"}, log=True)),
    ("truncated", "Importance ratio truncated", Curves("% of tokens", {
        "importance_ratio/truncated": "truncated"}, percent=True)),
    ("sync", "vLLM against the trainer, right after a sync", Curves("logprob difference (nats)", {
        "weight_sync/logp_difference_mean": "mean", "weight_sync/logp_difference_max": "max"}, log=True)),
    ("time", "Time", Curves("seconds", {"step_time": "a step", "weight_sync/seconds": "a weight sync"}, log=True)),
)}
# fmt: on


def draw(drawn: Figure, runs: list[Run], theme: str) -> bytes | None:
    """
    Draw a figure as PNG. Returns `None` where no run has logged its metrics.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ReportError(f"The report draws with matplotlib: pip install 'trl-pdm[report]' ({error}).") from error

    plots = [plot for plot in drawn.plots if plot.logged(runs)]
    if not plots:
        return None
    ink, page, muted, line = (THEMES[theme][part] for part in ("ink", "page", "muted", "line"))
    style = {
        "figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page, "text.color": ink,
        "axes.labelcolor": ink, "axes.edgecolor": muted, "xtick.color": muted, "ytick.color": muted,
        "xtick.labelcolor": ink, "ytick.labelcolor": ink, "grid.color": line, "axes.grid": True, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 10,
        "lines.linewidth": 1.5, "lines.markersize": 3.5, "text.parse_math": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = matplotlib.figure.Figure(figsize=SIZE, layout="constrained")
        figure.suptitle(drawn.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        axes = figure.subplots(len(plots), sharex=True, squeeze=False)[:, 0]
        for axis, plot in zip(axes, plots, strict=True):
            _plot(axis, plot, runs, theme)
        axes[-1].set_xlabel("optimizer step")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    return picture.getvalue()


def _plot(axes, plot: Curves, runs: list[Run], theme: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    many, is_divergence, ink = len(runs) > 1, plot.unit == "divergence", THEMES[theme]["ink"]
    colours, metrics = COLOURS[theme], plot.logged(runs)
    handles, values_drawn = [], []
    for number, metric in enumerate(metrics):
        for run, run_colour in zip(runs, colours, strict=False):
            steps, values = run.series(metric)
            values = [value * 100 if plot.percent else value for value in values]
            colour, marker = run_colour if many else colours[number], "o" if len(steps) < MANY_STEPS else ""
            axes.plot(steps, values, color=colour, linestyle=STYLES[number], marker=marker)
            values_drawn += values
        if len(plot.metrics) > 1:
            colour = THEMES[theme]["muted"] if many else colours[number]
            handles.append(Line2D([], [], color=colour, linestyle=STYLES[number], label=plot.metrics[metric]))
    if many:
        handles = [
            *(Patch(color=c, label=_shortened(run.name)) for c, run in zip(colours, runs, strict=False)), *handles
        ]  # fmt: skip
    if is_divergence:
        # Of several runs the wide bands would hide each other
        bands = {"50 % of recorded tokens": BAND[1:3]} | ({} if many else {"90 %": (BAND[0], BAND[3])})
        recorded = [(run.quantiles, c) for run, c in zip(runs, colours, strict=False) if run.quantiles is not None]
        for low, high in bands.values() if recorded else ():
            for quantiles, colour in recorded:
                axes.fill_between(
                    quantiles.index, quantiles[low], quantiles[high], color=colour, alpha=0.25, linewidth=0
                )
        colour = THEMES[theme]["muted"] if many else colours[0]
        for band, alpha in zip(bands if recorded else (), (0.5, 0.25), strict=False):
            handles.append(Patch(color=colour, alpha=alpha, label=band))
        thresholds = set().union(*(run.thresholds for run in runs))
        for threshold in thresholds:
            axes.axhline(threshold, color=ink, **THRESHOLD_LINE)
        if thresholds:
            handles.append(Line2D([], [], color=ink, label="threshold", **THRESHOLD_LINE))
    if plot.log:
        _logarithmic(axes, values_drawn)
    elif plot.percent:
        axes.set_ylim(0, None if any(values_drawn) else 1)
    divergences = {run.settings["divergence"] for run in runs if "divergence" in run.settings}
    axes.set_ylabel(UNITS[divergences.pop()] if is_divergence and len(divergences) == 1 else plot.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    columns = 3 if all(len(handle.get_label()) < 14 for handle in handles) else 2
    if handles:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=9)


def _logarithmic(axes, values: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    if not positive:
        return
    # Right after a rollout the policies are the same, and their divergence is rounding: the axis leaves that out
    top, bottom = max(positive), max(min(positive), max(positive) * 1e-4)
    axes.set_yscale("log")
    axes.set_ylim(bottom * 0.8, top * 1.25)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2]}\u2026{name[-MAX_NAME // 2 :]}"


def explain(drawn: Figure, runs: list[Run]) -> list[tuple[str, str]]:
    """The metrics of a figure, each with what it means."""
    from ..metrics import METRICS

    meanings = MEANINGS | {metric.name: metric.meaning for metric in METRICS}
    return [(name, meanings[name]) for plot in drawn.plots for name in plot.logged(runs)]


@dataclass
class Picture:
    """A figure as data URLs, in light and in dark colours, with its metrics and what they mean."""

    title: str
    meanings: list[tuple[str, str]]
    light: str
    dark: str


def draw_all(runs: list[Run], folder: Path) -> Iterator[Picture]:
    """Draw every figure that has data, and write it into `folder` in light colours."""
    folder.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        (folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier report
        drawn = {theme: png for theme in THEMES if (png := draw(figure, runs, theme))}
        if drawn:
            (folder / f"{name}.png").write_bytes(drawn["light"])
            yield Picture(
                figure.title, explain(figure, runs), **{theme: _data_url(png) for theme, png in drawn.items()}
            )


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
