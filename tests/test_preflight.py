"""What is checked of a data set before an engine starts."""

from datasets import Dataset

from trl_pdm import preflight


def test_rows_without_a_prompt_are_an_environments():
    preflight._check_prompts("train_dataset", Dataset.from_dict({"environment": ["game"]}), processing_class=None)
