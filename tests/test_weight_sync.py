"""Training weights into vLLM: after each sync the engine must sample from the very policy that is trained.

The engine's own logprobs are compared with the log-softmax of the trainer's full logits, after real optimizer updates.
"""

import copy
import gc
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from tests import tiny
from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer, weight_sync
from trl_pdm._hooks import TRLCompatibilityError
from trl_pdm.rollout import TopKVLLMGeneration
from trl_pdm.weight_sync import AdapterSync, FullSync, choose_sync, lora_model_params, private_folder


ENGINE_NOISE = 0.02  # mean, in nats: a bf16 engine against a float32 trainer
V = len(tiny.tokenizer())
INT8 = BitsAndBytesConfig(load_in_8bit=True)
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def lora(**overrides):
    return LoraConfig(**dict(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") | overrides)


def lora_model(**overrides):
    return get_peft_model(tiny.model(V), lora(**overrides))


def save_model(tmp_path, kind="untied"):
    # bitsandbytes' 4-bit product on a CPU needs widths that are multiples of 64
    kinds = {"tie_word_embeddings": "tied", "moe": "experts", "router_bias": "experts with a router bias"}
    overrides = {name: kind == value for name, value in kinds.items()} | {"intermediate_size": 128}
    return tiny.save(tmp_path / "model", **overrides)


def make_trainer(tmp_path, model=None, peft_config=None, quantization_config=None, kind="untied", **args):
    if peft_config:
        args.setdefault("learning_rate", 5e-2)
    defaults = dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        divergence_top_k=6,
        max_steps=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_vllm=True,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=64,
        **tiny.ON_CPU,
    )
    return PDMGRPOTrainer(
        model or save_model(tmp_path, kind),
        reward_funcs=tiny.count_ones,
        args=PDMGRPOConfig(**defaults | args),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        quantization_config=quantization_config,
    )


# ---- A real engine


@pytest.fixture(autouse=True)
def accelerate_state():
    PartialState(cpu=True)  # which accelerate's logger asks who may log


@pytest.fixture(scope="module")
def started():
    engines = {}
    yield engines
    shut_down(engines)


def shut_down(engines):
    from vllm.distributed import cleanup_dist_env_and_memory

    engines.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture
def engine_args(started, monkeypatch):
    """Trainers of one kind take turns on one engine. Yields the arguments that the last one asked its engine for."""
    LLM, asked = vllm_generation.LLM, {}

    def engine(**kwargs):
        asked.clear()
        asked.update(kwargs)
        config = AutoConfig.from_pretrained(kwargs["model"])
        kind = (config.model_type, config.tie_word_embeddings, kwargs.get("max_lora_rank"), kwargs.get("load_format"))
        if not any(kind[0] == model_type for model_type, *_ in started):  # experts have process groups of their own
            shut_down(started)
        if kind not in started:
            started[kind] = LLM(**kwargs)
        for name in ("generate", "chat", "enqueue", "enqueue_chat"):  # what an earlier trainer has put there
            vars(started[kind]).pop(name, None)
        return started[kind]

    monkeypatch.setattr(vllm_generation, "LLM", engine)
    return asked


@torch.no_grad()
def difference(trainer, model=None):
    """Mean absolute difference between the engine's logprobs of tokens that it samples, and those of full logits."""
    model = model or trainer.model
    was_training = model.training
    model.eval()
    prompts = [trainer.processing_class(row["prompt"])["input_ids"] for row in trainer.train_dataset.select(range(48))]
    _, completions, logprobs, _ = trainer.vllm_generation.generate(prompts, None, 1)
    errors = []
    for prompt, completion, entries in zip(prompts, completions, logprobs, strict=True):
        logps = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float().log_softmax(-1)
        expected = logps[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0]
        errors += (expected - torch.tensor([float(lp[0]) for lp in entries])).abs().tolist()
    model.train(was_training)
    assert len(errors) > 40
    return sum(errors) / len(errors)


def check_in_sync(trainer):
    """After a sync the engine samples from the trainer's policy."""
    trainer.vllm_generation.sync_weights()
    error, sync = difference(trainer), trainer.vllm_generation.last_sync
    print(f"mean abs difference {error:.5f}, {sync}")
    assert error < ENGINE_NOISE
    return sync


def sync_without(trainer, part):
    params = list(trainer.vllm_generation._sync.params())
    kept = SimpleNamespace(
        mode="full", push=FullSync(lambda: [(n, p) for n, p in params if part not in n], trainer.model).push
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.vllm_generation, "_sync", kept)
        trainer.vllm_generation.sync_weights()
    return difference(trainer)


def check_far_from(trainer, model=None):
    """... and from no other that it could have been left with."""
    assert difference(trainer, model) > 3 * ENGINE_NOISE


def initial(trainer):
    return AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path).eval()


