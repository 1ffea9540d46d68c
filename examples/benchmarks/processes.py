"""Runs of a benchmark in processes of their own, so that the memory and the engine of each are its own."""

import json
import subprocess
import sys
from typing import Any


def in_own_process(*arguments: str) -> Any:
    """Run this script again, with `arguments` besides its own. Returns its last line of output, read as JSON."""
    command = [sys.executable, *sys.argv, *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])
