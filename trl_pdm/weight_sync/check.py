"""Does the engine hold the trainer's weights? The logprobs that it samples tell, and its layers tell which do not."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from ..trust_region import Evidence, replay_support
from .parameters import Params
from .rounding import WeightRounding


if TYPE_CHECKING:
    from vllm import LLM

    from ..rollout.vllm import TopKVLLMGeneration


logger = get_logger(__name__)

NOTABLE = 0.05  # nats: more than what an engine's own bfloat16 arithmetic makes of the right weights


class WeightSyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


class SyncCheck:
    """Compares, on the same weights, the logprobs that vLLM sampled with the training policy's.

    Args:
        every (`int`): steps between two checks, 0 for none. The first comes with the first sync.
        threshold (`float`): mean absolute difference, in nats, at which the run stops.
        gather (`Callable`): concatenates a tensor of all processes along the first dimension.
    """

    def __init__(self, every: int, threshold: float, gather: Callable[[Tensor], Tensor]):
        self.every, self.threshold, self._gather = every, threshold, gather
        self._last: int | None = None
        self._told_why = False

    def __call__(
        self,
        engine: "TopKVLLMGeneration",
        step: int,
        sampled_at: int | None,
        evidence: Evidence,
        mask: Tensor,
        again: Callable[..., Evidence],
        noise: Collection[str],
    ) -> dict[str, float]:
        """Check a micro-batch, if it is time to: do vLLM and the trainer agree on its tokens?

        Args:
            engine ([`TopKVLLMGeneration`]): what sampled.
            step, sampled_at (`int`): the optimizer steps taken so far, and those when the tokens were sampled.
            evidence ([`Evidence`]): the two policies there.
            mask (`Tensor`, bool, `"B T"`): the tokens to compare.
            again (`Callable`): makes the evidence anew without noise, within the context manager that it is given.
            noise: what makes the training forward random.

        Returns, raises: as [`run`].
        """
        if not engine.samples_from_the_policy or not self.is_due(step, sampled_at):
            return {}
        if engine.truncates and evidence.valid.shape[-1] == 1:
            logger.warning_once(
                "The check of synced weights is off: sampling is truncated (`top_p`, `top_k`, `min_p` and the like), and the "
                "mask reads the sampled token alone, so which tokens survived is not known. With "
                "`sampling_support='replay'` it is."
            )
            return {}

        def over_support(evidence: Evidence) -> tuple[Evidence, Tensor]:
            if not engine.truncates:
                return evidence, mask
            replayed, complete, _ = replay_support(evidence)
            # Where a single token survived, its probability is 1 whatever the weights
            return replayed, mask & complete & (replayed.valid.sum(-1) > 1)

        evidence, known = over_support(again() if noise else evidence)
        trained = evidence.policy_logps
        apart = self.run(step, evidence.behavior_logps, trained, known, engine.suspects)
        self.tell_why(
            apart,
            trained,
            known,
            engine.rounding,
            lambda: over_support(again(engine.rounding.rounded_trainer))[0].policy_logps,
        )
        return apart

    def is_due(self, step: int, sampled_at: int | None) -> bool:
        """Whether to check at `step`: when the weights have not changed since the rollout, and it is time."""
        # A step before the last check is that of another training
        waits = self._last is not None and self._last <= step < self._last + self.every
        return self.every > 0 and step == sampled_at and not waits

    def run(
        self, step: int, sampled: Tensor, trained: Tensor, mask: Tensor, suspects: Callable[[], list[str]]
    ) -> dict[str, float]:
        """Compare, and stop a run whose difference only wrong weights explain.

        Args:
            step (`int`): the optimizer steps taken so far.
            sampled, trained (`Tensor`, `"B T K+1"`): logprobs in nats, the sampled tokens' in slot 0.
            mask (`Tensor`, bool, `"B T"`): the tokens to compare.
            suspects (`Callable`): names the tensors that differ, asked only before stopping.

        Returns:
            `dict[str, float]`: `logp_difference_mean` and `logp_difference_max`, in nats. Empty, and due again, where
            there is no token to compare.

        Raises:
            WeightSyncError: The mean is above the threshold (or no number).
        """
        apart = (sampled[..., 0] - trained[..., 0].detach()).abs()
        known = mask & ~sampled[..., 0].isnan()
        apart = torch.where(known, apart, 0)
        # Read from the device at once: this is the one check that must come before the update
        gathered = self._gather(torch.stack([apart.sum(), known.sum(), apart.max()])[None]).cpu()
        total, count = gathered[:, :2].sum(0).tolist()
        if not count:
            return {}
        self._last = step
        mean, largest = total / count, gathered[:, 2].max().item()
        self.verify(mean, largest, suspects)
        return {"logp_difference_mean": mean, "logp_difference_max": largest}

    def tell_why(
        self,
        apart: dict[str, float],
        trained: Tensor,
        mask: Tensor,
        rounding: WeightRounding,
        with_rounded_weights: Callable[[], Tensor],
    ) -> None:
        """Say once, of a difference above 0.05 nats, how much of it is the rounding of the engine's weights.

        Args:
            apart (`dict[str, float]`): what [`run`] returned.
            trained, mask: as for [`run`].
            rounding ([`WeightRounding`]): how the weights reached the engine.
            with_rounded_weights (`Callable`): computes `trained` in a block of [`WeightRounding.rounded_trainer`], asked
                where that can be.
        """
        mean = apart.get("logp_difference_mean", 0)
        if self._told_why or mean <= NOTABLE:
            return
        self._told_why = True
        said = (
            f"Right after a weight sync, the logprobs that vLLM sampled differ from the training policy's by {mean:.3f} "
            "nats on average, which the trust region takes for divergence before any update. "
        )
        if not rounding.can_round_the_trainer:
            logger.warning(
                f"{said}How much of it is the rounding of weights cannot be computed for this model. {rounding.advice}"
            )
            return
        rounded = with_rounded_weights()
        moved = torch.where(mask, (rounded[..., 0] - trained[..., 0].detach()).abs(), 0)
        total, count = self._gather(torch.stack([moved.sum(), mask.sum()])[None]).sum(0).tolist()
        by_rounding = total / max(count, 1)
        said += f"Rounding the weights as the engine holds them moves them by {by_rounding:.3f} nats. "
        if by_rounding > mean / 2:
            logger.warning(f"{said}Part of what was learned does not reach the engine. {rounding.advice}")
        else:
            logger.warning(
                f"{said}The rest is how the engine computes: in which precision, by which kernels, on which quantization."
            )

    def verify(self, mean: float, largest: float, suspects: Callable[[], list[str]]) -> None:
        """Stop a run whose difference only wrong weights explain.

        Raises:
            WeightSyncError: `mean`, in nats, is above the threshold (or no number).
        """
        if mean <= self.threshold:
            return
        try:
            names = suspects()
            blame = (
                f"These tensors differ from the trainer's: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
                if names
                else "No tensor can be named: suspect those that the engine fuses or repacks."
            )
        except Exception as error:  # of a kernel that was asked in a way it does not know: not what matters here
            blame = f"No tensor can be named ({error!r})."
        if mean != mean:
            blame = f"One of the two is no number; where it is the trainer's, its own weights are NaN. {blame}"
        raise WeightSyncError(
            f"Right after a weight sync, the logprobs that vLLM sampled differ from the training policy's by {mean:.3f} "
            f"nats on average and {largest:.3f} at most, more than `sync_check_threshold={self.threshold}` allows: the "
            f"engine does not hold the trainer's weights. {blame} Do not train on; report it, or set `use_vllm=False` "
            "(see docs/weight-sync-and-lora.md)."
        )


@torch.no_grad()
def differing_tensors(llm: "LLM", named_params: Params, tolerance: float = 0.05) -> list[str]:
    """Names of the engine's layers that do not compute what the trainer's weights would.

    Layers are asked for their output rather than read: what they hold may be fused, packed or quantized.

    Args:
        llm (`vllm.LLM`): an engine in this process.
        named_params: the trainer's parameters as the checkpoint names them.
        tolerance (`float`, *optional*, defaults to `0.05`): relative error that precision may explain.
    """
    # Copies, because a merged adapter is unmerged again when the iterator ends; on the CPU, because memory may be short
    params = {name: param.detach().to("cpu", copy=True) for name, param in named_params}

    def compare(model: nn.Module) -> list[str]:
        fused, device = getattr(model, "packed_modules_mapping", {}), next(model.parameters()).device
        differing = []
        for name, layer in model.named_modules():
            name = name.removesuffix(".base_layer")
            path, _, leaf = name.rpartition(".")
            parts = [".".join(filter(None, (path, part, "weight"))) for part in fused.get(leaf, [leaf])]
            if leaf == "lm_head" and parts[0] not in params:  # tied
                parts = [part for part in params if part.endswith("embed_tokens.weight")]
            if not parts or any(part not in params for part in parts):
                continue
            weight = torch.cat([params[part].float() for part in parts]).to(device)
            own, apply = getattr(layer, "weight", None), getattr(getattr(layer, "quant_method", None), "apply", None)
            if apply is not None and weight.ndim == 2 and "embed" not in leaf:
                probe = torch.randn(4, weight.shape[1], device=weight.device)
                dtype = getattr(own, "dtype", torch.bfloat16)
                dtype = dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16  # not fp8
                actual, expected = apply(layer, probe.to(dtype)).float(), probe @ weight.T
                actual = actual[:, : expected.shape[1]]  # the engine pads the vocabulary
            elif own is not None and own.ndim == weight.ndim:
                actual, expected = own[: len(weight)].float(), weight
            else:
                continue
            if actual.shape == expected.shape and (actual - expected).norm() > tolerance * expected.norm():
                differing.append(name)
        return differing

    return llm.apply_model(compare)[0]
