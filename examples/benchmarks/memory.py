"""The peak memory of a call."""

import gc
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes of tensors at once on top of what was there before, the temporaries inside of operators included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))
