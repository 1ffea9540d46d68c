"""Which direction test predicts whether the divergence really grows?

    python examples/alignment_study.py                                  # a tiny model it trains itself, 61 seeds
    python examples/alignment_study.py --model_name_or_path Qwen/Qwen3-0.6B [--prompts FILE] [--dtype bfloat16]

Each seed samples one rollout and takes AdamW steps on its minibatches, all but the first off policy. The objective is
that of PDM: mask * min(r, C) * A * log pi. Before and after each step the divergence of every token from the behaviour
policy is measured over the *whole vocabulary*. The tokens that count have a nonzero advantage and are outside the trust
region, by the top-K divergence that the trainer sees. On them each direction test says keep or mask, and three things
can happen to the divergence:

- `token alone`: a step of that token only, in its logits, z' = z + eta * A * min(r, C) * (e_a - pi);
- `optimizer step`: the real one, with all tokens of the minibatch. A masked token then has no pull of its own;
- `step without mask`: the same training over again with every token in the loss, so that the update each test judges
  is one that is made.

Rates, of which each has a 95 % interval by bootstrap over the seeds, alone and as the paired difference to the ratio's:

- `agreement`: kept and the divergence did not grow, or masked and it grew, of all tokens that count;
- `unsafe_keep`: kept, of those whose divergence then grew (low is good);
- `useful_keep`: kept, of those whose divergence then shrank (high is good);
- `full_sign`: decides as the prediction over the whole vocabulary does, of all tokens that count.

Two more predictions, `lm_head` and `jvp`, are of the whole step and not of a token's own update: see `first_order`. The
second is the most that any first-order prediction can reach. How much of a change a prediction over the whole vocabulary
explains is its rank correlation with that change (a mean over the seeds). Whether a test is of use is whether its
`agreement` beats the same answer for every token.

With subset `differ` they are of the tokens where the test and the ratio decide differently. The first value of
`--top_k`, `--thresholds` and `--divergences` makes the headline, the others take its place one at a time.

In `--output_dir`: alignment.csv (counts by seed), summary.csv (the rates of the headline, the agreement elsewhere),
alignment.png. The same flags, the same numbers. `python examples/alignment_study.py --help` lists the flags.
"""

import argparse
import copy
import json
import multiprocessing
import os
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import PercentFormatter
from scipy import stats
from tasks import addition, warm_start
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, logging, set_seed

from trl_pdm import Evidence, TrustRegion


RATIO_MAX = 20.0  # C
ETA = 0.05
LOGP_FLOOR = -100.0
LOGITS_AT_ONCE = 2**23  # sequences go through the model in chunks: 32 MiB a tensor, which malloc still keeps for reuse
RESAMPLES = 2000

