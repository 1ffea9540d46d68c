"""The two strategies of a weight sync, full or adapter, and the choice between them by what vLLM can serve."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import getmembers, ismethod, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from peft import PeftType
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn

from .._hooks import TRLCompatibilityError
from .adapter_files import private_folder, remove_stale_folders
from .checkpoint_names import CheckpointNames
from .engine import reload_weights
from .parameters import (
    PEFT_PREFIX,
    Params,
    adapter_rank,
    adapter_tensors,
    base_of,
    held_names,
    held_parameters,
    is_bnb_quantized,
    lora_layers,
    merged_copy,
    persistent_buffers,
)
from .rounding import WeightRounding


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm import LLM

logger = get_logger(__name__)


@dataclass(frozen=True)
class SyncRecord:
    """What one weight sync moved, and how long it took.

    Attributes:
        mode (`str`): `"full"` or `"adapter"`.
        bytes (`int`): size of the tensors that this process handed over.
        seconds (`float`): how long it took, waiting for the engine included.
    """

    mode: str
    bytes: int
    seconds: float


class FullSync:
    """Moves every parameter at each sync, with the active adapters merged.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model that is trained.
        params (`Callable`, *optional*): yields its parameters, under their names in memory, in place of
            [`held_parameters`], which cannot gather sharded ones.
        rounding ([`WeightRounding`], *optional*): how they are rounded; to nearest by default.
    """

    mode = "full"
    engine_kwargs: dict[str, Any] = {}

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        params: Callable[[], Params] | None = None,
        rounding: WeightRounding | None = None,
    ):
        self.model = model
        self.rounding = rounding or WeightRounding("nearest", model, merged=True)
        self._params = params or partial(held_parameters, model)

    def tensors(self) -> Params:
        """Yield everything that is pushed, as a checkpoint names it."""
        yield from checkpoint_tensors(self.model, self.rounding.apply(self._params()))

    def push(self, llm: "LLM") -> int:
        """Bring an engine in this process up to date. Returns the bytes moved."""
        return reload_weights(llm, self.tensors())


class AdapterSync:
    """Moves the base once and the active LoRA adapter at each sync. All that the engine generates is with the adapter.

    Args:
        model ([`~peft.PeftModel`]): the model that is trained.
        base_every_time (`bool`, *optional*, defaults to `False`): move the base at each sync too, for an engine that
            forgets its weights in between.
        rounding ([`WeightRounding`], *optional*): how weights are rounded; to nearest by default.
    """

    mode = "adapter"

    def __init__(self, model: "PeftModel", base_every_time: bool = False, rounding: WeightRounding | None = None):
        self.model, self.base_every_time = model, base_every_time
        self.rounding = rounding or WeightRounding("nearest", model, merged=False)
        self.engine_kwargs = {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(model)}
        self.request: Any = None  # the live version. Each has its own id, because vLLM caches by id.
        remove_stale_folders()

    def tensors(self) -> Params:
        """Yield the base, as a checkpoint names it."""
        yield from checkpoint_tensors(self.model, self.rounding.apply(held_parameters(self.model, merged=False)))

    def push(self, llm: "LLM") -> int:
        """Bring an engine in this process up to date. Returns the bytes moved."""
        from vllm.lora.request import LoRARequest

        moved, old = 0, self.request.lora_int_id if self.request else 0
        if not old or self.base_every_time:
            # The engine loaded a checkpoint, which need not be what the trainer holds
            moved += reload_weights(llm, self.tensors())
        if old:
            llm.llm_engine.remove_lora(old)
        else:
            self._attach_to(llm)
        tensors, rank = self._adapter(), adapter_rank(self.model)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with private_folder(size) as folder:
            config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            request = LoRARequest(f"policy-{old + 1}", old + 1, folder)
            # It is loaded now, and not with the first generation, so that the folder can go right after
            if not llm.llm_engine.add_lora(request) or llm.llm_engine.list_loras() != {request.lora_int_id}:
                raise RuntimeError(
                    f"vLLM did not take {request.lora_name} of the LoRA adapter in place of the last one."
                )
        self.request = request
        return moved + size

    def _adapter(self) -> dict[str, Tensor]:
        saved = CheckpointNames(base_of(self.model), held_names(self.model))
        tensors = {}
        for name, tensor in self.rounding.apply(adapter_tensors(self.model).items()):
            layer, _, matrix = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
            renamed = saved.renamed(f"{layer}.weight")
            assert renamed is not None, "`why_not_servable` refuses layers that a checkpoint holds in another shape"
            tensors[f"{PEFT_PREFIX}{renamed.removesuffix('.weight')}.lora_{matrix}"] = tensor
        return tensors

    def _attach_to(self, llm: "LLM") -> None:
        # At the engine, not in our `generate`: rollout functions of users call `llm.generate` and `llm.chat` themselves.
        def with_adapter(method):
            @wraps(method)
            def call(*args, **kwargs):
                given = signature(method).bind(*args, **kwargs)
                if given.arguments.get("lora_request") is None:
                    given.arguments["lora_request"] = self.request
                return method(*given.args, **given.kwargs)

            return call

        public = {name: method for name, method in getmembers(llm, ismethod) if not name.startswith("_")}
        serving = {name: method for name, method in public.items() if "lora_request" in signature(method).parameters}
        if "generate" not in serving:
            raise TRLCompatibilityError("vLLM's `LLM.generate` no longer takes a `lora_request`.")
        vars(llm).update({name: with_adapter(method) for name, method in serving.items()})


def choose_sync(
    requested: str,
    model: "PreTrainedModel | PeftModel",
    stock_params: Callable[[], Params],
    *,
    colocated: bool = True,
    sharded: bool = False,
    base_every_time: bool = False,
    rounding: str = "auto",
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> FullSync | AdapterSync:
    """
    Choose the strategy by which the weights of `model` reach vLLM. Warns where `"auto"` cannot move the adapter alone.

    Args:
        requested (`str`): `"full"`, `"adapter"`, or `"auto"` for `"adapter"` where vLLM can serve it.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model that is trained.
        stock_params (`Callable`): TRL's own walk over the parameters, which gathers sharded ones.
        colocated (`bool`, *optional*, defaults to `True`): the engine runs in this process.
        sharded (`bool`, *optional*, defaults to `False`): parameters are sharded (ZeRO-3, FSDP).
        base_every_time (`bool`, *optional*, defaults to `False`): the engine forgets its weights between syncs.
        rounding (`str`, *optional*, defaults to `"auto"`): the `mode` of [`WeightRounding`].
        autocast, seed: as for [`WeightRounding`].

    Raises:
        ValueError: `"adapter"` was asked for and is impossible. Or the model cannot be synchronised at all: its base
            is quantized and its adapter not plain, the adapter trains tied embeddings apart, or it is no change of
            weights.
    """
    if is_peft_model(model) and (why := why_not_mergeable(model, sharded)):
        raise ValueError(
            f"`use_vllm=True` does not work with this adapter of the PEFT method "
            f"{model.active_peft_config.peft_type.value}, because {why}. Train a plain LoRA adapter "
            "(`peft_config=LoraConfig(...)`), or set `use_vllm=False`."
        )
    if is_peft_model(model) and parts_tied_embeddings(model):
        raise ValueError(
            "`use_vllm=True` does not work with this adapter, because the model ties its input and output embeddings and "
            "the adapter trains them apart, while vLLM holds one tensor for both. Leave them out of `target_modules` and "
            "`modules_to_save`, or, with `modules_to_save`, set `ensure_weight_tying=True` in the `LoraConfig`."
        )
    not_plain = why_not_plain_lora(model, sharded)
    if not_plain and is_bnb_quantized(model):
        raise ValueError(
            f"`use_vllm=True` does not work with this bitsandbytes-quantized model, because {not_plain}. Train a plain "
            "LoRA adapter on it (`peft_config=LoraConfig(...)`), load it without quantization, or set `use_vllm=False`."
        )
    reason = not_plain or (why_not_servable(model) if colocated else "a vLLM server takes full weights only")
    if requested == "adapter" and reason:
        raise ValueError(
            f"`vllm_weight_sync='adapter'` is not possible, because {reason}. Set `vllm_weight_sync` to 'full' or 'auto'."
        )
    round_weights = partial(WeightRounding, rounding, model, autocast=autocast, sharded=sharded, seed=seed)
    if requested != "full" and not reason:
        return AdapterSync(model, base_every_time, round_weights(merged=False))
    if requested == "auto" and is_peft_model(model):
        logger.warning(f"`vllm_weight_sync='auto'` moves all weights at each sync ('full'), because {reason}.")
    # Sharded weights go TRL's way, which merges an adapter in place and subtracts it again. Under ZeRO-3 that is in
    # gathered copies, which are dropped. Under FSDP it is in the shards: a bf16 base moves a little with each sync.
    return FullSync(model, stock_params if sharded else None, round_weights(merged=True))


def checkpoint_tensors(model: "PreTrainedModel | PeftModel", params: Params) -> Params:
    """Yield `params` of `model`, and copies of its persistent buffers in their own dtype, as a checkpoint has them."""
    # A walk without tensors knows all names beforehand
    names = chain(held_names(model), (name for name, _ in persistent_buffers(model)))
    buffers = ((name, buffer.clone()) for name, buffer in persistent_buffers(model))
    yield from CheckpointNames(base_of(model), names).convert(chain(params, buffers))


# ---- What vLLM can serve

# Fields of `peft.LoraConfig` that make an adapter more than `scaling * B A` added to some weights ...
_NOT_PLAIN = {"use_dora": False, "lora_bias": False, "trainable_token_indices": None, "target_parameters": None}
# ... and those that make other weights train along
_NOT_ALONE = {"bias": "none", "modules_to_save": None}


def _unusual(config: Any, usual: dict[str, Any]) -> str | None:
    values = {name: getattr(config, name, default) for name, default in usual.items()}
    return next((f"`{name}={value!r}`" for name, value in values.items() if value and value != usual[name]), None)


def why_not_plain_lora(model: "PreTrainedModel | PeftModel", sharded: bool = False) -> str | None:
    """Why the weights that `model` computes with are not its base's plus `scaling * B A`; `None` where they are."""
    if not is_peft_model(model):
        return "the model has no LoRA adapter"
    if sharded:
        return "the model is sharded (ZeRO-3 or FSDP)"
    config = model.active_peft_config
    if config.peft_type != PeftType.LORA:
        return f"the model's PEFT method is {config.peft_type.value}, not LoRA"
    if len(model.active_adapters) != 1:
        return f"several adapters are active ({', '.join(model.active_adapters)})"
    if unusual := _unusual(config, _NOT_PLAIN):
        return f"the LoRA config sets {unusual}"
    for name, layer in lora_layers(model).items():
        variant = getattr(layer, "lora_variant", {}).get(model.active_adapter)
        if variant or not isinstance(layer.base_layer, (nn.Linear, nn.Embedding)):
            return f"LoRA of `{name}` is not plain"
    return None


