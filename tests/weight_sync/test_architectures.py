"""What is pushed is what `save_pretrained` writes, for every architecture; on engines, for some that differ most."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.weight_sync.architectures import ARCHITECTURES, build, measure, shut_down, with_lora
from tests.weight_sync.helpers import ENGINE_NOISE
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


# Each on an engine, for what its way to a checkpoint has that no other here has, with the way that "auto" chooses
ON_AN_ENGINE = {
    "Mixtral": (False, "full"),  # experts, fused in memory and renamed
    "GPT-NeoX": (False, "full"),  # `embed_out` in a checkpoint is `lm_head` in memory; a fused projection with biases
    "GLM": (True, "full"),  # an adapter of `gate_up_proj`, which vLLM serves in parts only
    "GPT-2": (True, "full"),  # transposed weights, learned positions, biases everywhere
    "Gemma-3": (False, "full"),  # norms that are stored less one, a tied and scaled embedding
    "Llama": (True, "adapter"),  # an adapter served, on layers with biases
}


@pytest.fixture
def engine_of_its_own(started, monkeypatch):
    # Models with experts need process groups of their own
    started.clear()
    shut_down()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    shut_down()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_AN_ENGINE)
def test_an_engine_holds_what_was_trained(name, tmp_path, engine_of_its_own):
    lora, way = ON_AN_ENGINE[name]
    found = measure(name, lora, str(tmp_path))
    print(name, found)
    assert found["way"] == way
    assert found["difference"] < ENGINE_NOISE < 0.1 < found["moved"]


def test_the_page_has_a_line_for_each_architecture_and_none_fails():
    page = Path(__file__).parents[2].joinpath("docs/architectures.md").read_text()
    lines = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line.startswith("|")][2:]
    assert [line[0] for line in lines] == list(ARCHITECTURES)
    for name, full, moved, lora, moved_by_lora, way in lines:
        for difference, other in ((full, moved), (lora, moved_by_lora)):
            if difference == "refused":
                assert name == "gpt-oss" and not other
            elif difference.endswith("as loaded"):
                assert name == "LFM2"
            else:
                assert float(difference) < 0.03 and float(other) > 0.1, name
        assert way in ("adapter", "full") or lora == "refused"
