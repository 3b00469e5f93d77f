"""Work over static buffers, replayed from CUDA graphs on a card and run as it is elsewhere.

Both twins call the very same function on the very same buffers, padded to the same size; so what a graph computes can be tested
where there is no card.

Legend: B requests.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

Work = Callable[[int, Any], None]  # batch size, variant: reads and writes static buffers, never waits for the device
WARM_UP = 2


class GraphRunner(ABC):
    """Runs ``work`` at the smallest of ``sizes`` that holds a batch; what lies behind the batch is padding of the caller's."""

    def __init__(self, work: Work, sizes: Sequence[int]) -> None:
        """Take the work.

        Args:
            work: a function of the size and a variant (anything hashable: what else changes its control flow). It must be
                idempotent and must not make new inputs of its own.
            sizes: batch sizes to pad to. A larger batch runs unpadded and eagerly, and so does every batch where there are none.
        """
        self.work = work
        self.sizes = sorted(set(sizes))

    def padded(self, count: int) -> int:
        """The size at which a batch of ``count`` runs."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else count

    def run(self, count: int, variant: Hashable = None) -> None:
        """Run the work for a batch whose static buffers are filled up to :meth:`padded`."""
        size = self.padded(count)
        if size in self.sizes:
            self._run(size, variant)
        else:
            self.work(size, variant)

    def forget(self) -> None:  # noqa: B027
        """Tensors that the work reads, beside its static buffers, may be others now."""

    @abstractmethod
    def _run(self, size: int, variant: Hashable) -> None: ...


class EagerRunner(GraphRunner):
    """The twin: calls the work."""

    def _run(self, size: int, variant: Hashable) -> None:
        self.work(size, variant)


class CudaGraphRunner(GraphRunner):
    """One graph a size and variant, all in one memory pool; made by :meth:`capture`, or at first use."""

    def __init__(self, work: Work, sizes: Sequence[int]) -> None:
        super().__init__(work, sizes)
        self.graphs: dict[tuple[int, Hashable], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    def capture(self, variant: Hashable = None) -> None:
        """Capture every size of a variant, the largest first, so that the smaller ones find their memory in its."""
        for size in reversed(self.sizes):
            self._capture(size, variant)

    def forget(self) -> None:
        self.graphs.clear()
        self.pool = None

    def _capture(self, size: int, variant: Hashable) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):  # builds kernels and their workspaces, which a capture must not
                self.work(size, variant)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.work(size, variant)
        self.pool = self.pool or graph.pool()
        self.graphs[size, variant] = graph
        return graph

    def _run(self, size: int, variant: Hashable) -> None:
        graph = self.graphs.get((size, variant))
        (graph or self._capture(size, variant)).replay()


def make_runner(work: Work, sizes: Sequence[int], device: torch.device) -> GraphRunner:
    """Graphs on a card, the eager twin elsewhere; no sizes mean no padding and no graphs."""
    return CudaGraphRunner(work, sizes) if device.type == "cuda" and sizes else EagerRunner(work, sizes)
