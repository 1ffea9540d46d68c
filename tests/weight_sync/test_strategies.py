"""Which strategy is chosen and which is refused, without an engine; what is pushed, to an engine that only takes notes."""

import copy
import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from peft import IA3Config, PolyConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from tests.helpers import tiny
from tests.weight_sync import architectures
from tests.weight_sync.architectures import build, with_lora
from tests.weight_sync.helpers import (
    INT8,
    V,
    full_bytes,
    leftovers,
    lora,
    lora_model,
    make_trainer,
    quantized,
    save_model,
)
from trl_pdm import PDMGRPOConfig
from trl_pdm._hooks import TRLCompatibilityError
from trl_pdm.rollout import TopKVLLMGeneration
from trl_pdm.weight_sync.engine import engine_kwargs_for
from trl_pdm.weight_sync.strategies import AdapterSync, FullSync, choose_sync


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

    in_parts = with_lora(architectures.build("GLM-4"))
    refused_as_adapter(
        in_parts, "Glm4ForCausalLM has LoRA of `gate_up_proj` in parts only (gate_proj, up_proj)", caplog
    )

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
    sync = choose_sync("auto", model, pytest.fail)
    assert {name for name, _ in sync.tensors()} == {name for name, _ in model.named_parameters()}
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


NO_WEIGHTS = {
    "PROMPT_TUNING": PromptTuningConfig(num_virtual_tokens=4),
    "P_TUNING": PromptEncoderConfig(num_virtual_tokens=4),
    "PREFIX_TUNING": PrefixTuningConfig(num_virtual_tokens=4),
    "POLY": PolyConfig(target_modules=["q_proj"]),
    "LORA": lora(lora_bias=True),
}


@pytest.mark.parametrize("method", NO_WEIGHTS)
def test_adapters_that_are_no_change_of_weights_are_refused(method):
    config = copy.deepcopy(NO_WEIGHTS[method])
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(tiny.model(V), config)
    for requested in ("auto", "full", "adapter"):
        with pytest.raises(ValueError, match=f"`use_vllm=True`.*PEFT method {method}, because .*`use_vllm=False`"):
            choose_sync(requested, model, pytest.fail)


def test_trl_gathers_what_is_sharded():
    model, gathered = lora_model(), {"model.norm.weight": torch.ones(3)}
    ((name, sent),) = choose_sync("full", model, lambda: gathered.items(), sharded=True).tensors()
    assert name == "model.norm.weight" and torch.equal(sent, gathered[name])


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
@pytest.mark.parametrize(
    ("field", "argument", "values"),
    [
        ("vllm_quantization", "quantization", {"fp8": "fp8", None: None}),
        ("vllm_dtype", "dtype", {"float32": "float32", "auto": "vLLM's"}),
    ],
)
def test_what_the_engine_is_asked_for(field, argument, values, tmp_path, monkeypatch):
    def last_call(**kwargs):
        raise Asked(kwargs.get(argument, "vLLM's"))

    monkeypatch.setattr(vllm_generation, "LLM", last_call)
    for value, expected in values.items():
        with pytest.raises(Asked) as asked:
            make_trainer(tmp_path, **{field: value})
        assert asked.value.args == (expected,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_dtype": "half"}, "`vllm_dtype` must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'half'"),
        (
            {"vllm_dtype": "float32", "vllm_mode": "server"},
            "`vllm_dtype` must be 'auto' with a vLLM server.*'float32'",
        ),
        ({"vllm_weight_rounding": "up"}, "`vllm_weight_rounding` must be one of 'auto', 'nearest', 'stochastic', got"),
    ],
)
def test_precision_that_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PDMGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_a_quantized_engine_is_said_to_round_to_nearest_once_more(caplog):
    generation = TopKVLLMGeneration.__new__(TopKVLLMGeneration)
    for quantization, rounding, said in [("fp8", "auto", True), ("fp8", "nearest", False), (None, "auto", False)]:
        caplog.clear()
        generation.weight_rounding, generation._sync = rounding, choose_sync("full", tiny.model(V), pytest.fail)
        generation._settle_precision(torch.bfloat16, quantization)
        assert ("quantized (fp8), which rounds its weights to nearest" in caplog.text) == said


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

    def generate(self, prompts, lora_request=None):
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
        assert engine.generate([], None) is sync.request
        assert engine.generate([], lora_request="mine") == engine.generate([], "mine") == "mine"
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


def test_server_gets_every_parameter_in_its_own_dtype(monkeypatch):
    model = tiny.model(V)
    generation = TopKVLLMGeneration.__new__(TopKVLLMGeneration)
    generation.mode, generation.weight_rounding, received = "server", "auto", []
    generation._sync = choose_sync("full", model, pytest.fail)
    generation._settle_precision(torch.bfloat16, None)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: received.extend(self._iter_named_params()))
    generation.sync_weights()
    assert [name for name, _ in received] == [name for name, _ in model.named_parameters()]
    assert {param.dtype for _, param in received} == {torch.bfloat16}
    assert generation.last_sync.mode == "full" and generation.last_sync.bytes == full_bytes(model)
    assert any(not torch.equal(sent, dict(model.named_parameters())[name].bfloat16()) for name, sent in received)


# ---- Vocabularies


@pytest.mark.vllm
def test_engine_is_built_for_a_vocabulary_that_was_resized_in_memory(tmp_path):
    path = save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert engine_kwargs_for(model) == {}
    for rows in (V + 3, V - 2, 64):
        model.resize_token_embeddings(rows)
        assert engine_kwargs_for(model) == {"load_format": "dummy", "hf_overrides": {"vocab_size": rows}}


def test_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: pytest.fail("an engine was started"), raising=False)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<three>"]})
    for use_vllm in (False, True):
        with pytest.raises(ValueError, match=rf"`processing_class` has token ids up to {V + 2}.*{V} \(`vocab_size`\)"):
            make_trainer(tmp_path, use_vllm=use_vllm, processing_class=tokenizer)


def test_a_placeholder_that_a_text_model_never_sees_needs_no_row(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    assert tokenizer.image_token_id == V
    make_trainer(tmp_path, use_vllm=False, processing_class=tokenizer)


def test_a_model_that_vllm_cannot_reload_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: pytest.fail("an engine was started"), raising=False)
    model = build("gpt-oss")
    with pytest.raises(ValueError, match=r"`use_vllm=True` .* \(`model_type='gpt_oss'`\).*Set `use_vllm=False`"):
        make_trainer(tmp_path, use_vllm=True, model=model)


def test_a_model_without_a_checkpoint_is_refused_before_an_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: pytest.fail("an engine was started"), raising=False)
    with pytest.raises(ValueError, match=r"`use_vllm=True` does not work with a model that was made in memory.*Save"):
        make_trainer(tmp_path, use_vllm=True, model=tiny.model(V))
