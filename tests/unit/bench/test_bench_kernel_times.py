"""What is read from a profiler's trace."""

import pytest

from longdraft.bench.kernel_times import by_kernel, short


def test_names_are_without_templates() -> None:
    assert short("void cutlass::device_kernel<flash::enable_sm90<int>>(flash::Params)") == "device_kernel (flash)"
    assert short("_pages_kernel") == "_pages_kernel"


def test_kernels_are_summed_a_step_and_overlap_is_busy_once() -> None:
    events = [
        {"cat": "kernel", "name": "a<1>", "ts": 0.0, "dur": 10.0},
        {"cat": "kernel", "name": "a<2>", "ts": 12.0, "dur": 6.0},
        {"cat": "gpu_memcpy", "name": "b", "ts": 15.0, "dur": 5.0},
        {"cat": "cpu_op", "name": "c", "ts": 0.0, "dur": 100.0},
        {"name": "meta"},
    ]
    rows, busy, idle = by_kernel(events, 2)
    assert rows == [("a", 1.0, 8.0), ("b", 0.5, 2.5)]
    assert (busy, idle) == (pytest.approx(9.0), pytest.approx(1.0))
    assert by_kernel([], 2) == ([], 0.0, 0.0)
