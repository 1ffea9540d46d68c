"""Reloading a live engine, and repairing what a reload leaves stale."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from peft.utils.integrations import get_bnb_param_type
from torch import nn

from .parameters import Params


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm import LLM


def unquantized_view(model: "PreTrainedModel | PeftModel") -> tuple[SimpleNamespace, dict[str, Any]]:
    """For an engine that is to hold the dequantized weights of `model`: what TRL is to see of it, and engine arguments.

    TRL refuses 8-bit models, and quantizes the engine for 4-bit ones.
    """
    modules = [(name, m) for name, m in model.named_modules() if not get_bnb_param_type(getattr(m, "weight", None))]
    view = SimpleNamespace(name_or_path=model.name_or_path, named_modules=lambda: iter(modules))
    if not getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        return view, {}
    # The checkpoint is quantized too: nothing in it for this engine, which gets its weights with the first sync
    return view, {"load_format": "dummy", "hf_overrides": {"quantization_config": None}}


def reload_weights(llm: "LLM", named_params: Params) -> int:
    """Load `named_params`, in checkpoint format, through vLLM's own reload.

    Loading into the live modules, as stock TRL does, fails where the engine repacked or quantized its weights after
    loading; the reload undoes and redoes that.

    Args:
        llm (`vllm.LLM`): an engine in this process.
        named_params: names and tensors under the names of the Hugging Face checkpoint.

    Returns:
        `int`: the bytes moved.
    """
    moved = 0

    def copies():
        nonlocal moved
        for name, param in named_params:
            moved += param.nbytes
            yield name, param.detach().clone()  # the engine may keep it, and training changes it in place

    with _quiet_reload(has_tied_head=any(llm.apply_model(_has_tied_head))):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies()})
    llm.apply_model(_repack_tied_heads)
    llm.apply_model(_repack_experts)
    return moved


@contextmanager
def _quiet_reload(has_tied_head: bool) -> Iterator[None]:
    # A reload warns about each layer that got no weights. Rotary tables, computed from the config, and a tied head never
    # get any. All others would keep stale weights: their warning stays.
    harmless = ("RotaryEmbedding", "LMHead") if has_tied_head else ("RotaryEmbedding",)

    def is_news(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "Failed to load weights" not in message or not any(layer in message for layer in harmless)

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload_logger.addFilter(is_news)
    try:
        yield
    finally:
        reload_logger.removeFilter(is_news)


def _tied_heads(model: nn.Module) -> list[Any]:  # of `ParallelLMHead`
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    return [layer for layer in layers if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings]


def _has_tied_head(model: nn.Module) -> bool:
    return bool(_tied_heads(model))


def _repack_tied_heads(model: nn.Module) -> None:
    # The reload visits a tied weight once, as the embedding: a head that was repacked keeps its old, packed copy.
    for head in _tied_heads(model):
        head.quant_method.process_weights_after_loading(head)


def _repack_experts(model: nn.Module) -> None:
    # On a CPU only the first load packs them
    if next(model.parameters()).is_cpu:
        for layer in model.modules():
            if kernel := getattr(getattr(layer, "quant_method", None), "moe_kernel", None):
                kernel.fused_experts.process_weights_after_loading(layer)
