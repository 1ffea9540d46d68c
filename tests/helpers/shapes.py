"""Whether what a module does has the shapes of its signatures."""

import importlib
import sys
from contextlib import contextmanager

from jaxtyping import install_import_hook


@contextmanager
def shapes_checked(name):
    """A copy of the module `name` whose annotations are checked with each call; everybody else keeps the original."""
    original = sys.modules.pop(name, None)
    package, _, leaf = name.rpartition(".")
    try:
        with install_import_hook(name, "beartype.beartype"):
            yield importlib.import_module(name)
    finally:
        sys.modules[name] = original
        setattr(sys.modules[package], leaf, original)
