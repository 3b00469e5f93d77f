"""Padding of batches to captured sizes, and the eager twin of CUDA graphs."""

from typing import Any

import pytest
import torch

from longdraft.serve.graph_runner import EagerRunner, make_runner


def recording(sizes: list[int]) -> tuple[EagerRunner, list[tuple[int, Any]]]:
    calls: list[tuple[int, Any]] = []
    return EagerRunner(lambda size, variant: calls.append((size, variant)), sizes), calls


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9), (40, 40)])
def test_a_batch_runs_at_the_smallest_size_that_holds_it_or_unpadded(count: int, size: int) -> None:
    runner, calls = recording([8, 1, 4, 2, 2])
    assert runner.padded(count) == size
    runner.run(count, "v")
    assert calls == [(size, "v")]


def test_without_sizes_nothing_is_padded() -> None:
    runner, calls = recording([])
    runner.run(3)
    assert calls == [(3, None)]
    assert isinstance(make_runner(lambda size, variant: None, [4], torch.device("cpu")), EagerRunner)
