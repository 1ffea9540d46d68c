"""What rounding hides: how much of what the trainer learned is in the engine after a sync.

    python examples/benchmarks/weight_rounding.py gap [--model FOLDER] --out gap.json
    python examples/benchmarks/weight_rounding.py curves --model FOLDER --updates 24 --out curves.json --figure curves.png

The trainer computes in float32, the colocated engine in bfloat16. The task needs no answers: a short text about a word,
rewarded by its share of words without the letter e.

`gap` trains each kind (all weights, a LoRA adapter merged or served apart, one merged into an 8-bit base) with each
learning rate. After 8 and after 32 updates it syncs the same weights with each rounding, samples, and compares the
logprobs of the sampled tokens. Printed are

- `gap`: the mean absolute difference of the engine's logprobs from the trainer's, in nats;
- `shown`: the share of the trainer's change of logprobs since the start that the engine's logprobs show. It is the
  slope of a line through the origin, of the engine's change on the trainer's: 1 is all of it;
- `weights gap` and `weights shown`: the same of the trainer's own float32 forward with the weights as they were
  pushed. This is what rounding alone does, without the engine's own arithmetic;
- `kept`: the share of pushed weights that still have the value they had at the start;
- `seconds`: of a sync, the median of five, the roundings taking turns;
- `MB`: the most memory that tensors take during a sync on top of what was there before.

`curves` trains all weights once with each rounding, and once with a float32 engine, from the same seed.

Each run is a process of its own, and its result is kept in the JSON file: a command that was interrupted goes on where it
stopped.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from processes import in_own_process


KINDS = {  # LoRA, 8-bit base, `vllm_weight_sync`
    "full": (False, False, "full"),
    "LoRA merged": (True, False, "full"),
    "LoRA adapter": (True, False, "adapter"),
    "8-bit + LoRA merged": (True, True, "full"),
}
ROUNDINGS = ("nearest", "auto")
CURVES = {
    "nearest": {"vllm_weight_rounding": "nearest"},
    "stochastic": {},
    "float32 engine": {"vllm_dtype": "float32"},
}
WORDS = (
    "apple river clock garden winter teacher window bridge music train market doctor island paper forest night".split()
)


def without_e(completions, **kwargs) -> list[float]:
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [sum("e" not in word.lower() for word in text.split()) / max(len(text.split()), 1) for text in texts]


def make_trainer(args: argparse.Namespace, folder: str, kind: str = "full", callbacks=(), **overrides):
    from datasets import Dataset
    from peft import LoraConfig
    from tiny_model import tiny_model
    from transformers import AutoTokenizer, BitsAndBytesConfig

    from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer

    lora, eight_bit, sync = KINDS[kind]
    model = args.model or tiny_model(f"{folder}/model")
    texts = [f"Write one sentence about this: {word}." for word in WORDS]
    if AutoTokenizer.from_pretrained(model).chat_template:
        texts = [[{"role": "user", "content": text}] for text in texts]
    config = dict(
        output_dir=folder,
        use_vllm=True,
        vllm_weight_sync=sync,
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=128,
        max_completion_length=32,
        per_device_train_batch_size=16,
        num_generations=8,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        max_steps=args.updates,
        lr_scheduler_type="constant",
        sync_check_steps=1,
        sync_check_threshold=5.0,  # the gap is what is measured here
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=args.cpu,
        bf16=False,
        seed=args.seed,
    )
    return PDMGRPOTrainer(
        model,
        reward_funcs=without_e,
        args=PDMGRPOConfig(**config | overrides),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        quantization_config=BitsAndBytesConfig(load_in_8bit=True) if eight_bit else None,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if lora else None,
        callbacks=list(callbacks),
    )


# ---- The gap after a sync


def logprobs(model, prompts, completions):
    """Of the completions' tokens, from full logits in float32."""
    import torch

    found = []
    with torch.no_grad():
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion]], device=model.device)
            logps = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(logps.gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(found).cpu()


class Measurement:
    """Syncs a trainer's weights with each rounding, and compares engine and trainer."""

    def __init__(self, trainer):
        import torch
        from transformers import AutoModelForCausalLM

        self.trainer, self.rows = trainer, []
        # The trainer before any update, and a model to hold what was pushed
        self.first = AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path, dtype=torch.float32).eval()
        self.other = AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path, dtype=torch.float32).eval()
        tokenizer, data = trainer.processing_class, trainer.train_dataset
        encode = tokenizer.apply_chat_template if tokenizer.chat_template else None
        self.prompts = [
            encode(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
            if encode
            else tokenizer(row["prompt"])["input_ids"]
            for row in data
        ]

    def run(self, updates: int) -> None:
        import contextlib

        trainer, generation, model = self.trainer, self.trainer.vllm_generation, self.trainer.model
        costs = self.costs()
        for rounding in ROUNDINGS:
            generation._sync.rounding.mode = rounding
            generation.sync_weights()
            row = {"updates": updates, "rounding": rounding, **costs[rounding]}
            _, completions, sampled, _ = generation.generate(self.prompts, None, 1)
            row |= self.compare(lambda m, c=completions: logprobs(m, self.prompts, c), sampled, model, contextlib)
            self.rows.append(row)
            print(row, file=sys.stderr, flush=True)
        generation._sync.rounding.mode = "auto"
        trainer.vllm_generation.sync_weights()

    def costs(self, repeats: int = 5) -> dict[str, dict[str, float]]:
        from memory import peak_bytes

        generation, peaks = self.trainer.vllm_generation, {}
        seconds: dict[str, list[float]] = {rounding: [] for rounding in ROUNDINGS}
        for rounding in ROUNDINGS:  # which warms up as well
            generation._sync.rounding.mode = rounding
            peaks[rounding] = peak_bytes(generation.sync_weights) / 1e6
        for _ in range(repeats):
            for rounding in ROUNDINGS:
                generation._sync.rounding.mode = rounding
                generation.sync_weights()
                seconds[rounding].append(generation.last_sync.seconds)
        return {rounding: {"seconds": median(seconds[rounding]), "MB": peaks[rounding]} for rounding in ROUNDINGS}

    def compare(self, score, sampled, model, contextlib) -> dict[str, float]:
        import torch

        training = model.training
        model.eval()
        unadapted = model.disable_adapter if hasattr(model, "disable_adapter") else contextlib.nullcontext
        own = score(model)
        with unadapted():
            start = score(self.first if unadapted is contextlib.nullcontext else model)
        model.train(training)
        engine = torch.tensor([float(lp[0]) for sequence in sampled for lp in sequence])

        def shown(logps):
            return (((logps - start) * (own - start)).sum() / (own - start).square().sum()).item()

        row = {"tokens": len(own), "change": (own - start).abs().mean().item()}
        row |= {"gap": (engine - own).abs().mean().item(), "shown": shown(engine)}
        if (pushed := self.pushed()) is not None:
            self.other.load_state_dict(pushed, strict=False)
            weights = score(self.other)
            row |= {"weights gap": (weights - own).abs().mean().item(), "weights shown": shown(weights)}
            first = dict(self.first.named_parameters())
            same = sum((pushed[name] == first[name].to(pushed[name].dtype)).sum().item() for name in pushed)
            row["kept"] = same / sum(tensor.numel() for tensor in pushed.values())
        return row

    def pushed(self):
        sync = self.trainer.vllm_generation._sync
        return dict(sync.tensors()) if sync.mode == "full" else None


def measure_gap(kind: str, learning_rate: float, args: argparse.Namespace) -> list[dict[str, float]]:
    from transformers import TrainerCallback

    class AfterUpdates(TrainerCallback):
        def on_step_end(self, training_args, state, control, **kwargs):
            if state.global_step in args.after:
                measurement.run(state.global_step)

    args.updates = max(args.after)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder, kind, [AfterUpdates()], learning_rate=learning_rate)
        measurement = Measurement(trainer)
        trainer.train()
        return measurement.rows


