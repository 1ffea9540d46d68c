"""The example as its users start it: the default run and the recipe for one GPU, both shortened."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import tiny
from tests.helpers.processes import forked


ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def run_example(*flags, launcher=(), **env):
    command = [sys.executable, *map(str, launcher), str(ROOT / "examples" / "train_pdm.py"), *map(str, flags)]
    # Without what the tests set for themselves, which silences, too, and what engines of this process have left
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "TOKENIZERS_PARALLELISM" and (not name.startswith("VLLM_") or name.startswith("VLLM_CPU_"))
    }
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment | env
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_forked(*flags):
    """The same where it does not matter what is said, in a process that need not import everything."""
    process = forked().Process(target=_run_script, args=(list(map(str, flags)),))
    process.start()
    process.join()
    assert process.exitcode == 0


def _run_script(flags):
    script = ROOT / "examples" / "train_pdm.py"
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def before_the_bar(output):
    return [line for line in re.split(r"\s+0%\|", output)[0].splitlines() if line.strip()]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default")
    return folder, run_example("--max_steps", 16, "--warm_start_accuracy", 0.4, "--output_dir", folder)


def test_default_run_trains_tests_and_reports(default_run):
    folder, output = default_run
    last = output.strip().splitlines()[-1]
    before, after = re.fullmatch(r"accuracy before=(0\.\d\d) after=(0\.\d\d)", last).groups()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {key: f"{value:.2f}" for key, value in metrics["accuracy"].items()} == {"before": before, "after": after}
    assert metrics["seed"] == 0
    assert "Rollouts by vLLM" in output
    entries = [entry for entry in metrics["log_history"] if "reward" in entry]
    assert len(entries) == 2  # one a rollout
    assert all(0 <= entry["trust_region/masked"] <= entry["trust_region/outside"] <= 1 for entry in entries)
    assert max(entry["trust_region/divergence_max"] for entry in entries) > 0
    assert entries[0]["weight_sync/logp_difference_mean"] < 0.02
    assert Image.open(folder / "training.png").size[0] > 500


def test_four_lines_come_before_the_bar_and_three_after_it(default_run):
    folder, output = default_run
    assert before_the_bar(output) == [
        "Training a small Qwen3, made here, on 7108 problems: 16 steps of 128 completions, about 2 minutes.",
        "Rollouts by vLLM, colocate.",
        "Trust region: a divergence of 0.03 nats.",
        f"Results go to {folder}.",
    ]
    bar, *_ = re.findall(r"16/16 .*", output)[-1:]
    assert re.search(r"reward \d\.\d\d, masked [\d.]+%, [\d.]+ s a step", bar), bar
    assert output.strip().splitlines()[-3:-1] == [
        f"Saved in {folder}: the model, metrics.json and training.png.",
        f"To look at it: python -m trl_pdm.report {folder}",
    ]


def test_trained_model_is_an_ordinary_folder(default_run):
    folder, _ = default_run
    model, base = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, folder / "base"))
    assert any((a != b).any() for a, b in zip(model.parameters(), base.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder)("12+34=")["input_ids"])


def test_single_gpu_recipe_on_the_cpu(default_run, tmp_path):
    """8-bit base, LoRA, 8-bit optimizer, real vLLM and adapter sync, on a chat dataset of sums from a file."""
    folder, _ = default_run
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100, 25) for b in range(10, 100, 25)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    run_forked(
        *("--config", ROOT / "configs" / "recipes" / "lora_8bit_single_gpu.yaml"),
        *("--model_name_or_path", folder / "base", "--dataset_name", tmp_path / "sums.jsonl"),
        *("--output_dir", tmp_path / "out", "--dtype", "float32", "--bf16", "false"),
        *("--vllm_enable_sleep_mode", "false", "--reward_funcs", "exact_match"),
        *("--vllm_max_model_length", 32, "--max_completion_length", 4, "--per_device_train_batch_size", 64),
        *("--gradient_accumulation_steps", 1, "--steps_per_generation", 2, "--max_steps", 32, "--learning_rate", 6e-4),
        *("--sync_check_steps", 1, "--save_strategy", "no", "--lr_scheduler_type", "constant"),
    )
    history = json.loads((tmp_path / "out" / "metrics.json").read_text())["log_history"]
    differences = [e["weight_sync/logp_difference_mean"] for e in history if "weight_sync/logp_difference_mean" in e]
    assert len(differences) == 16 and max(differences) < 0.02, differences
    moved = [entry["weight_sync/bytes"] for entry in history if "weight_sync/bytes" in entry]
    assert len(moved) == 16 and moved[0] > 2 * max(moved[1:]), (
        "the base moves once, in bfloat16, then only the adapter"
    )
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def chats_without_vllm(tmp_path):
    model = tiny.save(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": f"${n + 1}$"} for n in range(10, 42)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        *("--model_name_or_path", model, "--dataset_name", tmp_path / "chats.jsonl", "--use_vllm", "false"),
        *("--output_dir", tmp_path / "out", "--use_peft", "--lora_target_modules", "q_proj", "v_proj"),
        *("--max_completion_length", 6, "--num_generations", 2, "--gradient_accumulation_steps", 1),
        *("--steps_per_generation", 2, "--max_steps", 4, "--logging_steps", 1, "--bf16", "false"),
        *("--vllm_weight_sync", "adapter"),
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_any_model_and_dataset_without_vllm_by_accelerate(tmp_path, processes):
    """A chat dataset from a file, LoRA, generation by transformers: the general path of the script, as quiet as the other."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configs" / "accelerate" / "cpu.yaml"]
    if processes == 2:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--standalone"]  # as that file says
    output = run_example(*chats_without_vllm(tmp_path), "--use_cpu", launcher=launcher, ACCELERATE_USE_CPU="1")
    problems = f"Training {tmp_path / 'model'} on 32 problems: 4 steps of {8 * processes} completions, "
    assert before_the_bar(output)[:4] == [
        problems + "the bar says for how long.",
        "Rollouts by transformers, without vLLM: slower.",
        "Trust region: a divergence of 0.15 nats.",
        f"Results go to {tmp_path / 'out'}.",
    ]
    ours = ["These options have no effect here: `vllm_weight_sync='adapter'`", "The model trains with `lora_dropout="]
    heard = before_the_bar(output)[4:]
    assert len(heard) == 2 and all(said in line for said, line in zip(ours, heard, strict=True)), output
    history = json.loads((tmp_path / "out" / "metrics.json").read_text())["log_history"]
    assert len([entry for entry in history if "trust_region/masked" in entry]) == 4
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert Image.open(tmp_path / "out" / "training.png").size[0] > 500
    assert output.strip().splitlines()[-1] == "Done."
