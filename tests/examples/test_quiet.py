"""What the examples silence is named: another message of the same logger is heard."""

import logging
import sys
import warnings
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import quiet  # noqa: E402


class Listener(logging.Handler):
    def __init__(self):
        super().__init__()
        self.heard = []

    def emit(self, record):
        self.heard.append(record.getMessage())


@pytest.mark.parametrize("name", quiet.NOTICES)
def test_only_what_is_named_is_silenced(name):
    logger, listener = logging.getLogger(name), Listener()
    logger.addHandler(listener)
    try:
        for notice in quiet.NOTICES[name]:
            logger.warning(notice + " ...")
        logger.warning("Failed to load weights of layer %s", 1)
    finally:
        logger.removeHandler(listener)
    assert listener.heard == ["Failed to load weights of layer 1"]


def test_loggers_of_this_package_and_of_syncs_are_left_alone():
    assert not [name for name in quiet.NOTICES if name.startswith(("trl", "transformers", "accelerate"))]
    assert not [name for name in quiet.NOTICES if "reload" in name or "load" in name.rsplit(".", 1)[-1]]
    assert quiet.ENVIRONMENT["VLLM_LOGGING_LEVEL"] == "WARNING"


def test_other_deprecations_are_heard():
    with pytest.warns(FutureWarning, match="something else"):
        warnings.warn("`something else` is deprecated", FutureWarning)
