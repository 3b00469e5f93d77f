"""Ranks that are threads of one process, for tests of what each rank computes: ``run_ranks(2, lambda ranks: ...)``."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from longdraft.draft_models.shares import Share
from longdraft.serve.ranks import Ranks

R = TypeVar("R")


class Meeting:
    """Where all threads leave something and see what the others have left."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self.left[rank] = thing
        self.barrier.wait()
        everything = list(self.left)
        self.barrier.wait()
        return everything


class ThreadRanks(Ranks):
    """One of them; ``messages`` are what it would have said itself."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.messages: list[tuple[str, list[torch.Tensor]]] = []

    def total(self, x_X: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x_X.clone())).sum(0)

    def joined(self, x_X: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x_X.clone()), dim)

    def first(self, what: str, *given: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        self.messages.append((what, [x.clone() for x in given]))
        return tuple(x.clone() for x in self.meeting.exchange(self.rank, (*given, *apart))[0])

    def word(self, value: Any) -> Any:
        return self.meeting.exchange(self.rank, value)[0]

    def share(self, least: int = 0) -> Share:
        return Share(self.rank, self.size, self.total, self.joined, least)


def run_ranks(size: int, work: Callable[[ThreadRanks], R]) -> list[R]:
    """What ``work`` returns on each of so many ranks; the first failure is raised here."""
    meeting, results, failures = Meeting(size), {}, []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(ThreadRanks(meeting, rank))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
    return [results[rank] for rank in range(size)]
