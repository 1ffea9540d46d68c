"""Rounding weights to an engine's coarser dtype without losing what training changed.

An update of 1e-5 is far smaller than the spacing of bfloat16 at a typical weight, so rounding to nearest gives the engine
the old weight again. Stochastic rounding picks one of the two neighbours, the nearer one more often, so that the
expectation is the weight itself. Of many weights that each move a little, the right share moves by a whole spacing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from .parameters import Params, adapted_names, computing_with, frozen_names, is_bnb_quantized, trains_modules_beside


# By accelerate's `mixed_precision`: the dtype to which the trainer's matrix products round weights, to nearest
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

# Elements rounded at a time, of one tensor. A CPU takes the same time with 2^18 to 2^20; on a GPU each block is a few
# launches, so the fewer the better.
_BLOCK = 1 << 20


class WeightRounding:
    """Rounds weights to the dtype in which an engine holds them.

    With `"auto"` the engine computes with what the trainer computes with, as closely as its dtype can:

    - A weight that is not trained is rounded to nearest, which is closest.
    - Under autocast a weight is rounded to nearest, as autocast does in the trainer's matrix products. (Autocast
      leaves embeddings and norms as they are. They are rounded here all the same: a tied embedding is in a matrix
      product too.)
    - Any other weight is rounded stochastically, if the engine's dtype is coarser than its own.
    - So is a weight that an adapter is merged into, even under autocast. The trainer adds the adapter's output and not
      its weights, so it does not round their sum.

    Args:
        mode (`str`): `"auto"`, or for all weights alike `"nearest"` or `"stochastic"`.
        model: the model that is trained.
        merged (`bool`): adapters are merged into the weights that are rounded. Otherwise both are rounded apart.
        autocast (`torch.dtype`, *optional*): the dtype of autocast, if it is on.
        sharded (`bool`, *optional*, defaults to `False`): no process holds the whole model.
        seed (`int`, *optional*, defaults to `0`): of stochastic rounding, the same on all processes.

    Attributes:
        dtype (`torch.dtype` or `None`): the engine's. Until it is known, weights are only copied.
        exceptions (`dict[str, torch.dtype]`): the dtypes of weights that the engine holds in another one, by name.
    """

    def __init__(
        self,
        mode: str,
        model: Any,
        *,
        merged: bool,
        autocast: torch.dtype | None = None,
        sharded: bool = False,
        seed: int = 0,
    ):
        self.mode, self.autocast, self.seed = mode, autocast, seed
        self._model, self._merges, self._sharded = model, merged, sharded
        self._merged = adapted_names(model) if merged else set()
        self._frozen = frozen_names(model) - self._merged
        self.dtype: torch.dtype | None = None
        self.exceptions: dict[str, torch.dtype] = {}

    def apply(self, named_params: Params) -> Params:
        """Yield the weights, by their names in memory, as [`rounded`] makes them."""
        for name, param in named_params:
            yield name, self.rounded(name, param.detach())

    def rounded(self, name: str, weight: Tensor) -> Tensor:
        """`weight` as the engine is to hold it, in memory of its own."""
        dtype = self.exceptions.get(name, self.dtype)
        if dtype is None or not weight.is_floating_point() or weight.dtype.itemsize < 2:
            return weight.clone()
        used = weight.to(self.autocast) if self._is_autocast(name) else weight
        if self.rounds_to_nearest(name) or is_held_by(used.dtype, dtype):
            return used.to(dtype, copy=used is weight)
        return round_stochastically(used, dtype, name, self.seed)

    @property
    def advice(self) -> str:
        """What to set where rounding takes away what was learned."""
        finer = "`vllm_dtype='float32'` (with a vLLM server: start it with `--dtype float32`)"
        or_else = " or `vllm_weight_rounding='stochastic'`" if self.mode == "nearest" else ""
        return f"Set {finer}{or_else} (see docs/weight-sync-and-lora.md)."

    @property
    def can_round_the_trainer(self) -> bool:
        """Whether [`rounded_trainer`] is possible: weights are neither sharded nor quantized, and no whole modules
        train beside an adapter."""
        return not (self._sharded or is_bnb_quantized(self._model) or trains_modules_beside(self._model))

    @contextmanager
    def rounded_trainer(self) -> Iterator[None]:
        """A block in which the trainer's own forward computes with the weights as the engine holds them. It takes
        memory for a copy of the weights."""
        with computing_with(self._model, self.rounded, self._merges):
            yield

    def _is_autocast(self, name: str) -> bool:
        return self.mode == "auto" and self.autocast is not None and name not in self._merged

    def rounds_to_nearest(self, name: str) -> bool:
        """Whether the weight `name` is rounded to nearest, whatever its dtype."""
        return self.mode == "nearest" or (self.mode == "auto" and name in self._frozen)


def is_held_by(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether each value of the floating point type `source` is one of `target`."""
    return torch.promote_types(source, target) == target