# (direction, tail estimator) of the region
DIRECTIONS = {
    "ratio": dict(direction="ratio", tail_estimator="aggregated"),
    "none": dict(direction="none", tail_estimator="aggregated"),  # every token outside is masked
    "aggregated": dict(direction="predictive", tail_estimator="aggregated"),
    "uniform": dict(direction="predictive", tail_estimator="uniform"),
    "exact": dict(direction="predictive", tail_estimator="exact"),
}
# Predicted changes of the divergence over the whole vocabulary, computed here, and what change each is of.
PREDICTIONS = {"full": ("alone", "step"), "lm_head": ("step",), "jvp": ("step",)}
TESTS = [*DIRECTIONS, *PREDICTIONS]
# (mu, pi, log(pi/mu)) `(..., V)` -> D(mu, pi), and pi * dD/dpi: over the whole vocabulary, and apart from the package.
DIVERGENCES = {
    "kl": lambda mu, pi, log_ratio: (-(mu * log_ratio).sum(-1), -mu),
    "tv": lambda mu, pi, log_ratio: ((pi - mu).abs().sum(-1) / 2, pi * (pi - mu).sign() / 2),
    "reverse_kl": lambda mu, pi, log_ratio: ((pi * log_ratio).sum(-1), pi * (log_ratio + 1)),
}
# What happened: the training run it is read from, the change of the divergence there.
TRUTHS = {
    "token alone": ("masked", "alone"),
    "optimizer step": ("masked", "step"),
    "step without mask": ("unmasked", "step"),
}
RATES = {
    "agreement": ("agree", "tokens"),
    "unsafe_keep": ("widened_kept", "widened"),
    "useful_keep": ("shrunk_kept", "shrunk"),
    "full_sign": ("as_full", "tokens"),
}
# The tiny model is flattened by the temperature until its top 5 of 98 tokens leave a tail like a real model's top 20.
TINY = dict(seeds=61, top_k=[5, 1, 2, 20], temperature=1.8, learning_rate=1e-3, prompts_per_seed=64, steps=8)
TINY |= dict(max_completion_length=4)
GIVEN = dict(seeds=5, top_k=[20, 1, 2, 5], temperature=1.0, learning_rate=2e-5, prompts_per_seed=4, steps=8)
GIVEN |= dict(max_completion_length=24)
SUMS = [addition(a, b) for a in range(10, 100) for b in range(10, 100)]
PROMPTS = [
    "The weather this morning was",
    "My grandmother always told me that",
    "In the middle of the old town there is",
    "The most important thing about cooking rice is",
    "When the train finally arrived,",
    "A good teacher knows how to",
    "The first time I saw the sea,",
    "Scientists have recently discovered that",
]


# ---- Measuring, over the whole vocabulary


def full_divergences(log_mu, log_pi, names):
    """`{name: (D(mu, pi), pi * dD/dpi)}`, `(...)` and `(..., V)`, of log-probabilities `(..., V)`."""
    mu, pi, log_ratio = log_mu.exp(), log_pi.exp(), log_pi - log_mu
    return {name: DIVERGENCES[name](mu, pi, log_ratio) for name in names}


def full_prediction(weighted_slope, pi, sampled):
    """First-order change of `D(mu, pi)` along `e_a - pi` in the logits: `d = g_a - sum_j pi_j g_j`, where
    `g = grad_z D = pi * h - pi * sum(pi * h)` and `h = dD/dpi`. `pi * h`, `pi` `(..., V)`, ids `(...)` -> `(...)`."""
    grad = weighted_slope - pi * weighted_slope.sum(-1, keepdim=True)
    return grad.gather(-1, sampled[..., None])[..., 0] - (pi * grad).sum(-1)


def logit_step(log_pi, sampled, size):
    """Log-probabilities after `z' = z + size * (e_a - pi)`. `(..., V)`, ids `(...)`, sizes `(...)` -> `(..., V)`."""
    z = log_pi - size[..., None] * log_pi.exp()
    return z.scatter_add(-1, sampled[..., None], size[..., None]).log_softmax(-1)


def logps(model, rows, temperature):
    """Log-probabilities of the whole vocabulary at the completions' positions: `(B, T, V)`, float32."""
    attention = rows["attention"]
    output = model(
        input_ids=rows["ids"],
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=rows["mask"].shape[1] + 1,
    )
    return (output.logits[:, :-1].float() / temperature).log_softmax(-1).clamp(min=LOGP_FLOOR)


