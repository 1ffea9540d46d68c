"""TRL's GPU path against its CPU path: the compact layout and the real Triton kernels, run by Triton's interpreter."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu import trainings


ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this system"),
]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What came of each training on the GPU path. They run in one process beside those on the CPU path."""
    folder = tmp_path_factory.mktemp("interpreted")
    command = [sys.executable, "-m", "tests.gpu.trainings", str(folder)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield lambda name: outcome(process, folder, name)
        finally:
            process.kill()
            process.wait()


def outcome(process, folder, name):
    path = folder / f"{name}.pt"
    while not path.exists():
        try:
            code = process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        if not path.exists():
            pytest.fail(f"exit code {code}:\n{(folder / 'output').read_text()[-3000:]}")
    return torch.load(path)


@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_the_gpu_path_trains_as_the_cpu_path(tmp_path, interpreted, name):
    with trainings.counted_rows() as every_position:
        expected = trainings.train(tmp_path, **trainings.TRAININGS[name] | trainings.ONE_ROLLOUT)
    actual = interpreted(name)

    assert actual["kernels"] == ("InterpretedFunction", "InterpretedFunction")
    assert len(actual["rows"]) == len(every_position)
    assert all(few <= all_ for few, all_ in zip(actual["rows"], every_position, strict=True))
    assert sum(actual["rows"]) < sum(every_position), "the compact layout leaves positions out"

    # A bfloat16 logit that the two round to different sides is off by 2^-8 of its size
    rtol, atol = (5e-2, 2e-3) if name in trainings.HALF_PRECISION else (2e-4, 2e-6)
    steps = [line for line in expected["logs"] if "grad_norm" in line]
    assert len(steps) == 2 and any(line.get("trust_region/outside") for line in steps), "the trust region must act"
    trainings.assert_logged_alike(actual["logs"], expected["logs"], rtol, atol)
    assert torch.equal(actual["start"], expected["start"])
    moved = (expected["end"] - expected["start"]).norm()
    assert moved > 1e-3
    assert (actual["end"] - expected["end"]).norm() < max(rtol, 1e-4) * moved


def test_a_kernel_that_computes_something_else_is_noticed(tmp_path, interpreted):
    """The comparison above can fail: against a training that differs by a temperature it does."""
    actual = interpreted("temperature")
    other = trainings.train(
        tmp_path, **trainings.TRAININGS["temperature"] | trainings.ONE_ROLLOUT | {"temperature": 0.61}
    )
    assert (actual["end"] - other["end"]).norm() > 1e-3 * (other["end"] - other["start"]).norm()
