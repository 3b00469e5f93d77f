# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Windows over rings in Triton: one launch where torch needs fifteen. One program a step and request.

Legend: B requests, S steps, W window (in the kernel rounded up to a power of two), Q rings.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.ring_windows import RingWindows


@triton.jit(do_not_specialize=["batch"])  # a batch of another size compiles nothing
def _windows_kernel(
    row_ptr, position_ptr, first_ptr, at_ptr, pages_ptr, lens_ptr, batch, row_step, position_step,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    step = tl.program_id(0)
    b = tl.program_id(1)
    out = (step * batch + b).to(tl.int64)
    row = tl.load(row_ptr + b * row_step)
    at = tl.load(position_ptr + b * position_step) + step
    back = tl.arange(0, W)
    # A remainder keeps its sign here; one ring more than the window reaches back makes it positive.
    slot = (at % SIZE + SIZE - back % SIZE) % SIZE
    tl.store(pages_ptr + out * WINDOW + back, (row * SIZE + slot).to(tl.int32), mask=back < WINDOW)
    held = tl.minimum(tl.maximum(at + 1 - tl.load(first_ptr + row), 0), WINDOW)
    tl.store(lens_ptr + out, held.to(tl.int32))
    tl.store(at_ptr + out, at)


def triton_ring_windows(
    row_B: torch.Tensor, position_B: torch.Tensor, first_Q: torch.Tensor, steps: int, window: int, size: int
) -> RingWindows:
    """:func:`longdraft.kernels.ring_windows.ring_windows` in Triton, for positions from 0."""
    assert row_B.dtype == position_B.dtype == first_Q.dtype == torch.int64 and first_Q.is_contiguous()
    batch, device = len(row_B), row_B.device
    at_SB = torch.empty(steps, batch, dtype=torch.int64, device=device)
    pages_SBW = torch.empty(steps, batch, window, dtype=torch.int32, device=device)
    lens_SB = torch.empty(steps, batch, dtype=torch.int32, device=device)
    if steps * batch:
        _windows_kernel[(steps, batch)](
            row_B, position_B, first_Q, at_SB, pages_SBW, lens_SB, batch, row_B.stride(0), position_B.stride(0),
            WINDOW=window, SIZE=size, W=triton.next_power_of_2(window), num_warps=4,
        )  # fmt: skip
    return RingWindows(at_SB, pages_SBW, lens_SB)
