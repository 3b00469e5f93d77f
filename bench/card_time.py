"""Time of work on a card, and the bandwidth of a plain copy that it is compared with."""

import statistics
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

Tile = TypeVar("Tile", bound=Hashable)
COPY_BYTES = 2 << 30  # far beyond any cache
WARM_UP, REPEATS = 3, 20


def seconds(work: Callable[[], object], graph: bool = True) -> float:
    """Median time of ``work`` on the card; in a CUDA graph, as it is served, unless ``graph`` is false."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    run: Callable[[], object] = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second of a copy on the card, read and write counted: the faster of the driver's copy and a kernel's.

    The driver's copy reached 2.7 TB/s inside a graph on an H200 whose kernels read at 4.3.
    """
    source, target = torch.zeros(2, COPY_BYTES // 8, dtype=torch.int64, device="cuda")
    copies: list[Callable[[], object]] = [lambda: target.copy_(source), lambda: torch.add(source, 1, out=target)]
    return 2 * COPY_BYTES / min(seconds(copy, graph) for copy in copies for graph in (True, False))


def sweep_tiles(label: str, first: Tile, tiles: Iterable[Tile], rate: Callable[[Tile], float]) -> None:
    """Print the rate, a share of a copy's, of every tile that fits the card, the chosen one's and the best."""
    found = dict[Tile, float]()
    for tile in tiles:
        try:
            found[tile] = rate(tile)
        except OutOfResources:
            found[tile] = 0.0
        print(f"{label}: {found[tile]:6.1%} of copy with {tile}", flush=True)
    best = max(found, key=found.__getitem__)
    print(f"{label}: chosen {found.get(first, 0.0):.1%}, best {found[best]:.1%} {best}", flush=True)
