"""What is pushed is what `save_pretrained` writes, for every architecture; on engines, for some that differ most."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.weight_sync.architectures import ARCHITECTURES, build, with_lora
from trl_pdm.weight_sync.strategies import FullSync


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same(sent, expected, tolerance=0.0):
    assert {name: tensor.shape for name, tensor in sent.items()} == {name: t.shape for name, t in expected.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_sent_is_what_a_checkpoint_holds(name, tmp_path):
    model = build(name)
    expected = saved(model, tmp_path)
    assert_same(dict(FullSync(model).tensors()), expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(dict(FullSync(loaded).tensors()), expected)

    adapted = with_lora(loaded)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    sent = dict(FullSync(adapted).tensors())
    assert any(not torch.equal(sent[name], tensor) for name, tensor in expected.items())
    assert_same(sent, saved(copy.deepcopy(adapted).merge_and_unload(), tmp_path / "merged"), tolerance=1e-6)
