"""Token records against full logits, and the report as its readers meet it: on the command line and in a browser."""

import base64
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html import escape
from io import BytesIO
from pathlib import Path

import matplotlib.axes
import pandas as pd
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tests.test_trainer import TEMPERATURE, B, make_batch, make_trainer, trainer_gradients
from tests.test_trainer_run import run
from trl_pdm import PDMGRPOConfig, report
from trl_pdm.report import COLOURS, ReportError, record_files, write_report
from trl_pdm.token_records import FOLDER, TokenRecords, token_texts


SAMPLE, THRESHOLD = 2, 0.1
# Two optimizer steps of two micro-batches a rollout, each rollout twice; logged every other step
SCHEDULE = dict(
    gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, max_steps=8, learning_rate=2e-3,
    lr_scheduler_type="constant", divergence_threshold=THRESHOLD,
)  # fmt: skip


# ---- Token records


def expected_tokens(model, batch):
    """Every token of a micro-batch's first completions from full logits, by autograd in float64."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1][:, -length:].double()
    tokenizer, rows = tiny.tokenizer(), []
    for b, t in batch["completion_mask"][:SAMPLE].nonzero().tolist():
        head = batch["behavior_topk_ids"][b, t]
        mu = batch["behavior_topk_logps"][b, t][head >= 0].double().exp()
        head = head[head >= 0].long()
        z = (logits[b, t] / TEMPERATURE).requires_grad_()
        pi = z.softmax(-1)
        p, q = (torch.cat([part, 1 - part.sum()[None]]) for part in (mu, pi[head]))
        divergence = (p * (p / q).log()).sum()
        (gradient,) = torch.autograd.grad(divergence, z)
        sampled, advantage = batch["completion_ids"][b, t], batch["advantages"][b].item()
        change = (gradient[sampled] - (pi.detach() * gradient).sum()).item()
        outside = divergence.item() > THRESHOLD
        completion = batch["completion_ids"][b][batch["completion_mask"][b].bool()]
        rows.append(
            {
                "completion": b,
                "position": t,
                "token_id": sampled.item(),
                "trained_on": True,
                "advantage": advantage,
                "behavior_logprob": mu[0].log().item(),
                "policy_logprob": pi[sampled].log().item(),
                "divergence": divergence.item(),
                "predicted_change": change,
                "outside": outside,
                "keep": not (outside and advantage * change > 0),
                "text": tokenizer.convert_ids_to_tokens(sampled.item()),
                "prompt": tokenizer.decode(batch["prompt_ids"][b][batch["prompt_mask"][b].bool()]) if t == 0 else None,
                "reward": tiny.count_ones([tokenizer.decode(completion, skip_special_tokens=True)])[0],
            }
        )
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with records, saved by a checkpoint, and what full logits say of its micro-batches."""
    folder = tmp_path_factory.mktemp("report") / "a_run"
    trainer = make_trainer(
        folder, **SCHEDULE, log_token_assessments=SAMPLE, log_realized_alignment=True, logging_steps=2,
        save_strategy="steps", save_steps=8,
    )  # fmt: skip
    last_of_step, compute_loss = {}, trainer.compute_loss

    def watched(model, inputs, *args, **kwargs):
        last_of_step[trainer.state.global_step + 1] = expected_tokens(model, inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
    run(trainer)
    return trainer, folder, last_of_step


def test_records_are_what_full_logits_say(trained):
    _, folder, expected = trained
    files = record_files(folder)
    assert list(files) == [2, 4, 6, 8]
    tables = {step: pd.read_parquet(file) for step, file in files.items()}
    for step, table in tables.items():
        assert (table.pop("step") == step).all()
        pd.testing.assert_frame_equal(
            table, expected[step][table.columns], rtol=1e-3, atol=1e-6, check_dtype=False, check_column_type=False
        )
    tokens = pd.concat(tables)
    assert 0 < (~tokens["keep"]).sum() < tokens["outside"].sum() < len(tokens), "all three states, or a test of little"
    assert tokens["reward"].nunique() > 2
    assert tables[8].attrs["divergence_threshold"] == THRESHOLD


def test_recording_changes_nothing(trained, tmp_path):
    trainer, *_ = trained
    without = make_trainer(tmp_path, **SCHEDULE)
    run(without)
    for expected, actual in zip(without.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(actual, expected)
    assert not (tmp_path / FOLDER).exists(), "records are opt-in"


def recorded(trainer, batch):
    trainer.state.global_step = 3
    trainer_gradients(trainer, batch)
    trainer.log({})
    return pd.read_parquet(Path(trainer.args.output_dir) / FOLDER / "step_000003.parquet")


def test_tokens_of_tools_and_without_logprob_are_told_apart(tmp_path):
    trainer = make_trainer(tmp_path, log_token_assessments=B + 1, divergence_threshold=0.05)
    batch, _ = make_batch(trainer.model)  # a tool's token in the first completion, the third
    batch["behavior_topk_logps"][1, 0] = math.nan
    table = recorded(trainer, batch).set_index(["completion", "position"])
    assert table.index.tolist() == list(map(tuple, batch["completion_mask"].nonzero().tolist()))
    assert table.index[~table["trained_on"]].tolist() == [(0, 2)]
    assert table.index[table["behavior_logprob"].isna()].tolist() == [(1, 0)] and table.loc[(1, 0), "keep"]
    page = write_page(tmp_path)
    assert page.count('class="token untrained"') == 1 and page.count("sampled without a logprob") == 1
    assert ">not trained on</li>" in re.sub(r"</span> ", ">", page)


def test_evaluation_and_other_processes_record_nothing(tmp_path):
    trainer = make_trainer(tmp_path, log_token_assessments=1)
    batch, _ = make_batch(trainer.model)
    trainer.model.eval()
    trainer.compute_loss(trainer.model, batch)
    trainer.log({})
    trainer.model.train()
    trainer.log({})
    trainer._token_records = TokenRecords(trainer.args, writes=False)
    trainer_gradients(trainer, batch)
    trainer.log({})
    assert not (tmp_path / FOLDER).exists()


def test_a_crash_while_writing_leaves_no_record(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, log_token_assessments=1)
    batch, _ = make_batch(trainer.model)

    def dies(self, path, **kwargs):
        Path(path).write_bytes(b"PAR1 and no more")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", dies)
        with pytest.raises(KeyboardInterrupt):
            recorded(trainer, batch)
    assert list((tmp_path / FOLDER).iterdir()) and not record_files(tmp_path)
    assert len(recorded(trainer, batch)) == batch["completion_mask"][0].sum()
    assert list(record_files(tmp_path)) == [3]


def as_pretrained(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_tokenizer():
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return as_pretrained(tokenizer)


def word_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({"\u2581so": 0, "\u2581it": 1, "\u2581goes": 2}, unk_token="\u2581so"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return as_pretrained(tokenizer)


@pytest.mark.parametrize(
    "tokenizer, text, expected",
    [
        (byte_tokenizer, "a \u00e9\u20ac!", ["a", " ", "", "\u00e9", "", "", "\u20ac", "!"]),
        (byte_tokenizer, "\U0001f600", ["", "", "", "\U0001f600"]),
        (word_tokenizer, "so it goes so", ["so", " it", " goes", " so"]),
    ],
)
def test_token_texts_make_up_the_text(tokenizer, text, expected):
    tokenizer = tokenizer()
    assert token_texts(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == expected


def test_bytes_that_are_no_character_are_shown_soon():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("\u20ac")[1:2] * 6 + tokenizer.encode("ab")
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids) and "\ufffd" in "".join(texts[:4]) and texts[-1] == "b"


def test_rewards_are_weighted_and_of_the_own_process():
    records = TokenRecords(PDMGRPOConfig(use_cpu=True, log_token_assessments=1), writes=True)
    batch = {"completion_ids": torch.zeros(3, 5, dtype=torch.long)}
    of_all_processes = {"a": [1.0, math.nan, 3.0, 7.0, 7.0, 7.0], "b": [10.0, math.nan, math.nan, 7.0, 7.0, 7.0]}
    records.tag("train", batch, of_all_processes, torch.tensor([1.0, 0.5]))
    assert batch["reward"].tolist() == pytest.approx([6.0, math.nan, 3.0], nan_ok=True)


def test_rewards_of_functions_that_trl_takes_for_one_are_left_out():
    records = TokenRecords(PDMGRPOConfig(use_cpu=True, log_token_assessments=1), writes=True)
    batch = {"completion_ids": torch.zeros(2, 5, dtype=torch.long)}
    records.tag("train", batch, {"partial": [1.0, 2.0, 3.0, 4.0]}, torch.tensor([1.0, 1.0]))
    assert "reward" not in batch


@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_the_field_refuses_what_is_no_number_of_completions(value):
    with pytest.raises(ValueError, match="`log_token_assessments` must be a number of completions, or 0 for none"):
        PDMGRPOConfig(use_cpu=True, log_token_assessments=value)


# ---- The report


def write_log(folder, log_history):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"seed": 0, "log_history": log_history}))
    return folder


def write_page(folder, **kwargs):
    """The page of a folder that has records, with the log of one step."""
    return write_report(write_log(folder, [{"step": 3, "reward": 1.0}]), **kwargs).read_text()


@pytest.fixture(scope="module")
def page(trained):
    _, folder, _ = trained
    report.main([str(folder)])
    return folder / "report.html"


def test_curves_show_what_was_logged(trained, tmp_path, monkeypatch):
    trainer, folder, _ = trained
    drawn, plot = {}, matplotlib.axes.Axes.plot

    def watched(self, steps, values, *args, **kwargs):
        drawn.setdefault(self.figure.get_suptitle(), []).append((steps, values))
        return plot(self, steps, values, *args, **kwargs)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", watched)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_report(copy)

    def logged(name, scale=1):
        entries = [entry for entry in trainer.state.log_history if name in entry]
        assert entries, name
        return [entry["step"] for entry in entries], [entry[name] * scale for entry in entries]

    both_themes = {title: lines[: len(lines) // 2] for title, lines in drawn.items()}
    assert both_themes == {
        "Reward": [logged("reward")],
        "Divergence from the behaviour policy": [
            logged("trust_region/divergence_mean"), logged("trust_region/divergence_max")
        ],
        "Outside the trust region, and masked": [
            logged(f"trust_region/{name}", 100) for name in ("outside", "masked_positive", "masked_negative")
        ],
        "Predicted change and ratio point opposite ways": [logged("trust_region/direction_disagreement", 100)],
        "Right about where the divergence went": [
            logged(f"trust_region/realized_alignment_{name}", 100) for name in ("predictive", "ratio")
        ],
        "Importance ratio": [logged("importance_ratio/mean"), logged("importance_ratio/max")],
        "Importance ratio truncated": [logged("importance_ratio/truncated", 100)],
        "Time": [logged("step_time")],
    }  # fmt: skip
    assert {file.stem for file in (copy / "report").iterdir()} == set(report.FIGURES) - {"sync"}


def test_no_figure_without_data(tmp_path):
    log = [{"step": step, "reward": step / 10, "weight_sync/logp_difference_mean": None} for step in (1, 2)]
    folder = write_log(tmp_path / "run", [*log, {"step": 2, "train_runtime": 1.0}])
    (folder / "report").mkdir()
    (folder / "report" / "mask.png").write_bytes(b"an earlier report's")
    text = write_report(folder).read_text()
    assert [file.name for file in (folder / "report").iterdir()] == ["reward.png"]
    assert text.count("<img") == 1 and "No token records." in text


def colours_of(png):
    image = Image.open(png).convert("RGB")
    return {f"#{r:02X}{g:02X}{b:02X}" for _, (r, g, b) in image.getcolors(1 << 24)}


def test_runs_are_overlaid_in_colours_of_their_own(page, tmp_path):
    folder = page.parent
    mine, other = tmp_path / "_mine", write_log(tmp_path / "b<b>$x_1^2", [{"step": s, "reward": s} for s in range(9)])
    shutil.copytree(folder, mine)
    report.main([str(mine), "--compare", str(other), "--step", "4"])
    text = (mine / "report.html").read_text()
    assert all(f"<th>{name}</th>" in text for name in ("_mine", "b&lt;b&gt;$x_1^2")) and "<b>$" not in text
    assert "Step 4, of steps 2, 4, 6, 8." in text and "Tokens of _mine" in text
    first, second, third = COLOURS["light"][:3]
    assert {first, second} <= colours_of(mine / "report" / "reward.png")
    assert third not in colours_of(mine / "report" / "reward.png")
    assert second not in colours_of(folder / "report" / "reward.png"), "one run alone has one colour"


def test_of_several_logs_the_one_that_goes_furthest_counts(tmp_path):
    for name, steps in (("checkpoint-2", 2), ("checkpoint-30", 30), ("checkpoint-4", 4)):
        (tmp_path / name).mkdir()
        state = json.dumps({"log_history": [{"step": step, "reward": 0.5} for step in range(1, steps + 1)]})
        (tmp_path / name / "trainer_state.json").write_text(state[:99] if steps == 30 else state)  # cut short
    (tmp_path / "trainer_state.json").write_text("[]")
    assert report.load_run(tmp_path, "run").last_step == 4
    write_log(tmp_path, [{"step": 5, "reward": 1.0}])
    assert report.load_run(tmp_path, "run").last_step == 5


LOG = [{"step": 1, "reward": 0.0}]


@pytest.mark.parametrize(
    "log_history, kwargs, says",
    [
        (None, {}, "has no logs that can be read. Looked for .* trainer_state.json, metrics.json and checkpoint-"),
        ([], {}, "has no logs that can be read"),
        (LOG, {"step": 7}, "has no token records of step 7. Train with `log_token_assessments`"),
        (LOG, {"compare": ["nowhere"]}, "nowhere is not a folder. Pass the output_dir of a run"),
        (LOG, {"compare": ["x"] * 6}, "7 runs are more than can be told apart. Draw at most 6"),
    ],
)
def test_errors_say_what_was_looked_for(tmp_path, log_history, kwargs, says):
    if log_history is not None:
        write_log(tmp_path, log_history)
    with pytest.raises(ReportError, match=says):
        write_report(tmp_path, **kwargs)
    assert not (tmp_path / "report.html").exists()


def test_a_step_without_records_names_those_that_have_them(trained):
    with pytest.raises(ReportError, match="step 3. There are those of steps 2, 4, 6, 8"):
        write_report(trained[1], step=3)


def test_the_command_line_ends_with_one_line(tmp_path):
    command = [sys.executable, "-m", "trl_pdm.report", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"python -m trl_pdm.report: .*nowhere is not a folder\. .*\n", done.stderr)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"pip install 'trl-pdm\[report\]'"):
        write_page(tmp_path)


# ---- In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium: where there is none its test is skipped, and fails under TRL_PDM_REQUIRE_BROWSER=1."""
    program, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if not (program and driver):
        reason = "chromium and chromedriver are not installed: the report's page is not looked at"
        (pytest.fail if os.environ.get("TRL_PDM_REQUIRE_BROWSER") == "1" else pytest.skip)(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    for flag in f"{flags} disable-component-update disable-sync disable-dev-shm-usage".split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def look_at(browser, page, theme="light", width=1280):
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def state(row):
    return "masked" if not row.keep else "outside" if row.outside else "inside"


@pytest.mark.parametrize("theme, width", [("light", 1280), ("dark", 1280), ("light", 360)])
def test_the_page_fits_and_is_complete(browser, page, trained, theme, width):
    look_at(browser, page, theme, width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    pictures = browser.execute_script("return [...document.images].map(i => [i.naturalWidth, i.currentSrc])")
    assert len(pictures) == len(list((page.parent / "report").iterdir())) and all(w > 800 for w, _ in pictures)
    loaded = {base64.b64decode(source.removeprefix("data:image/png;base64,")) for _, source in pictures}
    saved = {file.read_bytes() for file in (page.parent / "report").iterdir()}
    assert (loaded == saved) == (theme == "light") and len(loaded) == len(saved)
    for png in loaded:  # drawn on the page's own background
        background = "rgb({}, {}, {})".format(*Image.open(BytesIO(png)).convert("RGB").getpixel((0, 0)))
        assert background == browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    table = pd.read_parquet(record_files(page.parent)[8])
    shown = browser.execute_script("return [...document.querySelectorAll('.token')].map(t => t.className)")
    assert Counter(shown) == Counter(f"token {state(row)}" for row in table.itertuples())
    text = browser.execute_script(
        "return [...document.querySelectorAll('.completion')].map("
        "c => [...c.querySelectorAll('.token')].map(t => t.firstChild.data).join(''))"
    )
    assert text == table.groupby("completion")["text"].sum().tolist()
    prompts = browser.execute_script("return [...document.querySelectorAll('.prompt')].map(p => p.textContent)")
    assert prompts == table["prompt"].dropna().tolist()


def tip(browser, token):
    """What a token's tooltip shows, '' while it is hidden."""
    return token.find_element("class name", "tip").text


def test_tooltips_come_by_mouse_and_keyboard(browser, page):
    from selenium.webdriver import ActionChains, Keys

    look_at(browser, page, width=360)
    rows = list(pd.read_parquet(record_files(page.parent)[8]).itertuples())
    tokens = browser.find_elements("class name", "token")
    browser.execute_script("arguments[0].focus()", tokens[0])
    ActionChains(browser).send_keys(Keys.TAB).perform()
    assert browser.switch_to.active_element == tokens[1]
    assert tip(browser, tokens[1]) and not tip(browser, tokens[0])
    one_of_each = {state(row): number for number, row in enumerate(rows)}
    assert {"outside", "masked"} <= set(one_of_each)
    for kind, number in one_of_each.items():
        row = rows[number]
        ActionChains(browser).move_to_element(tokens[number]).perform()
        shown = tip(browser, tokens[number])
        facts = re.findall(r"(divergence|predicted change|ratio|probability|sampled,|advantage) ([-+.e\d]+)", shown)
        assert shown.startswith(kind)
        assert {name: float(value) for name, value in facts} == pytest.approx(
            {
                "divergence": row.divergence,
                "predicted change": row.predicted_change,
                "ratio": math.exp(row.policy_logprob - row.behavior_logprob),
                "probability": math.exp(row.behavior_logprob),
                "sampled,": math.exp(row.policy_logprob),
                "advantage": row.advantage,
            },
            rel=0.06,
        )
        assert f"token {row.position} " in shown
        width = browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= 360, "a tooltip widens the page"


HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "&amp;",
    "</pre>\n<img src=x onerror=alert(1)>",
    "\x1b\u202e\"'",
    "",
    "\n",
]


def test_hostile_text_is_text(browser, trained, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(trained[1], folder)
    file = record_files(folder)[8]
    table = pd.read_parquet(file)
    table.loc[: len(HOSTILE) - 1, "text"] = HOSTILE
    table.loc[0, "prompt"] = HOSTILE[0] + HOSTILE[2]
    table.to_parquet(file)
    look_at(browser, write_report(folder))
    assert browser.get_log("browser") == []
    assert browser.title == folder.name
    assert (
        browser.execute_script("return document.scripts.length + document.querySelectorAll('[onerror]').length") == 0
    )
    assert browser.find_element("tag name", "h1").text == folder.name
    tokens = browser.find_elements("class name", "token")
    shown = [browser.execute_script("return arguments[0].firstChild.data", token) for token in tokens[: len(HOSTILE)]]
    assert shown == [
        *HOSTILE[:2],
        HOSTILE[2].replace("\n", "\u21b5\n"),
        HOSTILE[3].replace("\x1b", "\u241b"),
        "\u25af",
        "\u21b5",
    ]
    prompt = browser.find_element("class name", "prompt").get_attribute("textContent")
    assert prompt == (HOSTILE[0] + HOSTILE[2]).replace("\n", "\u21b5\n")
    assert escape(HOSTILE[0]) in (folder / "report.html").read_text()
