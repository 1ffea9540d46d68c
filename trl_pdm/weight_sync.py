"""Training weights into vLLM, so that the engine samples from the policy that is trained.

Two strategies: *full* moves every parameter, with the adapter merged and a quantized base dequantized; *adapter* moves
the base once and then only the LoRA matrices, which vLLM serves next to it. Merging rounds small updates away in a bf16
engine; an adapter keeps them, and is a small fraction of the bytes.
"""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from inspect import getmembers, ismethod, signature
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from peft import PeftType
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from safetensors.torch import save_file
from torch import Tensor, nn

from ._hooks import TRLCompatibilityError


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm import LLM

logger = get_logger(__name__)

WEIGHT_SYNCS = ("auto", "full", "adapter")

Params = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class SyncRecord:
    """One weight sync.

    Attributes:
        mode (`str`): `"full"` or `"adapter"`.
        bytes (`int`): size of the tensors that this process handed over.
        seconds (`float`): how long it took, waiting for the engine included.
    """

    mode: str
    bytes: int
    seconds: float


class FullSync:
    """Every parameter, every time.

    Args:
        params (`Callable`): yields the parameters under the names and in the shapes of the checkpoint.
        model (`nn.Module`): the model that is trained, whose buffers go along.
    """

    mode = "full"
    engine_kwargs: dict[str, Any] = {}

    def __init__(self, params: Callable[[], Params], model: nn.Module):
        self.params, self.model = params, model

    def push(self, llm: "LLM") -> int:
        """Bring an engine in this process up to date. Returns the bytes moved."""
        return reload_weights(llm, chain(self.params(), persistent_buffers(self.model)))


class AdapterSync:
    """The base once, then only the active LoRA adapter, which every generation of the engine uses.

    Args:
        model ([`~peft.PeftModel`]): the model that is trained.
        base_every_time (`bool`, *optional*, defaults to `False`): the engine forgets its weights between syncs.
    """

    mode = "adapter"

    def __init__(self, model: "PeftModel", base_every_time: bool = False):
        self.model, self.base_every_time = model, base_every_time
        self.engine_kwargs = {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(model)}
        self.request: Any = None  # the live version. Each has its own id, because vLLM caches by id.
        remove_stale_folders()

    def push(self, llm: "LLM") -> int:
        """Bring an engine in this process up to date. Returns the bytes moved."""
        from vllm.lora.request import LoRARequest

        moved, old = 0, self.request.lora_int_id if self.request else 0
        if not old or self.base_every_time:
            # The engine loaded a checkpoint, which need not be what the trainer holds
            params = lora_model_params(self.model, merged=False)
            moved += reload_weights(llm, chain(params, persistent_buffers(self.model)))
        if old:
            llm.llm_engine.remove_lora(old)
        else:
            self._attach_to(llm)
        tensors, rank = adapter_tensors(self.model), adapter_rank(self.model)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with private_folder(size) as folder:
            config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            request = LoRARequest(f"policy-{old + 1}", old + 1, folder)
            # Loading it now, and not with the first generation, lets the folder go right after
            if not llm.llm_engine.add_lora(request) or llm.llm_engine.list_loras() != {request.lora_int_id}:
                raise RuntimeError(
                    f"vLLM did not take {request.lora_name} of the LoRA adapter in place of the last one."
                )
        self.request = request
        return moved + size

    def _attach_to(self, llm: "LLM") -> None:
        # At the engine, not in our `generate`: rollout functions of users call `llm.generate` and `llm.chat` themselves.
        def with_adapter(method):
            @wraps(method)
            def call(*args, **kwargs):
                if kwargs.get("lora_request") is None:
                    kwargs["lora_request"] = self.request
                return method(*args, **kwargs)

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
) -> FullSync | AdapterSync:
    """
    Choose how to bring the weights of `model` into vLLM.

    Args:
        requested (`str`): `"full"`, `"adapter"`, or `"auto"` for `"adapter"` where vLLM can serve it.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model that is trained.
        stock_params (`Callable`): TRL's own walk over the parameters, which gathers sharded ones and merges adapters.
        colocated (`bool`, *optional*, defaults to `True`): the engine runs in this process.
        sharded (`bool`, *optional*, defaults to `False`): parameters are sharded (ZeRO-3, FSDP).
        base_every_time (`bool`, *optional*, defaults to `False`): the engine forgets its weights between syncs.

    Raises:
        ValueError: `"adapter"` was asked for and is impossible, or the model cannot be synchronised at all: a quantized
            base without a plain adapter, or an adapter that unties tied embeddings.
    """
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
    if requested != "full" and not reason:
        return AdapterSync(model, base_every_time)
    if requested == "auto" and is_peft_model(model):
        logger.warning(f"`vllm_weight_sync='auto'` moves all weights at each sync ('full'), because {reason}.")
    # TRL merges in place and subtracts again, which in bf16 moves the weights that are trained
    return FullSync(stock_params if not_plain else lambda: lora_model_params(model, merged=True), model)


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


def parts_tied_embeddings(model: "PeftModel") -> bool:
    """Whether the adapter of `model` trains one of two embeddings that its configuration ties, or each for itself."""
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
        if not supports_lora(ModelRegistry.models[architecture].load_model_cls()):
            return f"vLLM's {architecture} does not serve LoRA"
    return None


def lora_layers(model: "PeftModel") -> dict[str, LoraLayer]:
    """The layers of the active adapter, by their names in `model`."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {name: layer for name, layer in layers if model.active_adapter in layer.r}


def adapter_rank(model: "PeftModel") -> int:
    return max(layer.r[model.active_adapter] for layer in lora_layers(model).values())  # `rank_pattern` sets several


def engine_rank(model: "PeftModel") -> int | None:
    """The smallest `max_lora_rank` of vLLM that fits the active adapter."""
    from vllm.config.lora import MaxLoRARanks

    return min((rank for rank in get_args(MaxLoRARanks) if rank >= adapter_rank(model)), default=None)


# ---- What the trainer holds


def is_bnb_quantized(model: nn.Module) -> bool:
    return any(get_bnb_param_type(param) for param in model.parameters())


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


# ---- Into the engine


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


# ---- The adapter's way: a folder that lives as long as vLLM reads it

_FOLDER_PREFIX = "trl-pdm-adapter-"
_SHARED_MEMORY = "/dev/shm"


@contextmanager
def private_folder(size: int) -> Iterator[str]:
    """A folder that only this user can read, in memory if `size` bytes fit there, gone when the block ends."""
    in_memory = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=_SHARED_MEMORY if in_memory else None) as folder,
        _locked(folder, fcntl.LOCK_SH),
    ):
        yield folder


def remove_stale_folders() -> None:
    """Remove the adapter folders of processes that were killed."""
    for parent in {_SHARED_MEMORY, tempfile.gettempdir()}:
        for folder in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
            with suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):  # else its process is alive
                if any(folder.iterdir()):  # else it may be one that is made right now, and not locked yet
                    shutil.rmtree(folder)


@contextmanager
def _locked(folder: str | Path, operation: int) -> Iterator[None]:
    # The kernel drops the lock with the process, also across containers that share the folder but no process ids
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)
