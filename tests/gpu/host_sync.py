"""Where a computation would make the host wait for a GPU, found without one: what is read, and who asked for it."""

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


# Operators whose result, or the shape of it, the host must know
READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "unique_dim",
    "_unique2",
    "bincount",
}
READS |= {"unique_consecutive", "repeat_interleave", "nonzero_static", "histc", "allclose"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Those that a tensor on the host does not pass on to an operator: copies to the host, and from it
COPIES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.__array__}
COPIES |= {torch.Tensor.new_tensor, torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray}

OURS = "trl_pdm"
PACKAGES = (OURS, "trl", "transformers", "accelerate", "peft")
_IN_PACKAGE = re.compile(rf"/({'|'.join(PACKAGES)})/([\w/]+)\.py$")


def _place(path: str, function: str) -> str | None:
    found = _IN_PACKAGE.search(path.replace(os.sep, "/"))
    return f"{found[1]}/{found[2]}.py {function}" if found else None


def caller() -> str:
    """The innermost function of one of `PACKAGES` that is running, or the operator that is differentiated."""
    frame = sys._getframe(1)
    while frame is not None:
        if place := _place(frame.f_code.co_filename, frame.f_code.co_name):
            return place
        if frame.f_code.co_name == "_engine_run_backward":
            node = torch._C._current_autograd_node()
            return f"torch {node.name()}" if node else "torch, backwards"
        frame = frame.f_back
    return "elsewhere"


class _Operators(TorchDispatchMode):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # PyTorch writes one number to the places of a mask without looking for them
        filling = by_mask and "put" in name and args[2].numel() == 1 and len(args[1]) == 1
        if (name in READS or by_mask) and not filling and args[0].device.type != "meta":
            self.note(name)
        return func(*args, **kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_host = func is torch.Tensor.to and "cpu" in (*args[1:], *kwargs.values())
        if to_host or (func in COPIES and func is not torch.Tensor.item):  # `item` is an operator as well
            self.note(func.__name__)
        return func(*args, **kwargs)


@contextmanager
def host_syncs() -> Iterator[set[tuple[str, str]]]:
    """Collects `(place, operation)` of all that would make the host wait, were the tensors on a GPU."""
    found: set[tuple[str, str]] = set()
    busy = False

    def note(operation: str) -> None:
        nonlocal busy
        if not busy:
            busy = True
            found.add((caller(), operation))
            busy = False

    with ExitStack() as stack:
        stack.enter_context(_Functions(note))
        stack.enter_context(_Operators(note))
        yield found


def ours(found) -> set[tuple[str, str]]:
    return {entry for entry in found if entry[0].startswith(OURS + "/")}


@contextmanager
def host_syncs_on_gpu() -> Iterator[set[tuple[str, str]]]:
    """The same, as CUDA itself tells them: an error would end at the first one of TRL's."""
    found: set[tuple[str, str]] = set()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: (
            found.add((caller(), "synchronizes")) if "synchronizing" in str(message) else None
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
