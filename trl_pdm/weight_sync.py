"""Training weights into vLLM, so that the engine samples from the policy that is trained.

Two strategies: *full* moves every parameter, with the adapter merged and a quantized base dequantized; *adapter* moves
the base once and then only the LoRA matrices, which vLLM serves next to it. Merging rounds small updates away in a bf16
engine; an adapter keeps them, and is a small fraction of the bytes.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import getmembers, ismethod, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import torch
from accelerate.utils import is_peft_model
from peft import PeftType
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from safetensors.torch import save_file
from torch import Tensor, nn

from ._hooks import TRLCompatibilityError


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm import LLM

logger = logging.getLogger(__name__)

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
    """

    mode = "full"
    engine_kwargs: dict[str, Any] = {}

    def __init__(self, params: Callable[[], Params]):
        self.params = params

    def push(self, llm: "LLM") -> int:
        """Bring a colocated engine up to date. Returns the bytes moved."""
        return reload_weights(llm, self.params())


class AdapterSync:
    """The base once, then only the active LoRA adapter, attached to every generation.

    Args:
        model ([`~peft.PeftModel`]): a model for which [`why_not_servable`] knows no reason.
        rank (`int`): the engine's `max_lora_rank`.
        base_every_time (`bool`): the engine forgets its weights between syncs (sleep level 2).
    """

    mode = "adapter"

    def __init__(self, model: "PeftModel", rank: int, base_every_time: bool = False):
        self.model, self.base_every_time = model, base_every_time
        self.engine_kwargs = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        self.request: Any = None  # the live version; each has its own id, because vLLM caches by id
        remove_stale_folders()

    def push(self, llm: "LLM") -> int:
        """Bring a colocated engine up to date. Returns the bytes moved."""
        from vllm.lora.request import LoRARequest

        moved, old = 0, self.request
        if old is None or self.base_every_time:
            # The engine loaded a checkpoint, which need not be what the trainer holds
            moved += reload_weights(llm, lora_model_params(self.model, merged=False))
        if old is None:
            self._attach(llm)
        else:
            llm.llm_engine.remove_lora(old.lora_int_id)
        version = 1 if old is None else old.lora_int_id + 1
        tensors = adapter_tensors(self.model)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with private_folder(size) as folder:
            rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A.weight"))
            config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            request = LoRARequest(f"policy-{version}", version, folder)
            # Loading it now, not with the first generation, is why the folder can be gone right after
            if not llm.llm_engine.add_lora(request) or llm.llm_engine.list_loras() != {version}:
                raise RuntimeError(f"vLLM did not take version {version} of the adapter in the place of the last one.")
        self.request = request
        return moved + size

    def _attach(self, llm: "LLM") -> None:
        # At the engine, not in our `generate`: users' rollout functions call `llm.generate` and `llm.chat` themselves.
        def with_adapter(method):
            @wraps(method)
            def call(*args, **kwargs):
                if kwargs.get("lora_request") is None:
                    kwargs["lora_request"] = self.request
                return method(*args, **kwargs)

            return call

        generating = {
            name: method
            for name, method in getmembers(llm, ismethod)
            if not name.startswith("_") and "lora_request" in signature(method).parameters
        }
        if "generate" not in generating:
            raise TRLCompatibilityError("vLLM's `LLM.generate` no longer takes a `lora_request`.")
        for name, method in generating.items():
            setattr(llm, name, with_adapter(method))


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
        requested (`str`): `"auto"`, `"full"` or `"adapter"`; `"auto"` means `"adapter"` where vLLM can serve it.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model that is trained.
        stock_params (`Callable`): TRL's own walk over the parameters, which gathers sharded ones and merges adapters.
        colocated (`bool`, *optional*, defaults to `True`): the engine runs in this process.
        sharded (`bool`, *optional*, defaults to `False`): parameters are sharded (ZeRO-3, FSDP).
        base_every_time (`bool`, *optional*, defaults to `False`): the engine forgets its weights between syncs.

    Returns:
        [`FullSync`] or [`AdapterSync`].

    Raises:
        ValueError: `"adapter"` was asked for and is impossible, or a quantized base cannot be synchronised at all.
    """
    not_mergeable = "it has no LoRA adapter" if not is_peft_model(model) else _why_not_plain_lora(model, sharded)
    if is_bnb_quantized(model) and not_mergeable:
        raise ValueError(
            f"`use_vllm=True` does not work for this bitsandbytes-quantized model, because {not_mergeable}. Train LoRA "
            "adapters on it (`peft_config=LoraConfig(...)`), load it without quantization, or set `use_vllm=False`."
        )
    reason = "the vLLM server takes full weights only (`vllm_mode='server'`)" if not colocated else None
    reason = reason or not_mergeable or why_not_servable(model)
    if requested == "adapter" and reason:
        raise ValueError(
            f"`vllm_weight_sync='adapter'` is not possible here, because {reason}. Set `vllm_weight_sync='full'`, or "
            "leave it at 'auto'."
        )
    if requested == "full" or reason:
        if requested == "auto" and is_peft_model(model):
            logger.warning(f"`vllm_weight_sync='auto'` means 'full' here, because {reason}.")
        # TRL merges in place and subtracts again, which in low precision moves the weights that are trained
        return FullSync(stock_params if not_mergeable else lambda: lora_model_params(model, merged=True))
    return AdapterSync(model, engine_rank(model), base_every_time)


# ---- What the engine can serve

# Fields of `peft.LoraConfig` that vLLM does not serve, and their harmless values
_UNSERVABLE = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


def _why_not_plain_lora(model: "PeftModel", sharded: bool) -> str | None:
    """Why `W + scaling * B A`, layer by layer, is not what `model` computes; `None` where it is."""
    if sharded:
        return "its parameters are sharded (ZeRO-3 or FSDP)"
    config = model.active_peft_config
    if config.peft_type != PeftType.LORA:
        return f"its PEFT method is {config.peft_type.value}, not LoRA"
    if len(model.active_adapters) != 1:
        return f"several adapters are active ({', '.join(model.active_adapters)})"
    for field in ("use_dora", "lora_bias", "trainable_token_indices", "target_parameters"):
        if (value := getattr(config, field, None)) not in (None, *_UNSERVABLE[field]):
            return f"of `{field}={value!r}` in its LoRA config"
    for name, layer in lora_layers(model).items():
        if layer.lora_variant.get(model.active_adapter) or not isinstance(layer.base_layer, (nn.Linear, nn.Embedding)):
            return f"`{name}` is adapted by more than two matrices of a linear layer"
    return None


def why_not_servable(model: "PeftModel") -> str | None:
    """Why vLLM cannot serve the active adapter of a plain LoRA model next to its base; `None` where it can."""
    config, adapter = model.active_peft_config, model.active_adapter
    for field, harmless in _UNSERVABLE.items():
        if (value := getattr(config, field, harmless[0])) not in harmless:
            return f"vLLM does not serve LoRA with `{field}={value!r}`"
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None and not is_bnb_quantized(model):
        return f"its base is quantized by {type(quantization).__name__}, which only vLLM's own loader can load"
    # vLLM may ignore adapters outside the language model without a word, and lm_head and embeddings depend on the model
    decoder = set(model.get_base_model().get_decoder().modules())
    layers = lora_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer.base_layer, nn.Linear) or layer not in decoder:
            return f"`{name}` is not a linear layer of the language model"
    served = {f"{name}.{matrix}.{adapter}.weight" for name in layers for matrix in ("lora_A", "lora_B")}
    for name, param in model.named_parameters():
        if param.requires_grad and name not in served:
            return f"`{name}` is trained and not part of the LoRA adapter"
    if engine_rank(model) is None:
        return f"vLLM serves no LoRA of rank {_rank(model)}"
    if not _engine_serves_lora(model.config.architectures or ()):
        return f"vLLM's {', '.join(model.config.architectures)} does not support LoRA"
    return None


def lora_layers(model: "PeftModel") -> dict[str, LoraLayer]:
    """The layers of the active adapter, by their name in `model`."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and model.active_adapter in module.r
    }


