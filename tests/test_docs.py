"""What the documents promise: numbers that a command prints, metrics and options that are declared, commands and code
that run, links that lead somewhere."""

import ast
import json
import re
import shlex
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig
from trl import ModelConfig

from tests.helpers import metrics_table
from trl_pdm import PDMGRPOConfig
from trl_pdm.rollout import with_candidates


ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))
DOCUMENTS = [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("examples/*.md")]
sys.path.insert(0, str(ROOT / "examples"))

import worked_example  # noqa: E402


# ---- The worked example


def test_page_quotes_what_the_worked_example_prints(capsys):
    worked_example.main()
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    _, quoted = page.split("<!-- printed by: python examples/worked_example.py -->\n```text\n")
    assert quoted.partition("```\n")[0] == capsys.readouterr().out


def derivative(sampled, categories):
    """Of the KL over `categories` of tokens, along `e_a - pi` in the logits: its value, and `d` by autograd."""
    logits = worked_example.POLICY.log().requires_grad_()
    pi = logits.softmax(-1)
    mu, pi_c = (torch.stack([p[list(c)].sum() for c in categories]) for p in (worked_example.BEHAVIOR, pi))
    kl = (mu * (mu / pi_c).log()).sum()
    (gradient,) = torch.autograd.grad(kl, logits)
    return kl.item(), (gradient[sampled] - gradient @ pi.detach()).item()


@pytest.mark.parametrize("sampled", range(5))
def test_worked_example_against_autograd(sampled):
    kl, change = derivative(sampled, [[j] for j in range(5)])
    result = worked_example.assess(sampled, 5)
    assert result.divergence.item() == pytest.approx(kl, abs=1e-12)
    assert result.predicted_change.item() == pytest.approx(change, abs=1e-12)
    # The step that the page measures leads where `d` says
    assert (worked_example.after_a_step(sampled) - kl) * change > 0


def test_worked_example_shows_a_tail_that_predicts_the_wrong_sign():
    _, change = derivative(4, [[4], [0], [1, 2, 3]])
    exact, aggregated = (
        worked_example.assess(4, 1, tail_estimator=name).predicted_change.item() for name in ("exact", "aggregated")
    )
    assert exact == pytest.approx(change, abs=1e-12) and exact < 0 < aggregated


def test_worked_example_has_a_token_on_which_ratio_and_prediction_disagree():
    by_ratio, by_prediction = (worked_example.assess(4, 5, direction=name) for name in ("ratio", "predictive"))
    assert by_ratio.outside and not by_ratio.keep and by_prediction.keep


# ---- The metrics


def test_table_of_metrics_is_the_declaration():
    """To make it anew: `python -m tests.helpers.metrics_table`."""
    page = metrics_table.PAGE.read_text()
    assert metrics_table.table() in page, test_table_of_metrics_is_the_declaration.__doc__
    assert metrics_table.replaced(page) == page


def test_troubleshooting_names_metrics_that_exist():
    rows = metrics_table.PAGE.read_text().partition("## Troubleshooting")[2]
    declared = {name.rpartition("/")[2] for name in re.findall(r"(?m)^\| `([\w/]+)`", metrics_table.table())}
    symptoms = [line.split("|")[1] for line in rows.splitlines() if line.startswith("| ")][1:]
    named = [name.rpartition("/")[2] for symptom in symptoms for name in re.findall(r"`([\w/]+)`", symptom)]
    assert len(named) > 10 and set(named) <= declared, set(named) - declared


# ---- Links


def anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if "://" not in link:
                yield pytest.param(document, link, id=f"{document.stem}-{link}")


@pytest.mark.parametrize("document, link", list(links()))
def test_relative_link_leads_somewhere(document, link):
    name, _, anchor = link.partition("#")
    target = document.parent / name if name else document
    assert target.exists()
    assert not anchor or anchor in anchors(target)