def adapter_bytes(model):
    return sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name and ".default." in name)


def full_bytes(model):
    return sum(p.nbytes for p in model.parameters())


@pytest.fixture
def vllm_warnings(caplog):
    """vLLM's loggers do not propagate."""
    logging.getLogger("vllm").addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    logging.getLogger("vllm").removeHandler(caplog.handler)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_full_sync(kind, tmp_path, engine_args, vllm_warnings):
    trainer = make_trainer(tmp_path, kind=kind)
    assert "enable_lora" not in engine_args
    trainer.train()
    sync = check_in_sync(trainer)
    check_far_from(trainer, initial(trainer))
    assert sync.mode == "full" and sync.bytes == full_bytes(trainer.model) and sync.seconds > 0
    assert not [message for message in vllm_warnings() if "Failed to load weights" in message]
    # One sync a rollout, and two steps a rollout
    synced = [log["step"] for log in trainer.state.log_history if "weight_sync/bytes" in log]
    assert synced == [1, 3, 5]
    assert trainer.state.log_history[0]["weight_sync/bytes"] == sync.bytes
    assert trainer.state.log_history[0]["weight_sync/seconds"] > 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_a_corrupted_sync_is_visible(kind, tmp_path, engine_args, vllm_warnings, monkeypatch):
    trainer = make_trainer(tmp_path, kind=kind)
    check_in_sync(trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(parameter.std() * torch.randn_like(parameter))
    assert sync_without(trainer, "layers.") > 2 * ENGINE_NOISE
    assert any("Failed to load weights" in message for message in vllm_warnings()), "the engine's word for it"
    assert sync_without(trainer, "none") < ENGINE_NOISE
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lm_head" in name or "embed_tokens" in name:
                parameter.add_(parameter.std() * torch.randn_like(parameter))
    if kind == "tied":  # the engine has no word for it, which is why it is mended here
        monkeypatch.setattr(weight_sync, "_repack_tied_heads", lambda model: None)
        assert sync_without(trainer, "none") > 5 * ENGINE_NOISE
    else:
        assert not any("LMHead" in message for message in vllm_warnings())
        assert sync_without(trainer, "lm_head") > 5 * ENGINE_NOISE
        assert any("LMHead: Failed to load weights" in message for message in vllm_warnings())


ADAPTERS = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True, "r": 6},
    "patterns": {"r": 5, "rank_pattern": {"q_proj": 8, "down_proj": 3}, "alpha_pattern": {"v_proj": 5, "up_proj": 12}},
    "some layers": {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1]},
}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_sync(name, tmp_path, engine_args):
    trainer = make_trainer(tmp_path, kind="tied", peft_config=lora(**ADAPTERS[name]))
    # The base, too, is no longer what the engine loads
    with torch.no_grad():
        for parameter in trainer.model.get_base_model().parameters():
            parameter.add_(parameter.std() * 0.3 * torch.randn_like(parameter))
    assert engine_args["enable_lora"] and engine_args["max_lora_rank"] == 8
    engine = trainer.vllm_generation.llm.llm_engine
    trainer.train()
    versions = []
    for _ in range(3):
        sync = check_in_sync(trainer)
        with trainer.model.disable_adapter():
            check_far_from(trainer)
        assert sync.mode == "adapter" and sync.bytes == adapter_bytes(trainer.model)
        versions.append(engine.list_loras())
        assert not leftovers()
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(parameter.std() * 0.2 * torch.randn_like(parameter))
    assert versions == [{4}, {5}, {6}], "after three versions in training, and each alone in the engine"
    logged = [log["weight_sync/bytes"] for log in trainer.state.log_history if "weight_sync/bytes" in log]
    assert logged == [full_bytes(trainer.model), *[adapter_bytes(trainer.model)] * 2], "the base once"


