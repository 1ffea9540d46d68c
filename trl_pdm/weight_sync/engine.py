"""Reloading a live engine, and repairing what a reload leaves stale."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from peft.utils.integrations import get_bnb_param_type
from torch import nn
from transformers import AutoConfig

from .._hooks import TRLCompatibilityError
from .parameters import Params, is_bnb_quantized


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm import LLM

logger = get_logger(__name__)


def unquantized_view(model: "PreTrainedModel | PeftModel") -> SimpleNamespace:
    """What TRL is to see of a quantized model when it starts the engine: the model without its quantized layers.

    Otherwise TRL refuses an 8-bit model, and has the engine quantize for a 4-bit one. Here the engine holds
    dequantized weights of either.
    """
    modules = [(name, m) for name, m in model.named_modules() if not get_bnb_param_type(getattr(m, "weight", None))]
    return SimpleNamespace(name_or_path=model.name_or_path, named_modules=lambda: iter(modules))


# By `model_type`: models whose weights vLLM does not load through the loaders that its reload watches
_NOT_RELOADED = {"gpt_oss": "vLLM's reload does not reach its experts and attention sinks"}


def engine_kwargs_for(
    model: "PreTrainedModel | PeftModel", model_impl: str = "auto", trust_remote_code: bool = False
) -> dict[str, Any]:
    """
    Arguments that `vllm.LLM` needs where the model in memory is not what its checkpoint says.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model that is trained.
        model_impl (`str`, *optional*, defaults to `"auto"`): vLLM's `model_impl`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): run code that comes with the checkpoint.

    Raises:
        ValueError: vLLM cannot reload the weights of this kind of model, the model has no checkpoint, or it is one of
            several modalities whose embeddings were resized.
    """
    if (model_type := model.config.get_text_config().model_type) in _NOT_RELOADED:
        raise ValueError(
            f"`use_vllm=True` with `vllm_mode='colocate'` does not work with this model (`model_type={model_type!r}`): "
            f"{_NOT_RELOADED[model_type]}. Set `use_vllm=False`."
        )
    kwargs: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    if is_bnb_quantized(model) and getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        overrides["quantization_config"] = None
    rows = model.config.get_text_config().vocab_size
    if not model.name_or_path:
        raise ValueError(
            "`use_vllm=True` does not work with a model that was made in memory (`name_or_path=''`), as vLLM loads one by "
            "its name. Save the model with `save_pretrained`, and load it from there."
        )
    config = AutoConfig.from_pretrained(model.name_or_path, trust_remote_code=trust_remote_code)
    if rows != (of_checkpoint := config.get_text_config().vocab_size):
        if config.get_text_config() is not config:
            raise ValueError(
                f"`use_vllm=True` does not work with embeddings that were resized in memory (`vocab_size={rows}`, where "
                f"the checkpoint {model.name_or_path} has {of_checkpoint}) in a model of several modalities. Save the "
                "model with `save_pretrained`, and load it from there."
            )
        overrides["vocab_size"] = rows
    if overrides:
        # The checkpoint does not fit this engine, which gets its weights with the first sync
        kwargs |= {"load_format": "dummy", "hf_overrides": overrides}
    if _runs_on_transformers(model, model_impl):
        kwargs["enforce_eager"] = True
    return kwargs


def _runs_on_transformers(model: "PreTrainedModel | PeftModel", model_impl: str) -> bool:
    from vllm.model_executor.models import ModelRegistry

    known = [ModelRegistry.models[name] for name in model.config.architectures or () if name in ModelRegistry.models]
    own = [entry for entry in known if not getattr(entry, "module_name", "").endswith(".transformers")]
    return model_impl == "transformers" or (model_impl == "auto" and not own)


@contextmanager
def leaving_classes_alone() -> Iterator[None]:
    """A block in which vLLM's Transformers backend compiles nothing.

    To compile, it decorates a class of transformers that the trainer's model shares, and the trainer's own forward
    would fail from then on.

    Raises:
        TRLCompatibilityError: vLLM's backend does this by another method.
    """
    from vllm.model_executor.models.transformers.base import Base

    if not hasattr(Base, name := "_decorate_cls_for_torch_compile"):
        raise TRLCompatibilityError(f"vLLM's Transformers backend no longer has `{name}`.")

    def tell(self, cls: type, **kwargs: Any) -> None:
        logger.warning(
            f"vLLM runs this model on its Transformers backend. Here that is without compilation, which would change "
            f"`{cls.__name__}` for the trainer too: sampling is slower."
        )

    decorate = getattr(Base, name)
    setattr(Base, name, tell)
    try:
        yield
    finally:
        setattr(Base, name, decorate)


def reload_weights(llm: "LLM", named_params: Params) -> int:
    """Load `named_params`, in checkpoint format, through vLLM's own reload.

    Stock TRL loads into the live modules. That fails where the engine repacked or quantized its weights after loading.
    The reload undoes this and does it again.

    Args:
        llm (`vllm.LLM`): an engine in this process.
        named_params: tensors by their names in the Hugging Face checkpoint. The engine may keep them, so they must not
            be the ones that training changes in place.

    Returns:
        `int`: the bytes moved.
    """
    moved = 0

    def counted():
        nonlocal moved
        for name, param in named_params:
            moved += param.nbytes
            yield name, param

    with _quiet_reload(has_tied_head=any(llm.apply_model(_has_tied_head))):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
    llm.apply_model(_repack_tied_heads)
    llm.apply_model(_repack_experts)
    return moved


def exceptional_dtypes(model: nn.Module, usual: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes of those parameters, by name, that an engine holds in a wider floating point type than `usual`."""
    dtypes = ((name, param.dtype) for name, param in model.named_parameters())
    return {name: dtype for name, dtype in dtypes if dtype.is_floating_point and dtype.itemsize > usual.itemsize}


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
