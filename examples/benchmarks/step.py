"""Time and peak memory of a training step: stock GRPO, DPPO from full logits, and PDM, on the same model and engine.

    python examples/benchmarks/step.py [--model FOLDER] [--repeats 5] [--variants pdm binary ratio]

`binary` is PDM on the sampled token alone. `ratio` is GRPO's own clip as a mask.

DPPO is written here as it usually is: the loss takes the log-softmax over the whole vocabulary, and gathers the
rollout's top K from it.

Each repeat runs every variant once, in turn. Each run is a process, so that its peak memory is its own. It warms up
with one rollout and its optimizer steps, and measures the next ones. The phases are *rollout* (generation), *scoring*
(the forwards without gradient after it), *loss* (forward and backward) and *sync* (of the weights into vLLM). Printed
are medians over the repeats and, last, the ratios to stock.

Without a GPU, stock TRL cannot bring weights into vLLM (the CPU engine repacks them): all variants then use this
package's sync.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections import defaultdict

from processes import in_own_process
from tiny_model import tiny_model


VARIANTS = ("stock", "dppo", "pdm", "binary", "ratio")
PHASES = ("whole step", "rollout", "scoring", "loss", "sync")


def measure(variant: str, args: argparse.Namespace) -> dict[str, float]:
    """Train, and return seconds per optimizer step of each phase, and the process's peak memory in GB."""
    import tempfile

    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer
    from trl_pdm.trust_region import Evidence
    from trl_pdm.weight_sync.engine import reload_weights

    class StockGeneration(VLLMGeneration):
        def _iter_named_params(self):
            if torch.cuda.is_available():
                yield from super()._iter_named_params()
            else:
                reload_weights(self.llm, ((name, param.clone()) for name, param in super()._iter_named_params()))

    class FullLogitsDPPO(PDMGRPOTrainer):
        def _gather_evidence(self, loss, model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs):
            # The class's own forward: TRL has put its fused LM head on the instance's
            logits = (
                type(model)
                .forward(model, input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1)
                .logits
            )
            logps = (logits[:, :-1].float() / self.temperature).log_softmax(-1)
            ids = loss.given["behavior_topk_ids"]
            evidence = Evidence(
                behavior_logps=loss.given["behavior_topk_logps"],
                policy_logps=logps.detach().gather(-1, ids.clamp(min=0).long()),
                valid=ids >= 0,
                vocab_size=logps.shape[-1],
            )
            with torch.no_grad():
                entropies = -(logps.exp() * logps).sum(-1)
            return evidence, logps.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropies, None

    seconds = defaultdict(float)

    def timed(phase, method):
        def call(*call_args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            try:
                return method(*call_args, **kwargs)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds[phase] += time.perf_counter() - start

        return call

    with tempfile.TemporaryDirectory() as folder:
        config, cls, fields = {
            "stock": (GRPOConfig, GRPOTrainer, {}),
            "dppo": (PDMGRPOConfig, FullLogitsDPPO, dict(direction="ratio", tail_estimator="uniform")),
            "pdm": (PDMGRPOConfig, PDMGRPOTrainer, {}),
            "binary": (PDMGRPOConfig, PDMGRPOTrainer, dict(divergence_support="binary")),
            "ratio": (PDMGRPOConfig, PDMGRPOTrainer, dict(proximity="ratio", direction="ratio")),
        }[variant]
        if variant == "stock":
            grpo_trainer.VLLMGeneration = StockGeneration
        steps = args.steps_per_generation
        trainer = cls(
            args.model or tiny_model(f"{folder}/model"),
            reward_funcs=lambda completions, **kwargs: [float(len(set(c))) for c in completions],
            args=config(
                output_dir=folder,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.3,
                vllm_max_model_length=args.completion_length + 64,
                max_completion_length=args.completion_length,
                per_device_train_batch_size=args.batch_size,
                num_generations=args.batch_size,
                steps_per_generation=steps,
                gradient_accumulation_steps=1,
                max_steps=steps * (1 + args.rollouts),
                learning_rate=1e-6,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                bf16=torch.cuda.is_available(),
                use_cpu=not torch.cuda.is_available(),
                logging_steps=1000,
                gradient_checkpointing=False,
                **fields,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"Tell a story about {i} sheep." for i in range(512)]}),
        )
        score = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda *call_args, **kwargs: (
            score if torch.is_grad_enabled() else timed("scoring", score)
        )(*call_args, **kwargs)
        trainer.vllm_generation.generate = timed("rollout", trainer.vllm_generation.generate)
        trainer.vllm_generation.sync_weights = timed("sync", trainer.vllm_generation.sync_weights)
        trainer.compute_loss = timed("loss", trainer.compute_loss)
        trainer.accelerator.backward = timed("loss", trainer.accelerator.backward)
        begun = []

        class Warm(grpo_trainer.TrainerCallback):
            def on_step_end(self, train_args, state, control, **kwargs):
                if state.global_step == steps:
                    seconds.clear()
                    begun.append(time.perf_counter())

        trainer.add_callback(Warm())
        trainer.train()
        seconds["whole step"] = time.perf_counter() - begun[0]
        measured = steps * args.rollouts
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
        # Linux counts the peak resident set in KiB
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        return {phase: seconds[phase] / measured for phase in PHASES} | {"peak memory": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model; a tiny one by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--completion_length", type=int, default=64)
    parser.add_argument("--steps_per_generation", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=20, help="rollouts measured in a run, after one to warm up")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS[1:], default=VARIANTS[1:3], help="beside stock")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.variant:
        print(json.dumps(measure(args.variant, args)))
        return
    variants = ("stock", *args.variants)
    results = {variant: [] for variant in variants}
    for repeat in range(args.repeats):
        for variant in variants if repeat % 2 == 0 else variants[::-1]:
            results[variant].append(in_own_process("--variant", variant))
            print(f"repeat {repeat + 1}, {variant}: {results[variant][-1]['whole step']:.3f} s a step", flush=True)
    medians = {v: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for v, runs in results.items()}
    print("\n" + " " * 12 + "".join(f"{variant:>10}" for variant in variants), end="")
    print("".join(f"{variant + '/stock':>13}" for variant in args.variants))
    for key in (*PHASES, "peak memory"):
        unit, stock = ("GB" if key == "peak memory" else "s"), medians["stock"][key]
        ratios = (f"{medians[v][key] / stock:13.2f}" if stock else " " * 13 for v in args.variants)
        print(f"{key:12}" + "".join(f"{medians[v][key]:7.3f} {unit:2}" for v in variants) + "".join(ratios))


if __name__ == "__main__":
    main()
