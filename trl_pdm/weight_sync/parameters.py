"""The parameters and buffers that the trainer computes with, as those of a plain model: merged and dequantized."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Params = Iterable[tuple[str, Tensor]]


# What PEFT puts before the names of the model inside it
PEFT_PREFIX = "base_model.model."


def is_bnb_quantized(model: nn.Module) -> bool:
    """Whether bitsandbytes has quantized parameters of `model`."""
    return any(get_bnb_param_type(param) for param in model.parameters())


def lora_layers(model: "PeftModel") -> dict[str, LoraLayer]:
    """The LoRA layers of the active adapter, by their names in `model`."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {name: layer for name, layer in layers if model.active_adapter in layer.r}


def adapter_rank(model: "PeftModel") -> int:
    """The largest rank of the active adapter, which has several with a `rank_pattern`."""
    return max(layer.r[model.active_adapter] for layer in lora_layers(model).values())


def adapter_tensors(model: "PeftModel") -> dict[str, Tensor]:
    """The matrices of the active adapter, named as in PEFT's files.

    The B matrices are multiplied by the scaling, which may come from `lora_alpha`, `alpha_pattern` or rsLoRA.
    """
    adapter, tensors = model.active_adapter, {}
    for name, layer in lora_layers(model).items():
        tensors[f"{name}.lora_A.weight"] = layer.lora_A[adapter].weight.detach().contiguous()
        tensors[f"{name}.lora_B.weight"] = (
            layer.lora_B[adapter].weight.detach() * layer.scaling[adapter]
        ).contiguous()
    return tensors


