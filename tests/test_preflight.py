"""What cannot be trained is refused at construction, before an engine starts."""

import pytest
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.training_args import TrainingArguments
from trl.generation import vllm_generation

from tests.helpers import tiny
from tests.helpers.trainers import make_trainer, run


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: pytest.fail("the engine started"), raising=False)


def test_several_gpus_in_one_process(tmp_path, monkeypatch):
    """TRL refuses them itself, before the engine. This machine has one or none: their number is made up."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))
    with pytest.raises(
        ValueError, match=r"does not support `nn\.DataParallel`.*Launch the script with `accelerate launch`"
    ):
        make_trainer(tmp_path, use_vllm=True)


@pytest.mark.parametrize("use_vllm", [False, True])
def test_an_adapter_that_is_not_trainable(tmp_path, use_vllm):
    base = tiny.save(tmp_path / "model")
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules="all-linear")
    ).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    with pytest.raises(
        ValueError, match=r"nothing to train\. .*`PeftModel\.from_pretrained\(\.\.\., is_trainable=True\)`"
    ):
        make_trainer(tmp_path, model=model, use_vllm=use_vllm)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", is_trainable=True
    )
    make_trainer(tmp_path, model=model)


@pytest.mark.parametrize("use_vllm", [False, True])
@pytest.mark.parametrize(
    "datasets, message",
    [
        (dict(train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+2=", ""]})), r"row 2 of `train_dataset` is ''"),
        (dict(eval_dataset=Dataset.from_dict({"prompt": ["", "1+1="]})), r"row 0 of `eval_dataset` is ''"),
        (
            dict(eval_dataset={"hard": Dataset.from_dict({"prompt": ["1", ""]})}),
            r"row 1 of `eval_dataset\['hard'\]` is ''",
        ),
    ],
)
def test_an_empty_prompt(tmp_path, datasets, message, use_vllm):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **datasets, use_vllm=use_vllm)


def test_no_limits_as_none(tmp_path):
    """`None` for `top_k` and `top_p`, as earlier releases of TRL had it, is no limit: the same run as without them."""
    logs = [
        run(make_trainer(tmp_path, max_steps=1, seed=3, **limits))[0]
        for limits in ({}, dict(top_k=None), dict(top_p=None), dict(top_k=None, top_p=None))
    ]
    assert {log["reward"] for log in logs} == {logs[0]["reward"]}
    assert {log["grad_norm"] for log in logs} == {logs[0]["grad_norm"]}
