"""Every metric that stock `GRPOTrainer` logs is logged here too, or is in the list below with its reason."""

from functools import partial

import pytest
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from tests.helpers import tiny
from tests.helpers.trainers import TWO_STEPS, make_trainer, run


# The engine's logprobs against a second scoring of the rollout by the training model, a whole forward pass that PDM
# spares. It measures from the engine's logprobs themselves: `importance_ratio/mean` and `importance_ratio/max` of the
# first optimizer step on a rollout are the same comparison, and `weight_sync/logp_difference_mean` and `_max` are it in
# nats, each time the sync is checked.
SECOND_SCORING = {f"sampling/sampling_logp_difference/{of}" for of in ("mean", "max")} | {
    f"sampling/importance_sampling_ratio/{of}" for of in ("min", "mean", "max")
}


def missing(stock, ours):
    names = [{name for log in logs for name in log} for logs in (stock, ours)]
    assert len(names[0]) > 20
    return names[0] - names[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(beta=0.1),
        dict(loss_type="cispo"),
        dict(loss_type="sapo"),
        dict(importance_sampling_level="sequence"),
        dict(delta=2.0),
        dict(top_entropy_quantile=0.5),
        dict(off_policy_mask_threshold=0.5),
        dict(num_iterations=2, mask_truncated_completions=True),
        dict(scale_rewards="batch", log_completions=True, num_completions_to_print=0),
        dict(eval_strategy="steps", eval_steps=2, eval_dataset=tiny.prompts(2), per_device_eval_batch_size=2),
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_no_metric_of_stock_is_missing(tmp_path, options):
    options = TWO_STEPS | dict(max_steps=2) | options
    stock = run(make_trainer(tmp_path / "stock", GRPOTrainer, **options))
    assert missing(stock, run(make_trainer(tmp_path / "ours", **options))) == set()


@pytest.mark.vllm
@pytest.mark.slow
def test_no_metric_of_stock_is_missing_with_vllm(tmp_path, monkeypatch):
    """Stock cannot load weights into an engine on a CPU, so its engine keeps the checkpoint's, which are the first ones."""
    options = TWO_STEPS | dict(use_vllm=True, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=64, max_steps=2)
    monkeypatch.setattr(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True))
    trainer = make_trainer(tmp_path / "ours", **options)
    ours = run(trainer)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: trainer.vllm_generation.llm)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: None)
    for corrected, expected in [(True, SECOND_SCORING), (False, set())]:
        options["vllm_importance_sampling_correction"] = corrected
        assert missing(run(make_trainer(tmp_path / "stock", GRPOTrainer, **options)), ours) == expected
