"""What a user's rollout function may return, and how that is checked."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor

from .candidates import checked_numbers, from_lists, lengths_of


logger = get_logger(__name__)  # of the main process, and it can say a thing once


def with_candidates(rollout_func: Callable[[list, Any], dict[str, Any]]) -> Callable[[list, Any], dict[str, Any]]:
    """Wrap a rollout function, so that its logprobs carry the candidates that it returns, if it returns any.

    It returns them as `topk_token_ids` and `topk_logprobs`: for each completion, one list per token. The list holds
    the K most probable tokens, with or without the sampled one, in any order. It is empty for a token that the policy
    did not sample.

    The wrapped function raises a `ValueError` where what the rollout function returns does not fit together.
    """

    @wraps(rollout_func)
    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        output = rollout_func(prompts, trainer)
        if not isinstance(output, Mapping):
            raise ValueError(f"The rollout function must return a dictionary, got {type(output).__name__}.")
        output = dict(output)
        if "completion_ids" not in output:
            return output  # TRL says what is missing
        token_ids, topk_logprobs = output.pop("topk_token_ids", None), output.pop("topk_logprobs", None)
        completion_ids, logprobs = output["completion_ids"], output.get("logprobs")
        fields = {"logprobs": logprobs, "topk_token_ids": token_ids, "topk_logprobs": topk_logprobs}
        for name, field in fields.items():
            if field is not None and (lengths_of(field) is None or lengths_of(field) != lengths_of(completion_ids)):
                raise ValueError(
                    f"The rollout function's `{name}` do not fit its `completion_ids`: there must be one list per "
                    "completion, with one entry per token."
                )
        if 0 in (lengths := lengths_of(completion_ids) or []):  # TRL would fail with an IndexError
            raise ValueError(
                f"The rollout function's completion {lengths.index(0)} is empty. A completion has at least one token, "
                "be it the end of the sequence."
            )
        if (token_ids is None) != (topk_logprobs is None):
            raise ValueError("A rollout function must return `topk_token_ids` and `topk_logprobs`, or neither.")
        for b, sequence in enumerate(() if logprobs is None else logprobs):
            checked_numbers(sequence, np.float32, "logprobs", b)
        if token_ids is not None:
            carrying = from_lists(completion_ids, token_ids, topk_logprobs, logprobs)
            output["logprobs"] = [
                [lp[0] if len(entries) else float(lp[0]) for lp, entries in zip(*sequence, strict=True)]
                for sequence in zip(carrying, token_ids, strict=True)
            ]
        return output

    return rollout


Behavior = tuple[Tensor, Tensor]
"""Ids (int32) and log-probabilities (float32) of the candidates of a batch, `(B, T, K+1)` each."""


def lack_candidates(behavior: Behavior | None, batch: dict[str, Any], mask: Tensor) -> bool:
    """Whether a rollout function returned no candidates for some tokens of `mask`, which is warned of once.

    Where no candidates are needed (`K = 0`), none can lack. Tokens of `behavior` without a logprob then get the one
    that `batch` has.
    """
    if behavior is None:
        return False
    if behavior[0].shape[-1] == 1:
        fill_in(behavior, (batch["completion_ids"][..., None], batch["sampling_per_token_logps"][..., None]), batch)
        return False
    lacking = bool((mask & (behavior[0][..., 0] < 0)).any())
    if lacking:
        logger.warning_once(
            "`rollout_func` returns logprobs without their candidates, so the training model scores the behaviour "
            "policy's top K: the trust region does not see how the sampling engine differs from it. Return the "
            "logprobs as `trainer.vllm_generation.generate` gives them, or `topk_token_ids` and `topk_logprobs`."
        )
    return lacking


def fill_in(behavior: Behavior | None, scored: Behavior, batch: dict[str, Any]) -> Behavior:
    """Give the tokens of `behavior` that have no candidates those of `scored`.

    Args:
        behavior ([`Behavior`], *optional*): changed in place. `None` if no token has candidates.
        scored ([`Behavior`]): has candidates for all tokens.
        batch (`dict`): has `sampling_per_token_logps`, `(B, T)` in nats. Where they are finite, the sampled tokens
            keep them.

    Returns:
        [`Behavior`]: `behavior`, or `scored` where that is `None`.
    """
    if behavior is None:
        return scored
    (ids, logps), (scored_ids, scored_logps) = behavior, scored
    sampled_logps, missing = batch["sampling_per_token_logps"], ids[..., 0] < 0
    ids[missing], logps[missing] = scored_ids[missing].to(ids.dtype), scored_logps[missing].to(logps.dtype)
    logps[..., 0] = torch.where(missing & sampled_logps.isfinite(), sampled_logps, logps[..., 0])
    return behavior