def test_messages_point_to_pages_that_exist():
    sources = {path: path.read_text() for path in ROOT.glob("trl_pdm/**/*.py")}
    named = {
        (path.stem, page)
        for path, text in sources.items()
        for page in re.findall(r"\(see (docs/[\w./-]+\.md)\)", text)
    }
    assert {stem for stem, _ in named} >= {"noise", "vllm", "rounding", "check", "config"}
    assert [page for _, page in named if not (ROOT / page).is_file()] == []


# ---- Pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_starts_with_the_question_that_it_answers(page):
    heading, first, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(r"# .+\?", heading) or re.fullmatch(r"\*\*[^*]+\?\*\*", first)


def test_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES if f"docs/{page.name}" not in text] == []


# ---- Code


def blocks(language, documents=DOCUMENTS):
    for document in documents:
        for number, code in enumerate(re.findall(rf"(?ms)^```{language}\n(.*?)^```$", document.read_text())):
            yield pytest.param(code, id=f"{document.stem}-{number}")


def constructed(code):
    """What every `PDMGRPOConfig(...)` in a piece of code is given."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "PDMGRPOConfig":
            yield {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_compiles_and_its_configs_construct(code, tmp_path):
    compile(code, "document", "exec")
    for given in constructed(code):
        config = PDMGRPOConfig(**given | {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False})
        assert not config.without_effect()


def test_rollout_function_of_the_page_returns_what_is_wanted():
    page = (ROOT / "docs" / "rollouts-and-tools.md").read_text()
    code = page.partition("<!-- runs in tests/test_docs.py -->\n```python\n")[2].partition("```\n")[0]
    namespace = {}
    exec(code, namespace)
    logprobs = with_candidates(namespace["rollout_func"])(["a prompt", "another"], None)["logprobs"]
    assert [[float(logprob) for logprob in sequence] for sequence in logprobs] == [
        [pytest.approx(-0.6931472, abs=1e-6)] * 2
    ] * 2
    carried = logprobs[1][1]
    assert set(carried.candidates.ids[carried.position].tolist()) >= {11, 12, 13}


# ---- Commands


def commands():
    for block in blocks("bash"):
        (code,) = block.values
        for number, line in enumerate(filter(str.strip, code.replace("\\\n", " ").splitlines())):
            yield pytest.param(shlex.split(line, comments=True), id=f"{block.id}-{number}")


def flags(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def flags_of_script(path):
    """Those that a script declares, and those of the dataclasses that its `TrlParser` reads."""
    source = (ROOT / path).read_text()
    found = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--")
    }
    if "TrlParser" in source:
        own = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign)]
        names = {getattr(node.target, "id", None) for node in own} | {"config"}
        names |= {f.name for cls in (PDMGRPOConfig, ModelConfig) for f in fields(cls)}
        names |= {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"}
        found |= {f"--{name}" for name in names}
    return found


LAUNCHER = {option for action in launch_command_parser()._actions for option in action.option_strings}
REPORT = flags_of_script("trl_pdm/report/__main__.py")


def check(words):
    """Refuse a command with a flag, file, target, module or extra that is not there."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "accelerate":
        script = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        assert rest[0] == "launch" and flags(rest[:script]) <= LAUNCHER
        check(["python", *rest[script:]])
    elif program == "python" and rest[0] == "-m":
        assert rest[1] in ("trl_pdm.report", "pytest", "tests.helpers.metrics_table"), rest
        assert rest[1] != "trl_pdm.report" or flags(word.strip("[]") for word in rest) <= REPORT
    elif program == "python":
        assert flags(rest[1:]) <= flags_of_script(rest[0]), flags(rest[1:]) - flags_of_script(rest[0])
    elif program == "make":
        targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.search(r"\[(.*)\]", " ".join(rest))
        assert rest[0] == "install" and set(asked[1].split(",")) <= set(known)
    elif program == "pytest":
        assert all((ROOT / word.partition("::")[0]).exists() for word in rest if word.startswith("tests/"))
    else:
        assert program in ("source", "git", "vllm", "cp"), program
    for word in rest:
        if re.fullmatch(r"(examples|configs|tests)/[\w/.]+\.\w+", word) and not re.search(r"NAME|RECIPE", word):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("words", list(commands()))
