"""What is checked of a data set before an engine starts."""

import pytest
from datasets import Dataset, Features, Image, Sequence, Value
from PIL import Image as Picture

from trl_pdm import preflight


def test_rows_without_a_prompt_are_an_environments():
    preflight._check_prompts("train_dataset", Dataset.from_dict({"environment": ["game"]}), processing_class=None)


def pictures(column, has):
    picture = Picture.new("RGB", (2, 2))
    cells = {"image": [picture if x else None for x in has], "images": [[picture] if x else [] for x in has]}
    kinds = {"image": Image(), "images": Sequence(Image())}
    return Dataset.from_dict(
        {"prompt": ["a"] * len(has), column: cells[column]},
        features=Features({"prompt": Value("string"), column: kinds[column]}),
    )


@pytest.mark.parametrize("column", ["image", "images"])
def test_rows_with_and_without_images_are_refused_together(column, monkeypatch):
    """Stock fails in the processor, with an error about types, in the middle of a rollout."""
    monkeypatch.setattr(preflight, "_ROWS", 2)
    mixed = pictures(column, [True, True, True, False, True])
    with pytest.raises(ValueError, match=f"`{column}` in row 3 of `train_dataset` is empty"):
        preflight._check_images("train_dataset", mixed)
    preflight._check_images("train_dataset", mixed.select([0, 1, 4]))
    preflight._check_images("train_dataset", mixed.select([3]))
    with pytest.raises(ValueError, match=f"`{column}` in row 0"):
        preflight._check_images("train_dataset", mixed.select([3, 4]))
    preflight._check_images("train_dataset", mixed.remove_columns(column))
