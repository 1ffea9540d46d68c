"""Loads what a user brings to the example by name: rewards, tools and problems.

If something is wrong with them, a `TaskError` says so in one sentence, before a model or an engine is loaded.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path

import tasks
import trl.rewards
import yaml
from datasets import Dataset, DatasetDict, load_dataset


OVERLONG = "get_soft_overlong_punishment"
NAMED = (
    *(name for name in trl.rewards.__all__ if name.endswith("_reward") and not name.startswith("get_")),
    "exact_match",
)
QUESTIONS, ANSWERS = ("prompt", "problem", "question"), ("solution", "answer")
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
REASONING_GYM, PROBLEMS = "reasoning_gym:", 2000
# The keywords by which TRL calls a reward, besides the columns of the problems
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class TaskError(ValueError):
    """A reward, tool or dataset cannot be used. The message says why, and what to do."""


# ---- Functions


def load_function(name, flag):
    """The function that `my_file.py:function` or `package.module.function` names."""
    in_file = ":" in name
    path, _, attribute = name.rpartition(":" if in_file else ".")
    if not path or not attribute:
        raise TaskError(f"`{flag}` {name!r} is neither `file.py:function` nor `package.module.function`.")
    try:
        if in_file:
            if not Path(path).is_file():
                raise TaskError(f"`{flag}` {name!r}: there is no file {path!r} in {os.getcwd()!r}.")
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            if spec is None:
                raise TaskError(f"`{flag}` {name!r}: {path!r} is no Python file.")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            module = importlib.import_module(path)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"`{flag}` {name!r}: importing {path!r} fails: {type(error).__name__}: {error}.") from error
    function = getattr(module, attribute, None)
    if not callable(function) or not hasattr(function, "__name__"):
        found = "has no" if function is None else "has no function"
        raise TaskError(f"`{flag}` {name!r}: {path!r} {found} {attribute!r}.")
    return function


def load_reward(name, max_completion_length):
    """The reward that `name` stands for, one of TRL's or the user's own, if TRL can call it."""
    if name == OVERLONG:  # as in TRL's own script, for this run's length
        cache = max_completion_length // 5
        return trl.rewards.get_soft_overlong_punishment(max_completion_length, cache)
    if name in NAMED:
        return getattr(tasks if name == "exact_match" else trl.rewards, name)
    if "." not in name and ":" not in name:
        raise TaskError(
            f"`reward_funcs` {name!r} is none of {', '.join((*NAMED, OVERLONG))}, and neither `file.py:function` nor "
            "`package.module.function`."
        )
    reward = load_function(name, "reward_funcs")
    try:
        inspect.signature(reward).bind_partial(**dict.fromkeys(PASSED))
    except TypeError as error:
        raise TaskError(
            f"`reward_funcs` {name!r} {error}: TRL calls it with keywords, so write "
            f"`def {reward.__name__}(completions, **kwargs)` and name the columns it needs."
        ) from None
    return reward


def load_rewards(names, weights, max_completion_length):
    """The rewards that `names` stand for, if there are as many as `weights`."""
    if weights is not None and len(weights) != len(names):
        raise TaskError(
            f"`reward_weights` has {len(weights)} values, and there are {len(names)} `reward_funcs`: {names}."
        )
    return [load_reward(name, max_completion_length) for name in names]


def check_columns(rewards, dataset):
    """Refuse a reward with a parameter that is neither a column of the problems nor has a default."""
    for reward in rewards:
        try:
            inspect.signature(reward).bind(**dict.fromkeys((*PASSED, *dataset.column_names)))
        except TypeError as error:
            raise TaskError(
                f"The reward `{reward.__name__}` does not fit the dataset, which has the columns {dataset.column_names}: "
                f"{error}."
            ) from None


# ---- Problems


def load_problems(name, config=None, seed=0):
    """The splits of the dataset `name`, as chats, and the reward that comes with it, or `None`."""
    if name.startswith(REASONING_GYM):
        return reasoning_gym_problems(name.removeprefix(REASONING_GYM), config, seed)
    path = Path(name)
    if path.is_file():
        if path.suffix not in FORMATS:
            raise TaskError(f"`dataset_name` {name!r} ends in none of {list(FORMATS)}.")
        source = dict(path=FORMATS[path.suffix], data_files=name)
    elif path.suffix in FORMATS or name.startswith((".", "/", "~")) and not path.is_dir():
        raise TaskError(f"`dataset_name` {name!r}: there is no such file or folder in {os.getcwd()!r}.")
    else:
        source = dict(path=name)
    try:
        splits = load_dataset(**source, name=config)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise TaskError(f"`dataset_name` {name!r} cannot be read: {type(error).__name__}: {reason}") from error
    return DatasetDict({split: as_chats(rows, split) for split, rows in splits.items()}), None


def as_chats(rows, split):
    """Questions become chats, and answers the column `solution`; other columns stay."""
    question, answer = (next((n for n in names if n in rows.column_names), None) for names in (QUESTIONS, ANSWERS))
    if question is None:
        raise TaskError(f"`dataset_name`: none of the columns {QUESTIONS} is among {rows.column_names}.")

    def convert(row, index):
        asked = row[question]
        empty = not asked or not (asked.strip() if isinstance(asked, str) else asked[-1].get("content"))
        if empty:
            raise TaskError(f"`dataset_name`: row {index + 1} of {split!r} has an empty `{question}`.")
        prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if answer is None:
            return {"prompt": prompt}
        if row[answer] is None:
            raise TaskError(f"`dataset_name`: row {index + 1} of {split!r} has no `{answer}`.")
        return {"prompt": prompt, "solution": str(row[answer])}

    return rows.map(convert, with_indices=True)


def reasoning_gym_problems(name, config, seed):
    """Two splits that a generator of Reasoning Gym makes, and a reward that grades as it does."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
    except ImportError:
        raise TaskError(
            f"`dataset_name` {REASONING_GYM + name!r} needs the package `reasoning-gym`: pip install 'trl-pdm[tasks]'."
        ) from None
    if name not in DATASETS:
        raise TaskError(f"`dataset_name` {REASONING_GYM + name!r}: Reasoning Gym has {sorted(DATASETS)}.")
    settings = yaml.safe_load(config or "{}")
    try:  # the generators draw problem i with the seed `seed + i`
        train = reasoning_gym.create_dataset(name, **{"size": PROBLEMS, "seed": seed} | settings)
        test = reasoning_gym.create_dataset(
            name, **settings | {"size": max(1, train.size // 10), "seed": train.seed + train.size}
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise TaskError(f"`dataset_config` {config!r} does not fit {REASONING_GYM + name!r}: {error}.") from None
    sets = {"train": list(train), "test": list(test)}
    asked = {entry["question"] for entry in sets["train"]}
    sets["test"] = [entry for entry in sets["test"] if entry["question"] not in asked]

    def chats():
        for split, entries in sets.items():
            yield split, Dataset.from_list([
                {
                    "prompt": [
                        {"role": "system", "content": SYSTEM_PROMPTS["direct"]},
                        {"role": "user", "content": entry["question"]},
                    ],
                    "solution": str(entry["answer"]),
                    "entry": f"{split}:{index}",
                }
                for index, entry in enumerate(entries)
            ])  # fmt: skip

    def score_answer(completions, entry, **kwargs):
        """The generator's own grade of the text inside <answer></answer>, or of the whole text without these tags."""
        rewards = []
        for chat, key in zip(completions, entry, strict=True):
            split, index = key.split(":")
            text = chat[-1]["content"]
            found = extract_answer(text)
            rewards.append(
                float(train.score_answer(text.strip() if found is None else found, sets[split][int(index)]))
            )
        return rewards

    return DatasetDict({split: rows for split, rows in chats() if len(rows)}), score_answer


def check_lengths(dataset, split, tokenizer, max_completion_length, max_model_length):
    """Refuse a prompt that leaves no room for a completion in the engine's context."""
    room = max_model_length - max_completion_length
    for index, prompt in enumerate(dataset["prompt"]):
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        if len(text.encode()) <= room:
            continue  # a token is at least a byte, and to count bytes is much faster
        tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        if tokens > room:
            raise TaskError(
                f"`dataset_name`: row {index + 1} of {split!r} has a prompt of {tokens} tokens, which with "
                f"`max_completion_length` {max_completion_length} exceed `vllm_max_model_length` {max_model_length}."
            )
