"""Figures that take a GPU's memory for themselves, each in a process of its own.

    python -m tests.gpu.measure step --size 1.7B

prints them as JSON, in its last line. `--rehearse` does the same with tiny models on a CPU.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path


SIZES = {
    "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, tied=True),
    "8B": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, tied=False),
    "engine": dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, tied=False),
    "rehearsal": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, tied=False),
}
REAL_VOCABULARY = 151_936
FULL, ADAPTER = 8, 2  # bytes a parameter: bfloat16 weights, gradients and Adam's two moments; weights only
ROOM = 8e9  # bytes for activations, and for what else is on the GPU


class Lacking(Exception):
    """What this machine lacks."""


def config_of(size: str, vocab_size: int):
    from transformers import Qwen3Config

    shape = dict(SIZES[size])
    return Qwen3Config(
        vocab_size=vocab_size,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=128 if size != "rehearsal" else 16,
        tie_word_embeddings=shape.pop("tied"),
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **shape,
    )


def build(size: str, vocab_size: int, device: str, dtype: str = "bfloat16"):
    """Random weights, made where they stay."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device), no_init_weights():
            model = Qwen3ForCausalLM(config_of(size, vocab_size))
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(std=0.02)
    model.tie_weights()
    return model


def rollout_of(vocab_size: int, length: int, top_k: int = 20):
    """A rollout function of random completions, so that no time goes into generation. Candidates fall off by rank."""
    import random

    numbers = random.Random(0)
    logps = [-1.5 - 0.4 * rank for rank in range(top_k)]

    def rollout(prompts, trainer):
        rows = dict(prompt_ids=[], completion_ids=[], logprobs=[], topk_token_ids=[], topk_logprobs=[])
        for prompt in prompts:
            candidates = [numbers.sample(range(2, vocab_size), top_k) for _ in range(length)]
            rows["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
            rows["completion_ids"].append([ids[0] for ids in candidates])
            rows["logprobs"].append([logps[0]] * length)
            rows["topk_token_ids"].append(candidates)
            rows["topk_logprobs"].append([logps] * length)
        return rows

    return rollout


def step(args) -> dict:
    """Loss, backward pass and optimizer step on one batch, with the mask and as stock GRPO has it, in turn."""
    import torch
    from peft import LoraConfig

    from tests.helpers.trainers import make_trainer

    size = "rehearsal" if args.rehearse else args.size
    vocab_size, length = (64, 16) if args.rehearse else (REAL_VOCABULARY, 448)
    device, adapter = "cpu" if args.rehearse else "cuda", False
    if device == "cuda":
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build(size, vocab_size, "meta").parameters())
        free = torch.cuda.mem_get_info()[0] - ROOM
        adapter = free < FULL * parameters
        if free < ADAPTER * parameters:
            raise Lacking(f"{(ADAPTER * parameters + ROOM) / 1e9:.0f} GB of free GPU memory, even for LoRA")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            model=build(size, vocab_size, device),
            peft_config=LoraConfig(r=32, target_modules="all-linear") if adapter else None,
            rollout_func=rollout_of(vocab_size, length),
            use_cpu=args.rehearse,
            bf16=not args.rehearse,
            gradient_checkpointing=True,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=length,
            steps_per_generation=2,
            gradient_accumulation_steps=1,
            divergence_top_k=20,
            max_steps=1,
            learning_rate=1e-7,
        )
        kept = []
        compute_loss = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, *rest, **more: (
            kept.append(dict(inputs)) or compute_loss(model, inputs, *rest, **more)
        )
        trainer.train()  # as a user would, which also warms everything up
        trainer.current_gradient_accumulation_steps = 1
        masked = kept[0]
        stock = {name: value for name, value in masked.items() if not name.startswith("behavior_")}
        stock["old_per_token_logps"] = masked["behavior_topk_logps"][..., 0]
        seconds, peaks = {"PDM": [], "stock": []}, {"PDM": 0.0, "stock": 0.0}
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        for n in range(args.repeats + 1):
            for name in ("PDM", "stock") if n % 2 else ("stock", "PDM"):
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                wait()
                start = time.perf_counter()
                with trainer.compute_loss_context_manager():
                    loss = compute_loss(trainer.model_wrapped, dict(masked if name == "PDM" else stock))
                trainer.accelerator.backward(loss)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                wait()
                if n:
                    seconds[name].append(time.perf_counter() - start)
                if device == "cuda":
                    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        trained = "LoRA" if adapter else "all weights"
        tokens = masked["completion_mask"].sum().item()
        return dict(
            trained=trained, tokens=tokens, seconds=medians, peak=peaks, ratio=medians["PDM"] / medians["stock"]
        )


