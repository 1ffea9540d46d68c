"""What moves the training policy's logprobs at random while it trains: dropout, router jitter and NEFTune."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


logger = get_logger(__name__)

# Names of rates that a layer keeps as a number and applies itself, without a dropout module
_RATES = re.compile(r"dropout|pdrop|jitter_noise|layerdrop")


def sources(model: nn.Module, neftune_noise_alpha: float | None = None) -> dict[str, str]:
    """
    Find what makes the training forward of `model` random.

    This reads the layers, not the config, which `disable_dropout` leaves as it is.

    Args:
        model (`nn.Module`): the model that is trained, with its adapter.
        neftune_noise_alpha (`float`, *optional*): of the trainer's arguments.

    Returns:
        `dict[str, str]`: for each source, named with its value, what to set to be rid of it.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            if module.p > 0 and ".lora_dropout." in name:
                found[f"`lora_dropout={module.p}`"] = "`lora_dropout=0` in the `LoraConfig`"
            elif module.p > 0:
                found[f"dropout of {module.p}"] = "`disable_dropout=True`"
            continue
        for rate, value in vars(module).items():
            if isinstance(value, float) and value > 0 and _RATES.search(rate):
                found[f"`{rate}={value}`"] = f"the model's `{rate}` to 0"
    if neftune_noise_alpha:
        found[f"`neftune_noise_alpha={neftune_noise_alpha}`"] = "no `neftune_noise_alpha`"
    return found


def warn_of(found: dict[str, str]) -> None:
    """Warn of what noise does to a trust region, naming what [`sources`] has `found`. Says nothing if that is empty."""
    if found:
        logger.warning(
            f"The model trains with {', '.join(found)}, which moves its logprobs at random: the trust region takes that "
            "for divergence and masks tokens for it, before any update (see docs/metrics-and-troubleshooting.md). "
            f"Set {', '.join(dict.fromkeys(found.values()))}."
        )


@contextmanager
def silenced(model: nn.Module) -> Iterator[None]:
    """A block in which the forward of `model` is not random: its layers are in evaluation mode, and then as before."""
    was: list[tuple[Any, bool]] = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training
