"""Which checkpoint to resume from after a crash."""

import re
from contextlib import suppress
from pathlib import Path

from transformers import TrainerState


_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


def last_complete_checkpoint(output_dir: str) -> str | None:
    """
    Find the newest complete checkpoint in `output_dir`. Returns its path, or `None` where there is none.

    `transformers.trainer_utils.get_last_checkpoint` returns the newest, complete or not: a run may have been killed,
    or the disk full, while it was written. `Trainer` writes its state last, so a checkpoint whose state can be read is
    complete. (Only the controller of TRL's adaptive entropy comes later. It restarts where it is missing.)
    """
    steps = {int(found[1]): found[0] for path in Path(output_dir).glob("*") if (found := _CHECKPOINT.match(path.name))}
    for step in sorted(steps, reverse=True):
        checkpoint = Path(output_dir) / steps[step]
        with suppress(OSError, ValueError):
            TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            return str(checkpoint)
    return None
