"""Runs that are killed, interrupted or short of disk: the last complete checkpoint continues as if nothing had happened.

Each run is a process of its own, forked from one that has imported everything.
"""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests import fault_run
from tests.fault_run import COMPLETE, INCOMPLETE
from tests.helpers.processes import forked


pytestmark = pytest.mark.slow
TIMEOUT = 120  # seconds


@pytest.fixture(scope="module")
def processes():
    return forked()


@pytest.fixture
def start(processes, tmp_path):
    """Run, and return the exit code and the error."""

    def start(fault=None, resume=None, folder=tmp_path, **kwargs):
        Path(folder, "error.txt").unlink(missing_ok=True)
        process = processes.Process(target=fault_run.train, args=(str(folder), fault, resume), kwargs=kwargs)
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            pytest.fail(f"{fault} {resume}: still running")
        error = Path(folder, "error.txt")
        return process.exitcode, error.read_text() if error.exists() else None

    return start


@pytest.fixture(scope="module")
def uninterrupted(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = processes.Process(target=fault_run.train, args=(str(folder),))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    result = torch.load(folder / "result.pt", weights_only=True)
    masked = [log["trust_region/masked"] for log in result["logs"][:-1]]
    assert any(masked[:2]) or any(masked[2:4]) and any(masked[4:]), "the runs must be PDM's"
    return result


def timeless(log):
    return {name: value for name, value in log.items() if "time" not in name and "per_second" not in name}


def assert_as_if_uninterrupted(folder, uninterrupted):
    result = torch.load(folder / "result.pt", weights_only=True)
    torch.testing.assert_close(result["weights"], uninterrupted["weights"], rtol=0, atol=0)
    torch.testing.assert_close(result["optimizer"], uninterrupted["optimizer"], rtol=0, atol=0)
    assert result["schedule"] == uninterrupted["schedule"]
    assert result["rollouts"] == uninterrupted["rollouts"][1:], (
        "the prompts go on where they were, and the sampling too"
    )
    *logs, summary = map(timeless, result["logs"])
    *expected, expected_summary = map(timeless, uninterrupted["logs"])
    assert logs == expected and len(logs) == fault_run.STEPS
    assert summary["step"] == expected_summary["step"]


@pytest.mark.parametrize("fault", ["generation", "loss"])
def test_killed_between_checkpoints(start, tmp_path, uninterrupted, fault):
    assert start(fault) == (-9, None)
    assert (tmp_path / COMPLETE).exists() and not (tmp_path / INCOMPLETE).exists()
    assert start(resume=True) == (0, None)
    assert_as_if_uninterrupted(tmp_path, uninterrupted)


@pytest.mark.parametrize("fault", ["weights", "optimizer", "state"])
def test_killed_while_writing_a_checkpoint(start, tmp_path, uninterrupted, fault):
    assert start(fault) == (-9, None)
    assert_the_last_complete_checkpoint_is_good(start, tmp_path, uninterrupted)


@pytest.mark.parametrize("size", [100_000, 600_000], ids=["weights", "optimizer"])
def test_disk_full_while_writing_a_checkpoint(start, tmp_path, uninterrupted, size):
    """By a limit on the size of files, which the kernel enforces as it does the end of a disk: the write fails."""
    code, error = start(f"full disk:{size}")
    assert code == 1 and error, "writing must not fail silently"
    assert_the_last_complete_checkpoint_is_good(start, tmp_path, uninterrupted)


def assert_the_last_complete_checkpoint_is_good(start, folder, uninterrupted):
    assert (folder / INCOMPLETE).exists()
    # Named, it is refused. Never is it trained on from
    code, error = start(resume=str(folder / INCOMPLETE))
    assert code == 1 and error and not (folder / "result.pt").exists()
    assert start(resume=True) == (0, None), "the last complete one is found"
    assert_as_if_uninterrupted(folder, uninterrupted)


def assert_ended_promptly(folder, ended):
    noted = json.loads((folder / "interrupted.json").read_text())
    assert ended - noted["at"] < 20
    assert not list(filter(os.path.exists, noted["in memory"])), "nothing is left in shared memory"


def test_interrupted_from_the_keyboard(start, tmp_path, uninterrupted):
    code, error = start("generation:interrupt")
    assert_ended_promptly(tmp_path, time.time())
    assert code == 1 and error.startswith("KeyboardInterrupt")
    assert start(resume=True) == (0, None)
    assert_as_if_uninterrupted(tmp_path, uninterrupted)


@pytest.mark.vllm
def test_killed_in_a_weight_sync_and_interrupted_in_the_next_run(start, tmp_path):
    """With vLLM and an adapter in shared memory: the next start removes what a killed run left there."""
    before = set(fault_run.in_shared_memory())
    assert start("sync", use_vllm=True) == (-9, None)
    (left,) = set(fault_run.in_shared_memory()) - before
    code, error = start("engine:interrupt", resume=True, use_vllm=True)
    assert_ended_promptly(tmp_path, time.time())
    assert code == 1 and error.startswith("KeyboardInterrupt")
    assert left not in json.loads((tmp_path / "at start.json").read_text()) and not os.path.exists(left)
    assert (tmp_path / COMPLETE / "adapter_model.safetensors").exists()