def _rank(model: "PeftModel") -> int:
    return max(layer.r[model.active_adapter] for layer in lora_layers(model).values())


def engine_rank(model: "PeftModel") -> int | None:
    """The smallest `max_lora_rank` of vLLM that fits the active adapter, `None` if none does."""
    from vllm.config.lora import MaxLoRARanks

    return min((rank for rank in get_args(MaxLoRARanks) if rank >= _rank(model)), default=None)


def _engine_serves_lora(architectures: Iterable[str]) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    # What vLLM does not know runs on its Transformers backend, which serves LoRA
    known = (ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models)
    return all(supports_lora(entry.load_model_cls()) for entry in known)


# ---- What the trainer holds


def is_bnb_quantized(model: nn.Module) -> bool:
    return any(get_bnb_param_type(param) for param in model.parameters())


_CAST_NOTICES: set[str] = set()


def quiet_bitsandbytes() -> None:
    """Let bitsandbytes say once that it casts inputs to float16, not once a matrix multiplication."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_first_cast_notice)


def _is_first_cast_notice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if "inputs will be cast" not in message:
        return True
    first = message not in _CAST_NOTICES
    _CAST_NOTICES.add(message)
    return first


def unquantized_view(model: "PreTrainedModel | PeftModel") -> SimpleNamespace:
    """What TRL reads of a model before it starts an engine, without the layers that would have it start another."""
    modules = [(name, m) for name, m in model.named_modules() if not get_bnb_param_type(getattr(m, "weight", None))]
    return SimpleNamespace(name_or_path=model.name_or_path, named_modules=lambda: iter(modules))


def adapter_tensors(model: "PeftModel") -> dict[str, Tensor]:
    """The active adapter in PEFT's file format, its scaling (rsLoRA's and `alpha_pattern`'s too) inside the B matrix."""
    adapter, tensors = model.active_adapter, {}
    for name, layer in lora_layers(model).items():
        tensors[f"{name}.lora_A.weight"] = layer.lora_A[adapter].weight.detach().contiguous()
        tensors[f"{name}.lora_B.weight"] = (layer.lora_B[adapter].weight.detach() * layer.scaling[adapter]).contiguous()
    return tensors


