"""Does the engine hold the trainer's weights? Its logprobs tell, and its layers tell which ones it does not."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from ..metrics import SYNC_DIFFERENCE_MAX, SYNC_DIFFERENCE_MEAN
from ..trust_region import Evidence, replay_support
from .parameters import Params


if TYPE_CHECKING:
    from vllm import LLM

    from ..rollout.vllm import TopKVLLMGeneration


logger = get_logger(__name__)

NOTABLE = 0.05  # nats: more than what an engine's own bfloat16 arithmetic makes of the right weights


class WeightSyncError(RuntimeError):
    """vLLM does not hold the trainer's weights, so training on its samples would train on something else."""


class SyncCheck:
    """Compares the logprobs that vLLM sampled with the training policy's, while both have the same weights.

    Args:
        every (`int`): steps between two checks, 0 for none. The first comes with the first sync.
        threshold (`float`): mean absolute difference, in nats, above which the run stops.
        gather (`Callable`): concatenates a tensor of all processes along the first dimension.
        engine ([`TopKVLLMGeneration`]): what samples.
        noise (`Collection`, *optional*): what makes the training forward random.
    """

    def __init__(
        self,
        every: int,
        threshold: float,
        gather: Callable[[Tensor], Tensor],
        engine: "TopKVLLMGeneration",
        noise: Collection[str] = (),
    ):
        self.every, self.threshold, self._gather, self.engine, self.noise = every, threshold, gather, engine, noise
        self._last: int | None = None
        self._told_why = False

    def __call__(
        self, step: int, sampled_at: int | None, evidence: Evidence, mask: Tensor, again: Callable[..., Evidence]
    ) -> dict[str, float]:
        """Check whether vLLM and the trainer agree on the tokens of a micro-batch, if a check is due.

        Args:
            step (`int`): the optimizer steps taken so far.
            sampled_at (`int` or `None`): the optimizer steps taken when the tokens were sampled.
            evidence ([`Evidence`]): the two policies at these tokens.
            mask (`Tensor`, bool, `(B, T)`): the tokens to compare.
            again (`Callable`): makes the evidence anew, without noise. It may be given a context manager to do so in.

        Returns:
            `dict[str, float]`: as of [`run`]. Empty where no check is due, or none is possible.

        Raises:
            WeightSyncError: As [`run`].
        """
        engine = self.engine
        if not engine.samples_from_the_policy or not self.is_due(step, sampled_at):
            return {}
        if engine.truncates and evidence.valid.shape[-1] == 1:
            logger.warning_once(
                "The check of synced weights is off, because sampling is truncated (`top_p`, `top_k`, `min_p` and the like) "
                "and the mask reads the sampled token alone, so that nothing tells which tokens survived. "
                "`sampling_support='replay'` turns it on."
            )
            return {}

        def over_support(evidence: Evidence) -> tuple[Evidence, Tensor]:
            if not engine.truncates:
                return evidence, mask
            replayed, complete, _ = replay_support(evidence)
            # Where a single token survived, its probability is 1 whatever the weights
            return replayed, mask & complete & (replayed.valid.sum(-1) > 1)

        evidence, known = over_support(again() if self.noise else evidence)
        trained = evidence.policy_logps
        apart = self.run(step, evidence.behavior_logps, trained, known)
        self.tell_why(
            apart, trained, known, lambda: over_support(again(engine.rounding.rounded_trainer))[0].policy_logps
        )
        return apart

    def is_due(self, step: int, sampled_at: int | None) -> bool:
        """Whether to check at `step`: the weights are those of the rollout, and the last check is long enough ago."""
        # A step before the last check is that of another training
        waits = self._last is not None and self._last <= step < self._last + self.every
        return self.every > 0 and step == sampled_at and not waits

    def run(self, step: int, sampled: Tensor, trained: Tensor, mask: Tensor) -> dict[str, float]:
        """Compare the sampled tokens' logprobs, and stop the run if only wrong weights explain their difference.

        Args:
            step (`int`): the optimizer steps taken so far.
            sampled, trained (`Tensor`, float, `(B, T, K+1)`): logprobs in nats, the sampled tokens' in slot 0.
            mask (`Tensor`, bool, `(B, T)`): the tokens to compare.

        Returns:
            `dict[str, float]`: the mean and the largest absolute difference, in nats, under the names that they are
            logged by. Empty where there is no token to compare; a check is then still due.

        Raises:
            WeightSyncError: The mean is above the threshold, or NaN.
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
        self.verify(mean, largest)
        return {SYNC_DIFFERENCE_MEAN: mean, SYNC_DIFFERENCE_MAX: largest}

    def tell_why(
        self, apart: dict[str, float], trained: Tensor, mask: Tensor, with_rounded_weights: Callable[[], Tensor]
    ) -> None:
        """Warn once of a mean difference above 0.05 nats, and say how much of it is the rounding of the weights.

        Args:
            apart (`dict[str, float]`): what [`run`] returned.
            trained, mask: as for [`run`].
            with_rounded_weights (`Callable`): computes `trained` in a block of [`WeightRounding.rounded_trainer`].
                Called only if that is possible.
        """
        mean, rounding = apart.get(SYNC_DIFFERENCE_MEAN, 0), self.engine.rounding
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

    def verify(self, mean: float, largest: float) -> None:
        """Stop the run if only wrong weights explain so large a difference of logprobs.

        Args:
            mean, largest (`float`): absolute differences in nats.

        Raises:
            WeightSyncError: `mean` is above the threshold, or NaN.
        """
        if mean <= self.threshold:
            return
        blame = named(self.engine.suspects)
        if mean != mean:
            blame = f"One of the two is no number; where it is the trainer's, its own weights are NaN. {blame}"
        raise WeightSyncError(
            f"Right after a weight sync, the logprobs that vLLM sampled differ from the training policy's by {mean:.3f} "
            f"nats on average and {largest:.3f} at most, more than `sync_check_threshold={self.threshold}` allows: the "
            f"engine does not hold the trainer's weights. {blame} Do not train on; report it, or set `use_vllm=False` "
            "(see docs/weight-sync-and-lora.md)."
        )


def named(suspects: Callable[[], list[str]]) -> str:
    """A sentence with the first of the names that `suspects` returns, or on why there are none."""
    try:
        names = suspects()
    except Exception as error:  # of a kernel that was asked in a way it does not know: not what matters here
        return f"No tensor can be named ({error!r})."
    if not names:
        return "No tensor can be named: suspect those that the engine fuses or repacks."
    return f"These tensors differ from the trainer's: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."


@torch.no_grad()
def differing_tensors(llm: "LLM", named_params: Params, tolerance: float = 0.05) -> list[str]:
    """Find the layers of an engine that do not compute what the trainer's weights would.

    It compares their outputs, because the weights that they hold may be fused, packed or quantized.

    Args:
        llm (`vllm.LLM`): an engine in this process.
        named_params: the trainer's parameters as the checkpoint names them.
        tolerance (`float`, *optional*, defaults to `0.05`): relative error that precision may explain.

    Returns:
        `list[str]`: the layers' names in the engine.
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
            if actual.shape == expected.shape:
                actual, expected = actual.nan_to_num(), expected.nan_to_num()  # else a NaN is no difference
                if (actual - expected).norm() > tolerance * expected.norm():
                    differing.append(name)
        return differing

    return llm.apply_model(compare)[0]
