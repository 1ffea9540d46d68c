"""Runs of a benchmark in processes of their own, so that the memory and the engine of each are its own."""

import json
import subprocess
import sys
from typing import Any


def in_own_process(*arguments: str) -> Any:
    """What the running script prints last, as JSON, where it is given `arguments` besides its own."""
    command = [sys.executable, *sys.argv, *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])
