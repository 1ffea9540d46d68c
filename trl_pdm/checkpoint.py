"""Which checkpoint to resume from after a crash."""

import os
from contextlib import suppress

from transformers import TrainerState
from transformers.trainer_utils import sort_checkpoints


def last_complete_checkpoint(output_dir: str) -> str | None:
    """
    The newest checkpoint in `output_dir` that was written to its end, `None` where there is none.

    `transformers.trainer_utils.get_last_checkpoint` returns the newest, which may be what a run was writing when it was
    killed or the disk was full. The trainer's state is written last: a checkpoint whose state can be read is complete.
    """
    for checkpoint in reversed(sort_checkpoints(output_dir)):
        with suppress(OSError, ValueError):
            TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            return checkpoint
    return None
