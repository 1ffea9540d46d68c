"""A run's curves, and the tokens that its mask holds back, as one page that needs nothing else.

    python -m trl_pdm.report RUN_DIR [--compare OTHER_RUN ...] [--step N]

writes `RUN_DIR/report.html` and the figures, `RUN_DIR/report/*.png`. It reads what the run logged, in a
`trainer_state.json` or the example's `metrics.json`, and the token records of `log_token_assessments`.
"""

import argparse
import base64
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pandas as pd

from .token_records import FOLDER


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
MAX_STEPS_LISTED = 12

TOKEN_STATES = {
    "inside": "inside the trust region",
    "outside": "outside, and the update does not lead further out: kept",
    "masked": "outside, and the update leads further out: held back",
    "untrained": "not trained on",
}
UNITS = {"kl": "KL divergence (nats)", "reverse_kl": "reverse KL divergence (nats)", "tv": "total variation"}
VISIBLE = {code: chr(0x2400 + code) for code in range(32)} | {10: "\u21b5\n", 127: "\u2421"}
SEPARATOR = " \u00b7 "


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


def record_files(path: Path) -> dict[int, Path]:
    """The token records' files by step."""
    files = {file: re.fullmatch(r"step_(\d+)\.parquet", file.name) for file in (path / FOLDER).glob("*")}
    return dict(sorted((int(name[1]), file) for file, name in files.items() if name))


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


def pictures(runs: list[Run], folder: Path) -> Iterator[str]:
    """Draw every figure that has data into `folder`, in light colours, and yield its HTML, in both."""
    folder.mkdir(exist_ok=True)
    for name, curves in FIGURES.items():
        (folder / f"{name}.png").unlink(missing_ok=True)  # that of an earlier report
        drawn = [png for theme in THEMES if (png := draw(curves, runs, theme))]
        if not drawn:
            continue
        (folder / f"{name}.png").write_bytes(drawn[0])
        light, dark = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in drawn)
        yield (
            f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
            f'<img src="{light}" alt="{escape(curves.title)}, by optimizer step"></picture>\n'
        )


# ---- Tokens


def visible(text: str) -> str:
    """Escaped for HTML, with control characters as their pictures."""
    return escape(text.translate(VISIBLE))


def state_of(token) -> str:
    if not token.trained_on:
        return "untrained"
    return "masked" if not token.keep else "outside" if token.outside else "inside"


def token_html(token) -> str:
    state = state_of(token)
    facts = [f"<b>{ {'outside': 'outside, kept', 'untrained': 'not trained on'}.get(state, state) }</b>"]
    facts.append(f"token {token.position}")
    if state != "untrained" and math.isfinite(token.behavior_logprob):
        move = token.advantage * token.predicted_change
        ratio = math.exp(min(token.policy_logprob - token.behavior_logprob, 700))
        facts += [
            f"divergence {token.divergence:.3g}",
            f"predicted change {token.predicted_change:+.2g}",
            f"update leads {'outwards' if move > 0 else 'inwards' if move < 0 else 'nowhere'}",
            f"ratio {ratio:.3g}",
            f"probability {math.exp(token.behavior_logprob):.3g} when sampled, {math.exp(token.policy_logprob):.3g} now",
        ]
    elif state != "untrained":
        facts.append("sampled without a logprob")
    if state != "untrained":
        facts.append(f"advantage {token.advantage:+.3g}")
    text, tip = visible(token.text) or "\u25af", SEPARATOR.join(facts)
    end = (
        "\n" if text.endswith("\n") else ""
    )  # behind the token: within it, it would colour the start of the next line
    text = text.removesuffix(end)
    return f'<span class="token {state}" tabindex="0">{text}<span class="tip" role="tooltip">{tip}</span></span>{end}'


def completion_html(number: int, tokens: pd.DataFrame) -> str:
    rows = list(tokens.itertuples())
    states = [state_of(row) for row in rows]
    facts = [f"{len(rows)} tokens, {states.count('outside')} outside and kept, {states.count('masked')} masked"]
    advantages = tokens.loc[tokens["trained_on"], "advantage"]
    if len(advantages):
        low, high = advantages.min(), advantages.max()
        facts.insert(0, f"advantage {low:+.3g}" + (f" to {high:+.3g}" if high > low else ""))
    if "reward" in tokens and math.isfinite(rows[0].reward):
        facts.insert(0, f"reward {rows[0].reward:.3g}")
    return (
        f"<article><h3>Completion {number}</h3><p>{SEPARATOR.join(facts)}</p>\n"
        f'<pre class="prompt">{visible(rows[0].prompt or "")}</pre>\n'
        f'<pre class="completion">{"".join(map(token_html, rows))}</pre></article>\n'
    )


def tokens_html(run: Run, step: int | None) -> str:
    """The completions recorded at a step, by default the last one.

    Raises:
        ReportError: Nothing was recorded at that step.
    """
    files = record_files(run.path)
    if step is not None and step not in files:
        there = f"There are those of {_listed(files)}." if files else "Train with `log_token_assessments`."
        raise ReportError(f"{run.path} has no token records of step {step}. {there}")
    if not files:
        return (
            "<p>No token records. A run with <code>log_token_assessments=16</code> has those of 16 completions, where "
            "the policy can leave the one that sampled: with vLLM, or several optimizer steps a rollout.</p>"
        )
    step = max(files) if step is None else step
    table = pd.read_parquet(files[step])
    settings = table.attrs
    about = f"Step {step}, of {_listed(files)}."
    if settings.get("proximity") == "divergence":
        high = settings["divergence_threshold_high"]
        about += f" {UNITS[settings['divergence']]}: outside above {settings['divergence_threshold']:g}"
        about += "." if high is None else f", with a positive advantage above {high:g}."
    if "direction" in settings:
        direction = {"predictive": "predicted change", "ratio": "ratio"}[settings["direction"]]
        about += f" The {direction} tells where an update leads."
    legend = "".join(
        f'<li><span class="key {state}">token</span> {meaning}</li>'
        for state, meaning in TOKEN_STATES.items()
        if state != "untrained" or not table["trained_on"].all()
    )
    completions = [completion_html(n, tokens) for n, (_, tokens) in enumerate(table.groupby("completion"), start=1)]
    return (
        f"<p>{about} Point at a token, or move to it with the Tab key, for its figures.</p>"
        f'<ul class="legend">{legend}</ul>{"".join(completions)}'
    )


