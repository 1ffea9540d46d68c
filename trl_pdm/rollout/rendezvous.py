"""The port at which the processes of a colocated engine meet, which vLLM needs even for one process."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


# What TRL sets for an engine in the training process
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """A TCP port of this machine on which nobody listens, chosen by the system."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextmanager
def rendezvous(num_processes: int) -> Iterator[None]:
    """A block in which the engine of a single process starts on a port of its own, unless `MASTER_PORT` names one.

    TRL prefers port 29500. It is free until vLLM listens there, some seconds later, so two trainings that start
    together both take it. TRL also leaves its environment variables behind. accelerate would take the next trainer of
    this process, and any process that it starts, for one of several.

    Args:
        num_processes (`int`): processes of the training. With several, TRL does right, and nothing is changed.
    """
    if num_processes > 1:
        yield
        return
    before = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if before.get("MASTER_PORT", "").strip().lower() in ("", "0", "auto"):  # TRL chooses one for these
        os.environ["MASTER_PORT"] = str(free_port())
    try:
        yield
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