def test_command_has_what_it_names(words):
    if words:
        check(words)


@pytest.mark.parametrize(
    "command",
    [
        "make trian",
        "python examples/train_pdm.py --divergence_treshold 1",
        "python examples/no_such_file.py",
        "python examples/benchmarks/step.py --repeat 3",
        "accelerate launch --config_fil x examples/train_pdm.py",
        "python -m trl_pdm.report outputs --stepp 3",
        'pip install -e ".[vlm]"',
        "pytest tests/no_such_test.py",
    ],
)
def test_command_that_cannot_run_is_found(command):
    with pytest.raises((AssertionError, FileNotFoundError)):
        check(shlex.split(command))


# ---- Options

ELSEWHERE = {
    # Of other libraries, on the page that compares them
    "divergence_type", "policy_loss.loss_mode", "loss_fn", "dppo_divergence_type", "topk_kl", "binary_kl",
    # Of transformers, vLLM, PEFT, tokenizers and the environment
    "model_type",
    "CUDA_VISIBLE_DEVICES", "PYTHON", "VLLM", "ARGS", "PYTEST_ARGS", "CANARY", "TRL_PDM_REHEARSE_GPU",
}  # fmt: skip


def options():
    for document in DOCUMENTS:
        text = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
        for code in set(re.findall(r"`([^`\n]+)`", text)):
            for name in re.findall(r"(?:^|[(, ])([A-Za-z_.]+)=(?=[\w\"'\[{.-])", code):
                yield pytest.param(name, id=f"{document.stem}-{name}")


@pytest.mark.parametrize("name", sorted({o.values[0] for o in options()}))
def test_option_that_a_document_sets_exists(name):
    known = {f.name for cls in (PDMGRPOConfig, ModelConfig, LoraConfig) for f in fields(cls)}
    assert name in known | ELSEWHERE


def test_fields_in_tables_of_options_exist():
    """The first column of tables whose head is `field`."""
    known, found = {f.name for f in fields(PDMGRPOConfig)}, []
    for document in DOCUMENTS:
        for table in re.findall(r"(?m)^\| field \|.*\n\|[-|]+\n((?:\|.*\n)+)", document.read_text()):
            found += re.findall(r"(?m)^\| `(\w+)` \| `?(.+?)`? \|", table)
    defaults = {f.name: f.default for f in fields(PDMGRPOConfig)}
    assert len(found) > 10 and {name for name, _ in found} <= known
    assert {name: ast.literal_eval(default) for name, default in found} == {name: defaults[name] for name, _ in found}


def test_figures_of_rounding_are_the_measured_ones():
    page = (ROOT / "docs" / "weight-sync-and-lora.md").read_text()
    measured = json.loads((ROOT / "examples" / "benchmarks" / "results" / "weight_rounding.json").read_text())
    digits = {"change": 3, "gap": 3, "shown": 2, "weights gap": 4, "weights shown": 2, "kept": 3}
    expected = [
        f'| {kind} | {row["updates"]} | `"{row["rounding"]}"` | '
        + " | ".join(f"{row[name]:.{places}f}" if name in row else "" for name, places in digits.items())
        + " |"
        for kind, rows in measured.items()
        for row in rows
    ]
    found = [line for line in page.splitlines() if re.match(r"\| .* \| \d+ \| `\"(nearest|auto)\"` \|", line)]
    assert found == expected


# ---- The study of masks, by its committed runs and without its own code


