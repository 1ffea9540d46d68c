"""Trainers and rollout functions that the tests of rollouts share."""

import random

from tests.helpers import tiny, trainers
from tests.helpers.references import reference_logps
from trl_pdm import PDMGRPOTrainer


def make_trainer(folder, rollout_func=None, **options) -> PDMGRPOTrainer:
    defaults = trainers.TWO_STEPS | dict(max_completion_length=8, temperature=1.0)
    return trainers.make_trainer(folder, rollout_func=rollout_func, **defaults | options)


class Rollout:
    """A rollout function that knows another policy's probabilities, and hands out what it is asked to.

    Args:
        give: fields to return besides the required ones.
        env_mask: whether the second token of each completion is the environment's.
        drop_sampled: whether the candidates are K tokens without the sampled one.
        plain_on_rank: a process that returns the required fields only.
    """

    def __init__(self, give=(), env_mask=False, drop_sampled=False, plain_on_rank=None, top_k=6):
        self.policy = tiny.model(len(tiny.tokenizer()), seed=7).eval()
        self.give, self.env_mask, self.drop_sampled = give, env_mask, drop_sampled
        self.plain_on_rank, self.top_k = plain_on_rank, top_k
        self.rng = random.Random(7)

    def __call__(self, prompts, trainer):
        give = () if trainer.accelerator.process_index == self.plain_on_rank else self.give
        names = ["prompt_ids", "completion_ids", "logprobs", *give, *(["env_mask"] if self.env_mask else [])]
        rows = [self.row(trainer.processing_class(prompt)["input_ids"], 3 + n % 4) for n, prompt in enumerate(prompts)]
        return {name: [row[name] for row in rows] for name in names} | {"difficulty": list(range(len(prompts)))}

    def row(self, prompt_ids, length):
        completion_ids = [self.rng.randrange(2, 41) for _ in range(length)]
        mask = [0 if self.env_mask and t == 1 else 1 for t in range(length)]
        logprobs, ids, logps = [], [], []
        full = reference_logps(self.policy, prompt_ids, completion_ids)
        for own, token, logp in zip(mask, completion_ids, full, strict=True):
            top = logp.topk(self.top_k).indices.tolist()
            top = [i for i in top if i != token] if self.drop_sampled else sorted({token, *top})
            logprobs.append(logp[token].item() if own else 0.0)
            ids.append(top if own else [])
            logps.append(logp[top].tolist() if own else [])
        return dict(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            env_mask=mask,
            topk_token_ids=ids,
            topk_logprobs=logps,
        )


GIVEN = ("topk_token_ids", "topk_logprobs")


def generate(trainer, n=8):
    trainer.model.train()
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(n // 2)) for _ in range(2)]
    return trainer._generate_and_score_completions(rows)


def by_probability(full, ids):
    return sorted(ids, key=lambda i: -full[i].item())


ENGINE_TOP_K = 30  # above vLLM's default of 20, below the vocabulary of 41
ENGINE = dict(
    use_vllm=True,
    divergence_top_k=ENGINE_TOP_K,
    temperature=0.8,
    max_completion_length=12,
    per_device_train_batch_size=6,
    num_generations=3,
    vllm_gpu_memory_utilization=0.3,
    vllm_max_model_length=64,
)


def sync(trainer):
    trainer.state.global_step += 1  # TRL syncs when a training step has been made
    return trainer


def generate_on(trainer):
    trainer.model.train()
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(4)) for _ in range(3)]
    return trainer._generate_and_score_completions(rows)
