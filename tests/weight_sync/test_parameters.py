"""What the trainer sends, under the names of a checkpoint, against models that PEFT merged or that were loaded anew."""

import copy
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.weight_sync.helpers import (
    INT8,
    NF4,
    V,
    lora,
    lora_model,
    make_trainer,
    quantized,
)
from trl_pdm.weight_sync import parameters
from trl_pdm.weight_sync.parameters import lora_model_params


def test_merged_weights_leave_the_trained_ones_alone():
    model = lora_model(init_lora_weights=False, modules_to_save=["lm_head"]).to(torch.bfloat16)
    model.add_adapter("other", lora(init_lora_weights=False, modules_to_save=["lm_head"]))
    before = copy.deepcopy(model.state_dict())
    sent = dict(lora_model_params(model, merged=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    reference = copy.deepcopy(model).float().merge_and_unload(adapter_names=["default"])
    assert set(sent) == {name for name, _ in reference.named_parameters()}
    for name, expected in reference.named_parameters():
        assert sent[name].dtype == torch.bfloat16
        torch.testing.assert_close(sent[name].float(), expected, rtol=2**-7, atol=1e-3)


def test_base_weights_are_the_bases_own():
    model = lora_model(init_lora_weights=False)
    sent = dict(lora_model_params(model, merged=False))
    expected = dict(tiny.model(V).named_parameters())
    assert set(sent) == set(expected) and all(torch.equal(sent[name], expected[name]) for name in sent)


@pytest.mark.parametrize("quantization", [INT8, NF4])
def test_quantized_weights_are_sent_as_the_trainer_computes_with_them(quantization, tmp_path):
    model = quantized(tmp_path, quantization, init_lora_weights=False, target_modules="all-linear")
    original = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    base, merged = (dict(lora_model_params(model, merged=merged)) for merged in (False, True))
    assert set(base) == set(merged) == set(original)
    x = torch.randn(200, 64)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"):
        weight = base[f"{name}.weight"]
        assert weight.is_floating_point() and not torch.equal(weight, original[f"{name}.weight"])
        layer = model.get_base_model().get_submodule(name)
        tolerance = 0.02 * (x @ weight.T).std()  # the int8 product rounds its inputs
        assert (x @ merged[f"{name}.weight"].float().T - layer(x)).std() < tolerance
        assert (x @ weight.T.float() - layer.base_layer(x)).std() < tolerance
        assert (x @ weight.T.float() - layer(x)).std() > 5 * tolerance
    again = dict(lora_model_params(model, merged=False))  # a forward pass moves scales, or repacks all
    for name, weight in base.items():
        torch.testing.assert_close(again[name].float(), weight.float(), rtol=2**-6, atol=0)


def test_active_adapter_is_sent():
    model = lora_model(r=4)
    model.add_adapter("other", lora(r=6, lora_alpha=3, init_lora_weights=False))
    model.set_adapter("other")
    tensors = parameters.adapter_tensors(model)
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name} == {6}
    name = "base_model.model.model.layers.1.mlp.up_proj"
    layer = model.get_submodule(name)
    delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    torch.testing.assert_close(delta, layer.get_delta_weight("other"))


# ---- bitsandbytes


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_8bit_optimizers(optim, tmp_path):
    import bitsandbytes as bnb

    trainer = make_trainer(tmp_path, use_vllm=False, optim=optim, max_steps=3)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, bnb.optim.AdamW) and optimizer.is_paged == (optim != "adamw_8bit")
    states = [state["state1"] for state in optimizer.state.values()]
    assert any(state.dtype == torch.uint8 for state in states), "moments in 8 bits, for all but small tensors"
    after = dict(trainer.model.named_parameters())
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert len(changed) == len(before) and all(p.isfinite().all() for p in after.values())
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_bitsandbytes_says_it_once(caplog):
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    parameters.quiet_bitsandbytes()
    parameters.quiet_bitsandbytes()
    for _ in range(5):
        logger.warning("MatMul8bitLt: inputs will be cast from %s to float16 during quantization", "test.dtype")
        logger.warning("something else")
    messages = [record.getMessage() for record in caplog.records]
    assert sum("inputs will be cast" in message for message in messages) == 1
    assert messages.count("something else") == 5
