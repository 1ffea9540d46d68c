"""Whole training runs without vLLM: what GRPOTrainer does around the loss still happens, and resuming loses nothing."""

import copy

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.references import sampled_logps
from tests.helpers.trainers import TWO_STEPS, make_trainer, run, weights
from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


def test_three_steps_under_a_huge_threshold_are_plain_importance_weighting(tmp_path):
    trainer = make_trainer(
        tmp_path,
        divergence_threshold=1e9,
        importance_ratio_max=None,
        loss_type="bnpo",
        gradient_accumulation_steps=1,
        steps_per_generation=3,
        max_steps=3,
        optim="sgd",
        learning_rate=0.05,  # with larger steps the weights are so far off that rounding shows
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    model = copy.deepcopy(trainer.model)
    del model.forward  # TRL patches the instance; the reference is to use the architecture's own forward
    behavior = copy.deepcopy(model)
    logs = run(trainer)
    assert max(log.get("importance_ratio/max", 0) for log in logs) > 1.05, "the policy must move between the steps"

    assert len(trainer._buffered_inputs) == 3
    for batch in trainer._buffered_inputs:
        logps, mask = sampled_logps(model, batch), batch["completion_mask"]
        with torch.no_grad():
            old = sampled_logps(behavior, batch)
        surrogate = (logps - old).exp() * batch["advantages"][:, None]
        model.zero_grad()
        (-(surrogate * mask).sum() / mask.sum()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= trainer.args.learning_rate * parameter.grad
    moved = 0
    for (name, actual), expected, start in zip(
        trainer.model.named_parameters(), model.parameters(), behavior.parameters(), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=name)
        moved += (expected - start).norm().item()
    assert moved > 0.1


@pytest.mark.parametrize(
    "schedule, several",
    [
        (dict(gradient_accumulation_steps=2, steps_per_generation=2), False),
        (dict(gradient_accumulation_steps=4, steps_per_generation=2), False),
        (dict(gradient_accumulation_steps=1, steps_per_generation=2), True),
        (dict(gradient_accumulation_steps=2, steps_per_generation=2, num_iterations=2), True),
        (dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2), True),
    ],
)
def test_the_behaviour_policy_is_scored_only_when_it_can_differ(tmp_path, schedule, several):
    trainer = make_trainer(tmp_path, max_steps=4, learning_rate=1e-2, lr_scheduler_type="constant", **schedule)
    forwards = []
    score = GRPOTrainer._get_per_token_logps_and_entropies

    def count(self, *args, **kwargs):
        forwards.append(torch.is_grad_enabled())
        return score(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", count)
        logs = run(trainer)
    micro_steps = 4 * schedule["gradient_accumulation_steps"]
    rollouts = -(-micro_steps // (schedule["steps_per_generation"] * schedule.get("num_iterations", 1)))
    assert forwards.count(True) == micro_steps  # TRL's own forwards, not one more
    assert forwards.count(False) == (rollouts if several else 0)
    seen = [log for log in logs if "trust_region/divergence_max" in log]
    assert bool(seen) == several
    if several:
        assert max(log["trust_region/divergence_max"] for log in seen) > 1e-4
        assert min(log["trust_region/divergence_max"] for log in seen) < 1e-5  # on policy, ours is exact
        assert {log["trust_region/unscored"] for log in seen} == {0.0}


def test_reference_model_is_scored_as_in_stock(tmp_path):
    """With a reference and several steps, TRL scores policy and reference: skipping the first must not hit the second."""
    trainer = make_trainer(tmp_path, beta=0.1, max_steps=2, **TWO_STEPS)
    reference = copy.deepcopy(trainer.ref_model)
    run(trainer)
    batch = trainer._buffered_inputs[0]
    with torch.no_grad():
        expected = sampled_logps(reference, batch)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["ref_per_token_logps"][kept], expected[kept], rtol=1e-4, atol=1e-5)


def test_peft_reference_and_training(tmp_path):
    from peft import LoraConfig

    trainer = make_trainer(
        tmp_path,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        beta=0.1,
        max_steps=4,
        learning_rate=5e-2,
        gradient_checkpointing=True,
        **TWO_STEPS,
    )
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    logs = run(trainer)
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in name for name in changed)
    assert max(log.get("kl", 0) for log in logs) > 0
    assert max(log.get("trust_region/divergence_max", 0) for log in logs) > 0


def test_evaluation_logs_the_trust_region(tmp_path):
    trainer = make_trainer(
        tmp_path,
        max_steps=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=tiny.prompts(8),
        **TWO_STEPS,
    )
    logs = run(trainer)
    evaluations = [log for log in logs if "eval_reward" in log]
    assert len(evaluations) == 2
    for log in evaluations:
        assert log["eval_trust_region/outside"] == 0  # evaluated on what the current policy sampled
        assert log["eval_importance_ratio/mean"] == pytest.approx(1, abs=1e-5)


def test_masking_changes_training(tmp_path):
    schedule = dict(gradient_accumulation_steps=1, steps_per_generation=4, max_steps=4, learning_rate=3e-2)
    trained, masked = [], []
    for threshold in (1e-4, 1e9):
        trainer = make_trainer(tmp_path / str(threshold), divergence_threshold=threshold, **schedule)
        logs = run(trainer)
        masked.append(max(log.get("trust_region/masked", 0) for log in logs))
        trained.append(weights(trainer))
    assert masked[0] > 0 and masked[1] == 0
    assert not torch.equal(*trained)


@pytest.mark.parametrize("cls", [PDMGRPOTrainer, GRPOTrainer])
def test_resuming_equals_never_having_stopped(tmp_path, cls):
    """At the end of a rollout's steps; stock is run along to show that it is TRL's own behaviour that is kept."""
    schedule = dict(
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        **TWO_STEPS,
    )
    whole = make_trainer(tmp_path / "whole", cls, max_steps=4, **schedule)
    whole_logs = run(whole)
    again = make_trainer(tmp_path / "again", cls, max_steps=4, **schedule)
    logs = run(again, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for expected, actual in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert logs[0]["reward"] == whole_logs[2]["reward"] and again.state.global_step == 4


def test_plain_grpo_config_and_no_config(tmp_path):
    path = tiny.save(tmp_path / "model")
    common = dict(reward_funcs=tiny.count_ones, train_dataset=tiny.prompts(), processing_class=tiny.tokenizer())
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        epsilon=0.3,
        learning_rate=3e-5,
        steps_per_generation=3,
        per_device_train_batch_size=8,
    )
    trainer = PDMGRPOTrainer(path, args=args, **common)
    assert trainer.args.divergence == "kl" and trainer.args.divergence_threshold is None
    assert (trainer.args.epsilon, trainer.args.learning_rate, trainer.args.steps_per_generation) == (0.3, 3e-5, 3)
    assert args.vllm_importance_sampling_correction, "the user's own config is left as it is"


def test_a_config_is_checked_again_when_it_is_used(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.args.vllm_importance_sampling_correction, trainer.args.divergence_threshold = True, 0.2
    args = PDMGRPOConfig.from_grpo(trainer.args)
    assert args is trainer.args and not args.vllm_importance_sampling_correction and args.divergence_threshold == 0.2
    args.divergence_threshold = -1.0
    with pytest.raises(ValueError, match="`divergence_threshold` must be a positive"):
        PDMGRPOConfig.from_grpo(args)


def test_top_k_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`divergence_top_k` must be at most .* 41 tokens, got 42"):
        make_trainer(tmp_path, divergence_top_k=42)
    make_trainer(tmp_path, divergence_top_k=41)


@pytest.mark.parametrize("trusted", [False, True])
def test_remote_code_is_run_only_if_asked_for(tmp_path, monkeypatch, trusted):
    """In the trainer as in the engine. The engine is a stand-in that only tells what it was asked for."""
    from transformers import AutoConfig
    from trl.generation import vllm_generation

    class Asked(Exception):
        pass

    def llm(**kwargs):
        raise Asked(kwargs["trust_remote_code"])

    loaded, from_pretrained = [], AutoConfig.from_pretrained
    monkeypatch.setattr(
        AutoConfig,
        "from_pretrained",
        lambda *args, **kwargs: loaded.append(kwargs.get("trust_remote_code")) or from_pretrained(*args, **kwargs),
    )
    monkeypatch.setattr(vllm_generation, "LLM", llm, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *args, **kwargs: True)
    asked = {"trust_remote_code": True} if trusted else {}
    with pytest.raises(Asked) as engine:
        make_trainer(tmp_path, use_vllm=True, vllm_mode="colocate", **asked)
    assert engine.value.args == (trusted,) and trusted in loaded and (not trusted) not in loaded