def chunks(rows, vocab_size):
    size = max(1, LOGITS_AT_ONCE // (rows["mask"].shape[1] * vocab_size))
    for start in range(0, len(rows["ids"]), size):
        yield {name: values[start : start + size] for name, values in rows.items()}


@torch.no_grad()
def measure(behavior, model, rows, args, only_divergence=False):
    """Of each completion token: `D` for each divergence and, unless `only_divergence`, the evidence, the
    prediction over the whole vocabulary and the change of `D` by a step of that token alone. Arrays with `(N, ...)` rows."""
    records = []
    for chunk in chunks(rows, model.config.get_text_config().vocab_size):
        mask = chunk["mask"]
        log_mu, log_pi = (logps(policy, chunk, args.temperature)[mask] for policy in (behavior, model))
        sampled = chunk["ids"][:, -mask.shape[1] :][mask]
        now = full_divergences(log_mu, log_pi, args.divergences)
        record = {f"D_{name}": div for name, (div, _) in now.items()}
        if not only_divergence:
            top = log_mu.topk(min(max(args.top_k), log_mu.shape[-1])).indices
            ids = torch.cat([sampled[:, None], top], 1)
            record["valid"] = torch.cat([torch.ones_like(ids[:, :1], dtype=bool), top != sampled[:, None]], 1)
            record["behavior"], record["policy"] = log_mu.gather(1, ids), log_pi.gather(1, ids)
            pi = log_pi.exp()
            record["sum_sq"] = pi.square().sum(-1)
            head = torch.where(record["valid"], record["behavior"], -torch.inf)[:, : args.top_k[0] + 1]
            record["tail"] = 1 - head.exp().sum(-1)
            record["entropy"] = -(log_mu.exp() * log_mu).sum(-1)
            record["advantage"] = chunk["advantage"][:, None].expand(mask.shape)[mask]
            log_ratio = record["policy"][:, 0] - record["behavior"][:, 0]
            record["weight"] = log_ratio.exp().clamp(max=RATIO_MAX) * record["advantage"]
            for name, (_, slope) in now.items():
                record[f"full_{name}"] = record["weight"] * full_prediction(slope, pi, sampled)
            after = full_divergences(log_mu, logit_step(log_pi, sampled, ETA * record["weight"]), args.divergences)
            record |= {f"alone_{name}": div - record[f"D_{name}"] for name, (div, _) in after.items()}
        records.append(record)
    return {name: torch.cat([record[name] for record in records]) for name in records[0]}


@torch.no_grad()
def first_order(behavior, model, before, rows, args):
    """Change of each completion token's `D`, to first order, by an optimizer step that led from the parameters `before`
    to the model's. `rows` with the objective's `weight` `(B, T)`; arrays `(N,)`.

    - `jvp`: along the change of all parameters, the directional derivative.
    - `lm_head`: along the objective's gradient of the head's weights, `W + sum_s weight_s (e_a - pi_s) h_s^T`, so that
      the logits of token `t` move by `sum_s (h_s . h_t) weight_s (e_a - pi_s)`. What AdamW makes of the gradient and the
      rest of the model do not count, nor does the input embedding where it is tied. Its size has no meaning.
    """

    def at(parameters):
        return lambda **inputs: functional_call(model, before | parameters, kwargs=inputs, tie_weights=False)

    def log_pi(parameters, chunk):
        return logps(at(parameters), chunk, args.temperature)[chunk["mask"]]

    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings()) + ".weight"
    parts, changes = list(chunks(rows, model.config.get_text_config().vocab_size)), defaultdict(list)
    ascent = torch.zeros_like(before[head])
    for part in parts:
        ascent += grad(lambda weight, part=part: objective(at({head: weight}), part, args))(before[head])
    steps = {"lm_head": {head: ascent}, "jvp": {name: p - before[name] for name, p in parameters(model).items()}}
    for part in parts:
        log_mu = logps(behavior, part, args.temperature)[part["mask"]]
        for name, step in steps.items():
            start = {moved: before[moved] for moved in step}
            with sdpa_kernel(SDPBackend.MATH):  # the one that has a forward derivative
                now, moving = jvp(lambda point, part=part: log_pi(point, part), (start,), (step,))
            for divergence, (_, slope) in full_divergences(log_mu, now, args.divergences).items():
                changes[f"{name}_{divergence}"].append((slope * moving).sum(-1))
    return {name: torch.cat(values) for name, values in changes.items()}