# Modules that PyTorch puts around others, of which a checkpoint knows nothing
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, BaseTunerLayer | None]]:
    """The modules that a checkpoint knows, each with its path and the PEFT layer around it, if there is one.

    The module inside a PEFT layer is one part, with its children. Any other module is a part without its children.
    """
    if isinstance(module, ModulesToSaveWrapper):
        active = next((name for name in module.active_adapters if name in module.modules_to_save), None)
        yield from _parts(module.modules_to_save[active] if active else module.original_module, path)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _parts(module.token_adapter, path)
    elif isinstance(module, BaseTunerLayer):
        yield path, module.get_base_layer(), module
    else:
        yield path, module, None
        for name, child in module.named_children():
            yield from _parts(child, path if name in _WRAPPERS else _join(path, name))


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def base_of(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """`model` without PEFT around it."""
    return model.get_base_model() if is_peft_model(model) else model


def held_names(model: "PreTrainedModel | PeftModel") -> Iterator[str]:
    """The names that [`held_parameters`] yields, without computing the tensors."""
    for path, _, _, names in _parts_with_parameters(model):
        yield from (_join(path, name) for name in names)


def adapted_names(model: "PreTrainedModel | PeftModel") -> set[str]:
    """Those of [`held_names`] that adapters are merged into."""
    parts = _parts_with_parameters(model)
    return {_join(path, name) for path, _, layer, names in parts if layer is not None for name in names}


def frozen_names(model: "PreTrainedModel | PeftModel") -> set[str]:
    """Those of [`held_names`] that are not trained themselves."""
    parts = _parts_with_parameters(model)
    named = ((_join(path, name), part.get_parameter(name)) for path, part, _, names in parts for name in names)
    return {name for name, param in named if not param.requires_grad}


@torch.no_grad()
def held_parameters(model: "PreTrainedModel | PeftModel", merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The parameters that `model` computes with, under the names of the model without PEFT.

    Adapters are merged into copies, one layer at a time, so the model itself does not change. The copies are in
    float32 or wider, because a coarser dtype would round the adapter away. Quantized weights are dequantized. A
    parameter that several modules share comes once.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model, not sharded.
        merged (`bool`, *optional*, defaults to `True`): merge the active adapters. The modules that train beside them
            (`modules_to_save`) come in either case.
    """
    for path, module, layer, names in _parts_with_parameters(model):
        adapter = layer if merged else None
        if any(get_bnb_param_type(module.get_parameter(name)) for name in names):
            module = _dequantized(module, adapter)
        elif adapter is not None:
            module = merged_copy(adapter)
        for name in names:
            yield _join(path, name), module.get_parameter(name)


def _parts_with_parameters(model: "PreTrainedModel | PeftModel") -> Iterator[tuple[str, nn.Module, Any, list[str]]]:
    shared: set[int] = set()
    for path, module, layer in _parts(base_of(model)):
        named = module.named_parameters(recurse=layer is not None)
        own = {name: id(param) for name, param in named if id(param) not in shared}
        shared.update(own.values())
        if own:
            yield path, module, layer, list(own)


def trains_modules_beside(model: nn.Module) -> bool:
    """Whether PEFT keeps trained copies of whole modules, or of rows of embeddings, beside the adapter."""
    return any(isinstance(module, (ModulesToSaveWrapper, TrainableTokensWrapper)) for module in model.modules())


@contextmanager
def computing_with(
    model: "PreTrainedModel | PeftModel", change: Callable[[str, Tensor], Tensor], merged: bool
) -> Iterator[None]:
    """A block in which `model` computes with `change(name, weight)` in place of each weight.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model, not sharded and not quantized,
            without [`trains_modules_beside`].
        change (`Callable`): takes a name in memory and a tensor, returns one of its shape.
        merged (`bool`): whether the active adapters are first merged into the weights. Otherwise each of the adapters'
            matrices is a weight of its own.
    """
    held = []
    if not merged:
        held = [(name, param, param.detach()) for name, param in model.named_parameters()]
    else:
        for path, module, layer, names in _parts_with_parameters(model):
            source = merged_copy(layer) if layer is not None else module
            held += [
                (_join(path, name), module.get_parameter(name), source.get_parameter(name).detach()) for name in names
            ]
    before = [(param, param.data) for _, param, _ in held]
    try:
        for name, param, weight in held:
            param.data = change(name, weight).to(param.dtype)
        with model.disable_adapter() if merged and is_peft_model(model) else nullcontext():
            yield
    finally:
        for param, weight in before:
            param.data = weight


def persistent_buffers(model: "PreTrainedModel | PeftModel") -> Iterator[tuple[str, Tensor]]:
    """The buffers that a checkpoint holds, such as a router's correction bias, by their names without PEFT.

    In vLLM such a buffer may be a parameter. A reload that gets only the layer's other parameters leaves it undefined.
    """
    for path, part, layer in _parts(base_of(model)):
        for name, module in part.named_modules() if layer is not None else [("", part)]:
            for leaf, buffer in module.named_buffers(recurse=False):
                if leaf not in module._non_persistent_buffers_set:
                    yield _join(path, name, leaf), buffer


def merged_copy(layer: BaseTunerLayer) -> nn.Module:
    """A copy of the module in `layer` with the active adapters merged into it, in float32 or wider.

    Raises:
        Exception: PEFT cannot merge this kind of layer.
    """
    twins: dict[int, Any] = {}
    for tensor in chain(layer.parameters(), layer.buffers()):
        wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
        twin = tensor.detach().to(wide, copy=True)
        twins[id(tensor)] = nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin
    for module in layer.modules():  # a hook may hold on to a whole model
        twins |= {id(hooks): OrderedDict() for hooks in (module._forward_hooks, module._forward_pre_hooks)}
    copied = copy.deepcopy(layer, twins).eval()
    for module in list(copied.modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
    return copied.get_base_layer()


def _dequantized(module: Any, adapter: BaseTunerLayer | None) -> nn.Module:
    weight = _dequantized_weight(module)
    if adapter is not None:
        deltas = (adapter.get_delta_weight(name) for name in adapter.active_adapters if name in adapter.r)
        weight = sum((delta.float() for delta in deltas), weight.float())
    plain = nn.Module()
    plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), module.bias
    return plain


def _dequantized_weight(module: nn.Linear) -> Tensor:
    if not getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
        return dequantize_bnb_weight(module.weight, state=getattr(module, "state", None))
    # On a CPU an evaluation repacks 4-bit weights, and then only the layer's own product can read them
    weight = module(torch.eye(module.in_features)).T
    return weight if module.bias is None else weight - module.bias[:, None]


_cast_notices: set[str] = set()


def quiet_bitsandbytes() -> None:
    """Let bitsandbytes say only once that it casts inputs to float16, and not at each matrix product."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_repeated_notice)


def _is_no_repeated_notice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    repeated = message in _cast_notices
    if "inputs will be cast" in message:
        _cast_notices.add(message)
    return not repeated