# What these add depends on the input, so no weights can stand for it
_NO_WEIGHTS = {PeftType.XLORA, PeftType.ADAPTION_PROMPT}


def why_not_mergeable(model: "PeftModel", sharded: bool = False) -> str | None:
    """Why the model without PEFT cannot compute what `model` does, whatever its weights; `None` where it can."""
    config = model.active_peft_config
    if config.is_prompt_learning or config.peft_type in _NO_WEIGHTS:
        return "it adds to what the model is given and not to its weights"
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    tried: set[Any] = set()
    for layer in layers if not sharded else ():
        base = layer.get_base_layer()
        kind = (type(layer), type(base), tuple(name for name, _ in base.named_parameters()))
        if kind in tried or is_bnb_quantized(base):
            continue
        tried.add(kind)
        try:
            merged_copy(layer)
        except Exception as error:  # whatever PEFT says of what it has no code for
            return f"PEFT cannot merge it ({str(error).strip() or type(error).__name__})"
    return None


def parts_tied_embeddings(model: "PeftModel") -> bool:
    """Whether the adapter trains input and output embeddings apart, which the configuration of `model` ties."""
    if not model.config.get_text_config().tie_word_embeddings:
        return False
    base = model.get_base_model()
    layers = base.get_input_embeddings(), base.get_output_embeddings()
    if any(isinstance(layer, LoraLayer) for layer in layers):
        return True
    # A wrapper's `weight` is that of the copy it trains
    apart = layers[1] is not None and layers[0].weight is not layers[1].weight
    return apart and any(isinstance(layer, ModulesToSaveWrapper) for layer in layers)


