"""Weights in memory under the names and in the shapes of a checkpoint.

In memory, transformers keeps some weights fused or under other names, and converts them when it loads a checkpoint.
vLLM reads checkpoints, so what is pushed to it is converted back, as `save_pretrained` does.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CheckpointNames:
    """Converts tensors back to what a checkpoint holds: one at a time, or a group that is converted together.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, without PEFT around it.
        names (`Iterable`): the names in memory of all tensors that will come.
    """

    def __init__(self, model: "PreTrainedModel", names: Iterable[str]):
        self.model = model
        back = [transform.reverse_transform() for transform in _transforms(model)[::-1]]
        converters = [transform for transform in back if isinstance(transform, WeightConverter)]
        renamings = [transform for transform in back if not isinstance(transform, WeightConverter)]
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        ignored = set(model._keys_to_ignore_on_save or ())
        # name in memory: (name in the checkpoint, or the first of several, the pattern of a converter). Some renamings
        # depend on what came before, in this order.
        self._targets: dict[str, tuple[str, str | None]] = {
            name: rename_source_key(name, renamings, converters, reverse=True)
            for name in sorted(names, key=dot_natural_key)
            if name not in ignored
        }
        self._group_sizes: dict[str, int] = {}
        for target, _ in self._targets.values():
            self._group_sizes[target] = self._group_sizes.get(target, 0) + 1

    def renamed(self, name: str) -> str | None:
        """The name that the tensor `name` has in a checkpoint; `None` where a checkpoint holds it in another shape."""
        target, pattern = self._targets[name]
        return target if pattern is None else None

    def convert(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `named_tensors`, named as in memory, under the names and in the shapes of a checkpoint."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in named_tensors:
            if name not in self._targets:
                continue
            target, pattern = self._targets[name]
            if pattern is None:
                yield target, tensor
                continue
            group = waiting.setdefault(target, {})
            # A tensor that waits for others is copied, as it may be gathered only until the next one comes
            group[name] = tensor.detach() if self._group_sizes[target] == 1 else tensor.detach().clone()
            if len(group) == self._group_sizes[target]:
                yield from self._converted(target, waiting.pop(target))

    def _converted(self, target: str, group: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        converter = None
        for name in sorted(group, key=dot_natural_key):
            pattern = self._targets[name][1]
            converter = converter or copy.deepcopy(self._converters[pattern or ""])
            converter.add_tensor(target, name, pattern, group[name])
        assert converter is not None, "a group has at least one tensor"
        for name, tensor in converter.convert(target, model=self.model, config=self.model.config).items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


def _transforms(model: "PreTrainedModel") -> list[WeightTransform]:
    loaded_by = getattr(model, "_weight_conversions", None)
    # A quantizer's cannot be reversed, and need not be: what comes is dequantized
    if loaded_by is not None and getattr(model, "hf_quantizer", None) is None:
        return list(loaded_by)
    # A model that was made in memory has no prefix that a checkpoint left out
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in found if not isinstance(transform, PrefixChange)]
