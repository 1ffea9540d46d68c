"""How the loss phase grows: time and memory against K, the number of tokens and the vocabulary, beside stock GRPO.

    python examples/benchmarks/scaling.py [--output_dir outputs/scaling]

At each point stock GRPO, PDM, and PDM with `tail_estimator="uniform"` run the loss phase (forward, loss, backward) in
turn, on the same batch. Two figures of each are kept: the shortest CPU time (on a GPU, wall time), as all that
disturbs a run makes it longer, and the peak memory on top of what was there before. The difference of two such times
is mostly noise, so PDM's own operations (the candidates' logits, the trust region and its sums) are timed as well.
Slopes are those of straight lines through the logarithms: 1 is linear, 0 is flat. The results are printed as a table,
written as `scaling.csv` and drawn as `scaling.png`.

The exact tail needs the sum of squared probabilities, which TRL's LM head computes. On a GPU it does so within the
pass over the logits that stock makes. On a CPU it takes a product and a sum more for each logit, which the uniform
tail does not need.
"""

import argparse
import tempfile
import time
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from memory import peak_bytes
from tiny_model import tiny_lm, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer, topk_head


# The values of the others while one grows. The batch is one sequence, so that attention costs all of them the same.
USUAL = {"K": 20, "tokens": 256, "vocabulary": 8192}
SWEEPS = {
    "K": (5, 10, 20, 50, 100, 200),
    "tokens": (64, 128, 256, 512, 1024, 2048),
    "vocabulary": (1024, 4096, 16384, 65536, 262144),
}
ON_GPU = torch.cuda.is_available()
CLOCK = time.perf_counter if ON_GPU else time.process_time
own_seconds = 0.0  # of PDM's own operations, in the last run


def own(function):
    """Count what `function` takes as PDM's own."""

    @wraps(function)
    def timed(*args, **kwargs):
        global own_seconds
        start = now()
        try:
            return function(*args, **kwargs)
        finally:
            own_seconds += now() - start

    return timed


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return CLOCK()


class TimedPDM(PDMGRPOTrainer):
    _apply_trust_region = own(PDMGRPOTrainer._apply_trust_region)


topk_head._Head.at = own(topk_head._Head.at)


