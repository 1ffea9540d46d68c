"""The benchmark of what rounding hides: a real run of one kind, and what it makes of results that are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


SCRIPT = Path(__file__).parents[2] / "examples" / "benchmarks" / "weight_rounding.py"


def command(*flags):
    done = subprocess.run([sys.executable, str(SCRIPT), *map(str, flags)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.vllm
def test_the_gap_of_one_kind(tmp_path):
    out, task = tmp_path / "gap.json", "full @ 1e-05"
    flags = ["gap", "--kinds", "full", "--learning_rates", "1e-5", "--after", "2", "--out", out]
    command(*flags)
    nearest, auto = json.loads(out.read_text())[task]
    assert (nearest["rounding"], auto["rounding"], auto["updates"]) == ("nearest", "auto", 2)
    # An adaptive optimizer moves each weight by about the learning rate, wherever its gradient points
    assert 0 < auto["kept"] < nearest["kept"] < 1
    assert auto["weights shown"] == pytest.approx(1, abs=0.05) and 0 < auto["weights gap"] < auto["change"]
    assert auto["shown"] == pytest.approx(1, abs=0.15) and auto["seconds"] > 0
    # The largest tensor, rounded, has to lie somewhere
    assert 0 < nearest["MB"] <= auto["MB"]
    # What is there is not run again
    nearest["gap"] = 77.125
    out.write_text(json.dumps({task: [nearest, auto]}))
    assert "77.1250" in command(*flags)


@pytest.mark.slow
def test_curves_that_are_there_are_drawn(tmp_path):
    metrics = ("weight_sync/logp_difference_mean", "trust_region/outside", "reward")
    curve = {"step": [1, 2, 3], "seconds": 1.0} | {name: [0.1, None, 0.3] for name in metrics}
    out, figure = tmp_path / "curves.json", tmp_path / "curves.png"
    out.write_text(json.dumps(dict.fromkeys(("nearest", "stochastic", "float32 engine"), curve)))
    command("curves", "--out", out, "--figure", figure)
    assert Image.open(figure).size[0] > 300