def parameters(model):
    """`{name: parameter}`, a tied one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def assess_records(records, vocab_size, divergence, threshold, top_k, direction, tail_estimator):
    """The assessment over the first `top_k` candidates of what `measure` returned."""
    region = TrustRegion(
        divergence=divergence,
        direction=direction,
        tail_estimator=tail_estimator,
        threshold_low=threshold,
        threshold_high=threshold,
    )
    behavior, policy, valid = (records[name][..., : top_k + 1] for name in ("behavior", "policy", "valid"))
    evidence = Evidence(
        behavior_logps=behavior,
        policy_logps=policy,
        valid=valid,
        vocab_size=vocab_size,
        policy_sum_sq=records["sum_sq"],
    )
    return region.assess(evidence, records["advantage"])


# ---- One seed: a rollout, and training on it


def rollout(model, tokenizer, prompts, args):
    """Sampled completions with group-normalised advantages. `ids`, `attention` `(B, P+T)`, `mask` `(B, T)`."""
    prompts = [prompt for prompt in prompts for _ in range(args.num_generations)]
    texts = [prompt["prompt"] for prompt in prompts]
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    sampling = dict(do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0)
    sampling |= dict(max_new_tokens=args.max_completion_length, pad_token_id=tokenizer.pad_token_id)
    ids = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **sampling)
    completions = ids[:, inputs.input_ids.shape[1] :]
    eos = model.generation_config.eos_token_id or tokenizer.eos_token_id  # one, or a list
    ends = torch.isin(completions, torch.tensor(eos, device=ids.device))
    mask = ends.cumsum(1) - ends.long() == 0  # up to and including the first end of text
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor([reward(text, prompt) for text, prompt in zip(texts, prompts, strict=True)])
    groups = rewards.view(-1, args.num_generations)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    attention = torch.cat([inputs.attention_mask, mask.long()], 1)
    return dict(ids=ids, attention=attention, mask=mask, advantage=advantages.flatten().to(ids.device))


def reward(text, prompt):
    """1 for the solution, where there is one to match; otherwise the share of words that are not repetitions."""
    words = text.lower().split()
    return float(text == prompt["solution"]) if "solution" in prompt else len(set(words)) / max(1, len(words))


def weighted(rows, weight):
    """The rows with each completion token's share in the objective, `weight` `(B, T)`, from `(N,)`."""
    weights = torch.zeros(rows["mask"].shape, device=weight.device)
    weights[rows["mask"]] = weight / len(weight)
    return rows | {"weight": weights}


def objective(model, rows, args):
    """`sum(weight * log pi_a)`"""
    sampled = rows["ids"][:, -rows["mask"].shape[1] :, None]
    return (rows["weight"] * logps(model, rows, args.temperature).gather(-1, sampled)[..., 0]).sum()