def save(folder: Path, rehearse: bool) -> str:
    from tests.helpers import tiny

    tokenizer = tiny.tokenizer()
    build("rehearsal" if rehearse else "engine", len(tokenizer), "cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def engine(args) -> dict:
    """After each of four syncs: how far a colocated engine's logprobs are from the trainer's, in nats."""
    from peft import LoraConfig

    from tests.helpers.trainers import make_trainer, run

    fields = dict(use_vllm=True, vllm_max_model_length=64, vllm_gpu_memory_utilization=0.3)
    fields |= dict(vllm_quantization=args.quantization, vllm_weight_sync=args.sync)
    fields |= dict(vllm_mode="server", vllm_server_port=args.port) if args.port else {}
    if args.sleep:
        fields["vllm_enable_sleep_mode"] = True
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            model=args.model or save(Path(folder) / "model", args.rehearse),
            peft_config=LoraConfig(r=8, target_modules="all-linear") if args.sync == "adapter" else None,
            use_cpu=args.rehearse,
            bf16=not args.rehearse,
            per_device_train_batch_size=8,
            max_completion_length=24,
            gradient_accumulation_steps=1,
            max_steps=4,  # a rollout and a sync each
            learning_rate=1e-3 if args.sync == "adapter" else 1e-4,
            sync_check_steps=1,
            **fields,
        )
        freed = []
        if args.sleep:
            import torch

            llm = trainer.vllm_generation.llm
            sleep = llm.sleep

            def asleep(level):  # TRL always asks for level 2
                before = torch.cuda.mem_get_info()[0]
                sleep(level=args.sleep)
                freed.append(torch.cuda.mem_get_info()[0] - before)

            llm.sleep = asleep
        logs = run(trainer)
    name = "weight_sync/logp_difference_mean"
    return dict(apart=[log[name] for log in logs if name in log], freed=max(freed, default=0))


def distributed(args) -> dict:
    """A training of several processes, started by torchrun or accelerate: what it logs, and whether weights agree."""
    import torch

    from tests.gpu import trainings
    from tests.helpers.trainers import run

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainings.make(folder, use_cpu=args.rehearse, bf16=False)
        logs = run(trainer)
        total = sum(p.detach().double().sum() for p in trainer.model.parameters())
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        sums = trainer.accelerator.gather(total.reshape(1)).tolist()
        processes, kind = trainer.accelerator.num_processes, str(trainer.accelerator.distributed_type)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    losses = [log["loss"] for log in logs if "grad_norm" in log]
    masked = [log["trust_region/outside"] for log in logs if "trust_region/outside" in log]
    return dict(processes=processes, kind=kind, losses=losses, outside=masked, sums=sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "engine", "distributed", "save"))
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sync", default="full")
    parser.add_argument("--quantization")
    parser.add_argument("--sleep", type=int, default=0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if args.what == "save":
        found = dict(model=save(Path(args.model), args.rehearse))
    else:
        try:
            found = dict(step=step, engine=engine, distributed=distributed)[args.what](args)
        except Lacking as lacking:
            found = dict(lacking=str(lacking))
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
