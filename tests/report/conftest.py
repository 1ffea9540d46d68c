"""One trained run for all tests of the report."""

import pytest

from tests.helpers.trainers import make_trainer, run
from tests.report.runs import SAMPLE, SCHEDULE, expected_tokens


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """A run with records, saved by a checkpoint, and what full logits say of its micro-batches."""
    folder = tmp_path_factory.mktemp("report") / "a_run"
    trainer = make_trainer(
        folder, **SCHEDULE, log_token_assessments=SAMPLE, log_realized_alignment=True, logging_steps=2,
        save_strategy="steps", save_steps=8,
    )  # fmt: skip
    last_of_step, compute_loss = {}, trainer.compute_loss

    def watched(model, inputs, *args, **kwargs):
        last_of_step[trainer.state.global_step + 1] = expected_tokens(model, inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
    run(trainer)
    return trainer, folder, last_of_step