@torch.no_grad()
def round_stochastically(tensor: Tensor, dtype: torch.dtype, name: str, seed: int = 0) -> Tensor:
    """
    Round each value to one of its two neighbours in `dtype`, so that the expectation over seeds is the value itself.

    The dither is a fixed function of seed, name and position. So rounding twice gives the same bits, on every process
    and device, and a weight that grows is never rounded to less than before.

    Values that `dtype` holds stay as they are, infinities, NaN and signed zeros among them. A finite value beyond the
    largest of `dtype` becomes that largest value.

    Args:
        tensor (`torch.Tensor`): floating point, of any shape, float64 at most. Not changed.
        dtype (`torch.dtype`): `torch.bfloat16` or `torch.float16`. A dtype that holds all values of the tensor's is
            only cast to.
        name (`str`): the tensor's name. Tensors of different names have different dithers.
        seed (`int`, *optional*, defaults to `0`): so have different seeds.

    Returns:
        `torch.Tensor`: of `dtype` and the tensor's shape, contiguous, with memory of its own. Its expectation is
        within 2^-17 of a spacing of `dtype` from the tensor.
    """
    rounded = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    if is_held_by(tensor.dtype, dtype) or not tensor.numel():
        return rounded.copy_(tensor)
    flat_in, flat_out, largest = tensor.detach().reshape(-1), rounded.view(-1), torch.finfo(dtype).max
    round_block = _float32_to_bfloat16 if (tensor.dtype, dtype) == (torch.float32, torch.bfloat16) else _to_grid
    extremes: list[Tensor] = []
    for start in range(0, flat_in.numel(), _BLOCK):
        source, target = flat_in[start : start + _BLOCK], flat_out[start : start + _BLOCK]
        round_block(source, target, _dither(f"{seed}:{name}:{start}", source.numel(), tensor.device))
        extremes += source.aminmax()  # here, while the block is in the cache
    if not float(torch.stack(extremes).abs().max()) <= largest:  # also where one is NaN
        beyond = ~(flat_in.abs() <= largest)
        values = flat_in[beyond]
        flat_out[beyond] = torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(dtype)
    return rounded


# Both round what is not beyond the largest value of the target's dtype
def _float32_to_bfloat16(source: Tensor, target: Tensor, dither: Tensor) -> None:
    # bfloat16 is the upper half of float32, so a carry out of the lower half is a step to the next value away from zero.
    # The dither is below 2^16, so it never carries from a lower half of zero.
    bits = torch.add(source.view(torch.int32), dither, out=_scratch(source.device)[: source.numel()])
    target.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


@cache
def _scratch(device: torch.device) -> Tensor:
    # Kept, because on a CPU fresh memory for every block takes longer than the rounding
    return torch.empty(_BLOCK, dtype=torch.int32, device=device)


def _to_grid(source: Tensor, target: Tensor, dither: Tensor) -> None:
    info, size = torch.finfo(target.dtype), source.double().abs()
    # The spacing at a value from its exponent, below the smallest normal number the spacing there; both as bits
    smallest = int(torch.tensor(info.smallest_normal, dtype=torch.float64).view(torch.int64)) >> 52
    steps = int(torch.tensor(info.eps, dtype=torch.float64).view(torch.int64)) - (1023 << 52)
    spacing = ((size.view(torch.int64) >> 52).clamp(min=smallest) << 52).add_(steps).view(torch.float64)
    on_grid = (size / spacing + (dither.double() + 0.5) / 65536).floor_() * spacing
    target.copy_(on_grid.copysign_(source))


@cache
def _table(device: torch.device) -> Tensor:
    # Each number below 2^16 equally often, so that every position's expectation over all places to begin is exact
    drawn = torch.Generator().manual_seed(0)
    numbers = torch.randperm(_BLOCK, generator=drawn, dtype=torch.int32, device="cpu").bitwise_and_(0xFFFF)
    return numbers.repeat(2).to(device)


def _dither(key: str, count: int, device: torch.device) -> Tensor:
    """Uniform integers below 2^16: `(count,)`, int32. The same on each process and device. Not to be changed."""
    # A hash of every position would cost more than the rounding. So each block reads a stretch of one table of random
    # numbers, which begins at a place of its own. Python's `hash` would not do: it differs between processes.
    begin = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % _BLOCK
    return _table(device)[begin : begin + count]
