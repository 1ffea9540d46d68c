"""Bad input: a run stops with a sentence that says what is wrong, or trains as an independent reference does.

Where TRL itself handles the input, its own `GRPOTrainer` is the reference. What a rollout function returns is this
package's to check: there the reference is plain Python.
"""

import copy
import math
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer
from trl.generation import vllm_generation

from tests.helpers import tiny
from tests.helpers.references import (
    CLIPPED,
    B,
    assert_same,
    gradients,
    make_batch,
    reference_keep,
    reference_logps,
    reference_loss,
    sampled_logps,
)
from tests.helpers.trainers import TWO_STEPS, make_trainer, trainer_gradients
from tests.rollout.helpers import ENGINE, GIVEN, generate
from tests.rollout.helpers import make_trainer as make_rollout_trainer
from tests.rollout.test_functions import change_output
from trl_pdm import PDMGRPOTrainer
from trl_pdm.rollout import collate, with_candidates


V = len(tiny.tokenizer())


# ---- Against stock: no token is masked and no ratio clipped, so the two must agree to rounding


def build(tmp_path, cls, model=None, **options):
    schedule = dict(
        max_completion_length=5,
        temperature=1.0,
        max_steps=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        loss_type="bnpo",
        **TWO_STEPS,
    )
    kept = dict(divergence_threshold=1e9, importance_ratio_max=None) if cls is PDMGRPOTrainer else dict(epsilon=1e9)
    model = copy.deepcopy(model) if model is not None else tiny.model(V)
    return make_trainer(tmp_path, cls, model=model, **schedule | kept | options)


def flat(model):
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


def outcome(*args, **kwargs):
    """How far the weights moved, or the error."""
    try:
        trainer = build(*args, **kwargs)
        before = flat(trainer.model)
        trainer.train()
    except Exception as error:
        return type(error), str(error)
    if isinstance(trainer, PDMGRPOTrainer):
        assert all("trust_region/outside" in log for log in trainer.state.log_history[:-1]), "PDM's loss, not stock's"
    return flat(trainer.model) - before


