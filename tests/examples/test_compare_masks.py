"""The comparison of masks: its engine, its tasks, what it counts and concludes, and a short run of the whole command."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from trl import TrlParser

from tests.helpers import tiny
from tests.helpers.processes import InThisProcess
from trl_pdm import Evidence, TrustRegion


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import compare_masks  # noqa: E402


# ---- The engine


@pytest.fixture
def policy():
    return tiny.model(41).eval()


def make_engine(policy, precision="float32", sync_every=1, **changed):
    args = compare_masks.StudyArguments(max_completion_length=12, temperature=1.3, **changed)
    engine = compare_masks.Engine(policy, args, precision, sync_every)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer = SimpleNamespace(model=policy, accelerator=accelerator, processing_class=tokenizer)
    return lambda prompts: engine([[{"role": "user", "content": text}] for text in prompts], trainer), engine


def logps_without_cache(model, prompt, completion, temperature=1.3):
    """`(T, V)`, from one forward over the whole sequence alone."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_reported_logprobs_are_the_engines_own(policy, precision):
    rollout, engine = make_engine(policy, precision, divergence_top_k=5)
    torch.manual_seed(0)
    output = rollout(["12+34=", "7+8=", "ab=", "9"] * 4)  # of unequal lengths: padded on the left
    assert len({len(ids) for ids in output["prompt_ids"]}) > 1
    assert len({len(ids) for ids in output["completion_ids"]}) > 1, "some completions should end early"
    for prompt, tokens, logps, top_ids, top_logps in zip(*output.values(), strict=True):
        expected = logps_without_cache(engine.model, prompt, tokens)
        torch.testing.assert_close(
            torch.tensor(logps), expected[range(len(tokens)), tokens], atol=1e-4, rtol=0, check_dtype=False
        )
        torch.testing.assert_close(torch.tensor(top_logps), expected.topk(5)[0], atol=1e-4, rtol=0, check_dtype=False)
        torch.testing.assert_close(
            torch.tensor(top_logps), expected.gather(1, torch.tensor(top_ids)), atol=1e-4, rtol=0
        )
        assert 1 not in tokens[:-1] and (tokens[-1] == 1 or len(tokens) == 12)


def test_engine_samples_from_the_distribution_it_reports(policy):
    rollout, engine = make_engine(policy, divergence_top_k=5)
    torch.manual_seed(0)
    n = 4000
    output = rollout(["12+34="] * n)
    expected = logps_without_cache(engine.model, output["prompt_ids"][0], output["completion_ids"][0][:1])[0].exp()
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in output["completion_ids"]]), minlength=41)
    chi_square = ((counts - n * expected) ** 2 / (n * expected))[expected > 5 / n].sum()
    assert chi_square < 40 + 5 * 80**0.5  # mean plus five standard deviations, for at most 40 degrees of freedom


def test_greedy_completions_are_those_of_transformers(policy):
    prompts = tiny.tokenizer()(["12+34=", "70+88="])["input_ids"]
    tokens = compare_masks.generate(policy, prompts, 10, eos_token_id=1)[0]
    wanted = policy.generate(torch.tensor(prompts), max_new_tokens=10, do_sample=False)[:, 6:].tolist()
    assert tokens == [row[: row.index(1) + 1] if 1 in row else row for row in wanted]


def test_stale_engine_is_stale_until_its_next_sync(policy):
    rollout, engine = make_engine(policy, sync_every=3)
    head = policy.get_input_embeddings().weight
    same = []
    for _ in range(5):
        with torch.no_grad():
            head.add_(0.1 * torch.randn_like(head))  # an optimizer step
        rollout(["12+34="])
        same.append(torch.equal(engine.model.get_input_embeddings().weight, head))
    assert same == [True, False, False, True, False]