@pytest.fixture(scope="module")
def studied():
    """`{(regime, mask, threshold): runs}`, each run in the order of the seeds."""
    cells = {}
    for path in (ROOT / "examples" / "results" / "mask_study" / "runs").glob("*.json"):
        run = json.loads(path.read_text())
        trained = [entry for entry in run["history"] if "grad_norm" in entry]
        (ended,) = [entry for entry in run["history"] if "eval_reward" in entry]

        def mean(name, trained=trained):
            values = [entry[f"trust_region/{name}"] for entry in trained if f"trust_region/{name}" in entry]
            return sum(values) / len(values) if values else None

        cell = run["cell"]
        cells.setdefault((cell["regime"], cell["mask"], cell["threshold"]), []).append(
            dict(
                seed=cell["seed"], start=trained[0]["reward"], final=ended["eval_reward"], entropy=trained[-1]["entropy"],
                words=ended["eval_writing/distinct_words"], masked=mean("masked"), drift=mean("entropy_drift"),
                drift_unmasked=mean("entropy_drift_unmasked"),
            )
        )  # fmt: skip
    return {cell: sorted(runs, key=lambda run: run["seed"]) for cell, runs in cells.items()}


def test_table_of_the_study_of_masks_is_that_of_its_runs(studied):
    expected = set()
    for (regime, mask, threshold), runs in studied.items():
        final, words, entropy = (sum(run[name] for run in runs) / len(runs) for name in ("final", "words", "entropy"))
        finals = ", ".join(f"{run['final']:.3f}" for run in runs)
        masked = "" if mask == "grpo" else f"{100 * sum(run['masked'] for run in runs) / len(runs):.0f} %"
        threshold = "" if threshold is None else f"{threshold}"
        expected.add((regime, mask, threshold, f"{final:.3f}", finals, f"{words:.1f}", f"{entropy:.1f}", masked))
    lines = (ROOT / "docs" / "evidence.md").read_text().splitlines()
    rows = [tuple(map(str.strip, line.split("|")[1:-1])) for line in lines if line.startswith(("| mild ", "| harsh "))]
    found = [row for row in rows if len(row) == 8]
    assert len(found) == len(expected) > 5 and set(found) == expected


