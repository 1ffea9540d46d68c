"""What is said of a model, its data and its surroundings before a training starts."""

from typing import Any

import torch
from accelerate.logging import get_logger


logger = get_logger(__name__)  # of the main process


def warn_of_noise(model: Any, neftune_noise_alpha: float | None) -> None:
    """Say where the training policy differs from the one that sampled before any update."""
    dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    in_attention = getattr(model.config.get_text_config(), "attention_dropout", 0)
    if dropout or in_attention or neftune_noise_alpha:
        logger.warning(
            "The model trains with dropout or NEFTune, which move its logprobs at random: the trust region takes that for "
            "divergence and masks tokens for it, before any update. Set `disable_dropout=True`, the model's "
            "`attention_dropout` to 0, and no `neftune_noise_alpha`."
        )
