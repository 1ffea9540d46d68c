"""The few places where this package reaches into TRL, and the error when TRL has moved them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import trl


SUPPORTED_TRL = ">=1.16,<1.17"


class TRLCompatibilityError(RuntimeError):
    """TRL lacks a hook that this package needs, or calls it differently.

    Training on would silently leave the trust region out, so nothing goes on after it.
    """

    def __init__(self, what: str):
        super().__init__(
            f"{what} This happens with a TRL release that this version of trl-pdm does not know: TRL {trl.__version__} "
            f"is installed, trl{SUPPORTED_TRL} is supported. Install a supported TRL, or a newer trl-pdm."
        )


@contextmanager
def substituted(module: ModuleType, **replacements: Any) -> Iterator[None]:
    """Replace module-level names of `module` for the duration of a block.

    Raises:
        TRLCompatibilityError: `module` has no such name, so nothing would look the replacement up.
    """
    missing = sorted(set(replacements) - set(vars(module)))
    if missing:
        raise TRLCompatibilityError(f"`{module.__name__}` no longer has `{', '.join(missing)}`.")
    originals = {name: getattr(module, name) for name in replacements}
    vars(module).update(replacements)
    try:
        yield
    finally:
        vars(module).update(originals)
