"""Where a decode step's time goes: drafting, verification, sampling, and what the host needs between and around them.

Off, a phase is one shared context manager that does nothing. On, the host's clock is read and, on a card, events are recorded; they
are read once they have passed, so that measuring waits for nothing.
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

PHASES = ("draft", "partial", "verify", "sampling", "select", "keep")
_NOTHING: AbstractContextManager[None] = nullcontext()


class StepClock:
    """Clock that is off."""

    def step(self, batch: int) -> AbstractContextManager[None]:
        """Around one step of ``batch`` requests."""
        return _NOTHING

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around one of :data:`PHASES` within a step; a phase that comes twice is counted together."""
        return _NOTHING


class Renamed(StepClock):
    """Another clock, to which one phase has another name."""

    def __init__(self, clock: StepClock, old: str, new: str) -> None:
        self.clock, self.old, self.new = clock, old, new

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.clock.phase(self.new if name == self.old else name)


class RunningClock(StepClock):
    """Writes one JSON line a step: ``batch``, ``wall_ms``, ``gap_ms`` (since the step before), and ``host_ms`` and ``device_ms`` by
    phase. A phase's host time has the waits for the device in it.
    """

    def __init__(self, path: Path, on_card: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", buffering=1)
        self.on_card = on_card
        self.ended: float | None = None
        self.pending: deque[tuple[dict[str, Any], list[tuple[str, Any, Any]]]] = deque()
        self.host: dict[str, float] = {}
        self.events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def step(self, batch: int) -> Iterator[None]:
        begin = time.perf_counter()
        self.host, self.events = {}, []
        yield
        end = time.perf_counter()
        line: dict[str, Any] = {
            "batch": batch,
            "wall_ms": 1e3 * (end - begin),
            "gap_ms": None if self.ended is None else 1e3 * (begin - self.ended),
            "host_ms": {name: 1e3 * seconds for name, seconds in self.host.items()},
            "device_ms": {},
        }
        self.ended = end
        self.pending.append((line, self.events))
        self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin, first = time.perf_counter(), self._event()
        try:
            yield
        finally:
            self.host[name] = self.host.get(name, 0.0) + time.perf_counter() - begin
            if first is not None:
                self.events.append((name, first, self._event()))

    def _event(self) -> Any:
        if not self.on_card:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self) -> None:
        """Lines whose events have passed, in order."""
        while self.pending and all(last.query() for _, _, last in self.pending[0][1]):
            line, events = self.pending.popleft()
            for name, first, last in events:
                line["device_ms"][name] = line["device_ms"].get(name, 0.0) + first.elapsed_time(last)
            self.file.write(json.dumps(line) + "\n")


OFF = StepClock()


def make_clock(path: str | None, device: torch.device) -> StepClock:
    """A running clock where there is a file to write to."""
    return OFF if path is None else RunningClock(Path(path), device.type == "cuda")