def build(cls: type, folder: str, vocabulary: int):
    torch.manual_seed(0)
    model, tokenizer = tiny_lm(vocabulary, intermediate_size=256), tiny_tokenizer(vocabulary)
    config = PDMGRPOConfig if cls is TimedPDM else GRPOConfig
    args = config(
        output_dir=folder,
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=1,
    )
    data = Dataset.from_dict({"prompt": ["a"] * 4})
    trainer = cls(model, reward_funcs=lambda **_: [], args=args, train_dataset=data, processing_class=tokenizer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def make_batch(k: int, tokens: int, vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One random completion with a random behaviour policy over K candidates, half a nat from uniform."""
    generator = torch.Generator().manual_seed(k + tokens + vocabulary)
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[: k + 1] for _ in range(tokens)])[None]
    logps = torch.randn(1, tokens, k + 1, generator=generator) / 2 - np.log(vocabulary)
    ones = torch.ones(1, tokens, dtype=torch.long)
    batch = {
        "prompt_ids": torch.zeros(1, 8, dtype=torch.long),
        "prompt_mask": torch.ones(1, 8, dtype=torch.long),
        "completion_ids": ids[..., 0].clone(),
        "completion_mask": ones,
        "advantages": torch.ones(1),
        "num_items_in_batch": torch.tensor(tokens),
        "old_per_token_logps": logps[..., 0].clone(),
        "behavior_topk_ids": ids.int(),
        "behavior_topk_logps": logps,
    }
    return {name: value.to(device) for name, value in batch.items()}


def run(trainer, batch, tail_estimator) -> float:
    """Seconds of one loss phase."""
    global own_seconds
    trainer.model.zero_grad()
    if isinstance(trainer, TimedPDM):
        trainer.args.tail_estimator = tail_estimator
        trainer._region, trainer._needs_sum_sq = trainer.args.trust_region, trainer.args.needs_sum_sq
    own_seconds, start = 0.0, now()
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    return now() - start


def peak_of_loss(trainer, *case) -> int:
    """Bytes at once on top of what was there before, the gradients among them."""
    trainer.model.zero_grad()
    return peak_bytes(lambda: run(trainer, *case))


def measure(repeats: int) -> pd.DataFrame:
    rows, trainers, built_for = [], {}, None
    points = [(sweep, USUAL | {sweep: value}) for sweep, values in SWEEPS.items() for value in values]
    with tempfile.TemporaryDirectory() as folder:
        for sweep, point in points:
            if built_for != (built_for := point["vocabulary"]):
                trainers = {cls: build(cls, folder, built_for) for cls in (GRPOTrainer, TimedPDM)}
            batch = make_batch(point["K"], point["tokens"], point["vocabulary"], trainers[GRPOTrainer].model.device)
            stock_batch = {name: value for name, value in batch.items() if not name.startswith("behavior_")}
            seconds, memory = {}, {}
            pdm = trainers[TimedPDM]
            cases = {
                "stock": (trainers[GRPOTrainer], stock_batch, "exact"),
                "pdm": (pdm, batch, "exact"),
                "uniform": (pdm, batch, "uniform"),
            }
            for name, case in cases.items():
                run(*case)  # warms up
                memory[name], seconds[name] = peak_of_loss(*case), []
            seconds["own"] = []
            for _ in range(repeats):
                for name, case in cases.items():
                    seconds[name].append(run(*case))
                    if name == "pdm":
                        seconds["own"].append(own_seconds)
            row = point | {"sweep": sweep, "at": point[sweep]}
            row |= {f"{name} ms": 1e3 * min(times) for name, times in seconds.items()}
            row |= {f"{name} MB": peak / 1e6 for name, peak in memory.items()}
            row |= {f"{name} ratio": row[f"{name} ms"] / row["stock ms"] for name in ("pdm", "uniform")}
            rows.append(row)
            print(f"{sweep} = {point[sweep]}: {row['pdm ratio']:.3f} of stock's time", flush=True)
    return pd.DataFrame(rows)


def measure_replay() -> None:
    """Print the peak memory with `sampling_support="replay"`, whose backward pass goes through all candidates."""
    engine = SimpleNamespace(truncates=True)  # all that the loss asks of one
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(TimedPDM, folder, USUAL["vocabulary"])
        trainer.use_vllm, trainer.vllm_generation = True, engine
        for k in (20, 100):
            batch, peaks = make_batch(k, 1024, USUAL["vocabulary"], trainer.model.device), {}
            for support in ("full", "replay"):
                trainer.args.sampling_support = support
                run(trainer, batch, "exact")
                peaks[support] = peak_of_loss(trainer, batch, "exact")
            print(
                f"K = {k}: {peaks['replay'] / 1e6:.0f} MB, {peaks['replay'] / peaks['full']:.3f} of that without replay"
            )


def slope(x: pd.Series, y: pd.Series) -> float:
    """Of a straight line through the logarithms."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def draw(results: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex="col", sharey="row", layout="constrained")
    styles = {
        "stock {}": ("stock GRPO", "#0072B2", "o-"),
        "pdm {}": ("PDM", "#D55E00", "s-"),
        "own {}": ("PDM's own operations", "#009E73", "^:"),
    }
    for column, (sweep, rows) in enumerate(results.groupby("sweep", sort=False)):
        for axis, unit in zip(axes[:, column], ("ms", "MB"), strict=True):
            slopes = []
            for name, (label, color, style) in styles.items():
                if (column_name := name.format(unit)) in rows:
                    axis.plot(rows["at"], rows[column_name], style, color=color, ms=4, label=label)
                    slopes.append(f"{slope(rows['at'], rows[column_name]):.2f}")
            axis.set(xscale="log", yscale="log")
            axis.set_title(f"slopes: {', '.join(slopes)}", fontsize=10)
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel(
            {"tokens": "tokens of the completion", "vocabulary": "size of the vocabulary"}.get(sweep, sweep)
        )
    axes[0, 0].set_ylabel("time of the loss phase, ms" if ON_GPU else "CPU time of the loss phase, ms")
    axes[1, 0].set_ylabel("peak memory of the loss phase, MB")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/scaling"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--replay", action="store_true", help="only measure what `sampling_support='replay'` takes")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not ON_GPU:
        torch.set_num_threads(1)  # CPU time is then time
    if args.replay:
        return measure_replay()
    results = measure(args.repeats)
    results.to_csv(args.output_dir / "scaling.csv", index=False)
    draw(results, args.output_dir / "scaling.png")
    columns = ["at", "stock ms", "pdm ms", "own ms", "pdm ratio", "uniform ratio", "stock MB", "pdm MB"]
    for sweep, rows in results.groupby("sweep", sort=False):
        print(f"\n{rows[columns].rename(columns={'at': sweep}).to_string(index=False, float_format='%.3g')}")
        slopes = [f"{name} {slope(rows['at'], rows[name]):.2f}" for name in columns[1:] if "ratio" not in name]
        print(f"slopes: {', '.join(slopes)}")


if __name__ == "__main__":
    main()
