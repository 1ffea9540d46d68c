"""Two runs on one machine: an engine in a process of its own needs no port that others could want."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trl.generation import vllm_generation

from tests.gpu import trainings
from tests.helpers.processes import forked
from tests.helpers.trainers import make_trainer
from trl_pdm.rollout import rendezvous


ROOT = Path(__file__).parents[2]
STAND_IN = trainings.Engine
ENGINE = trainings.TRAININGS["truncated sampling, whole support"]


@pytest.fixture
def unset(monkeypatch):
    for name in rendezvous.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def variables():
    return {name: os.environ.get(name) for name in rendezvous.VARIABLES}


def started_with(folder, monkeypatch):
    """The variables with which the engine of a trainer starts."""
    seen = {}

    def engine(**kwargs):
        seen.update(variables())
        return STAND_IN(**kwargs)

    monkeypatch.setattr(trainings, "Engine", engine)
    with trainings.engine_stand_in():
        before = variables()
        trainings.make(folder, **ENGINE)
        assert variables() == before, "accelerate would take the next trainer for one of several processes"
    return seen


def test_each_engine_has_a_port_of_its_own(tmp_path, monkeypatch, unset):
    first, second = (started_with(tmp_path, monkeypatch) for _ in range(2))
    assert first["RANK"] == "0" and first["WORLD_SIZE"] == "1"
    ports = {int(seen["MASTER_PORT"]) for seen in (first, second)}
    assert len(ports) == 2 and 29500 not in ports
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("localhost", port))


@pytest.mark.parametrize("port", ["0", "auto", ""])
def test_a_port_that_is_left_to_us(tmp_path, monkeypatch, unset, port):
    monkeypatch.setenv("MASTER_PORT", port)
    assert int(started_with(tmp_path, monkeypatch)["MASTER_PORT"]) not in (0, 29500)


def test_a_port_that_is_set_is_kept(tmp_path, monkeypatch, unset):
    monkeypatch.setenv("MASTER_PORT", "24681")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    seen = started_with(tmp_path, monkeypatch)
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("127.0.0.1", "24681")


def test_several_processes_keep_their_meeting_place(monkeypatch, unset):
    monkeypatch.setenv("MASTER_PORT", "0")
    with rendezvous.rendezvous(num_processes=2):
        assert os.environ["MASTER_PORT"] == "0"
        os.environ["RANK"] = "1"
    assert os.environ["RANK"] == "1"


def train_beside(mine, other):
    """Both choose their ports before either listens: the marker files hold them until the other is as far."""
    for name in rendezvous.VARIABLES:
        os.environ.pop(name, None)
    make_engine = vllm_generation.LLM

    def engine(**kwargs):
        (mine / "starts").touch()
        while not (other / "starts").exists():
            time.sleep(0.05)
        return make_engine(**kwargs, enforce_eager=True)  # compiling takes the most of its time

    vllm_generation.LLM = engine
    options = dict(use_vllm=True, vllm_max_model_length=32, vllm_gpu_memory_utilization=0.3, max_completion_length=6)
    trainer = make_trainer(mine, gradient_accumulation_steps=1, max_steps=2, **options)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.slow
@pytest.mark.vllm
def test_two_trainings_at_the_same_time_both_end_well(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    processes = [forked().Process(target=train_beside, args=folders) for folders in ((one, other), (other, one))]
    try:
        for folder, process in zip((one, other), processes, strict=True):
            folder.mkdir()
            process.start()
        for process in processes:
            process.join(500)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


# ---- The suite

AFTER_A_FAILURE = """
import os
from accelerate import Accelerator, PartialState

def test_that_meets_another_run():
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="{port}")
    PartialState(cpu=True)

def test_after_it():
    assert Accelerator(cpu=True).num_processes == 1
    assert "RANK" not in os.environ and os.environ["MASTER_PORT"] != "{port}"
"""


@pytest.mark.slow
def test_a_failure_leaves_no_state_for_the_next_test(tmp_path, unset):
    """accelerate's state is half made where its port is taken, and serves no one after that."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        (tmp_path / "test_pair.py").write_text(AFTER_A_FAILURE.format(port=taken.getsockname()[1]))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-rA"]
        done = subprocess.run(
            [*command, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert "EADDRINUSE" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout, done.stdout