def update(model, optimizer, rows, args):
    """One optimizer step that raises the objective."""
    for chunk in chunks(rows, model.config.get_text_config().vocab_size):
        (-objective(model, chunk, args)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(behavior, minibatches, masked, args):
    """Train from the behaviour policy; records of the off-policy steps, `{name: (N, ...)}`."""
    model, steps = copy.deepcopy(behavior), []
    vocab_size = model.config.get_text_config().vocab_size
    headline = (vocab_size, args.divergences[0], args.thresholds[0], args.top_k[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    for i, batch in enumerate(minibatches):
        if i == 0:  # on policy: every ratio is 1, and no token can be outside
            advantage = batch["advantage"][:, None].expand_as(batch["mask"])[batch["mask"]]
            update(model, optimizer, weighted(batch, advantage), args)
            continue
        records = measure(behavior, model, batch, args)
        keep = assess_records(records, *headline, **DIRECTIONS["exact"]).keep
        before = {name: parameter.detach().clone() for name, parameter in parameters(model).items()}
        batch = weighted(batch, records["weight"] * keep if masked else records["weight"])
        update(model, optimizer, batch, args)
        records |= first_order(behavior, model, before, batch, args)
        after = measure(behavior, model, batch, args, only_divergence=True)
        records |= {f"step_{name}": after[f"D_{name}"] - records[f"D_{name}"] for name in args.divergences}
        steps.append({name: values.cpu().numpy() for name, values in records.items()})
    return {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}


def study_seed(args, seed):
    """One rollout and two trainings on it: `{"masked": records, "unmasked": records}`, and the vocabulary's size."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    device = f"cuda:{seed % torch.cuda.device_count()}" if args.device == "cuda" else args.device
    name = args.models[seed % len(args.models)]
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype).to(device).eval()
    set_seed(seed)
    prompts = [args.rows[i] for i in torch.randperm(len(args.rows))[: args.prompts_per_seed]]
    rows = rollout(model, tokenizer, prompts, args)
    order = torch.randperm(len(rows["ids"])).to(device).chunk(args.steps)
    minibatches = [{name: values[chosen] for name, values in rows.items()} for chosen in order]
    result = {run: train(model, minibatches, run == "masked", args) for run in ("masked", "unmasked")}
    for records in result.values():
        records["seed"] = np.full(len(records["weight"]), seed)
    return result, model.config.get_text_config().vocab_size


# ---- Counting


def count(records, vocab_size, change, among, divergence, threshold, top_k):
    """Counts by seed, subset and direction: of the direction's decisions and, on the same tokens, the ratio's."""
    tensors = {name: torch.from_numpy(values) for name, values in records.items()}
    setting, keep = (tensors, vocab_size, divergence, threshold, top_k), {}
    for direction, choices in DIRECTIONS.items():
        assessed = assess_records(*setting, **choices)
        keep[direction] = assessed.keep.numpy()
    keep |= {name: records[f"{name}_{divergence}"] <= 0 for name, of in PREDICTIONS.items() if change in of}
    counted = assessed.outside.numpy() & (records["advantage"] != 0) & among
    grew, shrank = records[f"{change}_{divergence}"] > 0, records[f"{change}_{divergence}"] < 0
    frames = []
    for direction in keep:
        flags = {"tokens": counted | True, "widened": grew, "shrunk": shrank}
        for prefix, kept in (("", keep[direction]), ("ratio_", keep["ratio"])):
            flags |= {f"{prefix}agree": kept != grew, f"{prefix}as_full": kept == keep["full"]}
            flags |= {f"{prefix}widened_kept": kept & grew, f"{prefix}shrunk_kept": kept & shrank}
        by_seed = pd.DataFrame(flags).astype(int).assign(seed=records["seed"])
        differ = counted & (keep[direction] != keep["ratio"])
        for subset, chosen in {"all": counted, "differ": differ}.items():
            total = by_seed[chosen].groupby("seed").sum().reindex(np.unique(records["seed"]), fill_value=0)
            frames.append(total.reset_index().assign(subset=subset, direction=direction))
    return pd.concat(frames)


def interval(numerator, denominator, reference):
    """Pooled rate and its difference to a reference's, each with a 95 % percentile interval from resampled seeds.
    Three `(S,)` arrays of counts by seed; `(rate, low, high, difference, low, high)`."""

    def rates(counts, total, axis):
        total = total.sum(axis)
        return np.divide(counts.sum(axis), total, out=np.full(total.shape, np.nan), where=total > 0)

    data = np.stack([numerator, numerator - reference]), np.stack([denominator, denominator])
    with warnings.catch_warnings(action="ignore", category=stats.DegenerateDataWarning):  # draws without such tokens
        draws = stats.bootstrap(data, rates, axis=-1, paired=True, n_resamples=RESAMPLES, method="percentile", rng=0)
    known = [of[~np.isnan(of)] for of in draws.bootstrap_distribution]
    ends = [np.percentile(of, [2.5, 97.5]) if len(of) else (np.nan, np.nan) for of in known]
    return [x for rate, low_high in zip(rates(*data, axis=-1), ends, strict=True) for x in (rate, *low_high)]


def summarise(counts):
    """The rates with their intervals: one row by breakdown, level, truth, subset, direction and rate."""
    keys, rows = ["breakdown", "level", "truth", "subset", "direction"], []
    reported = counts[(counts.breakdown == "headline") | (counts.subset == "all")]
    for key, group in reported.groupby(keys, sort=False):
        for rate in RATES if key[0] == "headline" else ["agreement"]:
            numerator, denominator = RATES[rate]
            n = group[denominator].sum()
            values = interval(*(group[c].to_numpy() for c in (numerator, denominator, f"ratio_{numerator}")))
            rows.append([*key, rate, n, *values])
    columns = ["rate", "n", "value", "low", "high", "vs_ratio_value", "vs_ratio_low", "vs_ratio_high"]
    return pd.DataFrame(rows, columns=keys + columns)


def breakdowns(runs, args):
    """`(breakdown, level, setting, {run: tokens})`: the headline, then all that differs from it in one respect."""
    headline = dict(divergence=args.divergences[0], threshold=args.thresholds[0], top_k=args.top_k[0])
    everywhere = dict.fromkeys(runs, True)
    yield "headline", "{divergence} > {threshold}, K {top_k}".format(**headline), headline, everywhere
    for name, values in (("divergence", args.divergences), ("threshold", args.thresholds), ("top_k", args.top_k)):
        yield from ((name, str(value), headline | {name: value}, everywhere) for value in values)
    outside = runs["masked"][f"D_{args.divergences[0]}"] > args.thresholds[0]
    for name, measured in (("tail mass", "tail"), ("entropy", "entropy")):
        edges = np.quantile(runs["masked"][measured][outside], [1 / 3, 2 / 3])
        for i, level in enumerate((f"< {edges[0]:.3f}", "between", f">= {edges[1]:.3f}")):
            yield name, level, headline, {run: np.digitize(r[measured], edges) == i for run, r in runs.items()}


def rank_correlation(records, prediction, change, divergence, threshold):
    """Of a prediction with what happened, on the tokens outside: a value a seed, and the number of tokens."""
    chosen = (records[f"D_{divergence}"] > threshold) & (records["advantage"] != 0)
    names = {"prediction": f"{prediction}_{divergence}", "change": f"{change}_{divergence}", "seed": "seed"}
    tokens = pd.DataFrame({name: records[source][chosen] for name, source in names.items()})
    by_seed = [seed[["prediction", "change"]].rank().corr().iloc[0, 1] for _, seed in tokens.groupby("seed")]
    return np.nan_to_num(by_seed), len(tokens)


# ---- Reporting


def table(rows, columns="rate", prefix="", sign=""):
    def cell(row):
        value, low, high = (row[f"{prefix}{name}"] for name in ("value", "low", "high"))
        return "-" if np.isnan(value) else f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"

    return rows.assign(cell=[cell(row) for _, row in rows.iterrows()]).pivot(columns=columns, values="cell")


def report(summary, runs, args):
    """Print the tables of the headline and of the breakdowns."""
    for run, records in runs.items():
        outside = records[f"D_{args.divergences[0]}"] > args.thresholds[0]
        print(
            f"{run}: {len(outside):,} tokens off policy, {outside.mean():.1%} outside by the whole vocabulary; mean mass"
        )
        print(
            f"  beyond the top {args.top_k[0]}: {records['tail'].mean():.3f}, outside {records['tail'][outside].mean():.3f}"
        )
    for truth, (_, change) in TRUTHS.items():
        known = [name for name in TESTS if change in PREDICTIONS.get(name, change)]
        order = [name for name in known if name != "ratio"]
        of_truth = summary[summary.truth == truth].set_index("direction")
        headline = of_truth[of_truth.breakdown == "headline"]
        of_all, differ = (headline[headline.subset == subset] for subset in ("all", "differ"))
        n, widened = (of_all.n[of_all.rate == rate].iloc[0] for rate in ("agreement", "unsafe_keep"))
        explained = table(of_all[of_all.rate == "rank_correlation"]).iloc[:, 0]
        print(f"\n=== {truth}: {n:,} tokens, {n / args.seeds:.0f} a seed; the divergence grew on {widened / n:.1%}")
        print("  rank correlation of the predictions with the change:", *(f"{k} {v}" for k, v in explained.items()))
        print(table(of_all).loc[known, list(RATES)].to_string())
        print("\nminus the ratio's; an interval that holds 0 is noise")
        print(table(of_all, prefix="vs_ratio_", sign="+").loc[order, list(RATES)].to_string())
        print("\nwhere test and ratio decide differently")
        tokens = differ.n[differ.rate == "agreement"].rename("tokens")
        print(table(differ).join(tokens).loc[order, ["tokens", *RATES]].to_string())
        rows = of_truth[(of_truth.rate == "agreement") & (of_truth.subset == "all")].reset_index()
        rows = rows.set_index(["breakdown", "level"])
        exact = rows[rows.direction == "exact"].assign(rate="exact - ratio")
        values = rows.pivot(columns="direction", values="value").loc[exact.index, known]
        print("\nagreement by breakdown")
        print(exact[["n"]].join(values.round(3)).join(table(exact, prefix="vs_ratio_", sign="+")).to_string())


def draw(summary, title, path):
    """Agreement with what happened, a panel for each truth."""
    palette = ["#d55e00", "#999999", "#e69f00", "#56b4e9", "#0072b2", "#000000", "#cc79a7", "#009e73"]  # Okabe-Ito
    box = dict(boxstyle="round,pad=0.1", fc="white", ec="none")
    rows = summary[(summary.breakdown == "headline") & (summary.subset == "all")].set_index("direction")
    figure, axes = plt.subplots(1, len(TRUTHS), sharex=True, sharey=True, figsize=(11, 4.2), layout="constrained")
    for ax, truth in zip(axes, TRUTHS, strict=True):
        panel = rows[(rows.truth == truth) & (rows.rate == "agreement")]
        n = panel.n.iloc[0]
        widened = rows.n[(rows.truth == truth) & (rows.rate == "unsafe_keep")].iloc[0] / n
        ax.axvline(max(widened, 1 - widened), color="gray", ls=":", lw=1.5, zorder=0)
        for y, (direction, color) in enumerate(zip(TESTS, palette, strict=True)):
            if direction not in panel.index:
                continue
            row = panel.loc[direction]
            ax.plot([row.low, row.high], [y, y], color=color, lw=3, solid_capstyle="butt")
            ax.plot(row.value, y, "o", color=color, ms=7)
            ax.annotate(
                f"{row.value:.1%}", (row.value, y), (0, 8), textcoords="offset points", ha="center", size=9, bbox=box
            )
        gain = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*100 * panel.filter(like="vs_ratio").loc["exact"])
        ax.set_title(f"{truth}, {n:,} tokens\nexact minus ratio: {gain} points", size=10)
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.margins(x=0.15)
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(TESTS)), TESTS)
    axes[0].set_ylim(-0.5, len(TESTS) - 0.4)
    figure.suptitle(f"How often the divergence did what the direction test said\n{title}", size=12)
    figure.supxlabel(
        "share of tokens outside the region, 95 % interval; dotted: the same answer for every token", size=9
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def tiny_model(folder, seed, accuracy):
    """Train a small model on two-digit sums, as examples/train_pdm.py does before PDM takes over."""
    logging.disable_progress_bar()
    warm_start(folder, SUMS, accuracy, seed)
    return folder


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", help="folder or name of a model; by default tiny ones, trained first on sums")
    add("--prompts", help='text file with a prompt a line, or JSON lines {"prompt": ..., "solution": optional}')
    add("--output_dir", default="outputs/alignment_study")
    add("--seeds", type=int, help="number of seeds, counted from 0")
    add("--top_k", type=int, nargs="+", help="size of the behaviour policy's head")
    add("--thresholds", type=float, nargs="+", default=[0.15, 0.05, 0.5])
    add("--divergences", nargs="+", choices=list(DIVERGENCES), default=list(DIVERGENCES))
    add("--temperature", type=float)
    add("--learning_rate", type=float)
    add("--prompts_per_seed", type=int)
    add("--num_generations", type=int, default=8, help="completions of a prompt")
    add("--steps", type=int, help="minibatches of the rollout, each an optimizer step")
    add("--max_completion_length", type=int)
    add("--dtype", default="float32", help="of the weights")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="seeds take turns on several GPUs")
    add("--processes", type=int, default=os.cpu_count(), help="seeds at a time")
    add("--tiny_models", type=int, default=4, help="number of tiny models, which seeds take in turn")
    add("--warm_start_accuracy", type=float, default=0.55, help="accuracy up to which a tiny model is trained")
    args = parser.parse_args()
    for name, value in (GIVEN if args.model_name_or_path else TINY).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(args):
    output, tiny = Path(args.output_dir), args.model_name_or_path is None
    output.mkdir(parents=True, exist_ok=True)
    args.models, args.rows = [args.model_name_or_path], SUMS if tiny else [{"prompt": prompt} for prompt in PROMPTS]
    if args.prompts:
        lines = Path(args.prompts).read_text().splitlines()
        args.rows = [json.loads(line) if line.startswith("{") else {"prompt": line} for line in lines if line]
    with ProcessPoolExecutor(min(args.processes, args.seeds), multiprocessing.get_context("spawn")) as pool:
        if tiny:
            folders = [str(output / f"tiny{i}") for i in range(min(args.tiny_models, args.seeds))]
            args.models = list(pool.map(tiny_model, folders, range(len(folders)), repeat(args.warm_start_accuracy)))
        results = pool.map(study_seed, repeat(args, args.seeds), range(args.seeds))
        records, vocab_sizes = zip(*tqdm(results, "seeds", args.seeds), strict=True)
    runs = {
        run: {name: np.concatenate([seed[run][name] for seed in records]) for name in records[0][run]}
        for run in records[0]
    }
    if not (runs["masked"][f"D_{args.divergences[0]}"] > args.thresholds[0]).any():
        raise ValueError("No token left the trust region: raise `learning_rate`, or lower the first of `thresholds`.")
    counts, headline = [], (args.divergences[0], args.thresholds[0])
    for breakdown, level, setting, among in breakdowns(runs, args):
        labels = dict(breakdown=breakdown, level=level)
        for truth, (run, change) in TRUTHS.items():
            counted = count(runs[run], vocab_sizes[0], change, among[run], **setting)
            counts.append(counted.assign(**labels, truth=truth))
    model = f"tiny models ({len(args.models)})" if tiny else Path(args.model_name_or_path).name
    counts = pd.concat(counts).assign(model=model)
    counts.to_csv(output / "alignment.csv", index=False)
    summary = summarise(counts)
    for truth, (run, change) in TRUTHS.items():
        for prediction in (name for name, of in PREDICTIONS.items() if change in of):
            by_seed, n = rank_correlation(runs[run], prediction, change, *headline)
            value = interval(by_seed, np.ones(len(by_seed)), by_seed)[:3]
            labels = [*summary.loc[0, ["breakdown", "level"]], truth, "all", prediction, "rank_correlation", n]
            summary.loc[len(summary)] = [*labels, *value, *[np.nan] * 3]
    summary.to_csv(output / "summary.csv", index=False, float_format="%.6f")
    setting = f"{model}, {args.seeds} seeds, {args.divergences[0]} over the top {args.top_k[0]} > {args.thresholds[0]}"
    print(setting)
    report(summary, runs, args)
    draw(summary, setting, output / "alignment.png")


if __name__ == "__main__":
    main(parse_args())
