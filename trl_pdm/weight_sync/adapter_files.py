"""The adapter's way into the engine: a private folder that lives as long as vLLM reads it."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


_FOLDER_PREFIX = "trl-pdm-adapter-"
_SHARED_MEMORY = "/dev/shm"


@contextmanager
def private_folder(size: int) -> Iterator[str]:
    """A folder that only this user can read, removed when the block ends. In memory, if twice `size` bytes are free."""
    in_memory = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=_SHARED_MEMORY if in_memory else None) as folder,
        _locked(folder, fcntl.LOCK_SH),
    ):
        yield folder


def remove_stale_folders() -> None:
    """Remove the adapter folders of processes that were killed."""
    for parent in {_SHARED_MEMORY, tempfile.gettempdir()}:
        for folder in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
            with suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):  # else its process is alive
                if any(folder.iterdir()):  # else it may be one that is made right now, and not locked yet
                    shutil.rmtree(folder)


@contextmanager
def _locked(folder: str | Path, operation: int) -> Iterator[None]:
    # The kernel drops the lock with the process, also across containers that share the folder but no process ids
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)
