"""Checks of the model and the data at construction, before an engine takes its time to start.

They refuse what would fail later, or would train on something else without a word.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset


if TYPE_CHECKING:
    from .rollout.trainer import TopKRolloutTrainer

_ROWS = 1000  # of a column of images, read at a time


def check(trainer: "TopKRolloutTrainer") -> None:
    """Refuse a model and datasets that cannot be trained on.

    Raises:
        ValueError: The vocabulary is too small for the tokenizer or the top K, no parameter is trainable, a prompt
            holds no token, or only some rows have images.
    """
    vocab_size = trainer.model.config.get_text_config().vocab_size
    trainer.args.check_vocabulary(vocab_size, _embeddings_needed(trainer.processing_class))
    _check_trainable(trainer.model)
    if trainer.rollout_func is None:  # otherwise it is the function that makes tokens of the prompts
        _check_prompts("train_dataset", trainer.train_dataset, trainer.processing_class)
        _check_images("train_dataset", trainer.train_dataset)
        evaluated = trainer.eval_dataset
        named = evaluated if isinstance(evaluated, dict) else {None: evaluated}
        for name, dataset in named.items():
            field = "eval_dataset" if name is None else f"eval_dataset[{name!r}]"
            _check_prompts(field, dataset, trainer.processing_class)
            _check_images(field, dataset)


def _embeddings_needed(processing_class: Any) -> int:
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    # Some tokenizers of text models know a placeholder for images that their text models have no row for
    placeholders = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("image", "audio", "video")}
    return 1 + max(set(tokenizer.get_vocab().values()) - placeholders, default=-1)


def _check_trainable(model: Any) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "No parameter of `model` has `requires_grad=True`, so there is nothing to train. Load an adapter with "
            "`PeftModel.from_pretrained(..., is_trainable=True)`, or leave some parameters unfrozen."
        )


def _check_prompts(field: str, dataset: Any, processing_class: Any) -> None:
    # A stream is read once, so its rows are checked when they are sampled from. An environment may own all prompts.
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return
    for row, prompt in enumerate(dataset["prompt"]):
        if isinstance(prompt, str) and not prompt.strip() and not len(processing_class(text=[prompt])["input_ids"][0]):
            raise ValueError(
                f"The `prompt` in row {row} of `{field}` is {prompt!r}, which holds no token, and nothing can be sampled "
                "after none. Leave the row out, or let it begin with a token of your choice."
            )


def _check_images(field: str, dataset: Any) -> None:
    """Refuse images in some rows only: TRL processes a batch with images in each row, or in none."""
    column = next(
        (name for name in ("images", "image") if name in (getattr(dataset, "column_names", None) or ())), None
    )
    if column is None or not isinstance(dataset, Dataset) or not len(dataset):
        return
    stored, lacks = dataset.select_columns(column).with_format("arrow"), []  # as Arrow has them: none is decoded
    for start in range(0, len(dataset), _ROWS):
        cells = stored[start : start + _ROWS][column]
        is_empty = pc.is_null(cells)
        if column == "images":
            is_empty = pc.equal(pc.fill_null(pc.list_value_length(cells), 0), 0)
        lacks.append(is_empty.to_numpy())
    lacking = np.concatenate(lacks)
    if lacking.any() and not lacking.all():
        raise ValueError(
            f"The `{column}` in row {lacking.argmax()} of `{field}` is empty, and other rows have images. TRL processes a "
            "batch with images in each row or in none: train on the two kinds of rows apart."
        )
