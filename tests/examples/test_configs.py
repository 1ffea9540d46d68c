"""Every configuration file loads, and its comment shows a command that exists."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from trl import ModelConfig, TrlParser

from trl_pdm import PDMGRPOConfig


ROOT = Path(__file__).parents[2]
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
DISTRIBUTED_TYPE = {
    "cpu": "NO",
    "single_gpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "fsdp2": "FSDP",
    "multi_node": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}


def test_all_kinds_are_there():
    assert {path.stem for path in ACCELERATE} == set(DISTRIBUTED_TYPE)
    assert {path.stem for path in RECIPES} == {
        *("default", "lora_8bit_single_gpu", "colocate", "server"),
        *("own_reward", "reasoning_gym", "tool"),
    }


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))  # refuses keys that accelerate does not know
    assert config.distributed_type == DISTRIBUTED_TYPE[path.stem]
    assert config.use_cpu == (path.stem == "cpu")
    assert (config.num_machines > 1) == (path.stem == "multi_node")
    if "zero" in path.stem:
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
    if config.distributed_type == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_example_reads_it(path, monkeypatch):
    sys.path.append(str(ROOT / "examples"))
    from train_pdm import PDMScriptArguments

    parser = TrlParser((PDMScriptArguments, PDMGRPOConfig, ModelConfig))
    fields = yaml.safe_load(path.read_text())
    arguments = parser.parse_args_and_config(["--config", str(path), "--bf16", "false", "--use_cpu"])
    groups = (PDMScriptArguments, PDMGRPOConfig, ModelConfig)
    defaults = {field.name: field.default for group in groups for field in dataclasses.fields(group)}
    for name, value in fields.items():
        assert value != defaults[name], f"{name} is {value} anyway"
        assert [getattr(group, name) for group in arguments if hasattr(group, name)] == [value], name
    if path.stem == "server":
        assert fields["vllm_server_host"] == "127.0.0.1" and "--host 127.0.0.1" in path.read_text()


@pytest.mark.parametrize("path", [*ACCELERATE, *RECIPES], ids=lambda path: path.stem)
def test_its_comment_names_files_that_exist(path):
    comment = path.read_text().split("\n\n")[0]
    named = re.findall(r"[\w/.]+\.(?:yaml|py)", comment)
    assert named and all((ROOT / name).exists() for name in named if "/" in name), named


def commands():
    """The commands of the README, of the documents and of the recipes, on one line each."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *RECIPES]:
        text = re.sub(r"\s*\\\n#?\s*", " ", path.read_text())
        for line in re.findall(r"(?:accelerate launch|python) .*examples/train_pdm\.py.*--.*", text):
            for recipe in ("colocate", "server") if "RECIPE" in line else (None,):
                yield pytest.param(
                    line.replace("RECIPE", str(recipe)).strip("`"), id=f"{path.stem}-{recipe}-{line[-20:]}"
                )


@pytest.mark.parametrize("command", list(commands()))
def test_commands_as_they_are_written(command, monkeypatch):
    """Each flag exists, and the model comes with a dataset."""
    monkeypatch.chdir(ROOT)
    sys.path.append(str(ROOT / "examples"))
    from loading import load_function, load_rewards
    from train_pdm import PDMScriptArguments

    flags = command.split("examples/train_pdm.py")[1].split()
    parser = TrlParser((PDMScriptArguments, PDMGRPOConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config([*flags, "--bf16", "false", "--use_cpu"])
    assert (model.model_name_or_path is None) == (script.dataset_name is None)
    load_rewards(script.reward_funcs or [], training.reward_weights, training.max_completion_length)
    assert all(load_function(name, "tools") for name in script.tools or [])
    assert training.max_completion_length > 100 or model.model_name_or_path is None
