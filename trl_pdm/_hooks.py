"""The few places where this package reaches into TRL, and the error when TRL has moved them."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from types import ModuleType
from typing import Any

import trl


SUPPORTED_TRL = ">=1.16,<1.17"


class TRLCompatibilityError(RuntimeError):
    """The installed TRL lacks a hook that this package needs, or calls it differently.

    Training stops, because without the hook it would silently leave the trust region out.
    """

    def __init__(self, what: str):
        super().__init__(
            f"{what} This happens with a TRL release that this version of trl-pdm does not know: TRL {trl.__version__} "
            f"is installed, trl{SUPPORTED_TRL} is supported. Install a supported TRL, or a newer trl-pdm."
        )


def not_seen(trainer: type, scored: bool) -> Exception:
    """The error of a `trainer` class whose `_compute_loss` does not find the advantages.

    They come with the forward pass. If that has `scored`, the class looked in a copy made before; otherwise, too early.
    """
    first = next(cls for cls in trainer.__mro__ if "_compute_loss" in vars(cls))
    if first is trl.GRPOTrainer:
        return TRLCompatibilityError("`GRPOTrainer._compute_loss` reads the advantages before scoring.")
    if scored:
        return RuntimeError(
            f"`{first.__name__}._compute_loss` hands on a copy of `inputs` that was made before the forward pass, to which "
            "the masked advantages do not come. Change `inputs` in place, or override `compute_loss`."
        )
    return RuntimeError(
        f"`{first.__name__}._compute_loss` reads `inputs['advantages']` before the forward pass, which decides which "
        "tokens may update. Read them after `self._get_per_token_logps_and_entropies(...)`, masked and of shape (B, T), or "
        "override `compute_loss`, whose `inputs['advantages']` are those of the rollout."
    )


_substituting = RLock()


@contextmanager
def substituted(module: ModuleType, **replacements: Any) -> Iterator[None]:
    """Replace module-level names of `module` for the duration of a block, for this thread alone.

    Other threads that substitute wait; those that only call get the original.

    Raises:
        TRLCompatibilityError: `module` has no such name, so nothing would look the replacement up.
    """
    missing = sorted(set(replacements) - set(vars(module)))
    if missing:
        raise TRLCompatibilityError(f"`{module.__name__}` no longer has `{', '.join(missing)}`.")
    with _substituting:
        originals = {name: getattr(module, name) for name in replacements}
        vars(module).update({name: _ForOneThread(new, originals[name]) for name, new in replacements.items()})
        try:
            yield
        finally:
            vars(module).update(originals)


class _ForOneThread:
    """Acts as the replacement in the thread that made it, and as the original in all others."""

    def __init__(self, replacement: Any, original: Any):
        self._replacement, self._original, self._thread = replacement, original, get_ident()

    def _seen(self) -> Any:
        return self._replacement if get_ident() == self._thread else self._original

    def __call__(self, *args, **kwargs):
        return self._seen()(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._seen(), name)