@pytest.mark.vllm
@pytest.mark.slow
def test_adapter_in_calls_of_the_engine_itself(tmp_path, engine_args):
    from vllm import SamplingParams

    trainer = make_trainer(tmp_path, kind="tied", peft_config=lora(init_lora_weights=False))
    trainer.vllm_generation.sync_weights()
    llm, model = trainer.vllm_generation.llm, trainer.model.eval()
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
    prompt = trainer.processing_class("12+3=")["input_ids"]
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    ((token, entry),) = output.outputs[0].logprobs[0].items()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token]
        with model.disable_adapter():
            base = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token]
    assert abs(entry.logprob - expected) < 0.05 < abs(base - expected)


@pytest.mark.vllm
@pytest.mark.slow
def test_reference_adapter_is_not_served(tmp_path, engine_args):
    path = save_model(tmp_path, kind="tied")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora(init_lora_weights=False))
    trainer = make_trainer(tmp_path, model=model, beta=0.05, learning_rate=5e-2)
    assert set(trainer.model.peft_config) == {"default", "ref"}
    trainer.train()
    assert check_in_sync(trainer).mode == "adapter"
    trainer.model.set_adapter("ref")
    check_far_from(trainer)


QUANTIZED = {
    "8-bit, adapter": (INT8, "auto", "adapter"),
    "4-bit, adapter": (NF4, "adapter", "adapter"),
    "8-bit, merged": (INT8, "full", "full"),
    "4-bit, merged": (NF4, "full", "full"),
}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_base(name, tmp_path, engine_args, caplog):
    quantization, requested, mode = QUANTIZED[name]
    args = {"vllm_weight_sync": requested, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, peft_config=lora(), quantization_config=quantization, **args)
    assert trainer.vllm_generation.model is trainer.model
    assert engine_args["quantization"] is None and "load_format" not in engine_args
    assert ("enable_lora" in engine_args) == (mode == "adapter")
    for _ in range(2):
        trainer.train()
        assert check_in_sync(trainer).mode == mode
        with trainer.model.disable_adapter():
            check_far_from(trainer)
    assert sum("inputs will be cast" in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.vllm
@pytest.mark.slow
def test_quantized_checkpoint(tmp_path, engine_args):
    # Nothing of it can be loaded into an engine that is not quantized
    path = save_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(path, quantization_config=NF4).save_pretrained(tmp_path / "nf4")
    tiny.tokenizer().save_pretrained(tmp_path / "nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4")
    trainer = make_trainer(tmp_path, model=model, peft_config=lora(), learning_rate=1e-2)
    assert engine_args["load_format"] == "dummy" and engine_args["quantization"] is None
    trainer.train()
    assert check_in_sync(trainer).mode == "adapter"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}],
)
def test_what_vllm_cannot_serve_is_merged(overrides, tmp_path, engine_args, caplog):
    trainer = make_trainer(tmp_path, peft_config=lora(**overrides), learning_rate=1e-2)
    assert "enable_lora" not in engine_args
    (field,) = overrides
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "vllm_weight_sync" in text]
    assert field in warning
    trainer.train()
    assert check_in_sync(trainer).mode == "full"
    check_far_from(trainer, initial(trainer))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts", "experts with a router bias"])
