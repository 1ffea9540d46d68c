"""What a run did, in plain sentences that are computed from what it logged."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

from .runs import Run


# Beyond these values a sentence says what to look at. docs/metrics-and-troubleshooting.md has the same ones.
MUCH_MASKED = 1 / 3
MUCH_OUTSIDE_AT_FIRST = 0.03
SYNC_GAP_OF_PRECISION = 0.05  # a bfloat16 engine beside a float32 trainer has 0.02 to 0.03
LITTLE_MASS = 0.8
LITTLE_DISAGREEMENT = 0.01
LITTLE_PUSH = 0.1  # of the entropy's drift
MUCH_TRUNCATED = 0.001
LEAVES_THE_ROLLOUT = (
    "The policy has left its rollout behind: lower `learning_rate` or `steps_per_generation`. "
    "A larger `divergence_threshold` only hides it."
)


@dataclass
class Sentence:
    """A sentence about what a run did. With `notice`, it is about something to look at."""

    text: str
    notice: bool = False


def told(run: Run) -> list[Sentence]:
    """Sentences on what the run did, in the order in which a reader would ask."""
    return [
        sentence
        for part in (_end, _reward, _outside, _masked, _direction, _entropy, _rollout)
        for sentence in part(run)
    ]


def _ends(values: list[float]) -> tuple[list[float], list[float]]:
    """The first and the last tenth of `values`."""
    size = max(1, len(values) // 10)
    return values[:size], values[-size:]


def _change(values: list[float]) -> str:
    """Whether the values rose, fell or stayed: the means of the first and last tenth, to two standard errors."""
    first, last = _ends(values)
    noise = 2 * math.sqrt(sum(stdev(part) ** 2 / len(part) for part in (first, last))) if len(first) > 1 else 0.0
    difference = fmean(last) - fmean(first)
    return "stayed" if abs(difference) <= noise else "rose" if difference > 0 else "fell"


def _moved(what: str, values: list[float], unit: str = "") -> str:
    first, last = (f"{fmean(part):.3g}{unit}" for part in _ends(values))
    change = _change(values)
    if change == "stayed":
        return f"{what} stayed about where it was: {first} over the first tenth of the run, {last} over the last."
    return f"{what} {change} from {first} over the first tenth of the run to {last} over the last."


def _end(run: Run) -> Iterator[Sentence]:
    planned = run.settings.get("max_steps", -1)  # -1 where epochs decide
    if 0 < run.last_step < planned:
        yield Sentence(
            f"What is here ends at step {run.last_step} of {planned}: the run goes on, or was stopped. "
            "`--resume_from_checkpoint true` starts again from its last complete checkpoint."
        )


def _reward(run: Run) -> Iterator[Sentence]:
    _, values = run.series("reward")
    if len(values) > 1:
        yield Sentence(_moved("The reward", values), notice=_change(values) == "fell")


def _outside(run: Run) -> Iterator[Sentence]:
    steps, values = run.series("trust_region/outside")
    if not values:
        yield Sentence(
            "Nothing was logged about the trust region. Without vLLM and with one optimizer step per rollout, the policy "
            "that is trained is the one that sampled, so no token can be masked."
        )
    elif values[0] > MUCH_OUTSIDE_AT_FIRST:
        came_back = False
        _, gaps = run.series("weight_sync/logp_difference_mean")
        if steps[0] > 1 and gaps and gaps[0] <= SYNC_GAP_OF_PRECISION:
            # The mean of several updates, and what they started from was right
            why = "vLLM and the trainer agreed right after the sync, so the updates led there. "
            later = fmean(values[len(values) // 2 :])
            came_back = later <= MUCH_OUTSIDE_AT_FIRST
            why += f"Later it was {later:.1%}." if came_back else LEAVES_THE_ROLLOUT
        else:
            why = (
                "If this was the first step after a rollout, engine and trainer disagree: look at the logprob difference "
                "right after a sync."
            )
        yield Sentence(
            f"Already at step {steps[0]}, {values[0]:.1%} of the tokens were outside the trust region. {why}",
            notice=not came_back,
        )


def _masked(run: Run) -> Iterator[Sentence]:
    steps, values = run.series("trust_region/masked")
    if not values:
        return
    if not any(values):
        yield Sentence(
            "No token was masked: the run was nearly on-policy, or the threshold is wide. Lower `divergence_threshold` "
            "if rewards are unstable."
        )
        return
    yield Sentence(f"{fmean(values):.2%} of the tokens were masked, on average over the steps.")
    above = [step for step, value in zip(steps, values, strict=True) if value > MUCH_MASKED]
    if above:
        lasting = len(above) == sum(step >= above[0] for step in steps)
        when = (
            f"From step {above[0]} on" if lasting else f"At {len(above)} of {len(steps)} steps, first at {above[0]},"
        )
        yield Sentence(f"{when} more than a third of the tokens was masked. {LEAVES_THE_ROLLOUT}", notice=True)


def _direction(run: Run) -> Iterator[Sentence]:
    _, values = run.series("trust_region/direction_disagreement")
    if values and fmean(values) < LITTLE_DISAGREEMENT:
        yield Sentence(
            f"Prediction and ratio pointed opposite ways at {fmean(values):.2%} of the tokens outside: "
            '`direction="ratio"` would have trained nearly the same.'
        )
    _, values = run.series("trust_region/topk_mass_behavior")
    if values and fmean(values) < LITTLE_MASS:
        yield Sentence(
            f"The top K held only {fmean(values):.0%} of the behaviour policy's probability: raise `divergence_top_k`, "
            'and keep `tail_estimator="exact"`.',
            notice=True,
        )


def _entropy(run: Run) -> Iterator[Sentence]:
    _, values = run.series("entropy")
    if len(values) > 1:
        yield Sentence(_moved("The policy's entropy", values, " nats"))
    drifts = [run.series(f"trust_region/{name}")[1] for name in ("entropy_drift", "entropy_drift_unmasked")]
    if all(drifts):
        masked, unmasked = map(fmean, drifts)
        if abs(masked - unmasked) <= LITTLE_PUSH * max(abs(masked), abs(unmasked)):
            push = "hardly moved the entropy"
        else:
            push = f"pushed the entropy {'upwards' if masked > unmasked else 'downwards'}"
        yield Sentence(
            f"The mask {push}: to first order a token's update moved it by {masked:+.2g} per unit of step, and by "
            f"{unmasked:+.2g} if nothing had been masked."
        )


def _rollout(run: Run) -> Iterator[Sentence]:
    _, values = run.series("weight_sync/logp_difference_mean")
    if values:
        gap = fmean(values)
        says = f"Right after a sync vLLM's logprobs differed from the trainer's by {gap:.2g} nats on average"
        if gap <= SYNC_GAP_OF_PRECISION:
            yield Sentence(f"{says}, which is precision.")
        else:
            yield Sentence(
                f"{says}: more than precision, unless the base is quantized. Look for a wrong temperature, template "
                "or weight, or dropout.",
                notice=True,
            )
    _, values = run.series("trust_region/unscored")
    if any(values):
        yield Sentence(
            f"vLLM gave no logprob for {fmean(values):.2g} of the tokens. If these are many, its weights overflow: use "
            "bfloat16 or float32.",
            notice=True,
        )
    steps, values = run.series("importance_ratio/truncated")
    above = [step for step, value in zip(steps, values, strict=True) if value > MUCH_TRUNCATED]
    if above:
        yield Sentence(
            f"The importance ratio was truncated at more than one token in a thousand, at {len(above)} of {len(steps)} "
            f"steps, first at {above[0]}. {LEAVES_THE_ROLLOUT}",
            notice=True,
        )
