"""What the trainer holds, under the names of a checkpoint: merged, dequantized, buffers."""

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


# Where PEFT holds a model inside its own
PEFT_PREFIX = "base_model.model."


def is_bnb_quantized(model: nn.Module) -> bool:
    return any(get_bnb_param_type(param) for param in model.parameters())


def lora_layers(model: "PeftModel") -> dict[str, LoraLayer]:
    """The layers of the active adapter, by their names in `model`."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {name: layer for name, layer in layers if model.active_adapter in layer.r}


def adapter_rank(model: "PeftModel") -> int:
    return max(layer.r[model.active_adapter] for layer in lora_layers(model).values())  # `rank_pattern` sets several


def adapter_tensors(model: "PeftModel") -> dict[str, Tensor]:
    """The active adapter in PEFT's file format, its scaling (rsLoRA's and `alpha_pattern`'s too) inside the B matrix."""
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
    """The modules that a checkpoint knows, by their paths, each with PEFT's layer around it. What PEFT's layer holds is
    one part, with its children; any other module is a part without them."""
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
    return model.get_base_model() if is_peft_model(model) else model


def held_names(model: "PreTrainedModel | PeftModel") -> Iterator[str]:
    """The names of [`held_parameters`], which cost nothing."""
    for path, _, _, names in _parts_with_parameters(model):
        yield from (_join(path, name) for name in names)


def adapted_names(model: "PreTrainedModel | PeftModel") -> set[str]:
    """The names of those of [`held_parameters`] that adapters are merged into."""
    parts = _parts_with_parameters(model)
    return {_join(path, name) for path, _, layer, names in parts if layer is not None for name in names}


def frozen_names(model: "PreTrainedModel | PeftModel") -> set[str]:
    """The names of those of [`held_parameters`] that are not trained themselves."""
    parts = _parts_with_parameters(model)
    named = ((_join(path, name), part.get_parameter(name)) for path, part, _, names in parts for name in names)
    return {name for name, param in named if not param.requires_grad}


@torch.no_grad()
def held_parameters(model: "PreTrainedModel | PeftModel", merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The parameters that `model` computes with, under the names of the model without PEFT.

    An adapter is merged beside the weights, one layer at a time: what is trained, and what is frozen, stays as it is. What
    is merged is float32 at least, as the dtype of a coarser base would round the adapter away. Quantized weights are
    dequantized, what several modules share comes once.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model, not sharded.
        merged (`bool`, *optional*, defaults to `True`): with the active adapters. What they train along
            (`modules_to_save`) comes in either case.
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
    """Whether PEFT keeps trained copies of whole modules or of rows of them."""
    return any(isinstance(module, (ModulesToSaveWrapper, TrainableTokensWrapper)) for module in model.modules())


@contextmanager
def computing_with(
    model: "PreTrainedModel | PeftModel", change: Callable[[str, Tensor], Tensor], merged: bool
) -> Iterator[None]:
    """A block in which `model` computes with `change(name, weight)` of each weight, and not with the weight.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model, not sharded and not quantized,
            without [`trains_modules_beside`].
        change (`Callable`): takes a name in memory and a tensor, returns one of its shape.
        merged (`bool`): with the active adapters merged into the weights before, or else with each of the adapters'
            matrices as a weight.
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
    """What a checkpoint holds beside parameters, under its names there, e.g. a router's correction bias. To vLLM it may be
    a parameter, which a reload leaves undefined where it gets the layer's other parameters only."""
    for path, part, layer in _parts(base_of(model)):
        for name, module in part.named_modules() if layer is not None else [("", part)]:
            for leaf, buffer in module.named_buffers(recurse=False):
                if leaf not in module._non_persistent_buffers_set:
                    yield _join(path, name, leaf), buffer


def merged_copy(layer: BaseTunerLayer) -> nn.Module:
    """The module in `layer` as the active adapters make it, in float32 at least. It shares nothing with `layer`.

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
    # An evaluation on a CPU repacks 4-bit weights for a product that is now the only one to read them
    weight = module(torch.eye(module.in_features)).T
    return weight if module.bias is None else weight - module.bias[:, None]


_cast_notices: set[str] = set()


def quiet_bitsandbytes() -> None:
    """Let bitsandbytes say once, and not with each matrix multiplication, that it casts inputs to float16."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_repeated_notice)


def _is_no_repeated_notice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    repeated = message in _cast_notices
    if "inputs will be cast" in message:
        _cast_notices.add(message)
    return not repeated
