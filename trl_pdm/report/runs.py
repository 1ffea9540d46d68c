"""What a run left on disk: its logs, its settings and its token records."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pyarrow.parquet import ParquetFile

from .records import SETTINGS_FILE, record_files


BAND = (0.05, 0.25, 0.75, 0.95)  # quantiles of a step's recorded divergences
# Settings that differ between any two runs, and say nothing about how they trained
NAMES_OF_A_RUN = {"output_dir", "logging_dir", "run_name", "hub_model_id"}


class ReportError(Exception):
    """A report cannot be written. The message says why, and what to do."""


@dataclass
class Run:
    """What a run left on disk."""

    path: Path
    name: str
    history: list[dict]
    quantiles: pd.DataFrame | None  # of the recorded divergences: one row per step, one column per number in BAND
    settings: dict  # as far as they are known

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was logged as a finite number, and these numbers."""
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
        """The divergences at which the trust region ends. Empty where none bounds it, or nothing is known."""
        if self.settings.get("proximity") != "divergence":
            return set()
        return {self.settings["divergence_threshold"], self.settings["divergence_threshold_high"]} - {None}


def _last_step(history: list[dict]) -> int:
    return max((entry.get("step", 0) for entry in history), default=0)


def load_run(path: Path, name: str) -> Run:
    """
    Read a run's logs, settings and token records.

    Args:
        path (`Path`): the run's `output_dir`.
        name (`str`): what the report calls it.

    Raises:
        ReportError: `path` is no folder, or holds no logs.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder. Pass the output_dir of a run.")
    histories: list[list[dict]] = [[]]
    for source in ("trainer_state.json", "metrics.json", "checkpoint-*/trainer_state.json"):
        for file in path.glob(source):
            with suppress(OSError, ValueError, KeyError, TypeError):  # cut short, where a run was killed
                histories.append(json.loads(file.read_text())["log_history"])
    # A run saves its logs several times: the longest are the latest
    history = max(histories, key=_last_step)
    if not history:
        raise ReportError(
            f"{path} has no logs that can be read. Looked for a `log_history` in trainer_state.json, metrics.json and "
            "checkpoint-*/trainer_state.json. `trainer.save_state()` writes the first."
        )
    quantiles, settings = {}, {}
    for step, file in record_files(path).items():
        table = ParquetFile(file).read(["divergence", "trained_on"], use_threads=False).to_pandas()
        divergence = table.loc[table["trained_on"], "divergence"].dropna().to_numpy()
        quantiles[step] = np.quantile(divergence, BAND) if len(divergence) else [math.nan] * len(BAND)
        settings = table.attrs
    with suppress(OSError, ValueError, TypeError):
        settings = settings | json.loads((path / SETTINGS_FILE).read_text())
    return Run(
        path, name, history, pd.DataFrame.from_dict(quantiles, "index", columns=BAND) if quantiles else None, settings
    )


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """The settings in which the runs differ, each with one value per run, as JSON, or a dash where it is not known."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NAMES_OF_A_RUN)
    values = {
        name: [json.dumps(run.settings[name]) if name in run.settings else None for run in runs] for name in names
    }
    return {
        name: ["\u2013" if value is None else value for value in row]
        for name, row in values.items()
        if len({value for value in row if value is not None}) > 1
    }
