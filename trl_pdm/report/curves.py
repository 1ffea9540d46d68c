"""A run's curves: reading what it logged, and drawing it."""

import base64
import io
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from .records import record_files


# Okabe and Ito's palette, which colour-blind readers can tell apart: a colour a run, a line style a metric
COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    "dark": ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00"),
}
STYLES = ("-", "--", ":")
MAX_RUNS = len(COLOURS["light"])
THEMES = {
    "light": dict(page="#ffffff", ink="#1f2328", muted="#59636e", line="#d1d9e0", out="#cfe8fb", mask="#ffd8b5")
    | {"out-edge": "#0072b2", "mask-edge": "#b34700"},
    "dark": dict(page="#14171c", ink="#e6e9ee", muted="#9aa4b0", line="#39414b", out="#12395a", mask="#5c2a08")
    | {"out-edge": "#6cbcf0", "mask-edge": "#ff9c57"},
}
THRESHOLD_LINE = dict(linewidth=1, linestyle=(0, (1, 3)))
MANY_STEPS = 40  # from here on a line without markers
MAX_NAME = 40

UNITS = {"kl": "KL divergence (nats)", "reverse_kl": "reverse KL divergence (nats)", "tv": "total variation"}


@dataclass
class Curves:
    """One figure: its metrics, with their names in the legend."""

    title: str
    unit: str
    metrics: dict[str, str]
    percent: bool = False
    log: bool = False


# fmt: off
FIGURES = {
    "reward": Curves("Reward", "reward", {"reward": "training", "eval_reward": "evaluation"}),
    "divergence": Curves("Divergence from the behaviour policy", "divergence", {
        "trust_region/divergence_mean": "mean", "trust_region/divergence_max": "max"}, log=True),
    "mask": Curves("Outside the trust region, and masked", "% of tokens", {
        "trust_region/outside": "outside", "trust_region/masked_positive": "masked, advantage > 0",
        "trust_region/masked_negative": "masked, advantage < 0"}, percent=True),
    "disagreement": Curves("Predicted change and ratio point opposite ways", "% of tokens outside", {
        "trust_region/direction_disagreement": "opposite"}, percent=True),
    "alignment": Curves("Right about where the divergence went", "% of tokens updated from outside", {
        "trust_region/realized_alignment_predictive": "by the predicted change",
        "trust_region/realized_alignment_ratio": "by the ratio"}, percent=True),
    "ratio": Curves("Importance ratio", "ratio", {
        "importance_ratio/mean": "mean", "importance_ratio/max": "max"}, log=True),
    "truncated": Curves("Importance ratio truncated", "% of tokens", {
        "importance_ratio/truncated": "truncated"}, percent=True),
    "sync": Curves("vLLM against the trainer, right after a sync", "logprob difference (nats)", {
        "weight_sync/logp_difference_mean": "mean", "weight_sync/logp_difference_max": "max"}, log=True),
    "time": Curves("Time", "seconds", {"step_time": "a step", "weight_sync/seconds": "a weight sync"}, log=True),
}
# fmt: on


class ReportError(Exception):
    """What the user can put right."""


@dataclass
class Run:
    """What a run left behind."""

    path: Path
    name: str
    history: list[dict]
    records: pd.DataFrame | None  # every recorded step's divergences
    settings: dict

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was logged."""
        points = [
            (entry["step"], entry[metric])
            for entry in self.history
            if "step" in entry and isinstance(entry.get(metric), (int, float)) and math.isfinite(entry[metric])
        ]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def last_step(self) -> int:
        return _last_step(self.history)

    @property
    def thresholds(self) -> set[float]:
        """Divergences at which the trust region ends, as far as they are known."""
        if self.settings.get("proximity") != "divergence":
            return set()
        return {self.settings["divergence_threshold"], self.settings["divergence_threshold_high"]} - {None}


def _last_step(history: list[dict]) -> int:
    return max((entry.get("step", 0) for entry in history), default=0)


def load_run(path: Path, name: str) -> Run:
    """
    Read a run's logs and records.

    Raises:
        ReportError: There are no logs.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder. Pass the output_dir of a run.")
    histories: list[list[dict]] = [[]]
    for source in ("trainer_state.json", "metrics.json", "checkpoint-*/trainer_state.json"):
        for file in path.glob(source):
            with suppress(OSError, ValueError, KeyError, TypeError):  # cut short, where a run was killed
                histories.append(json.loads(file.read_text())["log_history"])
    # Of all that the run saved, what goes furthest
    history = max(histories, key=_last_step)
    if not history:
        raise ReportError(
            f"{path} has no logs that can be read. Looked for a `log_history` in trainer_state.json, metrics.json and "
            "checkpoint-*/trainer_state.json. `trainer.save_state()` writes the first."
        )
    columns = ["step", "divergence", "trained_on"]
    tables = [pd.read_parquet(file, columns=columns) for file in record_files(path).values()]
    return Run(path, name, history, pd.concat(tables) if tables else None, tables[-1].attrs if tables else {})


