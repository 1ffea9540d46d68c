"""Which mask trains an instruction-tuned model best, and at which threshold?

    python examples/mask_study.py --model FOLDER

FOLDER holds a model with a chat template; the default settings are for SmolLM2-135M-Instruct on a CPU. Two tasks:

- `writing`: one sentence about a thing. The reward is the share of words without the letter e, each counted once.
- `arithmetic`: a sum in the form asked for, right or wrong, after a short supervised start.

Each run trains a LoRA adapter with vLLM colocated. Runs of one task, regime and seed differ in their mask alone:

    pdm        divergence, predictive       symmetric      divergence, whatever the direction
    dppo       divergence, ratio            symmetric_tv   the same by total variation of the sampled token
    grpo       `trl.GRPOTrainer` itself     grpo_truncated ratio, ratio, truncated as the others are
    none       no token is ever outside

With several `--thresholds`, in nats, masks of a divergence run at each: `pdm@0.03`. Total variation takes what Pinsker's
inequality makes of them, the root of half. `grpo` has this package's engine and weight sync, so that it samples as the
others do.

The score is the mean reward of a rollout, and at the end, as `final`, that of sampled completions of held-out prompts. The
`area` of a run is the mean height of its curve. A run collapsed if it ends more than 10 points below its start or below
half of its best, or if its completions end with less than half of the distinct words that they had.
The mask `--reference` is compared with each other one by paired differences over the seeds, with 95 % bootstrap intervals.
With several thresholds it is taken at the first of them unless it names its own: `pdm@0.03`.

Every run is a file in `OUTPUT_DIR/runs` with its settings, versions and history. The same command goes on where it was
stopped; with nothing left to run it only draws. It writes runs.csv, comparisons.csv, score.png and entropy.png.
"""

import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from platform import python_version
from unittest.mock import patch


os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of one thread are faster than one of two
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import pandas as pd
import vllm
from compare_masks import COLORS, LINES, choices, compare, draw, is_collapsed, start_worker, statement
from peft import LoraConfig
from tasks import INSTRUCT_TASKS, chats, to_ids, warm_start_from
from tqdm import tqdm
from transformers import AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.trainer import grpo_trainer

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer
from trl_pdm.rollout import TopKVLLMGeneration


# A threshold that no divergence reaches masks nothing.
MASKS = {
    "pdm": dict(direction="predictive"),
    "dppo": dict(direction="ratio"),
    "symmetric": dict(direction="none"),
    "symmetric_tv": dict(direction="none", divergence="tv", divergence_support="binary"),
    "grpo": None,
    "grpo_truncated": dict(proximity="ratio", direction="ratio"),
    "none": dict(divergence_threshold=1e9),
}
WITH_THRESHOLD = ("pdm", "dppo", "symmetric", "symmetric_tv")
# Optimizer steps a rollout, and the learning rate's multiple. In a pilot of one seed without a mask even 8 steps a rollout
# learned at the mild rate, and the harsh regime collapsed into a repeated word within 20 steps.
REGIMES = {"mild": (4, 1), "harsh": (16, 2)}
LOG_EVERY = 4  # optimizer steps
LOGGED = (
    "reward",
    "entropy",
    "grad_norm",
    "clip_ratio/region_mean",
    "sampling/",
    "trust_region/",
    "importance_ratio/",
)
LOGGED += ("writing/", "weight_sync/logp", "eval_reward", "eval_writing/", "eval_entropy", "completions/mean_length")
VERSIONS = ("trl-pdm", "trl", "transformers", "peft", "torch")
MINUTES = 7  # of a run at the default settings, on a core of its own; replaced by what finished runs took


@dataclass
class StudyArguments:
    model: str = field(metadata={"help": "An instruction-tuned model, a folder or a name on the hub."})
    tasks: list[str] = field(default_factory=lambda: list(INSTRUCT_TASKS), metadata=choices(INSTRUCT_TASKS))
    regimes: list[str] = field(default_factory=lambda: ["mild", "harsh"], metadata=choices(REGIMES))
    masks: list[str] = field(default_factory=lambda: list(MASKS), metadata=choices(MASKS))
    thresholds: list[float] = field(default_factory=lambda: [0.15], metadata={"help": "In nats."})
    seeds: list[int] = field(
        default_factory=lambda: list(range(3)), metadata={"help": "Comparisons take two or more."}
    )
    reference: str = field(
        default="pdm", metadata={"help": "The mask, as in the table, that is compared with others."}
    )
    max_steps: int = field(default=48, metadata={"help": f"Optimizer steps a run, a multiple of {LOG_EVERY}."})
    learning_rate: float = field(default=1.2e-3, metadata={"help": "Regimes multiply it."})
    lora_rank: int = field(default=16, metadata={"help": "Of the adapter, on every linear layer."})
    batch_size: int = field(default=8, metadata={"help": "Completions an optimizer step."})
    num_generations: int = field(default=4, metadata={"help": "Completions a prompt."})
    max_completion_length: int = field(default=16, metadata={"help": "In tokens."})
    held_out: int = field(default=40, metadata={"help": "Prompts that `final` is of, with two completions each."})
    warm_start_accuracy: float = field(default=0.3, metadata={"help": "Where arithmetic's supervised start ends."})
    output_dir: str = field(default="outputs/mask_study", metadata={"help": "For the runs, tables and figures."})
    engine_dtype: str = field(
        default="float32", metadata={"help": "Of vLLM. bfloat16 is what GPUs use, and slow on a CPU without AVX-512."}
    )
    processes: int = field(default=1, metadata={"help": "Runs at a time. With 0 it draws what is finished."})