def _listed(files: Iterable[int]) -> str:
    steps = list(files)
    if len(steps) > MAX_STEPS_LISTED:
        return f"{len(steps)} recorded steps from {steps[0]} to {steps[-1]}"
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))


# ---- The page

_VARIABLES = {
    theme: f":root {{ color-scheme: {theme}; {' '.join(f'--{name}: {value};' for name, value in colours.items())} }}"
    for theme, colours in THEMES.items()
}
STYLE = (
    f"{_VARIABLES['light']}\n@media (prefers-color-scheme: dark) {{ {_VARIABLES['dark']} }}"
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 8rem; max-width: 84rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 0; }
p, li { max-width: 60rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); gap: 1.5rem; }
.figures img { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 600; } thead th { color: var(--muted); font-weight: 400; }
.legend { list-style: none; padding: 0; } .legend li { margin: .3rem 0; }
article { margin: 1.5rem 0; } article p { margin: 0 0 .4rem; color: var(--muted); }
pre { position: relative; margin: 0; padding: .7rem .9rem; border: 1px solid var(--line); white-space: pre-wrap;
  font: .95rem/2 ui-monospace, monospace; }
.prompt { border-bottom: 0; color: var(--muted); line-height: 1.5; }
.token, .key { padding: .15em 2px; margin: 0 1px; border-radius: 3px; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; unicode-bidi: isolate; }
.key { font: .95rem ui-monospace, monospace; padding: .15em .4em; margin-right: .4em; }
.outside { background: var(--out); box-shadow: inset 0 -3px var(--out-edge); }
.masked { background: var(--mask); box-shadow: inset 0 0 0 2px var(--mask-edge); }
.untrained { color: var(--muted); font-style: italic; }
.token:hover, .token:focus { outline: 2px solid var(--ink); outline-offset: 1px; }
.tip { display: none; position: absolute; left: 0; right: 0; z-index: 1; margin-top: .3rem; padding: .5rem .9rem;
  background: var(--ink); color: var(--page); font: .875rem/1.5 system-ui, sans-serif; white-space: normal;
  font-variant-numeric: tabular-nums; pointer-events: none; user-select: none; }
.token:hover .tip, .token:focus .tip { display: block; }
"""
)

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{summary}
<h2>Curves</h2>
<div class="figures">
{figures}</div>
<h2>Tokens{of_run}</h2>
{tokens}
</body>
</html>
"""


def summary_html(runs: list[Run]) -> str:
    """One row a run: how far it went, and what came of it. A dash for what was not logged."""
    columns: dict[str, tuple[str, str, Callable[[list[float]], float]]] = {
        "reward, first": ("reward", "{:.3g}", lambda values: values[0]),
        "reward, last": ("reward", "{:.3g}", lambda values: values[-1]),
        "outside, mean": ("trust_region/outside", "{:.2%}", lambda values: sum(values) / len(values)),
        "masked, mean": ("trust_region/masked", "{:.2%}", lambda values: sum(values) / len(values)),
        "largest divergence": ("trust_region/divergence_max", "{:.3g}", max),
    }
    head = "".join(f"<th>{name}</th>" for name in ("run", "steps", *columns))
    rows = []
    for run in runs:
        found = [(run.series(metric)[1], form, reduce) for metric, form, reduce in columns.values()]
        cells = [
            run.last_step,
            *(form.format(reduce(values)) if values else "\u2013" for values, form, reduce in found),
        ]
        rows.append(f"<tr><th>{escape(run.name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def write_report(run_dir: str | Path, compare: Sequence[str | Path] = (), step: int | None = None) -> Path:
    """
    Write the report of a run, with the curves of other runs beside its own.

    Args:
        run_dir (`str` or `Path`): the run's `output_dir`.
        compare (`Sequence`): those of the other runs.
        step (`int`, *optional*): whose token records to show, by default the last that there are.

    Returns:
        `Path`: the page.

    Raises:
        ReportError: There is nothing to read or to draw with, or there are more runs than colours.
    """
    paths = [Path(run_dir), *map(Path, compare)]
    if len(paths) > MAX_RUNS:
        raise ReportError(f"{len(paths)} runs are more than can be told apart. Draw at most {MAX_RUNS}.")
    names = [path.resolve().name for path in paths]
    runs = [
        load_run(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)
    ]
    tokens = tokens_html(runs[0], step)
    page = PAGE.format(
        title=" / ".join(escape(run.name) for run in runs),
        style=STYLE,
        summary=summary_html(runs),
        figures="".join(pictures(runs, runs[0].path / "report")),
        of_run=f" of {escape(runs[0].name)}" if compare else "",
        tokens=tokens,
    )
    path = runs[0].path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trl_pdm.report", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="RUN", help="output_dirs of runs to draw beside it"
    )
    parser.add_argument("--step", type=int, help="step whose tokens to show (default: the last one recorded)")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir, args.compare, args.step))
    except ReportError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
