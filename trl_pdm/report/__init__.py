"""
A run's curves, and the tokens that its mask holds back, as one page that needs nothing else.

    python -m trl_pdm.report RUN_DIR [--compare OTHER_RUN ...] [--step N]

writes `RUN_DIR/report.html` and the figures, `RUN_DIR/report/*.png`. It reads what the run logged, in a
`trainer_state.json` or the example's `metrics.json`, its `run_settings.json`, and the token records of
`log_token_assessments`.
"""

from .page import write_report
from .runs import ReportError


__all__ = ["ReportError", "write_report"]