def test_experts(kind, tmp_path, engine_args, monkeypatch):
    trainer = make_trainer(tmp_path, kind=kind)
    trainer.train()
    assert check_in_sync(trainer).mode == "full"
    check_far_from(trainer, initial(trainer))
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "experts" in name:
                parameter.mul_(8)
    check_in_sync(trainer)
    if kind == "experts with a router bias":  # a buffer of the model, and a parameter of the engine
        trainer.model.model.layers[1].mlp.gate.e_score_correction_bias.neg_()
        check_in_sync(trainer)
        trainer.model.model.layers[1].mlp.gate.e_score_correction_bias.neg_()
        monkeypatch.setattr(weight_sync, "persistent_buffers", lambda model: [])
        assert not sync_without(trainer, "none") < 3 * ENGINE_NOISE
        return
    monkeypatch.setattr(weight_sync, "_repack_experts", lambda model: None)
    if not torch.cuda.is_available():
        assert sync_without(trainer, "none") > 3 * ENGINE_NOISE, "what a CPU engine makes of a reload"


# ---- The choice, without an engine


SERVABLE = [
    {},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 64}},
    {"target_modules": ["o_proj"], "layers_to_transform": [0]},
    {"r": 512},
]
UNSERVABLE = {
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "trainable_token_indices": {"trainable_token_indices": [3, 4]},
    "rank 1024": {"r": 1024},
    "rank 600": {"rank_pattern": {"q_proj": 600}},
    "lm_head": {"target_modules": ["lm_head"]},
    "embed_tokens": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.vllm
@pytest.mark.parametrize("overrides", SERVABLE)
def test_adapter_is_chosen_where_vllm_can_serve_it(overrides):
    model = lora_model(**overrides)
    for requested in ("auto", "adapter"):
        sync = choose_sync(requested, model, pytest.fail)
        assert isinstance(sync, AdapterSync)
    largest = max([overrides.get("r", 8), *overrides.get("rank_pattern", {}).values()])
    assert sync.engine_kwargs["max_lora_rank"] == largest
    assert isinstance(choose_sync("full", model, pytest.fail), FullSync)


@pytest.mark.vllm
@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (9, 16), (129, 256), (257, 320)])
def test_smallest_rank_of_the_engine(rank, served):
    assert choose_sync("auto", lora_model(r=rank, target_modules=["q_proj"]), pytest.fail).engine_kwargs == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": served,
    }


def refused_as_adapter(model, reason, caplog, **kwargs):
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_sync("auto", model, list, **kwargs), FullSync)
    assert reason in caplog.text and "vllm_weight_sync='auto'" in caplog.text
    with pytest.raises(
        ValueError, match="vllm_weight_sync='adapter'.* because .*Set `vllm_weight_sync` to 'full'"
    ) as error:
        choose_sync("adapter", model, list, **kwargs)
    assert reason in str(error.value)


@pytest.mark.vllm
@pytest.mark.parametrize("reason", UNSERVABLE)
def test_full_is_chosen_with_a_reason(reason, caplog):
    refused_as_adapter(lora_model(**UNSERVABLE[reason]), reason, caplog)


@pytest.mark.vllm
def test_full_is_chosen_for_other_models(caplog):
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    refused_as_adapter(get_peft_model(tiny.model(V), ia3), "IA3", caplog)

    unfrozen = lora_model()
    unfrozen.get_base_model().model.norm.weight.requires_grad_()
    refused_as_adapter(unfrozen, "model.norm.weight` is trained", caplog)

    several = lora_model()
    several.add_adapter("second", lora())
    several.base_model.set_adapter(["default", "second"])
    refused_as_adapter(several, "default, second", caplog)

    other = lora_model()
    other.config.architectures = ["GPT2LMHeadModel"]
    refused_as_adapter(other, "GPT2LMHeadModel", caplog)

    awq = lora_model()
    awq.config.quantization_config = {"quant_method": "awq"}
    refused_as_adapter(awq, "other means than bitsandbytes", caplog)

    experts = get_peft_model(
        tiny.model(V, moe=True), lora(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    )
    refused_as_adapter(experts, "target_parameters", caplog)


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM on a CPU")
def test_full_is_chosen_for_models_with_experts_on_a_cpu(caplog):
    refused_as_adapter(get_peft_model(tiny.model(V, moe=True), lora(target_modules=["q_proj"])), "experts", caplog)


def test_full_is_chosen_where_nothing_is_colocated_or_whole(caplog):
    refused_as_adapter(lora_model(), "vLLM server", caplog, colocated=False)
    refused_as_adapter(lora_model(), "ZeRO-3 or FSDP", caplog, sharded=True)


def test_without_peft(caplog):
    model = tiny.model(V)
    assert choose_sync("auto", model, list).params is list
    assert not caplog.records, "nothing to explain"
    with pytest.raises(ValueError, match="`vllm_weight_sync='adapter'`.*no LoRA adapter"):
        choose_sync("adapter", model, list)


@pytest.mark.parametrize(
    "overrides",
    [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}],
)
def test_tied_embeddings_that_an_adapter_trains_apart_are_refused(overrides):
    model = get_peft_model(tiny.model(V, tie_word_embeddings=True), lora(**overrides))
    for requested in ("auto", "full", "adapter"):
        with pytest.raises(ValueError, match="ties its input and output embeddings.*ensure_weight_tying=True"):
            choose_sync(requested, model, pytest.fail)


