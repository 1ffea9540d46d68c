"""What do the trust region's masks do to training? Six masks, five regimes, two tasks, the same seeds for each.

    python examples/compare_masks.py

needs no GPU and no download, and less than half an hour on two cores. A mask is a proximity test with a direction test:

    pdm               divergence, predictive      grpo              ratio, ratio (PPO's)
    dppo              divergence, ratio           ratio_predictive  ratio, predictive
    symmetric         divergence, none            none              no token is ever outside

Each run is a real `PDMGRPOTrainer` on a small Qwen3 that was first taught to solve about half of a task's problems: sums
of two two-digit numbers, or sorting five letters with every step of a selection sort written out. Within a task and a
regime, runs of one seed differ in their mask alone. The regimes go from nearly on-policy to harsh: see `REGIMES`.

Rollouts do not go through vLLM here, whose start alone takes longer than a run. The engine is a copy of the model in its
own precision and with its own, possibly older, weights, which samples with a KV cache and reports its top K. With
`--use_vllm` the same comparison runs with colocated vLLM, each run in a fresh process, in the regimes that vLLM has; the
engine's precision is then vLLM's choice. In general:

    python examples/compare_masks.py --use_vllm --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \
        --learning_rate 1e-6 --max_completion_length 2048 --batch_size 32 --dtype bfloat16

Accuracy is greedy, on held-out problems. A run's `final` is its last accuracy and its `area` the mean height of its
curve over the training steps. A run collapsed if it ends more than 10 points below its start, or below half of its best.
PDM is compared with each other mask by the mean of the differences, paired over the seeds, and its 95 % bootstrap
interval. Where that excludes 0, PDM helps or hurts; elsewhere they tie.

In `--output_dir`: runs.csv, summary.csv (their means), comparisons.csv and curves.png. The same flags, the same numbers.
`entropy` to `direction_disagreement` are the trainer's metrics, means over a run. `pdm_only`, `dppo_only` and `both` are
the shares of tokens that these two masks would drop at `divergence_threshold`, whichever mask trains, but for GRPO's,
which does not ask for candidates: where the first two are next to nothing, the two cannot train differently.
"""

import math
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product, repeat
from pathlib import Path
from unittest.mock import patch


os.environ.setdefault("OMP_NUM_THREADS", "1")  # so small a model gains nothing from more threads; processes do
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout functions are experimental in TRL

import datasets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import transformers
from loading import load_problems
from scipy import stats
from tasks import TASKS, chats, to_ids, warm_start
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import TrlParser
from trl.rewards import accuracy_reward

from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer, TrustRegion
from trl_pdm.trust_region import TAIL_ESTIMATORS


# A threshold that no divergence reaches masks nothing.
MASKS = {
    "pdm": dict(proximity="divergence", direction="predictive"),
    "dppo": dict(proximity="divergence", direction="ratio"),
    "symmetric": dict(proximity="divergence", direction="none"),
    "grpo": dict(proximity="ratio", direction="ratio"),
    "ratio_predictive": dict(proximity="ratio", direction="predictive"),
    "none": dict(proximity="divergence", direction="predictive", divergence_threshold=1e9),
}
# Optimizer steps a rollout, the learning rate's multiple, the engine's precision and the rollouts between its syncs; then
# what the regime is in vLLM, if it is anything.
REGIMES = {
    "on_policy": dict(steps=2, rate=1, precision="float32", sync_every=1, vllm={}),
    "off_policy": dict(steps=16, rate=3, precision="float32", sync_every=1, vllm={}),
    "bf16": dict(steps=8, rate=1, precision="bfloat16", sync_every=1, vllm={}),
    "int8": dict(steps=8, rate=1, precision="int8", sync_every=1, vllm={"vllm_quantization": "fp8"}),
    "stale": dict(steps=4, rate=2, precision="float32", sync_every=4, vllm=None),
}
COLORS = ["#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#555555", "#56B4E9"]  # Okabe and Ito's
LINES = ["-", "--", (0, (1, 1)), "-.", (0, (4, 1, 1, 1, 1, 1)), ":", (0, (6, 2))]
STYLES = dict(zip(MASKS, zip(COLORS, LINES, strict=True), strict=False))
EVALUATIONS = 6  # on the held-out problems, after the first
LOGGED = "divergence_mean topk_mass_behavior outside masked masked_positive masked_negative direction_disagreement"
LOGGED = ["entropy", *(f"trust_region/{name}" for name in LOGGED.split())]
MANY_SEEDS = 6  # with fewer, all differences have the same sign by chance in more than 5 % of cases


