"""The report as its readers meet it: on the command line and in a browser."""

import base64
import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from io import BytesIO
from xml.etree import ElementTree

import matplotlib.axes
import pandas as pd
import pytest
from PIL import Image

from tests.report.runs import synthetic_run, write_log, write_page
from trl_pdm.metrics import METRICS
from trl_pdm.report import ReportError, write_report
from trl_pdm.report.__main__ import main
from trl_pdm.report.curves import COLOURS, FIGURES, explain
from trl_pdm.report.records import record_files
from trl_pdm.report.runs import differences, load_run


@pytest.fixture(scope="module")
def page(trained):
    _, folder, _ = trained
    main([str(folder)])
    return folder / "report.html"


@pytest.mark.slow
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

    def where_logged(*names, scale=1):
        return [logged(name, scale) for name in names if any(name in entry for entry in trainer.state.log_history)]

    both_themes = {title: lines[: len(lines) // 2] for title, lines in drawn.items()}
    assert both_themes == {
        "Reward": [logged("reward")],
        "Divergence from the behaviour policy": [
            logged("trust_region/divergence_mean"), logged("trust_region/divergence_max")
        ],
        "Outside the trust region, and masked": [
            *(logged(f"trust_region/{name}", 100) for name in ("outside", "masked_positive", "masked_negative")),
            *where_logged("trust_region/outside_half", "trust_region/outside_double", scale=100),
        ],
        "Entropy of the policy": [
            logged("entropy"), *where_logged("trust_region/entropy_drift", "trust_region/entropy_drift_unmasked")
        ],
        "Predicted change and ratio point opposite ways": [logged("trust_region/direction_disagreement", 100)],
        "Right about where the divergence went": [
            logged(f"trust_region/realized_alignment_{name}", 100) for name in ("predictive", "ratio")
        ],
        "Importance ratio": [logged("importance_ratio/mean"), logged("importance_ratio/max")],
        "Importance ratio truncated": [logged("importance_ratio/truncated", 100)],
        "Time": [logged("step_time")],
    }  # fmt: skip
    pictures = {file.name for file in (copy / "report").iterdir()}
    assert pictures == {f"{name}.png" for name in set(FIGURES) - {"sync"}} | {"tokens.svg"}


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


@pytest.mark.slow
def test_runs_are_overlaid_in_colours_of_their_own(page, tmp_path):
    folder = page.parent
    mine, other = tmp_path / "_mine", write_log(tmp_path / "b<b>$x_1^2", [{"step": s, "reward": s} for s in range(9)])
    shutil.copytree(folder, mine)
    main([str(mine), "--compare", str(other), "--step", "4"])
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
    assert load_run(tmp_path, "run").last_step == 4
    write_log(tmp_path, [{"step": 5, "reward": 1.0}])
    assert load_run(tmp_path, "run").last_step == 5


def test_a_run_alone_shows_more_than_several_in_one_figure(tmp_path):
    names = [f"trust_region/{name}" for name in ("outside", "outside_half", "outside_double")]
    log = [dict.fromkeys(names, 0.1) | {"step": step} for step in (1, 2)]
    runs = [load_run(write_log(tmp_path / name, log), name) for name in "ab"]
    (plot,) = FIGURES["mask"].plots
    assert plot.logged(runs[:1]) == names and plot.logged(runs) == names[:1]


def test_each_line_of_each_figure_is_explained_by_the_declaration_of_its_metric(trained, page):
    names = [name for figure in FIGURES.values() for plot in figure.plots for name in plot.metrics]
    declared = {metric.name: metric.meaning for metric in METRICS}
    assert {name for name in names if "/" in name} <= set(declared)
    run = load_run(trained[1], "run")
    shown = [name for name in names if run.series(name)[0]]
    text = re.sub("</?code>", "`", html.unescape(page.read_text()))
    assert len(shown) > 10 and all(text.count(f"<div>`{name}` ") == 1 for name in shown)
    for name in set(shown) & set(declared):
        assert f"<div>`{name}` {declared[name]}</div>" in text
    assert explain(FIGURES["sync"], [run]) == []


def test_settings_in_which_runs_differ_are_named(tmp_path):
    same = {"beta": 0.0, "output_dir": "anywhere", "reward_funcs": ["accuracy"]}
    settings = [
        same | {"divergence_threshold": 0.15, "direction": "predictive", "learning_rate": 1e-6},
        same | {"divergence_threshold": 0.03, "direction": "ratio", "learning_rate": 1e-6, "output_dir": "elsewhere"},
        {"learning_rate": 1e-6},  # of an older version, say
    ]
    for name, values in zip("abc", settings, strict=True):
        write_log(tmp_path / name, LOG)
        (tmp_path / name / "run_settings.json").write_text(json.dumps(values))
    assert differences([load_run(tmp_path / name, name) for name in "abc"]) == {
        "divergence_threshold": ["0.15", "0.03", "\u2013"],
        "direction": ['"predictive"', '"ratio"', "\u2013"],
    }
    text = write_report(tmp_path / "a", [tmp_path / "b"]).read_text()
    assert "<th>divergence_threshold</th><td>0.15</td><td>0.03</td>" in text and "learning_rate" not in text
    assert "Settings in which they differ" not in write_report(tmp_path / "a").read_text()


@pytest.mark.slow
def test_without_a_direction_the_legend_speaks_of_none(tmp_path):
    folder = synthetic_run(tmp_path / "run", steps=1, completions=1, length=4)
    (file,) = record_files(folder).values()
    table = pd.read_parquet(file)
    table.attrs["direction"] = "none"
    table.to_parquet(file)
    text = write_report(folder).read_text()
    assert "</span> outside: held back</li>" in text and "leads further out" not in text
    assert "What is outside is held back, wherever its update leads." in text


@pytest.mark.slow
def test_tokens_are_a_picture_too_those_first_of_which_most_was_masked(tmp_path):
    folder = synthetic_run(tmp_path / "run", steps=1, completions=3, length=3)
    (file,) = record_files(folder).values()
    table = pd.read_parquet(file)
    table["outside"] = [False, True, False] + [True] * 3 + [False] * 3
    table["keep"] = ~table["outside"] | (table["position"] == 2)
    table["text"] = ["<a>", "b", "c", "d", "&", "f", "g", "h\n", "i"]
    table["prompt"] = ["one?", None, None, "two?", None, None, "three?", None, None]
    table.to_parquet(file)
    write_report(folder)
    picture = folder / "report" / "tokens.svg"
    groups = list(ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}g"))
    drawn = [(group.get("class"), group.find("{*}text").text) for group in groups]
    assert [state for state, text in drawn if text == "token"] == ["inside", "outside", "masked"]
    assert drawn[6:] == [
        ("plain", "two?"), ("masked", "d"), ("masked", "&"), ("outside", "f"),
        ("plain", "one?"), ("inside", "<a>"), ("masked", "b"), ("inside", "c"),
        ("plain", "three?"), ("inside", "g"), ("inside", "h\u21b5"), ("inside", "i"),
    ]  # fmt: skip
    lines = [group.find("{*}text").get("y") for group in groups[6:]]
    assert [lines.count(y) for y in dict.fromkeys(lines)] == [4, 4, 3, 1], "a newline ends a line"
    (folder / "token_assessments" / file.name).unlink()
    write_report(folder)
    assert not picture.exists(), "an earlier report's"


@pytest.mark.parametrize("left", ["", "{", "[1]", None])
def test_unreadable_settings_are_none(tmp_path, left):
    write_log(tmp_path, LOG)
    if left is not None:
        (tmp_path / "run_settings.json").write_text(left)
    assert load_run(tmp_path, "run").settings == {}


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


@pytest.mark.slow
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


def look_at(browser, page, theme="light", width=1280, media=""):
    media = {"media": media, "features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def state(row):
    return "masked" if not row.keep else "outside" if row.outside else "inside"


@pytest.mark.slow
@pytest.mark.parametrize("theme, width", [("light", 1280), ("dark", 1280), ("light", 360)])
def test_the_page_fits_and_is_complete(browser, page, trained, theme, width):
    look_at(browser, page, theme, width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    pictures = browser.execute_script("return [...document.images].map(i => [i.naturalWidth, i.currentSrc])")
    assert len(pictures) == len(list((page.parent / "report").glob("*.png"))) and all(w > 800 for w, _ in pictures)
    loaded = {base64.b64decode(source.removeprefix("data:image/png;base64,")) for _, source in pictures}
    saved = {file.read_bytes() for file in (page.parent / "report").glob("*.png")}
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_tooltip_of_a_completions_last_token_is_not_cut_off(browser, page):
    """It stands over the end of its completion, which clips what it holds, and over the next one."""
    from selenium.webdriver.support.ui import WebDriverWait

    look_at(browser, page, width=360)
    last = browser.find_elements("css selector", "article .token:last-of-type")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", last)
    ink = browser.execute_script("return getComputedStyle(document.body).color")

    def stands_over_the_end(
        _,
    ) -> bool:  # articles get their real height when they are scrolled to: until then it moves
        left, top, width, height = map(
            round,
            browser.execute_script(
                "const r = arguments[0].querySelector('.tip').getBoundingClientRect(); "
                "return [r.left, r.top, r.width, r.height]",
                last,
            ),
        )
        screen = Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        corners = [(left + width - 3, y) for y in (top + 2, top + height - 3)]
        return all("rgb({}, {}, {})".format(*screen.getpixel(corner)) == ink for corner in corners)

    WebDriverWait(browser, 10).until(stands_over_the_end)


@pytest.mark.slow
def test_printed_it_is_light_and_without_tooltips(browser, page):
    look_at(browser, page, theme="dark", media="print")
    focused = browser.find_elements("class name", "token")[0]
    browser.execute_script("arguments[0].focus()", focused)
    assert browser.execute_script("return getComputedStyle(document.body).color") == "rgb(31, 35, 40)"
    assert not tip(browser, focused)
    shown = browser.execute_script("return [...document.images].map(i => i.currentSrc == i.src)")
    assert shown and all(shown), "the light figures are the fallback"
    for kind in ("outside", "masked"):
        key = f"getComputedStyle(document.querySelector('.token.{kind}'))"
        assert browser.execute_script(f"return {key}.printColorAdjust") == "exact"


@pytest.mark.slow
def test_a_long_run_loads_in_two_seconds(browser, tmp_path):
    """1,000 steps and 16 completions, of 500 tokens each: the best of three, as other processes take their time too."""
    page = write_report(synthetic_run(tmp_path / "long", steps=1000, completions=16, length=500, recorded=3))
    seconds = []
    for _ in range(3):
        look_at(browser, page)
        loaded = "return performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"
        seconds.append(browser.execute_script(loaded))
    assert len(browser.find_elements("css selector", "article")) == 16 and 0 < min(seconds) < 2


HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "&amp;",
    "</pre>\n<img src=x onerror=alert(1)>",
    "\x1b\u202e\"'",
    "",
    "\n",
]


@pytest.mark.slow
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
    assert "&lt;script&gt;" in (folder / "report.html").read_text()
