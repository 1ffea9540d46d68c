"""What the trainer holds, under the names of a checkpoint: merged, dequantized, buffers."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from torch import Tensor, nn


if TYPE_CHECKING:
    from peft import PeftModel

Params = Iterable[tuple[str, Tensor]]


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


@torch.no_grad()
def lora_model_params(model: "PeftModel", merged: bool) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a plain LoRA model's base, dequantized, the active adapter and what it trains along `merged`."""
    base, adapter = model.get_base_model(), model.active_adapter
    for name, param in base.named_parameters():
        name = name.replace(f".modules_to_save.{adapter}.", ".")
        if any(part in name for part in (model.base_model.prefix, ".modules_to_save.", ".original_module.")):
            continue
        path, _, leaf = name.rpartition(".")
        if get_bnb_param_type(param):
            param = _dequantized(base.get_submodule(path))
        if path.endswith(".base_layer"):
            path = path.removesuffix(".base_layer")
            layer = base.get_submodule(path)
            if merged and leaf == "weight" and adapter in layer.r:
                param = (param.float() + layer.get_delta_weight(adapter).float()).to(param.dtype)
        yield f"{path}.{leaf}", param


def persistent_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds beside parameters, under its names there, e.g. a router's correction bias. To vLLM it may be
    a parameter, which a reload leaves undefined where it gets the layer's other parameters only."""
    of_peft = (".original_module.", model.base_model.prefix) if is_peft_model(model) else ()
    base = model.get_base_model() if of_peft else model
    for path, module in base.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{leaf}"
            if leaf in module._non_persistent_buffers_set or any(part in name for part in of_peft):
                continue
            for part in (".base_layer", ".modules_to_save.default", "._checkpoint_wrapped_module"):
                name = name.replace(part, "")
            yield name, buffer


def _dequantized(module: nn.Linear) -> Tensor:
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
