"""What the trainer sends, under the names of a checkpoint, against models that PEFT merged or that were loaded anew."""

import copy
import logging
import math

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    FourierFTConfig,
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
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
from trl_pdm.weight_sync.parameters import held_names, held_parameters, lora_layers, persistent_buffers
from trl_pdm.weight_sync.strategies import why_not_mergeable


EVERYWHERE = ["q_proj", "o_proj", "down_proj"]
METHODS = {
    "LoRA": LoraConfig(target_modules="all-linear"),
    "DoRA": LoraConfig(use_dora=True, target_modules=EVERYWHERE),
    "DoRA of an embedding": LoraConfig(use_dora=True, target_modules=["embed_tokens", "q_proj"]),
    "LoRA of experts": LoraConfig(
        target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    ),
    "LoRA of rows": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "LoRA of rows of a head": LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 4]}),
    "LoRA with modules": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "AdaLoRA": AdaLoraConfig(total_step=10, target_modules=EVERYWHERE),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": LoHaConfig(target_modules=EVERYWHERE),
    "LoKr": LoKrConfig(target_modules=EVERYWHERE),
    "OFT": OFTConfig(oft_block_size=16, target_modules=EVERYWHERE),
    "BOFT": BOFTConfig(boft_block_size=4, target_modules=EVERYWHERE),
    "LN tuning": LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "VeRA": VeraConfig(target_modules=EVERYWHERE),
    "VB-LoRA": VBLoRAConfig(vector_length=16, num_vectors=32, target_modules=EVERYWHERE),
    "FourierFT": FourierFTConfig(n_frequency=50, target_modules=EVERYWHERE),
    "HRA": HRAConfig(target_modules=EVERYWHERE),
    "MiSS": MissConfig(target_modules=EVERYWHERE),
    "trained tokens": TrainableTokensConfig(token_indices=[3, 4]),
}


def adapted(name, dtype, **overrides):
    config = copy.deepcopy(METHODS[name])
    config.task_type = "CAUSAL_LM"
    return get_peft_model(tiny.model(V, moe="experts" in name, **overrides).to(dtype), config)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_computes_what_the_adapter_does_and_the_base_stays(name):
    """After updates with syncs between: the logits of a model that was loaded with what is sent are the trainer's, and
    what is frozen has the bits that it had."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        model = adapted(name, dtype)
        assert why_not_mergeable(model) is None
        frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        ids = torch.randint(2, V, (4, 10))
        ids[:, ::3] = 3
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-2)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            sent = dict(held_parameters(model))
        model.eval()
        assert frozen and all(torch.equal(frozen[n], p) for n, p in model.named_parameters() if n in frozen)
        loaded = tiny.model(V, moe="experts" in name).to(dtype).eval()
        with torch.no_grad():
            before, expected = loaded(input_ids=ids).logits, model(input_ids=ids).logits
            assert not loaded.load_state_dict(sent).missing_keys
            actual = loaded(input_ids=ids).logits
        # What is merged is not rounded to the base's dtype, which would lose the adapter
        assert all(sent[n].dtype in (p.dtype, torch.float32) for n, p in loaded.named_parameters())
        assert (expected - before).abs().mean() > 4 * tolerance * expected.abs().mean() * (dtype == torch.float32)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_merge_is_a_sum_in_float32_cast_once():
    model = adapted("LoRA", torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    sent = dict(held_parameters(model))
    for name, layer in lora_layers(model).items():
        b, a = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        expected = layer.base_layer.weight.float() + layer.scaling["default"] * (b.float() @ a.float())
        actual = sent[f"{name.removeprefix('base_model.model.')}.weight"]
        assert (actual.float() - expected).abs().max() <= expected.abs().max() * 2**-8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("indices", [[3, 4], {"embed_tokens": [3, 4]}])
def test_trained_rows_are_sent_as_part_of_the_embedding(tied, indices):
    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=indices, task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model(V, tie_word_embeddings=tied), config)
    with torch.no_grad():
        model.get_input_embeddings().token_adapter.trainable_tokens_delta["default"].fill_(7)
    sent = dict(held_parameters(model))
    original = tiny.model(V, tie_word_embeddings=tied)
    expected = original.get_input_embeddings().weight.detach().clone()
    expected[3:5] = 7
    assert torch.equal(sent["model.embed_tokens.weight"], expected)
    assert set(sent) == {name for name, _ in original.named_parameters()}
    original.load_state_dict(sent, strict=False)
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(original(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_active_adapter_is_merged_under_any_name():
    model = get_peft_model(tiny.model(V), lora(modules_to_save=["lm_head"]), adapter_name="mine")
    model.add_adapter("other", lora(init_lora_weights=False, modules_to_save=["lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mine." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    sent, loaded, ids = dict(held_parameters(model)), tiny.model(V), torch.arange(2, 12)[None]
    assert set(sent) == {name for name, _ in loaded.named_parameters()}
    loaded.load_state_dict(sent)
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_a_merge_copies_no_hook():
    """It could hold on to the trainer, and so to the model."""

    class Trainer:
        def __deepcopy__(self, memo):
            pytest.fail("copied")

        def hook(self, *args):
            pass

    model, trainer = lora_model(), Trainer()
    for module in model.modules():
        module.register_forward_hook(trainer.hook)
        module.register_forward_pre_hook(trainer.hook)
    assert len(list(held_parameters(model))) == len(list(tiny.model(V).parameters()))


def test_names_are_without_what_wraps_modules():
    """FSDP1 and activation checkpointing put modules around others, whose buffers keep their names in a checkpoint."""

    class Wrapper(torch.nn.Module):
        def __init__(self, name, module):
            super().__init__()
            self.add_module(name, module)

    model = tiny.model(V, router_bias=True)
    expected = {name for name, _ in persistent_buffers(model)}
    assert expected == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    layers = model.model.layers
    layers[1].mlp.gate = Wrapper("_checkpoint_wrapped_module", layers[1].mlp.gate)
    layers[1] = Wrapper("_fsdp_wrapped_module", layers[1])
    assert {name for name, _ in persistent_buffers(model)} == expected
    assert set(held_names(model)) == {name for name, _ in tiny.model(V, router_bias=True).named_parameters()}


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_buffers_of_trained_modules_keep_their_names(adapter):
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model(V, router_bias=True), config, adapter_name=adapter)
    ((name, buffer),) = persistent_buffers(model)
    assert name == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert buffer is model.get_base_model().model.layers[1].mlp.gate.modules_to_save[adapter].e_score_correction_bias


def test_base_weights_are_the_bases_own():
    model = lora_model(init_lora_weights=False)
    sent = dict(held_parameters(model, merged=False))
    expected = dict(tiny.model(V).named_parameters())
    assert set(sent) == set(expected) and all(torch.equal(sent[name], expected[name]) for name in sent)


@pytest.mark.parametrize("quantization", [INT8, NF4])
def test_quantized_weights_are_sent_as_the_trainer_computes_with_them(quantization, tmp_path):
    model = quantized(tmp_path, quantization, init_lora_weights=False, target_modules="all-linear")
    original = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    base, merged = (dict(held_parameters(model, merged)) for merged in (False, True))
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
    again = dict(held_parameters(model, merged=False))  # a forward pass moves scales, or repacks all
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