# ---- Figures


def draw(curves: Curves, runs: list[Run], theme: str) -> bytes | None:
    """A figure as PNG, `None` where no run has its data."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
    except ImportError as error:
        raise ReportError(f"The report draws with matplotlib: pip install 'trl-pdm[report]' ({error}).") from error

    logged = {metric for metric in curves.metrics if any(run.series(metric)[0] for run in runs)}
    if not logged:
        return None
    styles = {metric: dash for metric, dash in zip(curves.metrics, STYLES, strict=False) if metric in logged}
    many, is_divergence = len(runs) > 1, curves.unit == "divergence"
    ink, page, muted, line = (THEMES[theme][part] for part in ("ink", "page", "muted", "line"))
    style = {
        "figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page, "text.color": ink,
        "axes.labelcolor": ink, "axes.edgecolor": muted, "xtick.color": muted, "ytick.color": muted,
        "xtick.labelcolor": ink, "ytick.labelcolor": ink, "grid.color": line, "axes.grid": True, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 10,
        "lines.linewidth": 1.6, "lines.markersize": 3.5, "text.parse_math": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        figure.suptitle(curves.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        axes = figure.subplots()
        handles, positive, thresholds, bands = [], [], set(), {}
        for colour, run in zip(COLOURS[theme], runs, strict=False):
            for metric, dash in styles.items():
                steps, values = run.series(metric)
                values = [value * 100 if curves.percent else value for value in values]
                axes.plot(steps, values, dash, color=colour, marker="o" if len(steps) < MANY_STEPS else "")
                positive += [value for value in values if value > 0]
            if is_divergence and run.records is not None:
                bands = {"50 % of recorded tokens": (0.25, 0.75)} | ({} if many else {"90 %": (0.05, 0.95)})
                tokens = run.records[run.records["trained_on"]].groupby("step")["divergence"]
                for low, high in bands.values():
                    low, high = tokens.quantile(low), tokens.quantile(high)
                    axes.fill_between(low.index, low, high, color=colour, alpha=0.25, linewidth=0)
            if is_divergence:
                thresholds |= run.thresholds
            if many:
                handles.append(Patch(color=colour, label=_shortened(run.name)))
        colour = muted if many else COLOURS[theme][0]
        if len(curves.metrics) > 1:
            for metric, dash in styles.items():
                handles.append(Line2D([], [], color=colour, linestyle=dash, label=curves.metrics[metric]))
        handles += [Patch(color=colour, alpha=a, label=band) for band, a in zip(bands, (0.5, 0.25), strict=False)]
        for threshold in thresholds:
            axes.axhline(threshold, color=ink, **THRESHOLD_LINE)
        if thresholds:
            handles.append(Line2D([], [], color=ink, label="threshold", **THRESHOLD_LINE))
        if curves.log and positive:
            # Right after a rollout both policies are the same: what is left then is rounding, of no interest
            top, bottom = max(positive), max(min(positive), max(positive) * 1e-4)
            axes.set_yscale("log")
            axes.set_ylim(bottom * 0.8, top * 1.25)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        divergences = {run.settings["divergence"] for run in runs if "divergence" in run.settings}
        axes.set_ylabel(UNITS[divergences.pop()] if is_divergence and len(divergences) == 1 else curves.unit)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        columns = 3 if all(len(handle.get_label()) < 24 for handle in handles) else 2
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=9)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=160)
    return picture.getvalue()


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2]}\u2026{name[-MAX_NAME // 2 :]}"


@dataclass
class Picture:
    """A figure in light and in dark colours, as data URLs."""

    title: str
    light: str
    dark: str


def draw_all(runs: list[Run], folder: Path) -> list[Picture]:
    """Draw every figure that has data, into `folder` too, in light colours."""
    folder.mkdir(exist_ok=True)
    pictures = []
    for name, curves in FIGURES.items():
        (folder / f"{name}.png").unlink(missing_ok=True)  # that of an earlier report
        drawn = {theme: png for theme in THEMES if (png := draw(curves, runs, theme))}
        if drawn:
            (folder / f"{name}.png").write_bytes(drawn["light"])
            pictures.append(Picture(curves.title, **{theme: _data_url(png) for theme, png in drawn.items()}))
    return pictures


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