@pytest.mark.vllm
@pytest.mark.slow
def test_tied_embeddings_that_an_adapter_trains_together(tmp_path, engine_args):
    overrides = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    trainer = make_trainer(tmp_path, kind="tied", peft_config=lora(**overrides), learning_rate=1e-2)
    trainer.train()
    assert check_in_sync(trainer).mode == "full"
    check_far_from(trainer, initial(trainer))


def test_trl_gathers_what_is_sharded_and_merges_what_is_not_plain():
    for model, kwargs in [(lora_model(), {"sharded": True}), (lora_model(use_dora=True), {})]:
        assert choose_sync("full", model, list, **kwargs).params is list


def quantized(tmp_path, quantization=INT8, **overrides):
    path = save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization)
    return get_peft_model(model, lora(**overrides)) if overrides else model


def test_quantized_bases_that_cannot_be_synchronised(tmp_path):
    for model, reason in [(quantized(tmp_path), "no LoRA adapter"), (quantized(tmp_path, use_dora=True), "use_dora")]:
        for requested in ("auto", "full", "adapter"):
            with pytest.raises(ValueError, match=f"`use_vllm=True`.*bitsandbytes.*{reason}.*peft_config"):
                choose_sync(requested, model, pytest.fail)
    with pytest.raises(ValueError, match="sharded"):
        choose_sync("auto", quantized(tmp_path, r=4), pytest.fail, sharded=True)


@pytest.mark.parametrize("requested", ["Adapter", "", None, "delta"])
def test_unknown_weight_sync(requested, tmp_path):
    with pytest.raises(ValueError, match="`vllm_weight_sync` must be one of 'auto', 'full', 'adapter'"):
        PDMGRPOConfig(output_dir=str(tmp_path), vllm_weight_sync=requested, use_cpu=True, bf16=False)


@pytest.mark.vllm
def test_refused_before_an_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: pytest.fail("an engine was started"))
    with pytest.raises(ValueError, match="vllm_weight_sync='adapter'.*no LoRA adapter"):
        make_trainer(tmp_path, vllm_weight_sync="adapter")
    with pytest.raises(ValueError, match="vllm_weight_sync='adapter'.*use_dora"):
        make_trainer(tmp_path, vllm_weight_sync="adapter", peft_config=lora(use_dora=True))
    with pytest.raises(ValueError):  # transformers' own, or ours
        make_trainer(tmp_path, quantization_config=INT8)


class Asked(Exception):
    pass


@pytest.mark.vllm
def test_quantization_of_the_engine(tmp_path, monkeypatch):
    def last_call(**kwargs):
        raise Asked(kwargs["quantization"])

    monkeypatch.setattr(vllm_generation, "LLM", last_call)
    for quantization in ("fp8", None):
        with pytest.raises(Asked) as asked:
            make_trainer(tmp_path, vllm_quantization=quantization)
        assert asked.value.args == (quantization,)


