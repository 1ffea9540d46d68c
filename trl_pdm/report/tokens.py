"""The completions that a run recorded, as texts to show: each token, its state and its figures."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from .curves import UNITS
from .records import record_files
from .runs import ReportError, Run


MAX_STEPS_LISTED = 12
TOKEN_STATES = {
    "inside": "inside the trust region",
    "outside": "outside, and the update does not lead further out: kept",
    "masked": "outside, and the update leads further out: held back",
    "untrained": "not trained on",
}
WITHOUT_DIRECTION = {"outside": "outside, with nothing to learn from: kept", "masked": "outside: held back"}
DIRECTIONS = {
    "predictive": "The predicted change tells where an update leads.",
    "ratio": "The ratio tells where an update leads.",
    "none": "What is outside is held back, wherever its update leads.",
}
LABELS = {"outside": "outside, kept", "untrained": "not trained on"}
VISIBLE = {code: chr(0x2400 + code) for code in range(32)} | {10: "\u21b5\n", 127: "\u2421"}


@dataclass
class Token:
    """A token of a recorded completion."""

    state: str  # one of TOKEN_STATES
    text: str  # with signs for the control characters
    end: str  # the newline after it, if any: within the token, it would colour the start of the next line
    facts: list[str]

    @property
    def label(self) -> str:
        return LABELS.get(self.state, self.state)


@dataclass
class Completion:
    """A recorded completion, with its prompt."""

    facts: list[str]
    prompt: str
    tokens: list[Token]


@dataclass
class Recorded:
    """The recorded completions of one step."""

    about: str  # the step, and how the mask decided
    states: dict[str, str]  # what each state of a token means
    completions: list[Completion]


def read_completions(run: Run, step: int | None) -> Recorded | None:
    """
    Read the completions recorded at `step`, by default at the last recorded one. Returns `None` where there are none.

    Raises:
        ReportError: A `step` was asked for at which nothing was recorded.
    """
    files = record_files(run.path)
    if step is not None and step not in files:
        there = f"There are those of {_listed(files)}." if files else "Train with `log_token_assessments`."
        raise ReportError(f"{run.path} has no token records of step {step}. {there}")
    if not files:
        return None
    step = max(files) if step is None else step
    table = pd.read_parquet(files[step])
    settings = table.attrs
    about = f"Step {step}, of {_listed(files)}."
    if settings.get("proximity") == "divergence":
        high = settings["divergence_threshold_high"]
        about += f" {UNITS[settings['divergence']]}: outside above {settings['divergence_threshold']:g}"
        about += "." if high is None else f", with a positive advantage above {high:g}."
    if settings.get("direction") in DIRECTIONS:
        about += f" {DIRECTIONS[settings['direction']]}"
    meanings = TOKEN_STATES | (WITHOUT_DIRECTION if settings.get("direction") == "none" else {})
    states = {name: of for name, of in meanings.items() if name != "untrained" or not table["trained_on"].all()}
    return Recorded(about, states, [_completion(tokens) for _, tokens in table.groupby("completion")])


def _completion(table: pd.DataFrame) -> Completion:
    rows = list(table.itertuples())
    tokens = [_token(row) for row in rows]
    states = [token.state for token in tokens]
    facts = [f"{len(rows)} tokens, {states.count('outside')} outside and kept, {states.count('masked')} masked"]
    advantages = table.loc[table["trained_on"], "advantage"]
    if len(advantages):
        low, high = advantages.min(), advantages.max()
        facts.insert(0, f"advantage {low:+.3g}" + (f" to {high:+.3g}" if high > low else ""))
    if "reward" in table and math.isfinite(rows[0].reward):
        facts.insert(0, f"reward {rows[0].reward:.3g}")
    return Completion(facts, _visible(rows[0].prompt or ""), tokens)


def _token(row) -> Token:
    state = "masked" if not row.keep else "outside" if row.outside else "inside"
    state = state if row.trained_on else "untrained"
    facts = [f"token {row.position}"]
    if state != "untrained" and math.isfinite(row.behavior_logprob):
        move = row.advantage * row.predicted_change
        ratio = math.exp(min(row.policy_logprob - row.behavior_logprob, 700))
        facts += [
            f"divergence {row.divergence:.3g}",
            f"predicted change {row.predicted_change:+.2g}",
            f"update leads {'outwards' if move > 0 else 'inwards' if move < 0 else 'nowhere'}",
            f"ratio {ratio:.3g}",
            f"probability {math.exp(row.behavior_logprob):.3g} when sampled, {math.exp(row.policy_logprob):.3g} now",
        ]
    elif state != "untrained":
        facts.append("sampled without a logprob")
    if state != "untrained":
        facts.append(f"advantage {row.advantage:+.3g}")
    text = _visible(row.text) or "\u25af"
    end = "\n" if text.endswith("\n") else ""
    return Token(state, text.removesuffix(end), end, facts)


def _visible(text: str) -> str:
    return text.translate(VISIBLE)


def _listed(files: Iterable[int]) -> str:
    steps = list(files)
    if len(steps) > MAX_STEPS_LISTED:
        return f"{len(steps)} recorded steps from {steps[0]} to {steps[-1]}"
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))
