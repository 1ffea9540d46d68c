"""What makes a training forward random is found in the layers, named, and can be silenced."""

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM
from trl.trainer.utils import disable_dropout_in_model

from tests.helpers import tiny
from trl_pdm import noise


SMALL = dict(vocab_size=40, num_hidden_layers=2, num_attention_heads=4, hidden_size=32)


def gpt2(rate):
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = rate
    return GPT2LMHeadModel(config)


MODELS = {
    "none": (lambda: tiny.model(40), None),
    "lora": (lambda: get_peft_model(tiny.model(40), LoraConfig(target_modules="all-linear", lora_dropout=0.3)), "lora_dropout=0.3"),
    "attention": (lambda: tiny.model(40, attention_dropout=0.2), "attention_dropout=0.2"),
    "modules": (lambda: gpt2(0.1), "dropout of 0.1"),
    "functional": (lambda: OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.25)), "dropout=0.25"),
    "router": (lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2, intermediate_size=48, num_local_experts=4, router_jitter_noise=0.3)), "jitter_noise=0.3"),
}  # fmt: skip


def logits(model):
    return model(input_ids=torch.arange(16)[None] % 40).logits.detach()


@pytest.mark.parametrize("kind", MODELS)
def test_each_source_is_named_and_its_forward_really_random(kind):
    torch.manual_seed(0)
    make, named = MODELS[kind]
    model = make().train()
    if kind == "lora":
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    found = noise.sources(model)
    assert any(named in name for name in found) if named else found == {}
    differ = not torch.equal(logits(model), logits(model))
    assert differ == (named is not None)
    with noise.silenced(model):
        assert torch.equal(logits(model), logits(model))
    assert all(module.training for module in model.modules())


def test_disable_dropout_reaches_modules_and_lora_and_is_believed():
    for make, _ in (MODELS["modules"], MODELS["lora"]):
        model = make()
        assert noise.sources(model)
        disable_dropout_in_model(model)
        assert noise.sources(model) == {}


def test_silence_leaves_layers_that_were_in_evaluation_there():
    model = tiny.model(40).train()
    model.model.embed_tokens.eval()
    with noise.silenced(model):
        assert not any(module.training for module in model.modules())
    assert model.training and not model.model.embed_tokens.training


def test_neftune_is_a_source_and_the_warning_says_what_to_set(caplog):
    PartialState(cpu=True)  # the logger is the main process's
    found = noise.sources(tiny.model(40, attention_dropout=0.2), neftune_noise_alpha=5.0)
    with caplog.at_level("WARNING", logger="trl_pdm"):
        noise.warn_of(found)
        noise.warn_of({})
    (message,) = (record.getMessage() for record in caplog.records)
    assert "`neftune_noise_alpha=5.0`" in message and "`attention_dropout=0.2`" in message
    assert "Set the model's `attention_dropout` to 0, no `neftune_noise_alpha`." in message