# ---- What is sent


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
    tensors = weight_sync.adapter_tensors(model)
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name} == {6}
    name = "base_model.model.model.layers.1.mlp.up_proj"
    layer = model.get_submodule(name)
    delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    torch.testing.assert_close(delta, layer.get_delta_weight("other"))


# ---- The engine's side, with an engine that only takes notes


class Engine:
    def __init__(self, takes=True):
        self.calls, self.loras, self.llm_engine = [], set(), self
        self.takes = takes

    def collective_rpc(self, method, kwargs):
        self.calls.append((method, len(list(kwargs["weights_iterator"]))))

    def apply_model(self, function):
        return [False]

    def add_lora(self, request):
        folder = Path(request.lora_path)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
        assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        self.calls.append(("add", request.lora_int_id))
        if self.takes is None:
            raise OSError("no space left")
        if self.takes:
            self.loras.add(request.lora_int_id)
        return self.takes

    def remove_lora(self, version):
        self.loras.discard(version)

    def list_loras(self):
        return self.loras

    def generate(self, prompts, *, lora_request=None):
        return lora_request


@pytest.mark.vllm
@pytest.mark.parametrize("sleeps", [False, True])
def test_adapter_versions(sleeps):
    engine, sync = Engine(), choose_sync("auto", lora_model(), pytest.fail, base_every_time=sleeps)
    assert engine.generate([]) is None
    for version in (1, 2, 3):
        sync.push(engine)
        assert engine.loras == {version} and engine.generate([]).lora_int_id == version
        assert engine.generate([], lora_request=None) is engine.generate([], lora_request=sync.request)
        assert engine.generate([], lora_request="mine") == "mine"
        assert not leftovers()
    reload = ("reload_weights", len(list(tiny.model(V).parameters())))
    expected = [reload, ("add", 1), *[reload] * sleeps, ("add", 2), *[reload] * sleeps, ("add", 3)]
    assert engine.calls == expected


@pytest.mark.vllm
@pytest.mark.parametrize("takes", [False, None])
def test_adapter_that_the_engine_does_not_take(takes):
    engine, sync = Engine(takes), AdapterSync(lora_model())
    with pytest.raises((RuntimeError, OSError)):
        sync.push(engine)
    assert sync.request is None and not leftovers()


@pytest.mark.vllm
def test_engine_without_lora_requests():
    engine = Engine()
    engine.generate = lambda prompts: None
    with pytest.raises(TRLCompatibilityError, match="lora_request"):
        AdapterSync(lora_model()).push(engine)


def test_sync_that_bypasses_this_package(monkeypatch):
    generation = TopKVLLMGeneration.__new__(TopKVLLMGeneration)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: None)
    with pytest.raises(TRLCompatibilityError, match="_iter_named_params"):
        generation.sync_weights()


def test_server_gets_every_parameter(monkeypatch):
    model = tiny.model(V)
    generation = TopKVLLMGeneration.__new__(TopKVLLMGeneration)
    generation.mode, generation._sync, received = "server", FullSync(model.named_parameters, model), []
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: received.extend(self._iter_named_params()))
    generation.sync_weights()
    assert [name for name, _ in received] == [name for name, _ in model.named_parameters()]
    assert generation.last_sync.mode == "full" and generation.last_sync.bytes == full_bytes(model)


@pytest.mark.vllm
def test_tied_heads_are_found_wherever_they_are(monkeypatch):
    from vllm.model_executor.layers import vocab_parallel_embedding

    class Embedding(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight
            self.quant_method = SimpleNamespace(process_weights_after_loading=repacked.append)

    class Head(Embedding):
        pass

    monkeypatch.setattr(vocab_parallel_embedding, "VocabParallelEmbedding", Embedding)
    monkeypatch.setattr(vocab_parallel_embedding, "ParallelLMHead", Head)
    repacked, weights = [], [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    tied, untied = Head(weights[0]), Head(weights[1])
    nested = torch.nn.ModuleDict(
        {
            "vision": torch.nn.ModuleDict({"embed": Embedding(weights[2])}),
            "language_model": torch.nn.ModuleDict(
                {"wrapped": torch.nn.Sequential(Embedding(weights[0])), "lm_head": tied}
            ),
            "other_head": untied,
        }
    )
    assert weight_sync._has_tied_head(nested)
    weight_sync._repack_tied_heads(nested)
    assert repacked == [tied]
    assert not weight_sync._has_tied_head(torch.nn.Sequential(untied, Embedding(weights[2])))


# ---- The adapter's folder


def leftovers():
    parents = {Path(weight_sync._SHARED_MEMORY), Path(weight_sync.tempfile.gettempdir())}
    return [folder for parent in parents for folder in parent.glob(f"{weight_sync._FOLDER_PREFIX}*")]


def run_python(code, **kwargs):
    code = textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), **kwargs)


