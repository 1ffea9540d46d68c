"""What is said of a model, its data and its surroundings before a training starts."""

from accelerate.logging import get_logger


logger = get_logger(__name__)  # of the main process
