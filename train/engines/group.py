"""The processes of a run, and the signals that stop it."""

import os
import signal
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from longdraft.errors import UserError
from longdraft.processes import end_with_parent
from longdraft.train.engine_settings import EngineSettings

TIMEOUT = timedelta(hours=1)  # ranks wait for each other while one saves or evaluates a long prompt


class Group:
    """The processes of a run: one, or what torchrun started (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, settings: EngineSettings) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device='cuda' but torch sees no GPU: use engine.device=cpu")
        cuda = settings.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            end_with_parent()  # torchrun killed hard would leave ranks that train on beside a resumed run
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group(
                "nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=self.device if cuda else None
            )

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def whole(self, rows_RX: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks, as many of each, one rank's behind the other's."""
        if self.world == 1:
            return rows_RX
        every = rows_RX.new_empty(self.world * len(rows_RX), *rows_RX.shape[1:])
        dist.all_gather_into_tensor(every, rows_RX)
        return every

    def totals(self, *values: float) -> list[float]:
        """Sums over all ranks of a few numbers, in float64."""
        if self.world == 1:  # without a way to the device and back, which waits for all that it has still to do
            return [float(value) for value in values]
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(x) for x in self.sum(packed).tolist()]

    def gather(self, value: int) -> list[int]:
        """One integer from every rank, in rank order."""
        if self.world == 1:
            return [int(value)]
        mine = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        mine[self.rank] = value
        return [int(x) for x in self.sum(mine).tolist()]

    def gather_names(self, names: list[str]) -> list[str]:
        """All ranks' names, in rank order."""
        if self.world == 1:
            return names
        every: list[list[str]] = [[] for _ in range(self.world)]
        dist.all_gather_object(every, names)
        return [name for part in every for name in part]

    def barrier(self) -> None:
        self.gather(0)

    def close(self) -> None:
        if dist.is_initialized():  # also with one rank, where an engine needed a group
            dist.destroy_process_group()


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into a flag that the loop reads between steps."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._former = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends at once

    def restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
