"""What the mask adds to a batch in memory: `docs/gpu.md` gives the figure."""

import pytest
import torch
from trl import GRPOTrainer

from tests.gpu import trainings
from tests.helpers.trainers import make_trainer


@pytest.mark.parametrize("top_k", [5, 20])
def test_eight_bytes_a_candidate_and_token(tmp_path, top_k):
    """Beside stock's batch of the same rollout: an id and a log-probability for each candidate and the sampled token."""

    def batch_of(cls, **options):
        rollout = trainings.Rollout("qwen3", trainings.TEMPERATURE, trainings.LENGTHS, False, True, None)
        plain = {"prompt_ids", "completion_ids", "logprobs"}

        def without_candidates(*args):
            return {name: value for name, value in rollout(*args).items() if name in plain}

        trainer = make_trainer(
            tmp_path,
            cls,
            model=trainings.build("qwen3"),
            rollout_func=without_candidates if cls is GRPOTrainer else rollout,
            per_device_train_batch_size=8,
            max_completion_length=trainings.T,
            **options,
        )
        trainer.model.train()
        rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(4)) for _ in range(2)]
        return trainer._generate_and_score_completions(rows)

    def size(batch):
        return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))

    ours, stock = batch_of(trainings.PDMGRPOTrainer, divergence_top_k=top_k), batch_of(GRPOTrainer)
    assert ours["completion_ids"].numel() == stock["completion_ids"].numel() == 8 * trainings.T
    assert size(ours) - size(stock) == 8 * (top_k + 1) * ours["completion_ids"].numel()
