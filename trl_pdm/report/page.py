"""The report's page: words, numbers, curves and tokens, laid out by `page.html.j2` and `page.css`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from .curves import MAX_RUNS, THEMES, draw_all
from .runs import ReportError, Run, differences, load_run
from .svg import write_svg
from .tokens import read_completions
from .words import told


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# The columns of the table of runs: a metric, its format, and how its values become one number
COLUMNS: dict[str, tuple[str, str, Callable[[list[float]], float]]] = {
    "reward, first": ("reward", "{:.3g}", lambda values: values[0]),
    "reward, last": ("reward", "{:.3g}", lambda values: values[-1]),
    "outside, mean": ("trust_region/outside", "{:.2%}", _mean),
    "masked, mean": ("trust_region/masked", "{:.2%}", _mean),
    "largest divergence": ("trust_region/divergence_max", "{:.3g}", max),
}


def write_report(run_dir: str | Path, compare: Sequence[str | Path] = (), step: int | None = None) -> Path:
    """
    Write the report of a run into its folder: `report.html`, and its pictures in `report/`.

    Args:
        run_dir (`str` or `Path`): the run's `output_dir`.
        compare (`Sequence`, *optional*): the `output_dir` of each run to draw beside it.
        step (`int`, *optional*): the step whose recorded tokens to show, by default the last.

    Returns:
        `Path`: of the page.

    Raises:
        ReportError: A folder holds no logs, no tokens were recorded at `step`, there are more runs than colours, or
            matplotlib or Jinja2 is missing.
    """
    paths = [Path(run_dir), *map(Path, compare)]
    if len(paths) > MAX_RUNS:
        raise ReportError(f"{len(paths)} runs are more than can be told apart. Draw at most {MAX_RUNS}.")
    names = [path.resolve().name for path in paths]
    runs = [
        load_run(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)
    ]
    recorded = read_completions(runs[0], step)
    pictures = runs[0].path / "report"
    page = _render(
        runs=runs,
        columns=list(COLUMNS),
        rows=[_row(run) for run in runs],
        told=[told(run) for run in runs],
        differences=differences(runs),
        recorded=recorded,
        figures=list(draw_all(runs, pictures)),
        themes=THEMES,
    )
    (pictures / "tokens.svg").unlink(missing_ok=True)
    if recorded:
        write_svg(recorded, pictures / "tokens.svg")
    path = runs[0].path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _render(**parts) -> str:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ReportError(f"The page is made with Jinja2: pip install 'trl-pdm[report]' ({error}).") from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(**parts)


def _row(run: Run) -> list[str]:
    """The run's row of the table, with a dash for what was not logged."""
    found = [(run.series(metric)[1], form, reduce) for metric, form, reduce in COLUMNS.values()]
    return [
        run.name,
        str(run.last_step),
        *(form.format(reduce(values)) if values else "\u2013" for values, form, reduce in found),
    ]