# ---- Training curves


def train_curve(name: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder, learning_rate=args.learning_rates[0], **CURVES[name])
        trainer.train()
        logs = [log for log in trainer.state.log_history if "reward" in log]
        seconds = trainer.state.log_history[-1]["train_runtime"]
    names = ("reward", "weight_sync/logp_difference_mean", "trust_region/outside", "trust_region/divergence_mean")
    curve = {name: [log.get(name) for log in logs] for name in names}
    return {"step": [log["step"] for log in logs], "seconds": seconds, **curve}


def draw(found: dict[str, dict], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    panels = {
        "weight_sync/logp_difference_mean": "gap after a sync (nats)",
        "trust_region/outside": "outside the trust region",
        "reward": "reward",
    }
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for name, curve in found.items():
            points = [(x, y) for x, y in zip(curve["step"], curve[metric], strict=True) if y is not None]
            if metric == "reward":  # of one rollout of two updates: a running mean of four
                ys = [y for _, y in points]
                points = [
                    (x, sum(ys[max(i - 3, 0) : i + 1]) / len(ys[max(i - 3, 0) : i + 1]))
                    for i, (x, _) in enumerate(points)
                ]
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set(title=title, xlabel="update")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


# ---- The command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gap", "curves"])
    parser.add_argument("--model", help="folder or name of a model; a tiny one by default")
    parser.add_argument("--out", default="weight_rounding.json", help="where results are kept")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-5, 1e-6])
    parser.add_argument("--after", nargs="+", type=int, default=[8, 32], help="updates after which `gap` measures")
    parser.add_argument("--updates", type=int, default=24, help="of `curves`")
    parser.add_argument("--figure", help="where `curves` draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.task:
        import torch

        args.cpu = not torch.cuda.is_available()
        kind, _, learning_rate = args.task.partition(" @ ")
        result = measure_gap(kind, float(learning_rate), args) if args.what == "gap" else train_curve(kind, args)
        print(json.dumps(result))
        return
    tasks = [f"{kind} @ {lr:g}" for kind in args.kinds for lr in args.learning_rates] if args.what == "gap" else CURVES
    out = Path(args.out)
    found = json.loads(out.read_text()) if out.exists() else {}
    for task in tasks:
        if task not in found:
            found[task] = in_own_process("--task", task)
            out.write_text(json.dumps(found, indent=1))
    if args.what == "curves":
        if args.figure:
            draw(found, args.figure)
        return
    columns = ("change", "gap", "shown", "weights gap", "weights shown", "kept", "seconds", "MB")
    print(f"{'':28}{'updates':>8} {'rounding':11}" + "".join(f"{column:>14}" for column in columns))
    for task, rows in found.items():
        for row in rows:
            values = "".join(f"{row[c]:14.4f}" if c in row else f"{'':14}" for c in columns)
            print(f"{task:28}{row['updates']:8} {row['rounding']:11}{values}")


if __name__ == "__main__":
    main()
