"""Recipes for a task of one's own run as they are written, but for the size: a tiny model, and transformers generates.

One of one GPU runs with vLLM in test_train_pdm.py. A server's takes GPUs: test_configs.py only parses it.
"""

import json
import sys
from pathlib import Path

import pytest
from trl import ModelConfig, TrlParser

from tests.helpers import tiny
from tests.rollout.test_tools import make_tokenizer
from trl_pdm import PDMGRPOConfig


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import my_rewards  # noqa: E402
import my_tools  # noqa: E402
import train_pdm  # noqa: E402


LOGGED = {
    "own_reward": ["rewards/says_the_answer/mean", "rewards/brief/mean"],
    "reasoning_gym": ["rewards/score_answer/mean"],
    "tool": ["rewards/score_answer/mean", "tools/call_frequency", "tools/failure_frequency"],
}


def test_rewards_and_tool_to_start_from():
    chats = [[{"role": "assistant", "content": text}] for text in ("", "4\n" + "x" * 398, "x\n 4 ")]
    assert my_rewards.brief(completions=chats)[:2] == [1, 0.5]
    assert my_rewards.says_the_answer(completions=chats, solution=["4"] * 3) == [0, 0, 1]
    assert my_tools.add(2, 3) == 5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LOGGED)
def test_recipe_trains(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    tokenizer = make_tokenizer()
    tiny.model(len(tokenizer), max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"find {key}", "solution": key} for key in "uvwxyz"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--config", f"configs/recipes/{recipe}.yaml", "--model_name_or_path", tmp_path / "model"]
    flags += ["--dataset_name", tmp_path / "rows.jsonl"] if recipe == "own_reward" else []
    flags += ["--output_dir", tmp_path / "out", "--use_vllm", "false", "--use_cpu", "--bf16", "false"]
    flags += ["--max_completion_length", 8, "--num_generations", 2, "--per_device_train_batch_size", 2]
    flags += ["--gradient_accumulation_steps", 1, "--steps_per_generation", 2, "--max_steps", 4]
    flags += ["--save_strategy", "no", "--report_to", "none"]
    parser = TrlParser((train_pdm.PDMScriptArguments, PDMGRPOConfig, ModelConfig))
    train_pdm.main(*parser.parse_args_and_config(list(map(str, flags))))
    history = json.loads((tmp_path / "out" / "metrics.json").read_text())["log_history"]
    entries = [entry for entry in history if "reward" in entry]
    assert len(entries) == 2 and all(name in entry for entry in entries for name in LOGGED[recipe])
    if recipe == "own_reward":
        first, second = (entries[0][name] for name in LOGGED[recipe])
        assert entries[0]["reward"] == pytest.approx(1.0 * first + 0.2 * second) and second > 0.9
    printed = capsys.readouterr().out
    assert f"python -m trl_pdm.report {tmp_path / 'out'}" in printed and "Rollouts by transformers" in printed