def both(tmp_path, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the experimental `rollout_func`
        return outcome(tmp_path, GRPOTrainer, **kwargs), outcome(tmp_path, PDMGRPOTrainer, **kwargs)


def assert_trains_as_stock(tmp_path, moves=True, tolerance=1e-3, **kwargs):
    stock, ours = both(tmp_path, **kwargs)
    assert torch.is_tensor(stock) and torch.is_tensor(ours), (stock, ours)
    assert stock.isfinite().all() and bool(stock.any()) == moves
    assert (ours - stock).norm() <= tolerance * stock.norm()


def assert_fails_as_stock(tmp_path, error, message, **kwargs):
    stock, ours = both(tmp_path, **kwargs)
    assert not torch.is_tensor(stock) and stock == ours
    assert issubclass(ours[0], error) and message in ours[1]


def broken_grader(completions, **kwargs):
    raise RuntimeError("the grader is down")


def first_rewards(*first):
    return lambda completions, **kwargs: [*first, *tiny.count_ones(completions)[len(first) :]]


def same_for_all(reward):
    return lambda completions, **kwargs: [reward] * len(completions)


@pytest.mark.parametrize(
    "reward, error, message",
    [
        (broken_grader, RuntimeError, "the grader is down"),
        (lambda completions, **kwargs: [1.0], ValueError, "returned 1 rewards, but 8 were expected"),
    ],
    ids=["raises", "too-few"],
)
def test_reward_functions_that_fail(tmp_path, reward, error, message):
    assert_fails_as_stock(tmp_path, error, message, reward_funcs=reward)


@pytest.mark.parametrize(
    "reward, moves",
    [
        (first_rewards(math.nan, 1.0, None, 2.0), True),
        (first_rewards(math.inf, 1.0, -math.inf, 2.0), True),
        (same_for_all(None), False),
        (same_for_all(1.0), False),
    ],
    ids=["unknown", "infinite", "all-unknown", "all-equal"],
)
def test_rewards_that_are_no_numbers_or_all_equal(tmp_path, reward, moves):
    """TRL gives such a completion, or its group, an advantage of 0: without any other the weights stay where they are."""
    assert_trains_as_stock(tmp_path, moves, reward_funcs=reward)


class Completions:
    """A rollout function that returns given completions with the training model's own log-probabilities."""

    def __init__(self, *completions):
        self.completions = completions

    def __call__(self, prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completion_ids = [list(self.completions[n % len(self.completions)]) for n in range(len(prompts))]
        model = tiny.model(V)
        model.load_state_dict(trainer.model.state_dict())
        logprobs = [
            reference_logps(model, prompt, completion).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
            for prompt, completion in zip(prompt_ids, completion_ids, strict=True)
        ]
        return dict(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=logprobs)


@pytest.mark.parametrize(
    "completions", [([1],), ([1], [5, 6, 7, 1])], ids=["nothing but the end", "the end beside others"]
)
def test_completions_of_one_end_of_sequence(tmp_path, completions):
    def reward(completion_ids, **kwargs):
        return [float(len(ids) + n % 3) for n, ids in enumerate(completion_ids)]

    assert_trains_as_stock(tmp_path, rollout_func=Completions(*completions), reward_funcs=reward)


def test_a_prompt_beyond_the_models_context_is_extrapolated(tmp_path):
    prompts = Dataset.from_dict({"prompt": ["1+2=" * 70] * 8})  # 280 of 256 positions
    assert_trains_as_stock(tmp_path, train_dataset=prompts)


def resized(size):
    model = tiny.model(V)
    model.resize_token_embeddings(size, mean_resizing=False)
    return model


@pytest.mark.parametrize("model", [tiny.model(64), resized(48)], ids=["padded", "resized"])
def test_a_vocabulary_larger_than_the_tokenizers(tmp_path, model):
    assert_trains_as_stock(tmp_path, model=model)


def test_a_tokenizer_without_a_pad_token(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    assert_trains_as_stock(tmp_path, processing_class=tokenizer)


@pytest.mark.parametrize(
    "dtype, autocast",
    [
        (torch.float32, "bf16"),
        (torch.float32, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float16, None),
    ],
    ids=str,
)
def test_precisions(tmp_path, dtype, autocast):
    options = {} if autocast is None else {autocast: True}
    assert_trains_as_stock(tmp_path, model=tiny.model(V).to(dtype), tolerance=0.05, **options)


def test_nan_in_the_training_policy_ends_with_the_next_rollout(tmp_path):
    model = tiny.model(V)
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    assert_fails_as_stock(tmp_path, RuntimeError, "probability tensor contains either `inf`, `nan`", model=model)


# ---- All tokens outside, all masked


def outward_advantages(trainer, batch, mu):
    """Per token, of the sign that would move the policy further out."""
    ones = {**batch, "advantages": torch.ones(B)}
    return torch.where(reference_keep(trainer.model, ones, mu, threshold=1e-9), -1.0, 1.0)


@pytest.mark.parametrize("loss_type", [*CLIPPED, "sapo", "vespo", "luspo"], ids=str)
def test_a_micro_batch_without_a_kept_token_adds_nothing(tmp_path, loss_type):
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    trainer = make_trainer(tmp_path, loss_type=loss_type, divergence_threshold=1e-9, **level)
    batch, mu = make_batch(trainer.model)
    outward = outward_advantages(trainer, batch, mu)
    loss, gradient = trainer_gradients(trainer, {**batch, "advantages": outward})
    assert loss == 0 and not gradient.any()
    logs = {}
    trainer.log(logs)
    assert logs["trust_region/outside"] == logs["trust_region/masked"] == 1


def test_tokens_that_are_all_outside_and_come_back_are_all_kept(tmp_path):
    trainer = make_trainer(tmp_path, loss_type="grpo", divergence_threshold=1e-9)
    batch, mu = make_batch(trainer.model)
    batch["advantages"] = -outward_advantages(trainer, batch, mu)
    _, actual = trainer_gradients(trainer, batch)
    logps = sampled_logps(trainer.model, batch)
    weight = (logps.detach() - batch["behavior_topk_logps"][..., 0]).exp().clamp(max=20) * batch["advantages"]
    mask = batch["completion_mask"] * batch["tool_mask"]
    expected = (-(weight * logps * mask).sum(1) / mask.sum(1)).mean() / 2
    assert_same(actual, gradients(trainer.model, expected), 1e-5)


@pytest.mark.parametrize("candidates", [0, 1])
def test_fewer_candidates_than_asked_for(tmp_path, candidates):
    """The divergence is over those that are there: with none, over the sampled token and the rest."""
    trainer = make_trainer(tmp_path, loss_type="grpo", divergence_threshold=0.02)
    batch, mu = make_batch(trainer.model)
    complete = reference_keep(trainer.model, batch, mu, threshold=0.02)
    batch["behavior_topk_ids"][:, ::2, 1 + candidates :] = -1
    keep = reference_keep(trainer.model, batch, mu, threshold=0.02)
    assert (keep != complete).any() and not keep.all()
    _, actual = trainer_gradients(trainer, batch)
    assert_same(actual, gradients(trainer.model, reference_loss(trainer.model, batch, keep, "grpo", 20, 2, 2)), 1e-5)


# ---- Rollout functions: garbage stops the run before it is trained on


def first_row(change):
    """Change the candidates of the first token, whose sampled one is not the first listed."""

    def changed(output):
        ids, logps = (output[name][0][0] for name in GIVEN)
        if ids[0] == output["completion_ids"][0][0]:
            ids.reverse(), logps.reverse()
        change(ids, logps)

    return changed


def every_row(change):
    def changed(output):
        for rows in zip(*(output[name] for name in GIVEN), strict=True):
            for ids, logps in zip(*rows, strict=True):
                change(ids, logps)

    return changed


def of_another_model(output):
    """Normalised, and with the sampled tokens among them, but not what these were sampled with."""
    policy = tiny.model(V, seed=8).eval()
    for b, rows in enumerate(output["topk_token_ids"]):
        full = reference_logps(policy, output["prompt_ids"][b], output["completion_ids"][b])
        output["topk_logprobs"][b] = [logp[ids].tolist() for logp, ids in zip(full, rows, strict=True)]


def replace(ids, logps, token=None, logp=None):
    ids[0] = ids[0] if token is None else token
    logps[0] = logps[0] if logp is None else logp


GARBAGE = {
    "probabilities of 5 in all": (
        every_row(lambda ids, logps: logps.__setitem__(slice(None), [math.log(5 / len(ids))] * len(ids))),
        r"two logprobs, .* another policy",
    ),
    "a candidate of probability 2": (first_row(lambda *row: replace(*row, logp=math.log(2))), "more than 1"),
    "an infinite logprob": (
        first_row(lambda *row: replace(*row, logp=math.inf)),
        "completion 0 hold inf, .* more than 1",
    ),
    "positive logprobs": (
        lambda output: output["logprobs"][2].__setitem__(1, 0.7),
        "logprobs of completion 2 hold 0.7, which is a probability of more than 1",
    ),
    "positive logprobs without candidates": (
        lambda output: {k: v for k, v in output.items() if k not in GIVEN} | {"logprobs": negated(output)},
        "logprobs of completion 0 hold .* more than 1",
    ),
    "another model's candidates": (of_another_model, r"differ by \d\.\d+ nats .* another policy or temperature"),
    "a candidate twice": (first_row(lambda ids, _: replace(ids, _, token=other(ids))), "a token twice"),
    "the sampled token twice": (
        lambda output: (
            [output[name][1][2].append(value) for name, value in zip(GIVEN, sampled(output, 1, 2), strict=True)]
            and None
        ),
        r"candidates of completion 1 hold token \d+ twice at position 2",
    ),
    "a negative id": (first_row(lambda *row: replace(*row, token=-7)), "completion 0 .* whole numbers from 0, got -7"),
    "a fraction": (first_row(lambda *row: replace(*row, token=7.5)), "completion 0 .* whole numbers from 0, got 7.5"),
    "an id of 64 bits": (first_row(lambda *row: replace(*row, token=2**40)), "got 1099511627776"),
    "no list at all": (lambda output: output["topk_token_ids"].__setitem__(1, None), "`topk_token_ids` do not fit"),
    "logprobs in lists": (
        lambda output: output | {"logprobs": [[[lp] for lp in row] for row in output["logprobs"]]},
        "logprobs of completion 0 must be numbers, or `None`, in a flat list",
    ),
    "an empty completion": (
        lambda output: [output[name].__setitem__(3, []) for name in ("completion_ids", "logprobs", *GIVEN)] and None,
        "completion 3 is empty",
    ),
}


def negated(output):
    return [[-lp for lp in row] for row in output["logprobs"]]


def other(ids):
    return ids[1]


def sampled(output, b, t):
    return output["completion_ids"][b][t], output["logprobs"][b][t]


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_from_a_rollout_function_stops_the_run(tmp_path, case):
    change, message = GARBAGE[case]
    with pytest.raises(ValueError, match=message):
        change_output(tmp_path, change)()


def test_a_rollout_function_that_returns_nothing(tmp_path):
    trainer = make_rollout_trainer(tmp_path, lambda prompts, trainer: None)
    with pytest.raises(ValueError, match="must return a dictionary, got NoneType"):
        generate(trainer)


# ---- Fuzz


def valid_output(rng):
    """Two or three completions of one to four tokens, each with up to five candidates; logprobs exact in float32."""
    output = {name: [] for name in ("completion_ids", "logprobs", *GIVEN)}
    for _ in range(rng.randrange(2, 4)):
        row = {name: [] for name in output}
        for _ in range(rng.randrange(1, 5)):
            ids = rng.sample(range(V), rng.randrange(1, 6))
            weights = sorted(rng.random() for _ in ids)
            total = sum(weights) + rng.random()
            logps = [np.float32(math.log(weight / total)).item() for weight in weights]
            pick = rng.randrange(len(ids))
            row["completion_ids"].append(ids[pick])
            row["logprobs"].append(logps[pick])
            if rng.random() < 0.3:  # K entries without the sampled token, if it was the least likely of all
                least = logps.index(min(logps))
                row["completion_ids"][-1], row["logprobs"][-1] = ids.pop(least), logps.pop(least)
            row["topk_token_ids"].append(ids)
            row["topk_logprobs"].append(logps)
        for name, values in row.items():
            output[name].append(values)
    return output


NASTY = [
    None,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    3,
    V,
    2**31,
    2**70,
    -(2**70),
    10**400,
    1.5,
    -0.4,
    "x",
    [],
    [1],
    [0.5, 2],
]


def disarrange(rng, output):
    """Empty, reverse or lengthen a token's candidates, a completion, or its tokens alone."""
    b = rng.randrange(len(output["completion_ids"]))
    t = rng.randrange(len(output["completion_ids"][b]))
    candidates = [output[name][b][t] for name in GIVEN]
    completion = [output[name][b] for name in output]
    change = rng.choice([list.clear, list.reverse, lambda row: row.append(row[0])])
    for row in filter(None, rng.choice([candidates, completion, completion[:1]])):
        change(row)


def spoil(rng, output):
    """Replace, drop or repeat something at any depth of one field."""
    holder, key = output, rng.choice(list(output))
    deep = rng.random() < 0.6  # down to a single number
    while isinstance(holder[key], list) and holder[key] and (deep or rng.random() < 0.7):
        holder, key = holder[key], rng.randrange(len(holder[key]))
    action = "replace" if deep or holder is output else rng.choice(["replace", "drop", "repeat"])
    if action == "replace":
        # Without a whole field the output is another one, and no bad one
        holder[key] = copy.deepcopy(rng.choice(NASTY[1:] if holder is output else NASTY))
    elif action == "drop":
        del holder[key]
    else:
        holder.insert(key, copy.deepcopy(holder[key]))


def is_a_list_of(check, values):
    return isinstance(values, list) and all(map(check, values))


def reference_rows(output):
    """The batch in plain Python: per token, the sampled one's `(id, logprob)`, then its candidates'. `None` if unfit.

    A token without candidates has the empty row.
    """

    def is_id(value):
        return isinstance(value, int) and 0 <= value < V

    def is_logp(value):
        return value is None or isinstance(value, (int, float)) and not value > 0.01

    def known(value):
        return value is not None and math.isfinite(value)

    shapes = {"completion_ids": lambda v: isinstance(v, int) and 0 <= v < 2**31, "logprobs": is_logp}
    shapes |= {"topk_token_ids": lambda v: is_a_list_of(is_id, v), "topk_logprobs": lambda v: is_a_list_of(is_logp, v)}
    for name, check in shapes.items():
        if not is_a_list_of(lambda row, check=check: is_a_list_of(check, row), output[name]):
            return None
        if list(map(len, output[name])) != list(map(len, output["completion_ids"])):
            return None
    batch, apart = [], []
    for completion in zip(*output.values(), strict=True):
        if not completion[0]:
            return None
        batch.append([])
        for token, own, ids, logps in zip(*completion, strict=True):
            if ids and token >= V or len(ids) != len(logps) or len(set(ids)) != len(ids):
                return None
            entries = list(zip(ids, [math.nan if logp is None else logp for logp in logps], strict=True))
            entries.sort(key=lambda entry: math.inf if math.isnan(entry[1]) else -entry[1])
            listed = dict(entries).get(token)
            numbers = [logp for _, logp in entries if not math.isnan(logp)]
            if listed is None and entries and known(own) and own > min(numbers, default=math.inf) + 0.1:
                return None  # the sampled token is none of the candidates, but likelier than one
            if listed is None and entries and own == math.inf:
                return None
            if listed is not None and known(listed) and known(own):
                apart.append(abs(own - listed))
            logp = own if known(own) else math.nan if listed is None else listed
            row = [(token, logp), *((i, lp) for i, lp in entries if i != token)] if entries else []
            if sum(math.exp(lp) for _, lp in row if not math.isnan(lp)) > 1.01:
                return None
            batch[-1].append(row)
    if apart and sum(apart) / len(apart) > 0.5:
        return None
    return batch


def laid_out(output):
    """What this package makes of it, in the reference's form."""
    output = with_candidates(lambda prompts, trainer: output)([], None)
    width = max(map(len, output["completion_ids"]))
    completion_ids = torch.tensor([row + [0] * (width - len(row)) for row in output["completion_ids"]])
    ids, logps = collate(output["logprobs"], completion_ids, 6, V)
    return [
        [
            [(i, lp) for i, lp in zip(ids[b, t].tolist(), logps[b, t].tolist(), strict=True) if i >= 0]
            for t in range(len(row))
        ]
        for b, row in enumerate(output["completion_ids"])
    ]


@settings(max_examples=400)
@given(seed=st.integers(0, 10**9), spoilt=st.integers(0, 5))
def test_malformed_rollouts_are_refused_and_all_others_laid_out(seed, spoilt):
    rng = random.Random(seed)
    output = valid_output(rng)
    assert reference_rows(output) is not None
    if spoilt % 2:
        disarrange(rng, output)
    for _ in range(spoilt // 2):
        spoil(rng, output)
    expected = reference_rows(output)
    if expected is None:
        with pytest.raises(ValueError, match=r"completion|candidates"):
            laid_out(output)
        return
    for rows, expected_rows in zip(laid_out(output), expected, strict=True):
        for row, expected_row in zip(rows, expected_rows, strict=True):
            assert [i for i, _ in row] == [i for i, _ in expected_row]
            assert [lp for _, lp in row] == pytest.approx([lp for _, lp in expected_row], rel=1e-6, nan_ok=True)


# ---- The engine


@pytest.mark.vllm
@pytest.mark.slow
def test_a_prompt_beyond_the_engines_context_and_diverged_weights_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True))
    trainer = make_rollout_trainer(tmp_path, **ENGINE)
    trainer.train_dataset = Dataset.from_dict({"prompt": ["1+2=" * 20] * 8})  # 80 tokens of 64
    with pytest.raises(Exception, match="maximum context length is 64 tokens.* contains 80 input tokens"):
        generate(trainer, 6)

    trainer.train_dataset = tiny.prompts()
    generate(trainer, 6)
    with torch.no_grad():
        trainer.model.lm_head.weight[3] = math.nan
    trainer.state.global_step += 1  # the next rollout syncs
    with pytest.raises(ValueError, match="Every logprob that vLLM returned is NaN.*Resume from a checkpoint"):
        generate(trainer, 6)

    # The trainer's weights are whole again, but one of the engine's layers is what the memory held before
    with torch.no_grad():
        trainer.model.lm_head.weight[3] = 0
    push = trainer.vllm_generation._sync.push

    def undefined(model):
        dict(model.named_parameters())["model.layers.1.post_attention_layernorm.weight"].data.fill_(math.nan)

    monkeypatch.setattr(trainer.vllm_generation._sync, "push", lambda llm: (push(llm), llm.apply_model(undefined))[0])
    trainer.state.global_step += 1
    with pytest.raises(ValueError, match="The trainer's own are finite.*: model.layers.1.post_attention_layernorm\\."):
        generate(trainer, 6)
