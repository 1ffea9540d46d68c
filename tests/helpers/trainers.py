"""The one place where tests make trainers, and what they do with them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.helpers import tiny
from tests.helpers.references import TEMPERATURE, B, K, T, gradients
from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


# What every training of the tests has in common
ON_CPU = dict(
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
# Fits the batch of `references.make_batch`
DEFAULTS = ON_CPU | dict(
    per_device_train_batch_size=B,
    num_generations=2,
    max_completion_length=T,
    temperature=TEMPERATURE,
    gradient_accumulation_steps=2,
)
# Two optimizer steps on each rollout: at the second the policy has left the behaviour policy
TWO_STEPS = dict(gradient_accumulation_steps=1, steps_per_generation=2)


def make_trainer(
    folder: str | Path,
    cls: type[GRPOTrainer] = PDMGRPOTrainer,
    *,
    model: PreTrainedModel | str | dict | None = None,
    **options,
) -> GRPOTrainer:
    """A trainer that writes to `folder`.

    Args:
        folder: its `output_dir`.
        cls: ours, or stock.
        model: a model, the path of one, or in what it differs from the default of `tiny.model`.
        options: fields of the config and further arguments of the trainer alike.
    """
    config = PDMGRPOConfig if issubclass(cls, PDMGRPOTrainer) else GRPOConfig
    own = dict(divergence_top_k=K) if config is PDMGRPOConfig else dict(vllm_importance_sampling_correction=False)
    fields = {name: options.pop(name) for name in [*options] if name in config.__dataclass_fields__}
    args = config(**{"output_dir": str(folder)} | DEFAULTS | own | fields)
    if model is None or isinstance(model, dict):
        model = tiny.save(Path(folder) / "model", **model or {})
    arguments = dict(reward_funcs=tiny.count_ones, train_dataset=tiny.prompts(), processing_class=tiny.tokenizer())
    return cls(model, args=args, **arguments | options)


class Recorder(TrainerCallback):
    """What was logged."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def run(trainer, **kwargs) -> list[dict]:
    """Train, and return what was logged."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train(**kwargs)
    return recorder.logs


def weights(trainer) -> torch.Tensor:
    """What is trained, as one vector in float32."""
    return torch.cat([p.detach().float().flatten() for p in trainer.model.parameters() if p.requires_grad])


def trainer_gradients(trainer, batch, pdm=True) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's own loss on `batch` and its gradients; stock's, against the same behaviour policy."""
    batch = dict(batch)
    if not pdm:
        batch["old_per_token_logps"] = batch["behavior_topk_logps"][..., 0]
        batch = {name: value for name, value in batch.items() if not name.startswith("behavior_")}
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    loss = trainer.compute_loss(trainer.model, batch)
    return loss.detach(), gradients(trainer.model, loss)
