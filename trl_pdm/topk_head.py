"""The training policy's log-probabilities at the rollout's candidates, from TRL's own forward and without logits.

`log pi_i = log pi_a + (z_i - z_a)`: TRL's fused LM head yields `log pi_a` of the sampled token. A candidate then costs
one row of the LM head and one dot product. The rows are gathered where TRL calls its kernel, inside the model's
forward. There ZeRO-3 and FSDP hold the full head, and the hidden states, the scale, the soft-capping, the temperature
and the compute dtype are the very ones TRL uses.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding
from trl.trainer import utils as trl_utils

from ._hooks import TRLCompatibilityError, substituted


CHUNK_BYTES = 64 * 2**20
"""Upper bound of the temporaries of one chunk, in bytes."""
TOKENS_AT_ONCE = 1024
"""Tokens per chunk in the search for the training policy's own top K."""

_KERNEL = "_ChunkedLogProbFunction"
_KERNEL_ARGUMENTS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)


@dataclass
class PolicyScores:
    """The training policy's log-probabilities of the candidates, which [`topk_head`] fills in as the forwards run.

    Attributes:
        ids (`torch.Tensor`, int): `(B, T, K+1)`, the scored token ids, the sampled token in slot 0; `-1` where a slot
            is empty.
        logps (`torch.Tensor`, float32): `(B, T, K+1)`, their log-probabilities in nats, at the sampling temperature.
            Without gradient, unless `with_grad` was set. Slot 0 always has the sampled token's. In other slots they
            are arbitrary where `ids` is `-1`.
        sum_sq (`torch.Tensor`, float32, or `None`): `(B, T)`, sum over the vocabulary of the squared probabilities.
        vocab_size (`int`): rows of the LM head.
    """

    _chunks: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    vocab_size: int = 0

    @property
    def ids(self) -> Int[Tensor, "batch tokens slots"]:
        return torch.cat([chunk[0] for chunk in self._chunks])

    @property
    def logps(self) -> Float[Tensor, "batch tokens slots"]:
        return torch.cat([chunk[1] for chunk in self._chunks])

    @property
    def sum_sq(self) -> Float[Tensor, "batch tokens"] | None:
        parts = [chunk[2] for chunk in self._chunks if chunk[2] is not None]
        return torch.cat(parts) if parts else None


class _ScoringKernel:
    """Takes the place of TRL's kernel while candidates are scored. Compiled code relies on its being one class."""

    call: Any = None

    @staticmethod
    @torch.compiler.disable
    def apply(*args: Any) -> Any:
        return _ScoringKernel.call(*args)


