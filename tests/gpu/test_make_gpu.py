"""`make gpu` without a GPU: its order, its table, what it skips, and that it ends and leaves nothing behind."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import test_on_gpu


ROOT = Path(__file__).parents[2]
SUITE = """
import time
import pytest

gpu = pytest.mark.gpu

@gpu("second in the alphabet")
def test_z(figure):
    figure("0.021 nats")

@gpu("a pair")
@pytest.mark.parametrize("n", [1, 2])
def test_a(figure, n):
    figure(f"{n} | {n} GB")
    assert n == 1, "not one"

@gpu("lacking")
def test_lacking():
    pytest.skip("this machine lacks a second GPU")

def test_of_no_gpu():
    pass
"""
SLOW = """

@gpu("endless")
def test_endless():
    time.sleep(300)

@gpu("after it")
def test_after_it():
    pass
"""


def run(tmp_path, *arguments, suite=SUITE, **variables):
    (tmp_path / "test_suite.py").write_text(suite)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRL_PDM_")}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "tests.gpu.conftest", "--rootdir"]
    command += [str(tmp_path), str(tmp_path), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def rows(output):
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


@pytest.mark.slow
def test_the_table(tmp_path):
    done = run(tmp_path, "-m", "gpu", TRL_PDM_REHEARSE_GPU="1")
    header, rule, *found = rows(done.stdout)
    assert header == ["check", "result", "figure", "seconds"] and set(rule) == {"---"}
    assert [row[:3] for row in found] == [
        ["second in the alphabet", "passed", "0.021 nats"],
        ["a pair", "1 failed, 1 passed", "1 / 1 GB; test_a[2]: AssertionError: not one"],
        ["lacking", "skipped", "this machine lacks a second GPU"],
    ]
    assert all(row[3].isdigit() for row in found)
    assert "no figure here is of a GPU" in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
def test_without_a_gpu_each_check_is_skipped_by_name(tmp_path):
    done = run(tmp_path, "-m", "gpu", CUDA_VISIBLE_DEVICES="")
    assert [row[:2] for row in rows(done.stdout)[2:]] == [
        ["second in the alphabet", "skipped"],
        ["a pair", "2 skipped"],
        ["lacking", "skipped"],
    ]
    assert all(row[2].startswith("no NVIDIA GPU that torch") for row in rows(done.stdout)[2:])
    assert done.returncode == 0


@pytest.mark.slow
def test_the_suite_leaves_them_out_and_says_so(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0
    assert "1 passed, 4 deselected" in done.stdout
    assert "4 tests of a GPU are left out; `make gpu` runs them" in done.stdout
    assert not rows(done.stdout)


@pytest.mark.slow
def test_it_ends_in_time_with_what_is_done(tmp_path):
    start = time.monotonic()
    done = run(tmp_path, "-m", "gpu", suite=SUITE + SLOW, TRL_PDM_REHEARSE_GPU="1", TRL_PDM_GPU_MINUTES="0.05")
    assert time.monotonic() - start < 100
    assert [row[0] for row in rows(done.stdout)[2:]][:3] == ["second in the alphabet", "a pair", "lacking"]
    assert done.returncode == pytest.ExitCode.INTERRUPTED


@pytest.mark.slow
def test_what_there_is_no_time_for_is_skipped(tmp_path):
    done = run(tmp_path, "-m", "gpu", TRL_PDM_REHEARSE_GPU="1", TRL_PDM_GPU_MINUTES="0")
    assert {tuple(row[1:3]) for row in rows(done.stdout)[2:]} == {
        ("skipped", "no time left of 0 minutes"),
        ("2 skipped", "no time left of 0 minutes"),
    }


def test_the_order():
    checks = [f for _, f in inspect.getmembers(test_on_gpu, inspect.isfunction) if hasattr(f, "pytestmark")]
    checks.sort(key=lambda f: inspect.getsourcelines(f)[1])
    titles = [mark.args[0] for f in checks for mark in f.pytestmark if mark.name == "gpu"]
    assert len(titles) == len(checks) == len(set(titles))
    keys = ("driver", "fast", "host syncs", "1.7B", "8B", "four syncs", "sleep", "DDP and FSDP2", "NCCL")
    assert [key in title for key, title in zip(keys, titles, strict=True)] == [True] * len(keys)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gpu_leaves_nothing_behind(tmp_path):
    """A rehearsal of the parts that are quick on a CPU."""
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TRL_PDM_REHEARSE_GPU": "1", "TMPDIR": str(tmp_path / "temporary")}
    environment.pop("TRL_PDM_REQUIRE_VLLM", None)  # this part of it starts no engine
    some = "driver or (lengths and not tile) or small_model or two_processes or sleep"
    command = [
        "make",
        "-o",
        ".venv/.installed",
        f"BIN={Path(sys.executable).parent}",
        "gpu",
        f"PYTEST_ARGS=-k '{some}'",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    found = {row[0]: row for row in rows(done.stdout)[2:]}
    assert list(found) == [
        "driver and versions",
        "fast trainings: GPU against CPU",
        "host syncs of ours in the loss, as CUDA reports them",
        "step, 1.7B, random weights",
        "vLLM colocated: sleep mode",
        "two GPUs: DDP and FSDP2",
    ]
    assert re.search(r"all weights, 64 tokens: PDM .* time ratio", found["step, 1.7B, random weights"][2])
    assert found["vLLM colocated: sleep mode"][1] == "2 skipped"
    assert found["two GPUs: DDP and FSDP2"][1] == "1 passed, 1 skipped"
    assert not list((tmp_path / "temporary").iterdir())
