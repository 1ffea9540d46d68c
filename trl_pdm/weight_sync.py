"""Training weights into a colocated vLLM."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor


if TYPE_CHECKING:
    from vllm import LLM


def reload_weights(llm: "LLM", named_params: Iterable[tuple[str, Tensor]]) -> None:
    """Load `named_params`, in checkpoint format, through vLLM's own reload.

    Loading into the live modules, as stock TRL does, fails where the engine repacked or quantized its weights after
    loading; the reload undoes and redoes that.

    Args:
        llm (`vllm.LLM`): an engine in this process.
        named_params: names and tensors under the names of the Hugging Face checkpoint.
    """
    # The engine may keep what it is given, and the training parameters change in place.
    copies = ((name, param.detach().clone()) for name, param in named_params)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
    llm.apply_model(_repack_tied_head)


def _repack_tied_head(model) -> None:
    # The reload visits a tied weight once, as the embedding: a head that was repacked keeps its old, packed copy.
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if embedding is not None and getattr(head, "weight", None) is embedding.weight:
        head.quant_method.process_weights_after_loading(head)
