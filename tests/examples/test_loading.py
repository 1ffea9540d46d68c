"""A reward, a tool or a dataset of one's own is found by its name, or refused in one sentence."""

import json
import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
import trl.rewards

from tests.helpers import tiny


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import loading  # noqa: E402
import tasks  # noqa: E402


REWARDS = """
def length(completions, **kwargs):
    return [float(len(chat[-1]["content"])) for chat in completions]
def needs_colour(completions, colour, **kwargs):
    return [1.0] * len(completions)
def positional(texts, /):
    return [1.0]
def of_few(completions):
    return [1.0]
CONSTANT = 3
"""
CHAT = [[{"role": "assistant", "content": "four"}]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_rewards.py", "importable_rewards.py"):  # there is a module `my_rewards` of the recipes
        Path(name).write_text(REWARDS)
    Path("broken.py").write_text("import nothing_of_this_name\n")
    return tmp_path


def test_rewards_by_every_kind_of_name(folder):
    names = [
        "accuracy_reward",
        "exact_match",
        "my_rewards.py:length",
        "importable_rewards.length",
        "think_format_reward",
    ]
    rewards = loading.load_rewards(names, [1.0, 2.0, 3.0, 4.0, 5.0], 100)
    assert rewards[0] is trl.rewards.accuracy_reward and rewards[4] is trl.rewards.think_format_reward
    assert rewards[1] is tasks.exact_match
    assert [reward(completions=CHAT) for reward in rewards[2:4]] == [[4.0], [4.0]]
    (punishment,) = loading.load_rewards(["get_soft_overlong_punishment"], None, 100)
    assert punishment(completion_ids=[[0] * 80, [0] * 90, [0] * 101]) == [0, -0.5, -1]


def test_a_dotted_path_makes_the_current_folder_importable_once(folder):
    for _ in range(2):
        loading.load_function("importable_rewards.length", "reward_funcs")
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize(
    "name, says",
    [
        ("acuracy_reward", "'acuracy_reward' is none of accuracy_reward"),
        ("nowhere.py:length", "there is no file 'nowhere.py'"),
        ("my_rewards.py:lenght", "'my_rewards.py' has no 'lenght'"),
        ("my_rewards.py:CONSTANT", "'my_rewards.py' has no function 'CONSTANT'"),
        ("no_package.of_mine", "importing 'no_package' fails: ModuleNotFoundError"),
        (
            "broken.py:length",
            "importing 'broken.py' fails: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("my_rewards.py:of_few", "write `def of_few(completions, **kwargs)`"),
        ("my_rewards.py:positional", "write `def positional(completions, **kwargs)`"),
    ],
)
def test_rewards_that_cannot_be_used(folder, name, says):
    with pytest.raises(loading.TaskError) as error:
        loading.load_rewards([name], None, 100)
    assert says in str(error.value) and f"`reward_funcs` {name!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_are_as_many_as_rewards(folder):
    with pytest.raises(loading.TaskError, match="`reward_weights` has 1 values, and there are 2 `reward_funcs`"):
        loading.load_rewards(["exact_match", "accuracy_reward"], [1.0], 100)


def test_a_reward_names_the_column_it_misses(folder):
    rows = tasks.chats([tasks.addition(1, 2)])
    with pytest.raises(loading.TaskError, match="`needs_colour`.*'prompt', 'solution'.*'colour'"):
        loading.check_columns(loading.load_rewards(["my_rewards.py:needs_colour"], None, 9), rows)
    loading.check_columns(loading.load_rewards(["exact_match"], None, 9), rows)


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet", "rows.csv", "a folder"])
def test_files_and_folders_of_problems(folder, kind):
    rows = pd.DataFrame({"question": ["1+1=", "1+2="], "answer": [2, 3], "level": ["easy", "hard"]})
    if kind == "a folder":
        (folder / kind).mkdir()
        rows.to_json(folder / kind / "train.jsonl", orient="records", lines=True)
    else:
        write = {"jsonl": lambda p: rows.to_json(p, orient="records", lines=True), "parquet": rows.to_parquet}
        write.get(kind.split(".")[1], lambda p: rows.to_csv(p, index=False))(kind)
    dataset, graded = loading.load_problems(str(folder / kind))
    assert graded is None and list(dataset) == ["train"]
    assert dataset["train"]["prompt"][1] == [{"role": "user", "content": "1+2="}]
    assert dataset["train"]["solution"][:] == ["2", "3"] and dataset["train"]["level"][:] == ["easy", "hard"]


@pytest.mark.parametrize(
    "rows, says",
    [
        ([{"text": "1+1="}], "none of the columns ('prompt', 'problem', 'question') is among ['text']"),
        ([{"prompt": "1+1="}, {"prompt": " "}], "row 2 of 'train' has an empty `prompt`"),
        ([{"prompt": [{"role": "user", "content": ""}]}], "row 1 of 'train' has an empty `prompt`"),
        ([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": None}], "row 2 of 'train' has no `answer`"),
    ],
)
def test_problems_that_cannot_be_used(folder, rows, says):
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(loading.TaskError) as error:
        loading.load_problems("rows.jsonl")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_row_too_long_for_the_engine_is_named():
    tokenizer = tiny.tokenizer()  # one token a character
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rows = tasks.chats([{"prompt": "1+1=", "solution": "2"}, {"prompt": "12+13=", "solution": "25"}])
    loading.check_lengths(rows, "train", tokenizer, 4, 10)
    with pytest.raises(loading.TaskError, match="row 2 of 'train'.* 6 tokens.*`max_completion_length` 4.* 9"):
        loading.check_lengths(rows, "train", tokenizer, 4, 9)


def test_names_that_are_no_dataset(folder):
    Path("rows.txt").write_text("1+1=")
    for name, says in {
        "missing.jsonl": "there is no such file",
        "./missing": "there is no such file or folder",
        "rows.txt": "ends in none of",
        "reasoning_gym:sum_chain": "Reasoning Gym has .*'chain_sum'",
    }.items():
        with pytest.raises(loading.TaskError, match=says):
            loading.load_problems(name)
    with pytest.raises(loading.TaskError, match="`dataset_config` '.min_term: 2.' does not fit.*min_term"):
        loading.load_problems("reasoning_gym:chain_sum", "{min_term: 2}")


def test_reasoning_gym_grades_its_own_problems():
    dataset, graded = loading.load_problems("reasoning_gym:chain_sum", "{size: 40, max_terms: 3}", seed=3)
    again, _ = loading.load_problems("reasoning_gym:chain_sum", "{size: 40, max_terms: 3}", seed=3)
    assert dataset["train"].to_list() == again["train"].to_list()
    questions = {split: {chat[-1]["content"] for chat in rows["prompt"]} for split, rows in dataset.items()}
    assert not questions["train"] & questions["test"] and len(dataset["train"]) == 40
    row = dataset["train"][0]
    expression = row["prompt"][-1]["content"].split(":")[1].strip(" =")
    right = str(eval(expression))
    assert row["solution"] == right
    texts = [right, f"It is <answer> {right} </answer>.", f"{right} <answer>nothing</answer>", "nothing"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert graded(completions=completions, entry=[row["entry"]] * 4, prompts=None) == [1, 1, 0, 0]
    loading.check_columns([graded], dataset["train"])


def test_the_example_says_so_in_one_line_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    """The model does not exist: had it been looked for, that would be the error."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}')
    command = ["train_pdm.py", "--model_name_or_path", "no_model", "--dataset_name", "rows.jsonl"]
    command += ["--reward_funcs", "mine.py:length", "--bf16", "false", "--use_cpu"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / "train_pdm.py"), run_name="__main__")
    # What Python writes to the standard error, and ends with code 1
    assert (
        end.value.code == f"train_pdm.py: `reward_funcs` 'mine.py:length': there is no file 'mine.py' in '{tmp_path}'."
    )
    assert capsys.readouterr().out == ""