# What decides the result of a run, besides its cell
SETTINGS = (
    "model",
    "max_steps",
    "learning_rate",
    "lora_rank",
    "batch_size",
    "num_generations",
    "max_completion_length",
)
SETTINGS += ("held_out", "warm_start_accuracy", "engine_dtype")


def cells(args):
    """Every run of the study, all of one seed before the next: task, regime, mask, threshold (`None` where the mask has
    none) and seed."""
    masks = [(mask, t) for mask in args.masks for t in (args.thresholds if mask in WITH_THRESHOLD else [None])]
    return [
        dict(task=task, regime=regime, mask=mask, threshold=threshold, seed=seed)
        for seed, task, regime, (mask, threshold) in product(args.seeds, args.tasks, args.regimes, masks)
    ]


def path_of(cell, args):
    parts = [cell["task"], cell["regime"], cell["mask"], cell["threshold"], f"seed{cell['seed']}"]
    return Path(args.output_dir) / "runs" / ("-".join(str(part) for part in parts if part is not None) + ".json")


def finished(cell, args):
    """What a run wrote, or `None` where it has not run."""
    path = path_of(cell, args)
    if not path.exists():
        return None
    run = json.loads(path.read_text())
    for name in SETTINGS:
        if run["settings"][name] != (wanted := comparable(args)[name]):
            raise ValueError(
                f"{path} was run with `{name}` {run['settings'][name]!r}, and {wanted!r} is asked for: choose another "
                "`output_dir`, or the same setting."
            )
    return run


def comparable(args):
    return asdict(args) | {"model": Path(args.model).name}


# ---- A run


def problems(task, held_out):
    rows = chats(INSTRUCT_TASKS[task][0]())
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))


def base_of(task, args):
    """The model to train: the one given, or for arithmetic a taught one, which is made once."""
    if task != "arithmetic":
        return args.model
    folder = Path(args.output_dir) / "arithmetic"
    if not (folder / "tokenizer_config.json").exists():  # what is saved last
        warm_start_from(args.model, folder, INSTRUCT_TASKS[task][0]()[args.held_out :], args.warm_start_accuracy)
    return str(folder)


def settings_of(mask, threshold):
    """The trust region's fields of the config, `None` for stock GRPO."""
    if MASKS[mask] is None:
        return None
    fields = dict(MASKS[mask])
    if threshold is not None:
        fields["divergence_threshold"] = (threshold / 2) ** 0.5 if fields.get("divergence") == "tv" else threshold
    return fields


def make_trainer(cell, args):
    train, test = problems(cell["task"], args.held_out)
    model, (steps, rate) = base_of(cell["task"], args), REGIMES[cell["regime"]]
    tokenizer = AutoTokenizer.from_pretrained(model)
    longest = max(map(len, to_ids(tokenizer, [*train["prompt"], *test["prompt"]])))
    fields = settings_of(cell["mask"], cell["threshold"])
    stock = fields is None
    # Merged, as on a CPU vLLM takes minutes for prompts that pass through an adapter
    sync, dtype = "full", args.engine_dtype
    config = (GRPOConfig if stock else PDMGRPOConfig)(
        output_dir=f"{args.output_dir}/trainer",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=longest + args.max_completion_length,
        vllm_gpu_memory_utilization=0.3,
        max_completion_length=args.max_completion_length,
        num_generations=args.num_generations,
        per_device_train_batch_size=args.batch_size,
        steps_per_generation=steps,
        learning_rate=args.learning_rate * rate,
        lr_scheduler_type="constant",
        max_steps=args.max_steps,
        seed=cell["seed"],
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        eval_strategy="steps",
        eval_steps=args.max_steps,
        num_generations_eval=2,
        per_device_eval_batch_size=2 * args.held_out,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({} if stock else fields | {"vllm_weight_sync": sync, "vllm_dtype": dtype}),
    )
    engine = (
        partial(TopKVLLMGeneration, num_candidates=0, weight_sync=sync, dtype=dtype)
        if stock
        else grpo_trainer.VLLMGeneration
    )
    with patch.object(grpo_trainer, "VLLMGeneration", engine):
        return (GRPOTrainer if stock else PDMGRPOTrainer)(
            model,
            reward_funcs=INSTRUCT_TASKS[cell["task"]][1],
            args=config,
            train_dataset=train,
            eval_dataset=test,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"),
        )


