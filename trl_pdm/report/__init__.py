"""
The report of a run: one HTML page with its curves, and with the tokens that its mask held back.

    python -m trl_pdm.report RUN_DIR [--compare OTHER_RUN ...] [--step N]

This writes `RUN_DIR/report.html`, which needs no other file, and the pictures apart, into `RUN_DIR/report`. It reads
the run's logs (`trainer_state.json`, or the example's `metrics.json`), its settings (`run_settings.json`) and the
tokens recorded with `log_token_assessments`.
"""

from .page import write_report
from .runs import ReportError


__all__ = ["ReportError", "write_report"]
