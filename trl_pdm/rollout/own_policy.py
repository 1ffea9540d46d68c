"""The behaviour policy where there is no engine: the training model itself, before it is updated."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from ..topk_head import topk_head


def score_behavior(
    score: Callable[..., Any],
    model: Any,
    batch: dict[str, Any],
    batch_size: int,
    top_k: int,
    gradient_checkpointing_kwargs: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """
    Score a rollout with the training model, which is the behaviour policy until it is updated.

    Args:
        score (`Callable`): TRL's `_get_per_token_logps_and_entropies`.
        model: the model that is trained.
        batch (`dict`): TRL's, of a rollout.
        batch_size (`int`): sequences in one forward pass.
        top_k (`int`): K.
        gradient_checkpointing_kwargs (`dict` or `None`): of the trainer's arguments.

    Returns:
        `tuple[Tensor, Tensor]`: ids (int32) and log-probabilities (float32), laid out as by [`collate`].
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits_to_keep = batch["completion_ids"].size(1)
    multimodal = {name: batch[name] for name in signature(score).parameters if name in batch}
    with (
        torch.no_grad(),
        grpo_trainer.disable_gradient_checkpointing(model, gradient_checkpointing_kwargs),
        topk_head(attention_mask, logits_to_keep, batch_size, top_k=top_k) as scores,
    ):
        score(model, ids, attention_mask, logits_to_keep, batch_size=batch_size, **multimodal)
    return scores.ids, scores.logps
