"""Time, bytes and exactness of bringing weights into a colocated vLLM: ours beside TRL's way.

    python examples/benchmarks/weight_sync.py [--model FOLDER] [--repeats 5]

Each variant runs in a process of its own, `--rounds` times in turn. `--repeats` times it perturbs the trained weights,
syncs, samples, and compares the sampled logprobs with the trainer's. Printed are medians over all repeats and, last,
the ratios to TRL's way with the same model.

TRL's way with LoRA is to merge the adapter into the base and push every parameter. On a CPU its push fails, because
the engine repacks its weights, so there both ways push through vLLM's reload. On a GPU TRL's own push is measured.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

from processes import in_own_process


# name: (LoRA, 8-bit base, TRL's way, `vllm_weight_sync`, the variant it is compared with)
VARIANTS = {
    "full, TRL": (False, False, True, "full", None),
    "full": (False, False, False, "full", "full, TRL"),
    "LoRA merged, TRL": (True, False, True, "full", None),
    "LoRA merged": (True, False, False, "full", "LoRA merged, TRL"),
    "LoRA adapter": (True, False, False, "adapter", "LoRA merged, TRL"),
    "8-bit + LoRA merged": (True, True, False, "full", "LoRA merged, TRL"),
    "8-bit + LoRA adapter": (True, True, False, "adapter", "LoRA merged, TRL"),
}


def measure(name: str, args: argparse.Namespace) -> list[dict[str, float]]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from tiny_model import tiny_model
    from transformers import BitsAndBytesConfig
    from trl.generation.vllm_generation import VLLMGeneration

    from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer
    from trl_pdm.weight_sync.strategies import FullSync

    lora, eight_bit, trl_way, sync, _ = VARIANTS[name]
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PDMGRPOTrainer(
            args.model or tiny_model(f"{folder}/model"),
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=PDMGRPOConfig(
                output_dir=folder,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_weight_sync=sync,
                vllm_gpu_memory_utilization=0.4,
                vllm_max_model_length=128,
                max_completion_length=32,
                per_device_train_batch_size=8,
                report_to="none",
                use_cpu=not on_gpu,
                bf16=on_gpu,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["Once upon a time"] * 8}),
            quantization_config=BitsAndBytesConfig(load_in_8bit=True) if eight_bit else None,
            peft_config=LoraConfig(r=16, target_modules="all-linear") if lora else None,
        )
        generation, model = trainer.vllm_generation, trainer.model
        if trl_way and not on_gpu:
            generation._sync = FullSync(model, lambda: VLLMGeneration._iter_named_params(generation))
        elif trl_way:

            def counted():
                for name, param in VLLMGeneration._iter_named_params(generation):
                    generation._moved += param.nbytes
                    yield name, param

            generation._iter_named_params = counted
        prompts = [
            trainer.processing_class(f"Once upon a time there was a {word}")["input_ids"] for word in "abcdefgh"
        ]
        rows = []
        for repeat in range(args.repeats + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter += 0.02 * parameter.std().clamp(min=1e-2) * torch.randn_like(parameter)
            generation._moved = 0
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            if trl_way and on_gpu:
                VLLMGeneration.sync_weights(generation)
            else:
                generation.sync_weights()
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            _, completions, logprobs, _ = generation.generate(prompts, None, 1)
            differences = []
            for prompt, completion, sampled in zip(prompts, completions, logprobs, strict=True):
                with torch.no_grad():
                    ids = torch.tensor([[*prompt, *completion]], device=model.device)
                    own = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                own = own.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
                differences += [abs(a - lp[0]) for a, lp in zip(own, sampled, strict=True)]
            if repeat:  # the first brings the base along, and compiles
                rows.append(
                    {"seconds": seconds, "MB": generation._moved / 1e6, "difference": statistics.mean(differences)}
                )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model; a tiny one by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.variant:
        print(json.dumps(measure(args.variant, args)))
        return
    rows = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in VARIANTS:
            rows[name] += in_own_process("--variant", name)
    medians = {
        name: {key: statistics.median(row[key] for row in runs) for key in runs[0]} for name, runs in rows.items()
    }
    print(f"\n{'':22}{'seconds':>10}{'MB moved':>10}{'mean |difference|':>19}{'time to TRL':>13}{'bytes to TRL':>14}")
    for name, found in medians.items():
        line = f"{name:22}{found['seconds']:10.3f}{found['MB']:10.2f}{found['difference']:19.4f}"
        if (baseline := VARIANTS[name][-1]) is not None:
            line += "".join(
                f"{found[key] / medians[baseline][key]:{width}.3f}" for key, width in (("seconds", 13), ("MB", 14))
            )
        print(line)


if __name__ == "__main__":
    main()
