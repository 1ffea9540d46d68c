"""Runs to report on: a trained one's settings and references, and logs that are written by hand."""

import json

import numpy as np
import pandas as pd
import torch

from tests.helpers import tiny
from tests.helpers.references import full_logps
from trl_pdm.report import write_report
from trl_pdm.report.records import FOLDER


SAMPLE, THRESHOLD = 2, 0.1
# Two optimizer steps of two micro-batches a rollout, each rollout twice; logged every other step
SCHEDULE = dict(
    gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, max_steps=8, learning_rate=2e-3,
    lr_scheduler_type="constant", divergence_threshold=THRESHOLD,
)  # fmt: skip


def expected_tokens(model, batch):
    """Every token of a micro-batch's first completions from full logits, by autograd in float64."""
    with torch.no_grad():
        logps = full_logps(model, batch).double()
    tokenizer, rows = tiny.tokenizer(), []
    for b, t in batch["completion_mask"][:SAMPLE].nonzero().tolist():
        head = batch["behavior_topk_ids"][b, t]
        mu = batch["behavior_topk_logps"][b, t][head >= 0].double().exp()
        head = head[head >= 0].long()
        z = logps[b, t].clone().requires_grad_()
        pi = z.softmax(-1)
        p, q = (torch.cat([part, 1 - part.sum()[None]]) for part in (mu, pi[head]))
        divergence = (p * (p / q).log()).sum()
        (gradient,) = torch.autograd.grad(divergence, z)
        sampled, advantage = batch["completion_ids"][b, t], batch["advantages"][b].item()
        change = (gradient[sampled] - (pi.detach() * gradient).sum()).item()
        outside = divergence.item() > THRESHOLD
        completion = batch["completion_ids"][b][batch["completion_mask"][b].bool()]
        rows.append(
            {
                "completion": b,
                "position": t,
                "token_id": sampled.item(),
                "trained_on": True,
                "advantage": advantage,
                "behavior_logprob": mu[0].log().item(),
                "policy_logprob": pi[sampled].log().item(),
                "divergence": divergence.item(),
                "predicted_change": change,
                "outside": outside,
                "keep": not (outside and advantage * change > 0),
                "text": tokenizer.convert_ids_to_tokens(sampled.item()),
                "prompt": tokenizer.decode(batch["prompt_ids"][b][batch["prompt_mask"][b].bool()]) if t == 0 else None,
                "reward": tiny.count_ones([tokenizer.decode(completion, skip_special_tokens=True)])[0],
            }
        )
    return pd.DataFrame(rows)


def write_log(folder, log_history):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"seed": 0, "log_history": log_history}))
    return folder


def write_page(folder, **kwargs):
    """The page of a folder that has records, with the log of one step."""
    return write_report(write_log(folder, [{"step": 3, "reward": 1.0}]), **kwargs).read_text()


WORDS = [
    "The",
    " answer",
    " is",
    " four",
    "ty",
    "-two",
    ",",
    " so",
    " we",
    " add",
    " it",
    ".",
    "\n",
    " 17",
    " +",
    " 25",
]


def synthetic_run(folder, steps=1000, completions=16, length=200, recorded=None, seed=0):
    """A run that never was: plausible logs of `steps` steps, and records of completions at the last `recorded` ones."""
    rng = np.random.default_rng(seed)
    progress, noise = np.linspace(0, 1, steps), rng.normal(size=(8, steps))
    mean = 0.002 + 0.05 * progress**2 * np.exp(0.2 * noise[0])
    outside = np.clip(0.01 + 0.7 * progress**2 + 0.01 * noise[1], 0, 1)
    columns = {
        "step": np.arange(1, steps + 1),
        "reward": 0.2 + 0.6 * progress + 0.05 * noise[2],
        "entropy": 0.9 - 0.6 * progress + 0.03 * noise[3],
        "trust_region/divergence_mean": mean,
        "trust_region/divergence_max": mean * 40,
        "trust_region/outside": outside,
        "trust_region/outside_half": np.minimum(1, outside * 1.6),
        "trust_region/outside_double": outside / 2,
        "trust_region/masked": outside * 0.6,
        "trust_region/masked_positive": outside * 0.2,
        "trust_region/masked_negative": outside * 0.4,
        "trust_region/direction_disagreement": 0.2 + 0.02 * noise[4],
        "trust_region/entropy_drift": -0.002 + 0.001 * noise[5],
        "trust_region/entropy_drift_unmasked": -0.004 + 0.001 * noise[5],
        "trust_region/topk_mass_behavior": np.full(steps, 0.97),
        "importance_ratio/mean": 1 + 0.01 * noise[6],
        "importance_ratio/max": 1.5 + progress + 0.1 * np.abs(noise[7]),
        "importance_ratio/truncated": np.zeros(steps),
        "weight_sync/logp_difference_mean": 0.004 * np.exp(0.1 * noise[0]),
        "weight_sync/logp_difference_max": 0.1 * np.exp(0.1 * noise[1]),
        "weight_sync/seconds": 0.8 + 0.05 * noise[2],
        "step_time": 4 + 0.2 * noise[3],
    }
    folder.mkdir(parents=True)
    history = pd.DataFrame(columns).to_dict("records")
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (folder / FOLDER).mkdir()
    n = completions * length
    for step in range(steps - (steps if recorded is None else recorded) + 1, steps + 1):
        divergence = rng.lognormal(np.log(mean[step - 1]), 1.5, n)
        change, advantage = rng.normal(size=n), np.repeat(rng.normal(size=completions), length)
        outer = divergence > THRESHOLD
        table = pd.DataFrame(
            {
                "step": step,
                "completion": np.repeat(np.arange(completions), length),
                "position": np.tile(np.arange(length), completions),
                "token_id": 0,
                "trained_on": True,
                "advantage": advantage,
                "behavior_logprob": -rng.exponential(0.5, n),
                "policy_logprob": -rng.exponential(0.5, n),
                "divergence": divergence,
                "predicted_change": change,
                "outside": outer,
                "keep": ~(outer & (advantage * change > 0)),
                "text": rng.choice(WORDS, n),
                "prompt": None,
                "reward": 1.0,
            }
        )
        table.loc[table["position"] == 0, "prompt"] = "What is 17 + 25? Think first, then answer."
        table.attrs = dict(
            divergence="kl", divergence_threshold=THRESHOLD, divergence_threshold_high=None, proximity="divergence",
            direction="predictive",
        )  # fmt: skip
        table.to_parquet(folder / FOLDER / f"step_{step:06d}.parquet", index=False)
    return folder