def test_folder_is_private_and_in_memory():
    with private_folder(1000) as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert os.path.dirname(folder) == "/dev/shm" or not os.access("/dev/shm", os.W_OK)
    assert not os.path.exists(folder)


def test_folder_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sync.tempfile, "tempdir", str(tmp_path))
    with private_folder(2**60) as folder:  # a container's /dev/shm may have 64 MB
        assert os.path.dirname(folder) == str(tmp_path)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    monkeypatch.setattr(weight_sync, "_SHARED_MEMORY", "/nonexistent")
    with private_folder(1) as folder:
        assert os.path.dirname(folder) == str(tmp_path)


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise RuntimeError('crash')", "raise KeyboardInterrupt"])
def test_folder_is_gone_after_the_process(end):
    process = run_python(
        f"""
        from trl_pdm.weight_sync import private_folder
        with private_folder(1) as folder:
            open(folder + "/adapter", "w").write("secret")
            print(folder, flush=True)
            {end}
        """,
        stderr=subprocess.DEVNULL,
    )
    folder = process.communicate(timeout=120)[0].strip()
    assert process.returncode != 0 and folder and not os.path.exists(folder)


def test_folder_of_a_killed_process_is_removed_at_the_next_start():
    code = """
        import time
        from trl_pdm.weight_sync import private_folder
        with private_folder(1) as folder:
            open(folder + "/adapter", "w").write("secret")
            print(folder, flush=True)
            time.sleep(600)
        """
    killed, alive = run_python(code), run_python(code)
    try:
        folders = [process.stdout.readline().strip() for process in (killed, alive)]
        assert all(map(os.path.exists, folders))
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        assert os.path.exists(folders[0]), "nobody was there to remove it"
        weight_sync.remove_stale_folders()
        assert [os.path.exists(folder) for folder in folders] == [False, True]
    finally:
        alive.kill()
        alive.wait(60)
        weight_sync.remove_stale_folders()
    assert not os.path.exists(folders[1])


def test_a_folder_that_another_process_is_about_to_lock_stays(tmp_path, monkeypatch):
    locked = weight_sync._locked

    def late(folder, operation):
        monkeypatch.setattr(weight_sync, "_locked", locked)
        weight_sync.remove_stale_folders()  # what a process that starts now would do
        return locked(folder, operation)

    monkeypatch.setattr(weight_sync, "_locked", late)
    with private_folder(1) as folder:
        assert os.path.isdir(folder)


def test_stale_folder_is_never_followed_elsewhere(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    link = Path(weight_sync.tempfile.gettempdir(), f"{weight_sync._FOLDER_PREFIX}link-{os.getpid()}")
    link.symlink_to(tmp_path / "precious")
    try:
        weight_sync.remove_stale_folders()
        assert (tmp_path / "precious" / "file").exists()
    finally:
        link.unlink()


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
    weight_sync.quiet_bitsandbytes()
    weight_sync.quiet_bitsandbytes()
    for _ in range(5):
        logger.warning("MatMul8bitLt: inputs will be cast from %s to float16 during quantization", "test.dtype")
        logger.warning("something else")
    messages = [record.getMessage() for record in caplog.records]
    assert sum("inputs will be cast" in message for message in messages) == 1
    assert messages.count("something else") == 5