def why_not_servable(model: "PeftModel") -> str | None:
    """Why vLLM cannot serve the plain LoRA adapter of `model` next to its base; `None` where it can."""
    if unusual := _unusual(model.active_peft_config, _NOT_ALONE):
        return f"the LoRA config sets {unusual}, which vLLM does not serve"
    if getattr(model.config, "quantization_config", None) is not None and not is_bnb_quantized(model):
        return "the model's base is quantized by other means than bitsandbytes"
    # vLLM may ignore adapters elsewhere without a word
    language_model, layers = set(model.get_base_model().get_decoder().modules()), lora_layers(model)
    for name, layer in layers.items():
        if layer not in language_model or not isinstance(layer.base_layer, nn.Linear):
            return f"LoRA of `{name}`, not a linear layer inside the language model, is not served by every vLLM model"
    saved = CheckpointNames(base_of(model), held_names(model))
    for name in layers:
        if saved.renamed(f"{name.removeprefix(PEFT_PREFIX)}.weight") is None:
            return f"a checkpoint, which vLLM reads, holds the weight of `{name}` in another shape"
    moved = {f"{name}.lora_{matrix}.{model.active_adapter}.weight" for name in layers for matrix in "AB"}
    if left := next((name for name, p in model.named_parameters() if p.requires_grad and name not in moved), None):
        return f"`{left}` is trained without being part of the adapter"
    if engine_rank(model) is None:
        return f"vLLM serves no LoRA of rank {adapter_rank(model)}"
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and any(".experts." in name for name, _ in model.named_parameters()):
        return "on a CPU vLLM serves no LoRA of models with experts"
    # What vLLM does not know itself runs on its Transformers backend, which serves LoRA
    for architecture in set(model.config.architectures or ()) & set(ModelRegistry.models):
        served = ModelRegistry.models[architecture].load_model_cls()
        if not supports_lora(served):
            return f"vLLM's {architecture} does not serve LoRA"
        packed = getattr(served, "packed_modules_mapping", {})
        for name in layers:
            parts = packed.get(leaf := name.rpartition(".")[2], [leaf])
            if leaf not in parts:
                return f"vLLM's {architecture} has LoRA of `{leaf}` in parts only ({', '.join(parts)})"
    return None


def engine_rank(model: "PeftModel") -> int | None:
    """The smallest `max_lora_rank` of vLLM that fits the active adapter; `None` where none does."""
    from vllm.config.lora import MaxLoRARanks

    return min((rank for rank in get_args(MaxLoRARanks) if rank >= adapter_rank(model)), default=None)
