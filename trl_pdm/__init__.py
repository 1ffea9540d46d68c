"""Train language models with predictive divergence masks: a drop-in replacement for TRL's `GRPOTrainer`."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ._hooks import TRLCompatibilityError
    from .config import PDMGRPOConfig
    from .trainer import PDMGRPOTrainer
    from .trust_region import Evidence, TokenAssessment, TrustRegion
    from .weight_sync.check import WeightSyncError

try:
    __version__ = version("trl-pdm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "Evidence",
    "PDMGRPOConfig",
    "PDMGRPOTrainer",
    "TRLCompatibilityError",
    "TokenAssessment",
    "TrustRegion",
    "WeightSyncError",
]

_HOME = {
    "PDMGRPOConfig": "config",
    "PDMGRPOTrainer": "trainer",
    "TRLCompatibilityError": "_hooks",
    "WeightSyncError": "weight_sync.check",
    "Evidence": "trust_region",
    "TokenAssessment": "trust_region",
    "TrustRegion": "trust_region",
}


if not TYPE_CHECKING:  # to a type checker, a module with `__getattr__` has every name

    def __getattr__(name: str):
        # TRL's trainer imports vLLM where it is installed: seconds that `import trl_pdm` need not cost.
        if name not in _HOME:
            raise AttributeError(f"module 'trl_pdm' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