@torch.no_grad()
def lora_model_params(model: "PeftModel", merged: bool) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a plain LoRA model's base, dequantized, with the active adapter added if `merged`."""
    base, adapter = model.get_base_model(), model.active_adapter
    for name, param in base.named_parameters():
        if model.base_model.prefix in name or "original_module" in name:
            continue
        if ".modules_to_save." in name:
            if f".modules_to_save.{adapter}." not in name:
                continue  # another adapter's
            name = name.replace(f".modules_to_save.{adapter}", "")
        path, _, leaf = name.rpartition(".")
        if get_bnb_param_type(param):
            param = dequantize_bnb_weight(param, state=getattr(base.get_submodule(path), "state", None))
        if path.endswith(".base_layer"):
            layer = base.get_submodule(path := path.removesuffix(".base_layer"))
            if merged and leaf == "weight" and adapter in layer.r:
                param = (param.float() + layer.get_delta_weight(adapter).float()).to(param.dtype)
        yield f"{path}.{leaf}", param


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

    with _quiet_reload():
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies()})
    llm.apply_model(_repack_tied_heads)
    return moved


@contextmanager
def _quiet_reload() -> Iterator[None]:
    # A reload warns about each layer that got no weights. Tables computed from the config never do, and a tied head is
    # seen to below; any other layer would keep old weights, so its warning stays.
    def is_news(record: logging.LogRecord) -> bool:
        layer = str(record.args[0]) if record.args else ""
        return "Failed to load weights" not in record.msg or not ("RotaryEmbedding" in layer or "LMHead" in layer)

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload_logger.addFilter(is_news)
    try:
        yield
    finally:
        reload_logger.removeFilter(is_news)


def _repack_tied_heads(model: nn.Module) -> None:
    # The reload visits a tied weight once, as the embedding: a head that was repacked keeps its old, packed copy.
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for head in layers:
        if isinstance(head, ParallelLMHead) and id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


# ---- The adapter's way: a folder that lives as long as vLLM reads it

_FOLDER_PREFIX = "trl-pdm-adapter-"
_SHARED_MEMORY = "/dev/shm"


@contextmanager
def private_folder(size: int) -> Iterator[str]:
    """A folder that only this user can read, in memory if `size` bytes fit there, gone when the block ends."""
    import fcntl

    in_memory = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=_SHARED_MEMORY if in_memory else None) as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)  # the kernel drops it with the process, so that it tells who is alive
            yield folder
        finally:
            os.close(lock)


def remove_stale_folders() -> None:
    """Remove the adapter folders of processes that were killed."""
    import fcntl

    for parent in {_SHARED_MEMORY, tempfile.gettempdir()}:
        for folder in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            except OSError:  # another user's, or no folder
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:  # its process is alive
                pass
            finally:
                os.close(lock)
