"""What a training process says of itself while it runs: JSON lines, each on disk before the next step begins.

A process that is killed or runs out of memory leaves the steps that it did, and the parent reads those.
"""

import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
TRACEBACK_LINES = 15


class Meter:
    """Times steps and reads the allocator's peaks; on a CPU there are no peaks."""

    def __init__(self, path: Path, warmup: int) -> None:
        self.file = path.open("a")
        self.warmup, self.done = warmup, 0
        self.cuda = torch.cuda.is_available()
        self.first_peak = 0.0
        self.begin = self.end = time.perf_counter()

    def say(self, event: str, **fields: Any) -> None:
        """Write one line at once."""
        self.file.write(
            json.dumps({"event": event, "at_s": round(time.perf_counter() - self.begin, 2)} | fields) + "\n"
        )
        self.file.flush()

    def memory(self) -> dict[str, float]:
        """GiB: allocated at most since the warm-up ended (or the start), reserved at most, and allocated at most over all."""
        if not self.cuda:
            return {}
        peak = torch.cuda.max_memory_allocated() / GIB
        self.first_peak = max(self.first_peak, peak)
        reserved = torch.cuda.max_memory_reserved() / GIB
        return {"peak_gib": peak, "reserved_gib": reserved, "overall_peak_gib": self.first_peak}

    def sync(self) -> float:
        """The time now, with the device idle."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start_step(self) -> None:
        self.start = self.sync()

    def finish_step(self, loss: float, **fields: Any) -> None:
        """Close a step. ``wait_s`` is what passed between the step before and this one: loading, bookkeeping."""
        now = self.sync()
        wait, self.end = self.start - self.end, now
        self.done += 1
        self.say("step", step=self.done, seconds=now - self.start, wait_s=wait, loss=loss, **self.memory(), **fields)
        if (
            self.done == self.warmup and self.cuda
        ):  # compiling and tuning kernels may take memory that training does not
            torch.cuda.reset_peak_memory_stats()

    def fail(self, error: BaseException) -> None:
        """Say how training ended early."""
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
            self.say("oom", message=" ".join(text.split())[:300], **self.memory())
            return
        lines = "".join(traceback.format_exception(error)).splitlines()
        self.say(
            "error",
            message=f"{type(error).__name__}: {text[:300]}",
            traceback=lines[-TRACEBACK_LINES:],
            **self.memory(),
        )
