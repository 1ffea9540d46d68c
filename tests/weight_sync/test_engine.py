"""On a real engine: after each sync it must sample from the very policy that is trained.

The engine's own logprobs are compared with the log-softmax of the trainer's full logits, after real optimizer updates.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.weight_sync.helpers import (
    ENGINE_NOISE,
    INT8,
    NF4,
    V,
    adapter_bytes,
    check_far_from,
    check_in_sync,
    difference,
    full_bytes,
    initial,
    leftovers,
    logps,
    lora,
    make_trainer,
    pack_tied_heads,
    sample,
    save_model,
)
from trl_pdm.weight_sync import engine, strategies
from trl_pdm.weight_sync.parameters import held_parameters
from trl_pdm.weight_sync.strategies import FullSync


def sync_without(trainer, part):
    kept = FullSync(trainer.model, lambda: ((n, p) for n, p in held_parameters(trainer.model) if part not in n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.vllm_generation, "_sync", kept)
        trainer.vllm_generation.sync_weights()
    return difference(trainer)


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


def spacing(weight):
    """Of bfloat16, which has 8 bits of precision."""
    return 2.0 ** (weight.abs().log2().floor() - 7)


@pytest.mark.vllm
@pytest.mark.slow
def test_updates_smaller_than_the_engines_spacing_reach_it(tmp_path, engine_args):
    path = save_model(tmp_path)
    start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    start.save_pretrained(path)  # what the engine loads is what the trainer starts from, bit by bit
    start = start.float().eval()
    trainer = make_trainer(tmp_path, path)
    generation, model = trainer.vllm_generation, trainer.model.eval()
    prompts = sample(trainer)[0]
    logps(model, prompts, [trainer.processing_class("1" * 12)["input_ids"]] * len(prompts)).mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * spacing(param) * param.grad.sign()

    def gap_and_share(rounding):
        """Distance of the engine from the trainer, relative to what the trainer has learned, and how much of that it shows."""
        generation._sync.rounding.mode = rounding
        generation.sync_weights()
        prompts, completions, sampled = sample(trainer)
        with torch.no_grad():
            before, after = logps(start, prompts, completions), logps(model, prompts, completions)
        change = after - before
        assert change.abs().mean() > 0.01
        share = ((sampled - before) * change).sum() / change.square().sum()
        return ((sampled - after).abs().mean() / change.abs().mean()).item(), share.item()

    assert generation._sync.rounding.mode == "auto"
    found = {rounding: gap_and_share(rounding) for rounding in ("auto", "nearest")}
    print(found)
    assert found["auto"][0] < 0.6 and 0.9 < found["auto"][1] < 1.1
    assert found["nearest"][0] > 0.9 and -0.1 < found["nearest"][1] < 0.1


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_in_float32_holds_the_very_weights(tmp_path, engine_args):
    trainer = make_trainer(tmp_path, vllm_dtype="float32")
    assert engine_args["dtype"] == "float32"
    trainer.train()
    trainer.vllm_generation.sync_weights()
    assert difference(trainer) < 1e-4
    assert trainer.vllm_generation.last_sync.bytes == 2 * full_bytes(trainer.model)


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
        pack_tied_heads(trainer.vllm_generation.llm, monkeypatch)
        check_in_sync(trainer)
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight.copy_(trainer.model.get_input_embeddings().weight.flip(0))
        monkeypatch.setattr(engine, "_repack_tied_heads", lambda model: None)
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
    # What was trained differs with what was sampled. Of weights that are known and that bfloat16 holds, all checks are sure
    with torch.no_grad():
        for (name, parameter), start in zip(
            trainer.model.named_parameters(), initial(trainer).parameters(), strict=True
        ):
            parameter.copy_(start.bfloat16() * (2 if "experts" in name else 1))
    check_far_from(trainer)  # the engine still has the experts from before
    check_in_sync(trainer)
    if kind == "experts with a router bias":  # a buffer of the model, and a parameter of the engine
        trainer.model.model.layers[1].mlp.gate.e_score_correction_bias.neg_()
        check_in_sync(trainer)
        trainer.model.model.layers[1].mlp.gate.e_score_correction_bias.neg_()
        monkeypatch.setattr(strategies, "persistent_buffers", lambda model: [])
        assert not sync_without(trainer, "none") < 3 * ENGINE_NOISE
        return
    monkeypatch.setattr(engine, "_repack_experts", lambda model: None)
    if not torch.cuda.is_available():
        assert sync_without(trainer, "none") > 3 * ENGINE_NOISE, "what a CPU engine makes of a reload"


@pytest.mark.vllm
@pytest.mark.slow
def test_tied_embeddings_that_an_adapter_trains_together(tmp_path, engine_args):
    overrides = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    trainer = make_trainer(tmp_path, kind="tied", peft_config=lora(**overrides), learning_rate=1e-2)
    trainer.train()
    assert check_in_sync(trainer).mode == "full"
    check_far_from(trainer, initial(trainer))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_trained_rows_of_an_embedding(kind, tmp_path, engine_args):
    rows = [tiny.tokenizer().convert_tokens_to_ids(token) for token in "1+="]
    trainer = make_trainer(tmp_path, kind=kind, peft_config=lora(trainable_token_indices=rows))
    trainer.train()
    assert check_in_sync(trainer).mode == "full"
    before, after = initial(trainer).get_input_embeddings().weight, dict(trainer.vllm_generation._sync.tensors())
    changed = (after["model.embed_tokens.weight"].float() - before).abs().amax(-1) > 0.05
    assert changed.nonzero()[:, 0].tolist() == sorted(rows)


def check_engine_rows(trainer, rows):
    assert trainer.vllm_generation.llm.llm_engine.model_config.get_vocab_size() == rows
    (held,) = trainer.vllm_generation.llm.apply_model(lambda model: model.model.embed_tokens.org_vocab_size)
    assert held == rows


@pytest.mark.vllm
@pytest.mark.slow
def test_tokens_added_in_memory_are_sampled(tmp_path, engine_args):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(save_model(tmp_path)), tiny.tokenizer()
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    model.resize_token_embeddings(V + 3)
    one = tokenizer.convert_tokens_to_ids("1")
    with torch.no_grad():
        model.lm_head.weight[V:] = model.lm_head.weight[one]
    trainer = make_trainer(tmp_path, model=model, processing_class=tokenizer, peft_config=lora(), vllm_dtype="float32")
    trainer.train()
    assert check_in_sync(trainer).mode == "adapter"
    assert difference(trainer) < 1e-4
    check_engine_rows(trainer, V + 3)
    with trainer.model.disable_adapter():
        check_far_from(trainer)
    assert {V, V + 1, V + 2} & {token for completion in sample(trainer)[1] for token in completion}


@pytest.mark.vllm
@pytest.mark.slow
def test_a_vocabulary_that_shrank_in_memory(tmp_path, engine_args):
    tiny.model(V + 20, tie_word_embeddings=True).save_pretrained(tmp_path / "larger")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "larger")
    model.resize_token_embeddings(V)
    trainer = make_trainer(tmp_path, model=model)
    trainer.train()
    assert check_in_sync(trainer).mode == "full"
    check_engine_rows(trainer, V)
    check_far_from(trainer, initial(trainer))


@pytest.mark.vllm
@pytest.mark.slow
def test_transformers_backend_leaves_the_trainers_model_alone(tmp_path, engine_args, caplog):
    trainer = make_trainer(tmp_path, vllm_model_impl="transformers", peft_config=lora())
    assert engine_args["enforce_eager"]
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "Transformers backend" in text]
    assert "without compilation" in warning
    trainer.train()  # with the forward of a class that vLLM would have decorated
    assert check_in_sync(trainer).mode == "adapter"
    with trainer.model.disable_adapter():
        check_far_from(trainer)


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
    assert engine._has_tied_head(nested)
    engine._repack_tied_heads(nested)
    assert repacked == [tied]
    assert not engine._has_tied_head(torch.nn.Sequential(untied, Embedding(weights[2])))
