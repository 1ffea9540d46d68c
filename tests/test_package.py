"""What users get: the built package and its import, the model card, and metrics in the loggers that they use."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trl_pdm
from tests.helpers.trainers import make_trainer, run


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What `import trl_pdm` must not import
HEAVY = ("torch", "transformers", "trl", "vllm", "bitsandbytes", "matplotlib")


# ---- Building, installing, importing


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A copy of this tree, its source distribution, and the wheel that was built from that distribution."""
    folder = tmp_path_factory.mktemp("build")
    builds, runs = ("__pycache__", "*.egg-info", "build", "dist"), ("out*", "runs", "wandb", "trl_pdm_output*")
    ignored = shutil.ignore_patterns(".*", *builds, *runs)
    tree = shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    files = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "deprecated" not in (done.stdout + done.stderr).lower()
    stem = f"trl_pdm-{PROJECT['version']}"
    return files, folder / f"{stem}.tar.gz", folder / f"{stem}-py3-none-any.whl"


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(built):
    files, _, wheel = built
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == {name for name in files if name.startswith("trl_pdm/")}
    assert "trl_pdm/py.typed" in names and [name for name in metadata if name.endswith("licenses/LICENSE")]


@pytest.mark.slow
def test_source_distribution_can_run_its_tests(built):
    files, archive, _ = built
    with tarfile.open(archive) as opened:
        names = {entry.name.partition("/")[2] for entry in opened if entry.isfile()}
    generated = {name for name in names - files if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert names - generated == files
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/helpers/tiny.py"} <= names


@pytest.mark.slow
def test_wheel_works_and_imports_no_more_than_trl_does(built, tmp_path):
    """Installed alone into a fresh environment, which has only the dependencies of this one."""
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-index", "--no-deps", built[2]]
    subprocess.run(pip, check=True)
    (installed,) = tmp_path.glob("lib/python*/site-packages/trl_pdm")
    # A .pth file's folders are searched last, and the .pth files there, such as that of an editable install, ignored
    others = [path for path in sys.path if path.endswith("site-packages")]
    (installed.parent / "dependencies.pth").write_text("\n".join(others))
    code = f"""
import sys, trl_pdm
print(trl_pdm.__version__, trl_pdm.__file__)
print([name for name in {HEAVY} if name in sys.modules])
from trl import GRPOTrainer
before = set(sys.modules)
from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer, Evidence, TokenAssessment, TrustRegion
print(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names))
print(issubclass(PDMGRPOTrainer, GRPOTrainer))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    version, by_itself, beyond_trl, is_one = done.stdout.strip().splitlines()[-4:]
    assert version == f"{PROJECT['version']} {installed / '__init__.py'}"
    assert by_itself == "[]"
    assert beyond_trl == "['jaxtyping', 'trl_pdm']"  # a small package for shapes in signatures
    assert is_one == "True"


def test_version():
    assert trl_pdm.__version__ == PROJECT["version"]
    headings = re.findall(r"(?m)^## \[(.+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0][0] == PROJECT["version"], "the changelog's newest version"


def test_public_names():
    """Each can be imported, is one of this package's, and is found by completion."""
    for name in trl_pdm.__all__:
        assert getattr(trl_pdm, name).__module__.startswith("trl_pdm.") and name in dir(trl_pdm)
    with pytest.raises(AttributeError, match="module 'trl_pdm' has no attribute 'PDMTrainer'"):
        trl_pdm.PDMTrainer  # noqa: B018


# ---- The model card


def test_model_card(tmp_path):
    make_trainer(tmp_path).create_model_card(model_name="sums", dataset_name="two-digit-sums")
    card = ModelCard.load(tmp_path / "README.md")
    assert {"trl", "grpo", "pdm"} <= set(card.data.tags)
    for part in ("trained with PDM", "https://huggingface.co/papers/2607.10848", "@article{predictive2026divergence,"):
        assert part in card.text


# ---- Loggers


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with TensorBoard and trackio, the latter in a folder of its own and not in the user's."""
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        for name, module in list(sys.modules.items()):  # these have read it already, when they were imported
            if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
                patch.setattr(module, "TRACKIO_DIR", folder / "trackio")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        trainer = make_trainer(
            folder,
            report_to=["tensorboard", "trackio"],
            project="sums",
            run_name="first",
            gradient_accumulation_steps=1,
            steps_per_generation=2,
            max_steps=4,
            learning_rate=1e-2,
        )
        logs = run(trainer)
        assert len(own_metrics(logs)) == 4 and max(log["trust_region/masked"] for log in own_metrics(logs)) > 0
        return folder, logs, SQLiteStorage.get_logs("sums", "first")


def own_metrics(logs):
    """Of each step, what this package adds to TRL's metrics."""
    return [
        {name: value for name, value in log.items() if name.startswith(("trust_region/", "importance_ratio/"))}
        for log in logs
        if "loss" in log
    ]


def test_tensorboard(logged):
    folder, logs, _ = logged
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    expected = own_metrics(logs)
    for name in expected[-1]:
        written = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert written == pytest.approx({step + 1: log[name] for step, log in enumerate(expected) if name in log})


def test_trackio(logged):
    folder, logs, rows = logged
    assert (folder / "trackio" / "sums.db").exists()
    written = [
        {name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")}
        for row in rows
    ]
    assert own_metrics(written) == own_metrics(logs)