def test_int8_engine_differs_from_the_policy_by_less_than_half_a_step(policy):
    rollout, engine = make_engine(policy, "int8")
    rollout(["12+34="])
    for mine, exact in zip(engine.model.parameters(), policy.parameters(), strict=True):
        if exact.dim() < 2:
            assert torch.equal(mine, exact)
            continue
        step = exact.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127  # the padding token is all zeros
        assert 0 < (mine - exact).abs().max()
        assert ((mine - exact).abs() <= step / 2 + 1e-7).all()
        assert max(len(row.unique()) for row in mine) <= 255
        torch.testing.assert_close(mine / step, (mine / step).round(), atol=1e-3, rtol=0)
    ids = torch.arange(2, 30)[None]
    assert (engine.model(ids).logits - policy(ids).logits).abs().mean() > 1e-3


def test_bf16_engine_holds_bf16_weights(policy):
    rollout, engine = make_engine(policy, "bfloat16")
    rollout(["12+34="])
    for mine, exact in zip(engine.model.parameters(), policy.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, exact.bfloat16())


# ---- What is counted and concluded


def test_both_masks_are_counted_whichever_trains():
    torch.manual_seed(0)
    n, vocab = 4000, 50
    behavior, policy = (torch.randn(n, vocab).log_softmax(-1) for _ in range(2))
    ids = torch.stack([torch.randperm(vocab)[:6] for _ in range(n)])
    behavior, logps, sum_sq = behavior.gather(1, ids), policy.gather(1, ids), policy.exp().square().sum(1)
    behavior[: n // 4, 0] = torch.nan  # padding
    evidence = Evidence(
        behavior_logps=behavior,
        policy_logps=logps,
        valid=torch.ones_like(ids, dtype=torch.bool),
        vocab_size=vocab,
        policy_sum_sq=sum_sq,
    )
    advantage = torch.randn(n)
    region = TrustRegion(proximity="ratio", direction="ratio", threshold_low=0.2, threshold_high=0.3)
    counts = torch.zeros(4)
    assessed = compare_masks.counting(counts, 0.1)(region, evidence, advantage)
    expected = region.assess(evidence, advantage)
    assert torch.equal(assessed.keep, expected.keep), "what trains is not changed"
    # By the definitions, from the divergence and its predicted change
    log_ratio = logps[:, 0] - behavior[:, 0]
    outside = expected.divergence > 0.1
    pdm, dppo = outside & (advantage * expected.predicted_change > 0), outside & (advantage * log_ratio > 0)
    assert counts.tolist() == [(pdm & ~dppo).sum(), (dppo & ~pdm).sum(), (pdm & dppo).sum(), n - n // 4]
    assert counts.min() > 20


@pytest.mark.parametrize(
    "curve, collapsed",
    [
        ([0.5, 0.6, 0.7], False),
        ([0.5, 0.6, 0.41], False),
        ([0.5, 0.6, 0.39], True),  # more than 10 points below the start
        ([0.1, 0.6, 0.31], False),
        ([0.1, 0.6, 0.29], True),  # below half of the best
    ],
)
def test_collapse_is_what_the_docstring_says(curve, collapsed):
    assert compare_masks.is_collapsed(np.array(curve)) == collapsed


def test_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    intervals = [compare_masks.interval(rng.normal(0.3, 1, 10)) for _ in range(400)]
    covered = np.mean([low <= 0.3 <= high for low, high in intervals])
    assert abs(covered - 0.95) < 0.035  # three standard errors of 400 trials


def known_runs():
    noise = np.linspace(-0.02, 0.02, 8)
    finals = {"pdm": 0.5 + noise, "dppo": 0.5 + noise[::-1], "grpo": 0.3 + noise, "none": 0.6 - noise}
    rows = [
        dict(task="addition", regime="stale", mask=mask, seed=seed, final=final, area=final)
        for mask, values in finals.items()
        for seed, final in enumerate(values)
    ]
    return pd.DataFrame(rows).sample(frac=1, random_state=0)  # pairs are found by seed, not by order


def test_statement_on_known_data():
    comparisons = compare_masks.compare(known_runs(), measures=["final"])
    rows = comparisons.set_index("against")
    assert rows["verdict"].to_dict() == {"dppo": "ties", "grpo": "helps", "none": "hurts"}
    assert rows["difference"].to_dict() == pytest.approx({"dppo": 0, "grpo": 0.2, "none": -0.1})
    assert rows.loc["grpo", ["low", "high"]].tolist() == pytest.approx([0.2, 0.2]), "paired: the noise cancels"
    text = compare_masks.statement(comparisons, seeds=8)
    against_grpo = text[text.index("PDM against grpo") :].splitlines()[1:4]
    assert against_grpo[0].startswith("  helps in 1 of 1: addition/stale (+0.200")
    assert [line.strip() for line in against_grpo[1:]] == ["hurts in 0 of 1", "ties in 0 of 1"]
    assert "few seeds" not in text and "few seeds" in compare_masks.statement(comparisons, seeds=5)


# ---- The whole command


FLAGS = "--tasks addition --regimes stale --masks pdm none --seeds 0 1 --max_steps 6 --batch_size 16 --held_out 32"
FLAGS += " --warm_start_accuracy 0.03 --learning_rate 2e-3 --max_completion_length 4"


@pytest.fixture(scope="module")
def short_study(tmp_path_factory):
    folder, output = tmp_path_factory.mktemp("study"), io.StringIO()
    parser = TrlParser(compare_masks.StudyArguments)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(compare_masks, "ProcessPoolExecutor", InThisProcess)
        compare_masks.main(*parser.parse_args_and_config([*FLAGS.split(), "--output_dir", str(folder)]))
    return folder, output.getvalue()


@pytest.mark.slow
def test_study_writes_its_runs_tables_and_figure(short_study):
    folder, output = short_study
    runs, summary = pd.read_csv(folder / "runs.csv"), pd.read_csv(folder / "summary.csv")
    cells = runs[["task", "regime", "mask", "seed"]].itertuples(index=False, name=None)
    assert list(cells) == [("addition", "stale", mask, seed) for mask in ("pdm", "none") for seed in (0, 1)]
    curves = runs.filter(regex=r"^accuracy_\d+$")
    assert list(curves) == [f"accuracy_{step}" for step in range(7)]
    assert (runs["final"] == curves["accuracy_6"]).all() and curves.stack().between(0, 1).all()
    assert np.allclose(runs["area"], (curves.sum(axis=1) - (curves["accuracy_0"] + curves["accuracy_6"]) / 2) / 6)
    assert runs.groupby("seed")["accuracy_0"].nunique().eq(1).all(), "all masks start from the same model"
    of_pdm, of_none = (runs[runs["mask"] == mask] for mask in ("pdm", "none"))
    assert (of_none["masked"] == 0).all() and (of_pdm["masked"] > 0).any()
    assert np.allclose(of_pdm["masked"], of_pdm["masked_positive"] + of_pdm["masked_negative"])
    assert runs["divergence_mean"].gt(0).all() and runs["tail_mass"].between(0.001, 0.9).all()
    for row in summary.itertuples():
        mine = runs[runs["mask"] == row.mask]
        assert row.final == pytest.approx(mine["final"].mean()) and row.both == pytest.approx(mine["both"].mean())
    assert "PDM against none, final accuracy:" in output and "few seeds" in output
    assert Image.open(folder / "curves.png").size[0] > 500


@pytest.mark.slow
def test_study_is_deterministic_for_its_seeds(short_study, tmp_path):
    """As a command, whose runs are in a process of their own."""
    folder, output = short_study
    command = [sys.executable, str(ROOT / "examples" / "compare_masks.py"), *FLAGS.split(), "--processes", "1"]
    done = subprocess.run([*command, "--output_dir", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    again = done.stdout
    assert again[again.index("PDM against") :] == output[output.index("PDM against") :]
    for name in ("runs.csv", "summary.csv", "comparisons.csv"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
