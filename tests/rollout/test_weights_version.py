"""The engine samples from the weights that the trainer holds, whatever moved them since the last sync.

Expected are the logprobs of full logits, of the weights at the very moment of sampling.
"""

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.helpers import tiny
from tests.helpers.references import reference_logps, reference_model, unpadded


pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ENGINE_NOISE = 0.02  # mean, in nats: a bf16 engine against a float32 trainer
ONE_ROLLOUT = dict(max_steps=2, steps_per_generation=2, gradient_accumulation_steps=1, learning_rate=1e-2)


def watch(trainer):
    """`(mode, step, mean difference in nats)` of every rollout of `trainer`."""
    seen, generate = [], trainer._generate_and_score_completions

    def watched(inputs):
        batch, model = generate(inputs), reference_model(trainer)
        errors = []
        for prompt_ids, completion_ids, _, logps in unpadded(batch):
            full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)
            errors += (logps[:, 0] - full.gather(1, torch.tensor(completion_ids)[:, None])[:, 0]).abs().tolist()
        seen.append((trainer._mode, trainer.state.global_step, np.mean(errors)))
        return batch

    trainer._generate_and_score_completions = watched
    return seen


def assert_fresh(seen, expected):
    assert [(mode, step) for mode, step, _ in seen] == expected
    assert all(gap < ENGINE_NOISE for _, _, gap in seen), seen


@torch.no_grad()
def move(model):
    """By the `.data` of the weights, as averaging callbacks do: no counter of autograd sees it."""
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.data.copy_(param + param.std() * 0.5 * torch.randn_like(param))
    return before


def test_a_second_training_starts_from_the_weights_of_the_first(on_engine):
    trainer = on_engine(**ONE_ROLLOUT)
    seen = watch(trainer)
    trainer.train()
    trainer.train()
    assert_fresh(seen, [("train", 0)] * 2)


def test_weights_loaded_by_hand_reach_the_engine(on_engine):
    trainer = on_engine(**ONE_ROLLOUT)
    seen = watch(trainer)
    trainer.train()
    trainer.model.load_state_dict(tiny.model(trainer.model.config.vocab_size, seed=11).state_dict())
    trainer.train()
    trainer.model.load_state_dict(tiny.model(trainer.model.config.vocab_size, seed=12).state_dict())
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    move(trainer.model)
    trainer.predict(trainer.train_dataset.select(range(2)))
    assert_fresh(seen, [("train", 0), ("train", 0), ("eval", 2), ("eval", 2)])


class InterruptOnce(TrainerCallback):
    done = False

    def on_step_end(self, args, state, control, **kwargs):
        if not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_an_interrupted_rollout_is_not_trained_on_later(on_engine):
    trainer = on_engine(**ONE_ROLLOUT, callbacks=[InterruptOnce()])
    seen, trained, loss = watch(trainer), [], trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *args, **kwargs: (
        trained.append((len(seen), trainer._step)) or loss(model, inputs, *args, **kwargs)
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert_fresh(seen, [("train", 0), ("train", 0)])
    assert trained == [(1, 0), (2, 0), (2, 1)], "each training's own rollout, from its first micro-batch on"


def test_the_best_model_is_the_one_that_is_evaluated(on_engine, tmp_path):
    calls = []

    def worse_each_time(completions, **kwargs):
        calls.append(1)
        return [reward - 100 * len(calls) for reward in tiny.count_ones(completions)]

    trainer = on_engine(
        **ONE_ROLLOUT | dict(max_steps=4),
        reward_funcs=worse_each_time,
        eval_dataset=tiny.prompts(2),
        per_device_eval_batch_size=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )
    seen = watch(trainer)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    trainer.evaluate()
    assert_fresh(seen, [("train", 0), ("eval", 2), ("train", 2), ("eval", 4), ("eval", 4)])


class Averaged(TrainerCallback):
    """Puts other weights in for an evaluation, and takes them out after it."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            self.own = move(model)

    def on_evaluate(self, args, state, control, model, **kwargs):
        for name, param in model.named_parameters():
            param.data.copy_(self.own.get(name, param))
        self.own = {}


def test_weights_that_are_there_for_an_evaluation_alone(on_engine):
    evaluation = dict(eval_dataset=tiny.prompts(2), per_device_eval_batch_size=6, eval_strategy="steps", eval_steps=2)
    trainer = on_engine(**ONE_ROLLOUT | dict(max_steps=4), **evaluation, callbacks=[Averaged()])
    seen = watch(trainer)
    trainer.train()
    assert_fresh(seen, [("train", 0), ("eval", 2), ("train", 2), ("eval", 4)])