class _Head:
    """The arguments of one call of TRL's kernel, and the logits of any token under them."""

    def __init__(self, hidden, weight, bias, temperature, softcapping, scale):
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.temperature, self.softcapping, self.scale = temperature, softcapping, scale
        # TRL's kernel rounds logits to this dtype; the same rounding here keeps `z_i - z_a` on the same footing.
        device = hidden.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype

    def _cast_bytes(self, matrix: Tensor) -> int:
        """Bytes that a row of `matrix` takes once more in the compute dtype."""
        return 0 if matrix.dtype == self.dtype else matrix.shape[1] * self.dtype.itemsize

    def transform(self, z: Tensor) -> Tensor:
        z = z.float() * self.scale
        if self.softcapping is not None:
            z = self.softcapping * torch.tanh(z / self.softcapping)
        return z / self.temperature

    def at(self, ids: Int[Tensor, "tokens slots"]) -> Float[Tensor, "tokens slots"]:
        """Transformed logits of `ids` `(N, S)` at the hidden states `(N, H)`: `(N, S)`, float32."""
        return _LogitsAt.apply(self.hidden, self.weight, self.bias, ids, self)

    def chunks(self, n: int, slots: int) -> Iterator[tuple[slice, slice]]:
        """Slices of tokens and of slots whose rows of the head fit in `CHUNK_BYTES` together."""
        width = self.hidden.shape[1]
        # A gathered row is held once in the head's dtype, and once more where that is not the compute dtype; its id and
        # its logits come with it.
        row_bytes = width * self.weight.element_size() + self._cast_bytes(self.weight) + 32
        hidden_bytes = self._cast_bytes(self.hidden)
        slots_at_once = max(1, min(slots, (CHUNK_BYTES - hidden_bytes) // row_bytes))
        tokens_at_once = max(1, CHUNK_BYTES // (row_bytes * slots_at_once + hidden_bytes))
        for t in range(0, n, tokens_at_once):
            for s in range(0, slots, slots_at_once):
                yield slice(t, t + tokens_at_once), slice(s, s + slots_at_once)

    def products(
        self,
        hidden: Float[Tensor, "tokens width"],
        rows: Float[Tensor, "tokens slots width"],
        biases: Float[Tensor, "tokens slots"] | None,
    ) -> Float[Tensor, "tokens slots"]:
        """Transformed logits of `rows` `(N, S, H)` of the head at `hidden` `(N, H)`: `(N, S)`, float32."""
        # This way round, as with `embedding` rather than indexing, a CPU is several times faster
        products = torch.bmm(hidden.to(self.dtype).unsqueeze(1), rows.to(self.dtype).transpose(1, 2)).squeeze(1)
        if biases is not None:
            products = products + biases.to(self.dtype)
        return self.transform(products)

    def top(
        self, k: int, targets: Int[Tensor, " tokens"]
    ) -> tuple[Int[Tensor, "tokens slots"], Float[Tensor, "tokens slots"]]:
        """`targets` `(N,)`, and after each the `k` most probable tokens: ids (int32) and transformed logits (float32),
        `(N, k+1)` each. The id is -1 where one of the `k` repeats the target."""
        vocab, device = self.weight.shape[0], targets.device
        ids = torch.empty(len(targets), k + 1, dtype=torch.int32, device=device)
        z = torch.empty(len(targets), k + 1, dtype=torch.float32, device=device)
        for t in range(0, len(targets), TOKENS_AT_ONCE):
            hidden = self.hidden[t : t + TOKENS_AT_ONCE].to(self.dtype)
            # The best so far are merged tile by tile: a tile's logits are held in the compute dtype and in float32, and
            # the hidden states and the tile's rows of the head once more where theirs is not the compute dtype.
            free = CHUNK_BYTES - len(hidden) * (self._cast_bytes(self.hidden) + 32 * k)
            tile_width = max(k, free // (len(hidden) * (self.dtype.itemsize + 12) + self._cast_bytes(self.weight)))
            best = torch.empty(len(hidden), 0, device=device)
            best_ids = torch.empty(len(hidden), 0, dtype=torch.long, device=device)
            for v in range(0, vocab, tile_width):
                tile = hidden @ self.weight[v : v + tile_width].to(self.dtype).t()
                if self.bias is not None:
                    tile += self.bias[v : v + tile_width].to(self.dtype)
                tile = self.transform(tile)
                top = tile.topk(min(k, tile.shape[1]), dim=1)
                best, best_ids = torch.cat([best, top.values], 1), torch.cat([best_ids, top.indices + v], 1)
                best, order = best.topk(min(k, best.shape[1]), dim=1)
                best_ids = best_ids.gather(1, order)
            ids[t : t + TOKENS_AT_ONCE, 1:], z[t : t + TOKENS_AT_ONCE, 1:] = best_ids, best
        ids[:, 0] = targets
        z[:, :1] = self.at(ids[:, :1])
        ids[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :1], -1)
        return ids, z


class _LogitsAt(torch.autograd.Function):
    """What [`_Head.at`] computes. The backward pass gathers the rows again, so that they need not be kept. It adds up
    gradients in float32, as TRL's kernel does: a bfloat16 sum over many places of a token would round them away."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, head):
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.head = head
        z = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        for t, s in head.chunks(*ids.shape):
            chunk = ids[t, s].long().clamp(min=0)
            z[t, s] = head.products(hidden[t], embedding(chunk, weight), None if bias is None else bias[chunk])
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, ids = ctx.saved_tensors
        sources = hidden, weight, bias
        needed = [i for i in range(3) if ctx.needs_input_grad[i]]
        with trl_utils.maybe_gather_lm_head_ctx(weight, bias):
            sums = {i: torch.zeros_like(sources[i], dtype=torch.float32) for i in needed}
            for t, s in ctx.head.chunks(*ids.shape):
                chunk = ids[t, s].long().clamp(min=0)
                inputs = [hidden[t].detach(), embedding(chunk, weight), None if bias is None else bias[chunk]]
                for i in needed:
                    inputs[i].requires_grad_()
                with torch.enable_grad():
                    z = ctx.head.products(*inputs)
                parts = torch.autograd.grad(z, [inputs[i] for i in needed], grad[t, s])
                for i, part in zip(needed, parts, strict=True):
                    if i == 0:
                        sums[0][t] += part
                    else:
                        sums[i].index_add_(0, chunk.flatten(), part.flatten(0, 1).float())
        return *(sums[i].to(sources[i].dtype) if i in sums else None for i in range(3)), None, None


@contextmanager
def topk_head(
    attention_mask: Int[Tensor, "batch positions"],
    logits_to_keep: int,
    batch_size: int | None = None,
    *,
    ids: Int[Tensor, "batch tokens slots"] | None = None,
    top_k: int = 0,
    with_sum_sq: bool = False,
    with_grad: bool = False,
) -> Iterator[PolicyScores]:
    """A block in which each forward through TRL's fused LM head also scores candidates.

    Args:
        attention_mask (`torch.Tensor`): `(B, P+T)`, of the sequences that TRL is about to score.
        logits_to_keep (`int`): `T`, the number of completion positions.
        batch_size (`int`, *optional*): rows that TRL puts through one forward; all by default.
        ids (`torch.Tensor`, int, *optional*): `(B, T, K+1)`, the candidates to score, the sampled token in slot 0;
            `-1` where a slot is empty.
        top_k (`int`, *optional*, defaults to `0`): without `ids`, how many of the training policy's own most probable
            tokens to score besides the sampled one.
        with_sum_sq (`bool`, *optional*, defaults to `False`): also yield the sum of squared probabilities.
        with_grad (`bool`, *optional*, defaults to `False`): the log-probabilities have a gradient if the forward has.

    Yields:
        [`PolicyScores`]: filled as the forwards run.

    Raises:
        TRLCompatibilityError: TRL's forward did not pass through the kernel, or the kernel takes other arguments.
    """
    scores = PolicyScores()
    kernel = getattr(trl_utils, _KERNEL, None)
    parameters = () if kernel is None else tuple(inspect.signature(kernel.forward).parameters)[1:]
    if kernel is None or parameters != _KERNEL_ARGUMENTS:
        raise TRLCompatibilityError(f"TRL's fused LM head `{_KERNEL}` takes {parameters}, not {_KERNEL_ARGUMENTS}.")
    rows_done = 0

    def apply(*args: Any):
        nonlocal rows_done
        call = dict(zip(_KERNEL_ARGUMENTS, args, strict=True))
        if with_sum_sq:
            call["outputs"] = (*call["outputs"], "log_sum_sq_probs")
        outputs = kernel.apply(*call.values())
        with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
            rows = min(batch_size or len(attention_mask), len(attention_mask) - rows_done)
            mask = attention_mask[rows_done : rows_done + rows, -logits_to_keep:]
            n = len(call["hidden"])
            if n >= rows * (attention_mask.shape[1] - 1):  # TRL scores every position where there is no Triton
                source = torch.arange(n, device=mask.device).view(rows, -1)[:, -logits_to_keep:].reshape(-1)
                slots = torch.arange(rows * logits_to_keep, device=mask.device)
            else:  # and only the labelled ones, row by row, where there is; sorting spares the host sync of `nonzero`
                source = slice(None)
                slots = mask.reshape(-1).argsort(descending=True, stable=True)[:n]

            def lay_out(values: Tensor, fill: float = 0) -> Tensor:
                flat = values.new_full((rows * logits_to_keep, *values.shape[1:]), fill)
                return flat.index_copy_(0, slots, values).view(rows, logits_to_keep, *values.shape[1:])

            targets = call["targets"][source]
            head = _Head(
                call["hidden"][source],
                call["weight"],
                call["bias"],
                call["temperature"],
                call["final_logit_softcapping"],
                call["logit_scale"],
            )
            logps = outputs[0].float()[source, None]
            if ids is not None:
                chunk_ids = ids[rows_done : rows_done + rows].flatten(0, 1)[slots]
                if chunk_ids.shape[1] > 1:
                    # An empty slot 0 still stands for the sampled token.
                    z = head.at(torch.cat([targets[:, None].to(chunk_ids.dtype), chunk_ids[:, 1:]], dim=1))
                    logps = logps + (z - z[:, :1])
            elif top_k > 0:
                chunk_ids, z = head.top(top_k, targets)
                logps = logps + (z - z[:, :1])
            else:
                chunk_ids = targets[:, None].int()
            sum_sq = lay_out(outputs[2].exp()[source]) if with_sum_sq else None
            scores._chunks.append((lay_out(chunk_ids, -1), lay_out(logps), sum_sq))
            scores.vocab_size = len(call["weight"])
            rows_done += rows
        return outputs

    _ScoringKernel.call = apply
    try:
        with substituted(trl_utils, **{_KERNEL: _ScoringKernel}):
            yield scores
    finally:
        _ScoringKernel.call = None
    if rows_done != len(attention_mask):
        raise TRLCompatibilityError(f"TRL's forward did not score its tokens through `trl.trainer.utils.{_KERNEL}`.")


def show_bias_of_trained_rows(model: Any) -> None:
    """Let TRL's forward find the `bias` of the LM head. PEFT's layer around a tied head with `trainable_token_indices`
    shows only its `weight`."""
    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper) and not hasattr(head, "bias"):
        # Not registered, or a checkpoint would hold it twice
        object.__setattr__(head, "bias", head.token_adapter.get_base_layer().bias)
