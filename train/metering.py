"""Figures of training steps: averages between two log rows, and the run's time."""

import statistics
import time
from itertools import zip_longest
from typing import Any

from longdraft.train.checkpoints import Progress


class Meter:
    """Sums over the steps since the last log row. Saves and evaluations do not count as training time."""

    def __init__(self, progress: Progress, peak_flops: float | None = None) -> None:
        """``peak_flops``: operations a second of all devices together; without it there is no MFU."""
        self.progress, self.peak_flops = progress, peak_flops
        self._began = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self.loss = self.supervised = self.tokens = self.flops = self.waited = 0.0
        self.hits: list[float] = []
        self.rows: list[float] = []
        self.times: list[float] = []
        self.newest: dict[str, float] = {}

    def start(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def got_data(self) -> None:
        """The step's data is there: the time since its begin was spent waiting for it."""
        self.waited += time.monotonic() - self._began

    def finish(
        self,
        loss: float,
        hits: list[float],
        rows: list[float],
        supervised: float,
        tokens: float,
        flops: float,
        **newest: float,
    ) -> None:
        """A step ended: sums over all ranks (hits and rows by draft depth), and figures of which a row shows the newest."""
        seconds = time.monotonic() - self._began
        self.times.append(seconds)
        self.progress.seconds += seconds
        self.loss += loss
        self.hits = [a + b for a, b in zip_longest(self.hits, hits, fillvalue=0.0)]
        self.rows = [a + b for a, b in zip_longest(self.rows, rows, fillvalue=0.0)]
        self.supervised, self.tokens = self.supervised + supervised, self.tokens + tokens
        self.flops += flops
        self.newest = newest

    def row(self) -> dict[str, Any]:
        """The log row of the steps since the last one: loss in nats a supervised token, times in seconds, ``mfu`` the share of
        the devices' peak, ``data_wait_share`` the share of the time that this rank waited for data."""
        seconds = max(sum(self.times), 1e-9)
        row = {
            "step": self.progress.step,
            "loss": self.loss / self.supervised,
            "accuracy": sum(self.hits) / max(sum(self.rows), 1),
            "accuracy_by_depth": [hit / row if row else None for hit, row in zip(self.hits, self.rows, strict=True)],
            "tokens_per_s": self.tokens / seconds,
            "tflop_per_s": self.flops / seconds / 1e12,
            "data_wait_share": self.waited / seconds,
            "seconds_per_step": statistics.median(self.times),
            "tokens": self.progress.tokens,
            "supervised": self.progress.supervised,
            "max_position": self.progress.max_position,
            **self.newest,
        }
        if self.peak_flops is not None:
            row["mfu"] = self.flops / seconds / self.peak_flops
        self._clear()
        return row