def test_what_is_said_of_the_study_of_masks_holds_of_its_runs(studied):
    def of(regime, mask, threshold, name):
        return [run[name] for run in studied[regime, mask, threshold]]

    def mean(*cell):
        finals = of(*cell, "final")
        return sum(finals) / len(finals)

    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"PDM ended at {mean('mild', 'pdm', 0.15):.3f}, GRPO at {mean('mild', 'grpo', None):.3f}, PDM ahead" in readme
    )
    assert f"they tie: {mean('harsh', 'pdm', 0.15):.3f} and {mean('harsh', 'grpo', None):.3f}" in readme
    assert f"Without a mask it ended at {mean('mild', 'none', None):.3f}" in readme

    def ahead_of_stock(regime, mask, threshold):
        pairs = zip(of(regime, mask, threshold, "final"), of(regime, "grpo", None, "final"), strict=True)
        return [ours > theirs for ours, theirs in pairs]

    for cell in (("pdm", 0.03), ("pdm", 0.07), ("pdm", 0.15), ("dppo", 0.15)):  # "with each of three seeds"
        assert ahead_of_stock("mild", *cell) == [True] * 3
    assert sum(ahead_of_stock("mild", "none", None)) == 2  # "without a mask two of the three seeds"
    assert ahead_of_stock("harsh", "dppo", 0.15) == [True, False, True]
    assert f"{of('harsh', 'dppo', 0.15, 'final')[1]:.2f}" == "0.25"
    harsh_means = {cell[1:]: mean(*cell) for cell in studied if cell[0] == "harsh"}
    assert max(harsh_means, key=harsh_means.get) == ("grpo", None)  # "no mask is better than GRPO's clip"
    for regime in ("mild", "harsh"):  # "Either is ahead with some seeds"
        pairs = zip(of(regime, "pdm", 0.15, "final"), of(regime, "dppo", 0.15, "final"), strict=True)
        assert len({ours > theirs for ours, theirs in pairs}) == 2
    assert (
        all(words < 1.5 for words in of("harsh", "none", None, "words")) and len(studied["harsh", "none", None]) == 3
    )
    symmetric = [run for (regime, mask, _), runs in studied.items() if mask == "symmetric" for run in runs]
    masked_most = [run for t in (0.15, 0.03) for run in studied["harsh", "symmetric", t]]
    assert sorted(run["final"] < 0.2 for run in masked_most) == [False, True, True]
    assert all(0.75 < run["masked"] < 0.95 for run in masked_most)
    assert all(run["drift"] < run["drift_unmasked"] for run in symmetric)
    assert sum(run["entropy"] > 2.5 for run in symmetric) == 1

    def below_the_start(threshold, mask="pdm"):
        return sum(run["final"] < run["start"] for run in studied["harsh", mask, threshold])

    assert [below_the_start(t) for t in (0.03, 0.07, 0.5)] == [2, 1, 1] and below_the_start(None, "grpo") == 0
    assert sum(abs(run["final"] - run["start"]) < 0.01 for run in studied["harsh", "pdm", 0.15]) == 1
    assert ahead_of_stock("harsh", "pdm", 0.15) == [True, False, False]  # "ahead with one seed, behind with two"
    behind = [mean("harsh", "grpo", None) - mean("harsh", "pdm", threshold) for threshold in (0.15, 0.07)]
    assert [f"{value:.2f}" for value in behind] == ["0.02", "0.05"]  # "behind on average"
    for narrow, won in ((0.03, 5), (0.07, 3)):  # "in five of six runs", "in three of six"
        pairs = [
            pair
            for regime in ("mild", "harsh")
            for pair in zip(of(regime, "pdm", 0.15, "final"), of(regime, "pdm", narrow, "final"), strict=True)
        ]
        assert (sum(wide > other for wide, other in pairs), len(pairs)) == (won, 6)
    pdm = [run for (_, mask, _), runs in studied.items() if mask == "pdm" for run in runs]
    assert sum(run["drift"] <= run["drift_unmasked"] for run in pdm) == 1 < len(pdm) - 16  # "in all runs but one"
    harsh = [
        run["entropy"]
        for (regime, mask, _), runs in studied.items()
        if (regime, mask) == ("harsh", "pdm")
        for run in runs
    ]
    assert (
        4 < min(harsh) < max(harsh) < 9
        and 2.75 < min(of("harsh", "grpo", None, "entropy"))
        and max(of("harsh", "grpo", None, "entropy")) < 4.15
    )
    assert 3.4 < min(of("harsh", "dppo", 0.15, "entropy")) and max(of("harsh", "dppo", 0.15, "entropy")) < 4.9


def test_differences_in_the_study_of_masks_are_those_of_its_runs(studied):
    page = (ROOT / "docs" / "evidence.md").read_text()
    lines = page.partition("| regime | against | difference | interval |")[2].partition("\n\n")[0].splitlines()[2:]
    found = set()
    for line in lines:
        regime, against, difference, interval = (part.strip() for part in line.split("|")[1:-1])
        mask, _, threshold = against.partition(" at ")
        ours, theirs = (
            {run["seed"]: run["final"] for run in studied[cell]}
            for cell in ((regime, "pdm", 0.15), (regime, mask, float(threshold) if threshold else None))
        )
        differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        assert difference == f"{sum(differences) / len(differences):+.3f}"
        low, high = map(float, interval.split(" to "))
        assert min(differences) - 1e-3 < low < float(difference) < high < max(differences) + 1e-3
        found.add((regime, mask, float(threshold) if threshold else None))
    assert found == {cell for cell, runs in studied.items() if len(runs) > 1 and cell[1:] != ("pdm", 0.15)}
