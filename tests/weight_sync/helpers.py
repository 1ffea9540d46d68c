"""Models, adapters and trainers that the tests of the weight sync share, and how far an engine is from its trainer."""

from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.helpers import tiny, trainers
from trl_pdm.weight_sync import adapter_files, engine


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


def make_trainer(tmp_path, model=None, kind="untied", **options):
    defaults = dict(
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        temperature=1.0,
        max_steps=6,
        learning_rate=5e-2 if options.get("peft_config") else 1e-2,
        lr_scheduler_type="constant",
        use_vllm=True,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=64,
        **trainers.TWO_STEPS,
    )
    return trainers.make_trainer(tmp_path, model=model or save_model(tmp_path, kind), **defaults | options)


def logps(model, prompts, completions):
    """Logprobs of the completions' tokens, from full logits."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        all_logps = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float().log_softmax(-1)
        found.append(all_logps[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


def sample(trainer):
    """Prompts, what the engine makes of them, and its logprobs of that."""
    prompts = [trainer.processing_class(row["prompt"])["input_ids"] for row in trainer.train_dataset.select(range(48))]
    _, completions, logprobs, _ = trainer.vllm_generation.generate(prompts, None, 1)
    return prompts, completions, torch.tensor([float(lp[0]) for entries in logprobs for lp in entries])


@torch.no_grad()
def difference(trainer, model=None):
    """Mean absolute difference between the engine's logprobs of tokens that it samples, and those of full logits."""
    model = model or trainer.model
    was_training = model.training
    model.eval()
    prompts, completions, sampled = sample(trainer)
    errors = (logps(model, prompts, completions) - sampled).abs()
    model.train(was_training)
    assert len(errors) > 40
    return errors.mean().item()


def check_in_sync(trainer):
    """After a sync the engine samples from the trainer's policy."""
    trainer.vllm_generation.sync_weights()
    error, sync = difference(trainer), trainer.vllm_generation.last_sync
    print(f"mean abs difference {error:.5f}, {sync}")
    assert error < ENGINE_NOISE
    return sync


def check_far_from(trainer, model=None):
    """... and from no other that it could have been left with."""
    assert difference(trainer, model) > 3 * ENGINE_NOISE


def initial(trainer):
    return AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path).eval()


def adapter_bytes(model):
    """In bfloat16, the engine's dtype."""
    return sum(2 * p.numel() for name, p in model.named_parameters() if "lora_" in name and ".default." in name)


def full_bytes(model):
    return sum(2 * p.numel() for p in model.parameters())


def quantized(tmp_path, quantization=INT8, **overrides):
    path = save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization)
    return get_peft_model(model, lora(**overrides)) if overrides else model


def leftovers():
    parents = {Path(adapter_files._SHARED_MEMORY), Path(adapter_files.tempfile.gettempdir())}
    return [folder for parent in parents for folder in parent.glob(f"{adapter_files._FOLDER_PREFIX}*")]


def pack_tied_heads(llm, monkeypatch):
    """A head that computes with a copy of its weights, made when they are loaded: vLLM's own on CPUs that have kernels
    for packed weights. This stands for it on those that have none."""

    def pack(layer):
        layer.packed = layer.weight.detach().clone()

    def pack_all(model):
        for head in engine._tied_heads(model):
            monkeypatch.setattr(head.quant_method, "process_weights_after_loading", pack)
            monkeypatch.setattr(
                head.quant_method, "apply", lambda layer, x, bias=None: F.linear(x, layer.packed, bias), raising=True
            )
            pack(head)

    llm.apply_model(pack_all)