# ---- Settings


def choices(table):
    return {"help": f"Any of {', '.join(table)}.", "choices": list(table)}


@dataclass
class StudyArguments:
    tasks: list[str] = field(default_factory=lambda: list(TASKS), metadata=choices(TASKS))
    regimes: list[str] = field(default_factory=lambda: list(REGIMES), metadata=choices(REGIMES))
    masks: list[str] = field(default_factory=lambda: list(MASKS), metadata=choices(MASKS))
    seeds: list[int] = field(default_factory=lambda: list(range(10)), metadata={"help": "Seeds, at least two."})
    max_steps: int = field(default=48, metadata={"help": f"Optimizer steps per run, a multiple of {EVALUATIONS}."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate, which a regime may multiply."})
    batch_size: int = field(default=32, metadata={"help": "Completions per optimizer step."})
    num_generations: int = field(default=8, metadata={"help": "Completions per prompt."})
    max_completion_length: int = field(default=28, metadata={"help": "Tokens of a completion at most."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the rollouts."})
    divergence_threshold: float = field(default=0.15, metadata={"help": "Threshold of the masks by divergence."})
    epsilon: float = field(default=0.2, metadata={"help": "Threshold of the masks by the ratio."})
    divergence_top_k: int = field(
        default=5, metadata={"help": "K. With the usual 20 of the small model's 98 characters there would be no tail."}
    )
    tail_estimator: str = field(default="exact", metadata=choices(TAIL_ESTIMATORS))
    warm_start_accuracy: float = field(default=0.4, metadata={"help": "Accuracy at which supervised training ends."})
    held_out: int = field(default=128, metadata={"help": "Problems to measure accuracy on."})
    output_dir: str = field(default="outputs/compare_masks", metadata={"help": "For the tables and the figure."})
    processes: int | None = field(
        default=None, metadata={"help": "Runs at a time, by default as many as cores. With vLLM it is one."}
    )
    use_vllm: bool = field(default=False, metadata={"help": "Sample with colocated vLLM."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model to train instead of small ones."})
    dataset_name: str | None = field(default=None, metadata={"help": "Its problems, on the hub or in a JSON file."})
    dtype: str = field(default="float32", metadata={"help": "Dtype of the trained model."})


@cache
def load_task(task, held_out):
    """Its problems as chats, those to train on and those held out, and its reward function."""
    if task in TASKS:
        rows, reward = chats(TASKS[task][0]()), TASKS[task][1]
    else:
        rows, reward = load_problems(task)[0]["train"].shuffle(seed=0), accuracy_reward
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out)), reward


def teach(task, args):
    """Save a small model that solves `warm_start_accuracy` of a task's problems."""
    warm_start(f"{args.output_dir}/{task}", TASKS[task][0]()[args.held_out :], args.warm_start_accuracy)


# ---- The engine: a copy of the policy that samples


def round_to_int8(weight):
    """`(rows, columns)` on the grid of 8-bit integers times one scale a row; vectors as they are."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


# Its dtype, and what else happens to weights on their way into it
PRECISIONS = {
    "float32": (torch.float32, lambda weight: weight),
    "bfloat16": (torch.bfloat16, lambda weight: weight),
    "int8": (torch.float32, round_to_int8),
}


@torch.no_grad()
def generate(model, prompts, max_new_tokens, eos_token_id, temperature=0.0, top_k=1):
    """
    Complete prompts in one batch, with a KV cache.

    Args:
        model: causal language model.
        prompts (`list[list[int]]`): token ids, of any lengths.
        max_new_tokens (`int`): T, the most tokens of a completion, the end of the text among them.
        eos_token_id (`int`): token that ends a completion.
        temperature (`float`): 0 for the most probable token each time.
        top_k (`int`): K, number of the most probable tokens to report.

    Returns:
        Lists `(B, <=T)` of the tokens and their log-probabilities, and `(B, <=T, K)` of the most probable tokens and
        theirs, all at `temperature` and in float32, whatever the model's precision.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[eos_token_id] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    running = torch.ones(len(ids), dtype=torch.bool, device=model.device)
    cache, columns = None, []
    while running.any() and len(columns) < max_new_tokens:
        padded = None if mask.all() else mask
        output = model(ids, padded, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logps = (output.logits[:, -1].float() / (temperature or 1)).log_softmax(-1)
        ids = torch.multinomial(logps.exp(), 1) if temperature else logps.argmax(-1, keepdim=True)
        columns.append((running, ids[:, 0], logps.gather(1, ids)[:, 0], *reversed(logps.topk(top_k))))
        running = running & (ids[:, 0] != eos_token_id)
        cache, positions = output.past_key_values, positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    sampled, *results = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    lengths = sampled.sum(1).tolist()
    return tuple([row[:n] for row, n in zip(result.tolist(), lengths, strict=True)] for result in results)


class Engine:
    """
    A rollout function that samples from its own copy of the policy.

    Args:
        model: the policy, before the trainer has it.
        args ([`StudyArguments`]): sampling and the top K.
        precision (`str`): one of `PRECISIONS`.
        sync_every (`int`): rollouts between two updates of its weights, the first of which gets the newest.
    """

    def __init__(self, model, args, precision, sync_every):
        dtype, self.rounded = PRECISIONS[precision]
        self.model, self.args, self.sync_every, self.rollouts = deepcopy(model).to(dtype).eval(), args, sync_every, 0

    @torch.no_grad()
    def sync(self, policy):
        self.model.to(policy.device)
        for mine, newest in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.copy_(self.rounded(newest))

    def __call__(self, prompts, trainer):
        if self.rollouts % self.sync_every == 0:
            self.sync(trainer.accelerator.unwrap_model(trainer.model))
        self.rollouts += 1
        tokenizer, args = trainer.processing_class, self.args
        ids = to_ids(tokenizer, prompts)
        limits = args.max_completion_length, tokenizer.eos_token_id
        tokens, logps, topk_ids, topk_logps = generate(
            self.model, ids, *limits, args.temperature, args.divergence_top_k
        )
        output = dict(prompt_ids=ids, completion_ids=tokens, logprobs=logps)
        return output | dict(topk_token_ids=topk_ids, topk_logprobs=topk_logps)


# ---- A run


def counting(counts, threshold):
    """
    `TrustRegion.assess`, which also counts what both masks of the divergence would do, whichever one trains, where the
    behaviour policy's candidates are known: GRPO's mask does not ask for them.

    Args:
        counts (`Tensor`): `(4,)`, tokens that only PDM's mask drops, only DPPO's, both, and all that were sampled.
        threshold (`float`): the divergence's, for these two masks.
    """
    assess = TrustRegion.assess

    def assess_and_count(region, evidence, *others):
        if evidence.valid.shape[-1] > 1:
            same = replace(region, proximity="divergence", threshold_low=threshold, threshold_high=threshold)
            pdm, dppo = (
                ~assess(replace(same, direction=name), evidence, *others).keep for name in ("predictive", "ratio")
            )
            tokens = evidence.behavior_logps[..., 0].isfinite()  # padding is neither counted nor dropped
            counts.add_(torch.stack([x.sum() for x in (pdm & ~dppo, dppo & ~pdm, pdm & dppo, tokens)]).cpu())
        return assess(region, evidence, *others)

    return assess_and_count


class Accuracy(TrainerCallback):
    """Greedy accuracy on held-out problems, every so many optimizer steps: `curve`."""

    def __init__(self, every, model, tokenizer, problems, reward, max_new_tokens):
        self.every, self.model, self.tokenizer, self.reward, self.curve = every, model, tokenizer, reward, []
        self.prompts, self.solutions = to_ids(tokenizer, problems["prompt"]), list(problems["solution"])
        self.max_new_tokens = max_new_tokens

    def measure(self):
        self.model.eval()
        tokens = generate(self.model, self.prompts, self.max_new_tokens, self.tokenizer.eos_token_id)[0]
        self.model.train()
        chats = [[{"content": text}] for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        self.curve.append(np.mean([right or 0.0 for right in self.reward(completions=chats, solution=self.solutions)]))

    def on_train_begin(self, args, state, control, **kwargs):
        self.measure()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.measure()


def run(task, regime, mask, seed, args):
    """One training run: its row of the table."""
    regime_is, (train, held_out, reward) = REGIMES[regime], load_task(task, args.held_out)
    name = f"{args.output_dir}/{task}" if task in TASKS else args.model_name_or_path
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if args.use_vllm:
        longest = max(map(len, to_ids(tokenizer, train["prompt"]))) + args.max_completion_length
        in_vllm = dict(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=longest) | regime_is["vllm"]
        engine = None
    else:
        in_vllm, engine = {}, Engine(model, args, regime_is["precision"], regime_is["sync_every"])
    every = args.max_steps // EVALUATIONS
    same = ["output_dir", "max_steps", "num_generations", "max_completion_length", "temperature"]
    same += ["divergence_threshold", "epsilon", "divergence_top_k", "tail_estimator"]
    # The realized alignment is not asked about: with it the sum of squares is there, whichever mask trains
    fixed = dict(
        log_realized_alignment=True,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
        logging_steps=every,
        disable_tqdm=True,
    )
    config = PDMGRPOConfig(
        learning_rate=args.learning_rate * regime_is["rate"],
        steps_per_generation=regime_is["steps"],
        per_device_train_batch_size=args.batch_size,
        seed=seed,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=task not in TASKS,
        save_strategy="no",
        report_to="none",
        **fixed | {name: getattr(args, name) for name in same} | MASKS[mask] | in_vllm,
    )
    data = dict(reward_funcs=reward, train_dataset=train, processing_class=tokenizer)
    trainer = PDMGRPOTrainer(model, args=config, rollout_func=engine, **data)
    trainer.remove_callback(PrinterCallback)
    policy, counts = trainer.accelerator.unwrap_model(trainer.model), torch.zeros(4)
    accuracy = Accuracy(every, policy, tokenizer, held_out, reward, args.max_completion_length)
    trainer.add_callback(accuracy)
    with patch.object(TrustRegion, "assess", counting(counts, args.divergence_threshold)):
        trainer.train()
    curve, logs = np.array(accuracy.curve), pd.DataFrame(trainer.state.log_history)
    row = dict(task=task, regime=regime, mask=mask, seed=seed, final=curve[-1])
    row |= dict(area=np.trapezoid(curve) / EVALUATIONS, collapsed=is_collapsed(curve))
    row |= {metric.split("/")[-1]: logs.get(metric, pd.Series(dtype=float)).mean() for metric in LOGGED}
    row["tail_mass"] = 1 - row.pop("topk_mass_behavior")
    *dropped, tokens = counts.tolist()
    row |= {
        name: n / tokens if tokens else math.nan
        for name, n in zip(("pdm_only", "dppo_only", "both"), dropped, strict=True)
    }
    return row | {f"accuracy_{step * every}": height for step, height in enumerate(curve)}


def is_collapsed(curve):
    """Whether accuracy ends more than 10 points below its start, or below half of its best."""
    return bool(curve[-1] < max(curve[0] - 0.1, curve.max() / 2))


# ---- What the runs say


def interval(differences):
    """
    95 % percentile bootstrap interval of the mean of paired differences, `(seeds,)`.

    Percentile intervals of few values are too narrow. The percentiles are those whose interval, of normal differences,
    would be Student's (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 4.3).
    """
    n = len(differences)
    student = stats.t.ppf(0.975, n - 1) * (n / (n - 1)) ** 0.5
    level = 1 - 2 * stats.norm.sf(student)
    draws = stats.bootstrap((differences,), np.mean, confidence_level=level, method="percentile", rng=0)
    return draws.confidence_interval


def compare(runs, measures=("final", "area"), of="pdm"):
    """The mask `of` minus each other, paired over the seeds that both have: one row a task, regime, mask and measure."""
    rows = []
    for (task, regime), cell in runs.groupby(["task", "regime"], sort=False):
        for measure in measures:
            by_mask = cell.pivot(index="seed", columns="mask", values=measure)
            for other in [mask for mask in cell["mask"].unique() if mask != of and of in by_mask]:
                differences = (by_mask[of] - by_mask[other]).dropna().to_numpy()
                if len(differences) < 2:
                    continue
                low, high = interval(differences)
                verdict = "helps" if low > 0 else "hurts" if high < 0 else "ties"
                rows.append((task, regime, other, measure, differences.mean(), low, high, verdict))
    columns = ["task", "regime", "against", "measure", "difference", "low", "high", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def statement(comparisons, seeds, of="pdm", score="accuracy"):
    """Where the mask `of` helps, ties and hurts, in words."""
    if not len(comparisons):
        return f"No comparison: it takes the mask `{of}`, another, and two seeds."
    lines = []
    for (other, measure), rows in comparisons.groupby(["against", "measure"], sort=False):
        lines.append(f"{of.upper()} against {other}, {measure} {score}:")
        for verdict in ("helps", "hurts", "ties"):
            found = [
                f"{row.task}/{row.regime} ({row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}])"
                for row in rows[rows["verdict"] == verdict].itertuples()
            ]
            lines.append(f"  {verdict} in {len(found)} of {len(rows)}" + (f": {', '.join(found)}" if found else ""))
    chance = f"Were all masks equal, about {0.05 * len(comparisons):.0f} of these {len(comparisons)} would not be ties"
    few = ", and more with so few seeds." if seeds < MANY_SEEDS else "."
    return "\n".join([*lines, chance + few])


def draw(runs, path, score="accuracy", styles=STYLES):
    """A score over optimizer steps: a panel a task and regime, a line a mask, bands of one standard error."""
    tasks, regimes, masks = (list(runs[name].unique()) for name in ("task", "regime", "mask"))
    columns = {int(name.rpartition("_")[2]): name for name in runs if re.fullmatch(rf"{score}_\d+", name)}
    size = (1.2 + 2.3 * len(regimes), 1 + 2.2 * len(tasks))
    figure, axes = plt.subplots(
        len(tasks), len(regimes), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for (row, task), (column, regime), mask in product(enumerate(tasks), enumerate(regimes), masks):
        curves = runs.query("task == @task and regime == @regime and mask == @mask")
        steps = [step for step in sorted(columns) if curves[columns[step]].notna().any()]
        curves = curves[[columns[step] for step in steps]]
        mean, error, (color, line) = curves.mean(), curves.sem(), styles[mask]
        axis = axes[row, column]
        axis.fill_between(steps, mean - error, mean + error, alpha=0.15, color=color, linewidth=0)
        axis.plot(steps, mean, color=color, linewidth=1.6, linestyle=line, label=mask)
        axis.set(title=regime.replace("_", "-") if row == 0 else "", ylabel=f"{task}: {score}" if column == 0 else "")
        axis.grid(alpha=0.3)
    figure.supxlabel("optimizer steps")
    labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=min(4, len(regimes) + 1), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def start_worker():
    torch.set_num_threads(1)
    for library in (datasets.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def main(args):
    if len(args.seeds) < 2 or args.max_steps % EVALUATIONS:
        raise ValueError(f"Give at least two `seeds`, and `max_steps` as a multiple of {EVALUATIONS}.")
    if (args.model_name_or_path is None) != (args.dataset_name is None):
        raise ValueError("Give both `model_name_or_path` and `dataset_name`, or neither.")
    tasks = [args.dataset_name] if args.dataset_name else args.tasks
    regimes = [name for name in args.regimes if not args.use_vllm or REGIMES[name]["vllm"] is not None]
    if args.use_vllm and not torch.cuda.is_available():
        regimes = [name for name in regimes if not REGIMES[name]["vllm"]]  # an engine on a CPU has no fp8
    folder, cells = Path(args.output_dir), list(product(tasks, regimes, args.masks, args.seeds))
    folder.mkdir(parents=True, exist_ok=True)
    # An engine of vLLM lives as long as its process
    limits = dict(max_workers=1, max_tasks_per_child=1) if args.use_vllm else dict(max_workers=args.processes)
    limits |= dict(mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)
    with ProcessPoolExecutor(**limits) as pool:
        list(pool.map(teach, [task for task in tasks if task in TASKS], repeat(args)))
        jobs = {pool.submit(run, *cell, args): cell for cell in cells}
        rows = {}
        for job in tqdm(as_completed(jobs), "runs", len(jobs)):
            rows[jobs[job]] = job.result()
            pd.DataFrame(rows.values()).to_csv(folder / "runs.csv", index=False)  # what is done is not lost
    runs = pd.DataFrame([rows[cell] for cell in cells])
    measured = ["final", "area", "collapsed", *runs.loc[:, "entropy":"both"]]
    summary = runs.groupby(["task", "regime", "mask"], sort=False)[measured].mean()
    comparisons = compare(runs)
    for name, table in {"runs": runs, "summary": summary.reset_index(), "comparisons": comparisons}.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    draw(runs, folder / "curves.png")
    print(
        summary.drop(columns=["outside", "masked_positive", "masked_negative"]).to_string(float_format="{:.3f}".format)
    )
    print(statement(comparisons, len(args.seeds)))


if __name__ == "__main__":
    main(*TrlParser(StudyArguments).parse_args_and_config())
