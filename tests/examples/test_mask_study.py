"""The study of masks on an instruction-tuned model: its cells, what it makes of runs, and a short run of the whole command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from PIL import Image
from trl import TrlParser

from tests.helpers.processes import forked


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
study = pytest.importorskip("mask_study", reason="needs vLLM", exc_type=ImportError)
from tasks import sums_once, warm_start  # noqa: E402


def arguments(folder, **changed):
    return study.StudyArguments(model="models/small", output_dir=str(folder), **changed)


def test_masks_of_a_divergence_run_at_each_threshold_and_the_others_once(tmp_path):
    args = arguments(tmp_path, tasks=["writing"], regimes=["mild"], thresholds=[0.02, 0.5], seeds=[3, 4])
    found = study.cells(args)
    assert len(found) == (4 * 2 + 3) * 2 == len({study.path_of(cell, args) for cell in found})
    assert {cell["mask"] for cell in found if cell["threshold"] is None} == {"grpo", "grpo_truncated", "none"}
    assert study.settings_of("pdm", 0.02)["divergence_threshold"] == 0.02
    # Pinsker: TV <= sqrt(KL / 2)
    assert study.settings_of("symmetric_tv", 0.02)["divergence_threshold"] == pytest.approx(0.1)
    assert study.settings_of("symmetric_tv", 0.5)["divergence_threshold"] == pytest.approx(0.5)


def write(args, cell, curve, distinct=(None, None), **changed):
    """A finished run of 20 steps, with rollouts before the steps 0 and 8, and the rewards of `curve`."""
    first, second, last = ({"reward": score, "grad_norm": 1.0} for score in curve)
    logged = [{"step": 4, "entropy": 2.0, **first}, {"step": 8, "entropy": 1.0, "grad_norm": 1.0}]
    logged += [{"step": 12, "entropy": 1.5, **second}, {"step": 20, "eval_reward": last["reward"]}]
    if distinct[0]:
        logged[0]["writing/distinct_words"], logged[-1]["eval_writing/distinct_words"] = distinct
    settings = {name: study.comparable(args)[name] for name in study.SETTINGS} | changed
    path = study.path_of(cell, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(cell=cell, settings=settings, seconds=90, history=logged)))


def test_a_study_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    args = arguments(tmp_path, masks=["pdm", "none"], tasks=["writing"], regimes=["mild"], seeds=[0, 1])
    first, *others = study.cells(args)
    for cell in others:
        write(args, cell, [0.5, 0.6, 0.7])

    class Stopped(Exception):
        pass

    started = []

    def in_place(function, *call):
        if function is study.run:
            started.append(call[0])
            raise Stopped

    monkeypatch.setattr(study, "in_a_process", in_place)
    with pytest.raises(Stopped):
        study.main(args)
    assert started == [first]
    # 90 seconds each
    assert "1 of 4 runs left, 1.5 minutes each (the mean of 3 finished): 0.0 hours." in capsys.readouterr().out


def test_runs_of_other_settings_are_refused(tmp_path):
    args = arguments(tmp_path)
    cell = study.cells(args)[0]
    write(args, cell, [0.5, 0.6, 0.7], learning_rate=1.0)
    with pytest.raises(ValueError, match="was run with `learning_rate` 1.0, and 0.0012 is asked for"):
        study.finished(cell, args)


@pytest.mark.parametrize(
    "curve, distinct, collapsed",
    [
        ([0.5, 0.7, 0.9], (12, 7), False),
        ([0.5, 0.7, 0.9], (12, 5), True),
        ([0.5, 0.7, 0.39], (None, None), True),
        ([0.5, 0.7, 0.7], (None, None), False),
    ],
)
def test_collapse_is_what_the_docstring_says(tmp_path, curve, distinct, collapsed):
    args = arguments(tmp_path)
    cell = study.cells(args)[0]
    write(args, cell, curve, distinct)
    row = study.row_of(study.finished(cell, args))
    assert row["collapsed"] == collapsed and row["final"] == curve[-1]
    # Trapezoids of 8 and of 12 steps
    assert row["area"] == pytest.approx((8 * (curve[0] + curve[1]) / 2 + 12 * (curve[1] + curve[2]) / 2) / 20)
    assert [row[f"score_{step}"] for step in (0, 8, 20)] == curve and row["entropy_8"] == 1.0


def test_a_study_that_is_not_finished_can_be_looked_at(tmp_path, capsys):
    args = arguments(tmp_path, masks=["pdm", "none"], tasks=["writing"], seeds=[0, 1], processes=0)
    for cell in study.cells(args)[:-2]:
        write(args, cell, [0.5, 0.6, 0.7])
    study.main(args)
    assert "2 of 8 runs left" in capsys.readouterr().out and len(pd.read_csv(tmp_path / "runs.csv")) == 6
    assert Image.open(tmp_path / "score.png").size[0] > 300


@pytest.mark.parametrize("named, compared", [("pdm", 0.15), ("pdm@0.03", 0.03)])
def test_of_several_thresholds_the_reference_is_at_the_first_unless_it_names_one(named, compared, tmp_path):
    thresholds, finals = [0.15, 0.03], {0.15: 0.7, 0.03: 0.6, None: 0.5}
    args = arguments(
        tmp_path, masks=["pdm", "none"], tasks=["writing"], regimes=["mild"], seeds=[0, 1], thresholds=thresholds,
        reference=named, processes=0,
    )  # fmt: skip
    for cell in study.cells(args):
        write(args, cell, [0.5, 0.5, finals[cell["threshold"]]])
    study.main(args)
    compared_with = pd.read_csv(tmp_path / "comparisons.csv").query("measure == 'final'").set_index("against")
    (other,) = set(thresholds) - {compared}
    expected = {"none": finals[compared] - 0.5, f"pdm@{other}": finals[compared] - finals[other]}
    assert compared_with["difference"].to_dict() == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_whole_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "multiprocessing", SimpleNamespace(get_context=lambda method: forked()))
    model = tmp_path / "small"
    warm_start(model, sums_once(), accuracy=0.0)
    flags = "--tasks writing --regimes mild --masks pdm grpo --seeds 0 --max_steps 8 --learning_rate 1e-2 --held_out 4"
    flags += " --lora_rank 2 --max_completion_length 12 --thresholds 0.01"
    flags += f" --model {model} --output_dir {tmp_path / 'study'}"
    (args,) = TrlParser(study.StudyArguments).parse_args_and_config(flags.split())
    for left in (2, 0):  # the second time there is nothing left to run
        study.main(args)
        assert f"{left} of 2 runs left" in capsys.readouterr().out
    runs = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "study" / "runs").iterdir()}
    pdm, grpo = runs["writing-mild-pdm-0.01-seed0"], runs["writing-mild-grpo-seed0"]
    assert (pdm["trainer"], grpo["trainer"]) == ("PDMGRPOTrainer", "GRPOTrainer")
    assert pdm["settings"]["model"] == "small" and pdm["versions"]["trl"] and pdm["seconds"] > 0
    names = [{name for entry in run["history"] for name in entry} for run in (pdm, grpo)]
    assert "trust_region/masked" in names[0] and not any(name.startswith("trust_region/") for name in names[1])
    assert all({"eval_reward", "entropy", "writing/words", "eval_writing/distinct_words"} <= found for found in names)
    assert "clip_ratio/region_mean" in names[1], "stock's own clip"
    first = [next(entry for entry in run["history"] if "reward" in entry) for run in (pdm, grpo)]
    assert first[0]["writing/words"] == first[1]["writing/words"], "both start from the same model"
    assert any(entry.get("trust_region/masked", 0) > 0 for entry in pdm["history"])
    table = pd.read_csv(tmp_path / "study" / "runs.csv")
    assert list(table["mask"]) == ["pdm", "grpo"] and list(table.filter(regex="^score_")) == [
        "score_0",
        "score_4",
        "score_8",
    ]
    assert all(Image.open(tmp_path / "study" / f"{name}.png").size[0] > 300 for name in ("score", "entropy"))