def run(cell, args):
    """Train, and write down what came of it."""
    start = time.time()
    trainer = make_trainer(cell, args)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    history = [
        {name: float(f"{value:.5g}") for name, value in entry.items() if name == "step" or name.startswith(LOGGED)}
        for entry in trainer.state.log_history
    ]
    result = dict(
        cell=cell,
        settings={name: comparable(args)[name] for name in SETTINGS},
        trust_region=settings_of(cell["mask"], cell["threshold"]),
        trainer=type(trainer).__name__,
        versions={name: version(name) for name in VERSIONS} | {"vllm": vllm.__version__, "python": python_version()},
        seconds=round(time.time() - start),
        history=[entry for entry in history if len(entry) > 1],
    )
    path = path_of(cell, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(path)  # a run that is killed leaves no file that looks like one


# ---- What the runs say


def row_of(run):
    """A run's line of the table."""
    last = next(entry for entry in run["history"] if "eval_reward" in entry)
    # Logged after `LOG_EVERY` updates with it
    rollouts = {int(entry["step"]) - LOG_EVERY: entry for entry in run["history"] if "reward" in entry}
    steps = [*rollouts, int(last["step"])]
    curve = np.array([*(entry["reward"] for entry in rollouts.values()), last["eval_reward"]])
    distinct = [rollouts[0].get("writing/distinct_words"), last.get("eval_writing/distinct_words")]
    cell = run["cell"]
    label = cell["mask"] if cell["threshold"] is None else f"{cell['mask']}@{cell['threshold']:g}"
    row = dict(task=cell["task"], regime=cell["regime"], mask=label, seed=cell["seed"])
    row |= dict(final=curve[-1], area=np.trapezoid(curve, steps) / steps[-1])
    row["collapsed"] = is_collapsed(curve) or (distinct[0] is not None and distinct[1] < distinct[0] / 2)
    row |= dict(distinct_words=distinct[1], seconds=run["seconds"])
    trained = pd.DataFrame([entry for entry in run["history"] if "grad_norm" in entry])
    for name in ("outside", "masked", "divergence_mean", "entropy_drift", "entropy_drift_unmasked"):
        row[name] = trained.get(f"trust_region/{name}", pd.Series(dtype=float)).mean()
    row |= {f"score_{step}": score for step, score in zip(steps, curve, strict=True)}
    return row | {f"entropy_{entry.step:.0f}": entry.entropy for entry in trained.itertuples()}


def report(runs, args):
    """Tables and figures of the runs that are finished."""
    folder = Path(args.output_dir)
    table = pd.DataFrame(map(row_of, runs))
    reference = args.reference
    if len(args.thresholds) == 1:
        table["mask"] = table["mask"].str.partition("@")[0]
    elif reference in WITH_THRESHOLD:
        reference = f"{reference}@{args.thresholds[0]:g}"
    n = len(COLORS)
    styles = {mask: (COLORS[i % n], LINES[(i + i // n) % n]) for i, mask in enumerate(table["mask"].unique())}
    comparisons = compare(table, of=reference)
    table.to_csv(folder / "runs.csv", index=False)
    comparisons.to_csv(folder / "comparisons.csv", index=False)
    for score in ("score", "entropy"):
        draw(table, folder / f"{score}.png", score, styles)
    measured = ["final", "area", "collapsed", "distinct_words", "outside", "masked", "entropy_drift"]
    print(
        table.groupby(["task", "regime", "mask"], sort=False)[measured].mean().to_string(float_format="{:.3f}".format)
    )
    print(statement(comparisons, table["seed"].nunique(), reference, "score"))


def cost(done, left, args):
    """What is to come, in words."""
    minutes = np.mean([run["seconds"] / 60 for run in done]) if done else MINUTES
    source = f"the mean of {len(done)} finished" if done else "a guess for the default settings on an idle core"
    hours = left * minutes / 60 / max(1, args.processes)
    return f"{left} of {left + len(done)} runs left, {minutes:.1f} minutes each ({source}): {hours:.1f} hours."


def in_a_process(function, *call):
    """An engine of vLLM lives as long as its process, so each run has its own."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=(function, *call))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"A process of the study ended with exit code {process.exitcode}; its error is above.")


def work(function, *call):
    start_worker()
    function(*call)


def train(todo, args):
    if any(cell["task"] == "arithmetic" for cell in todo):
        in_a_process(base_of, "arithmetic", args)
    with ThreadPoolExecutor(args.processes) as pool:
        jobs = [pool.submit(in_a_process, run, cell, args) for cell in todo]
        try:
            for job in tqdm(as_completed(jobs), "runs", len(jobs)):
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after a run that failed


def main(args):
    if args.max_steps % LOG_EVERY:
        raise ValueError(f"`max_steps` is {args.max_steps}. Give a multiple of {LOG_EVERY}.")
    of_all = {path_of(cell, args): (cell, finished(cell, args)) for cell in cells(args)}
    todo = [cell for cell, run in of_all.values() if run is None]
    print(cost([run for _, run in of_all.values() if run], len(todo), args), flush=True)
    if args.processes:
        train(todo, args)
    report([run for cell in cells(args) if (run := finished(cell, args))], args)


if __name__ == "__main__":
    main(*TrlParser(StudyArguments).parse_args_and_config())
