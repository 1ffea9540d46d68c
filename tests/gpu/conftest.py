"""`make gpu`: the table that its tests end in, and the time that they have.

A test's marker names its row, `@pytest.mark.gpu("driver and versions")`; tests of one name share a row. What a test
measured it says with the fixture `figure`.
"""

import os
import platform
import signal
import threading
import time
from collections import Counter

import pytest


REHEARSAL = os.environ.get("TRL_PDM_REHEARSE_GPU") == "1"
MINUTES = float(os.environ.get("TRL_PDM_GPU_MINUTES", 30))
GRACE = 5  # seconds in which a test that was given the time that was left ends by itself
HEADER = ("check", "result", "figure", "seconds")
START, ROWS, FIGURES = pytest.StashKey[float](), pytest.StashKey[dict](), pytest.StashKey[list]()


def seconds_left(config) -> float:
    return config.stash[START] + 60 * MINUTES - time.monotonic()


def why_not() -> str | None:
    if REHEARSAL:
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return f"no NVIDIA GPU that torch {torch.__version__} can use"


def pytest_configure(config):
    config.stash[ROWS] = {}


def pytest_collection_finish(session):
    """What still runs when the time is over is interrupted, as from the keyboard: the table comes nevertheless."""
    session.config.stash[START] = time.monotonic()
    if any(item.get_closest_marker("gpu") for item in session.items):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
        timer = threading.Timer(seconds_left(session.config) + GRACE, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()


@pytest.fixture
def device() -> str:
    return "cpu" if REHEARSAL else "cuda"


@pytest.fixture
def figure(request):
    """Says what the test measured."""
    request.node.stash[FIGURES] = []
    return request.node.stash[FIGURES].append


def pytest_runtest_setup(item):
    if not item.get_closest_marker("gpu"):
        return
    if reason := why_not():
        pytest.skip(reason)
    if seconds_left(item.config) < 0:
        pytest.skip(f"no time left of {MINUTES:g} minutes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marker = item.get_closest_marker("gpu")
    if marker and (report.when == "call" or not report.passed):
        row = item.config.stash[ROWS].setdefault(marker.args[0], dict(results=[], figures=[], seconds=0.0))
        row["results"].append(report.outcome)
        row["seconds"] += call.duration
        if report.skipped:
            row["figures"].append(str(call.excinfo.value))
        elif report.failed:
            row["figures"].append(f"{item.name}: {call.excinfo.exconly().splitlines()[0]}")
        else:
            row["figures"] += item.stash.get(FIGURES, [])
    return report


def result(outcomes: list[str]) -> str:
    counts = Counter(outcomes)
    if len(outcomes) == 1:
        return outcomes[0]
    return ", ".join(f"{counts[name]} {name}" for name in ("failed", "passed", "skipped") if counts[name])


def table(rows: dict[str, dict]) -> str:
    """In Markdown, so that it can be pasted into an issue."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for name, row in rows.items():
        said = "; ".join(dict.fromkeys(row["figures"])).replace("|", "/")
        lines.append(
            (name, result(row["results"]), said if len(said) < 400 else said[:400] + " ...", f"{row['seconds']:.0f}")
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pytest_terminal_summary(terminalreporter, config):
    if rows := config.stash[ROWS]:
        terminalreporter.section("make gpu")
        if REHEARSAL:
            terminalreporter.write_line(f"Rehearsal on a CPU ({platform.machine()}): no figure here is of a GPU.")
        terminalreporter.write_line(table(rows))
