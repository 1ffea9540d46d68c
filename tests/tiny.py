"""The former place of what is in `tests.helpers`."""

from tests.helpers.tiny import count_ones, model, prompts, save, tokenizer  # noqa: F401
from tests.helpers.trainers import ON_CPU  # noqa: F401
