"""Shapes and checks of the draft step's small kernels, for their twins, the interpreter and a card."""

import torch

from longdraft.kernels.ring_windows import ring_windows, torch_ring_windows
from longdraft.kernels.rotate import Into, rotate_heads, torch_rotate_heads
from longdraft.kernels.row_ops import (
    add_norm,
    best_id,
    best_place,
    embed_norm,
    gated_silu,
    torch_add_norm,
    torch_best_id,
    torch_best_place,
    torch_embed_norm,
    torch_gated_silu,
)

# tokens, query heads, key/value heads, angles of a head
HEADS = [(1, 4, 2, 8), (5, 3, 1, 20), (2, 0, 2, 8), (3, 6, 0, 16), (4, 2, 2, 64), (0, 2, 1, 8)]
ROWS = [(1, 64), (3, 40), (2, 1000), (5, 1), (0, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding more or less than the twin."""
    return {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_rotation(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Rows of a wider tensor, slots in any order with a stride of their own, a cache whose other slots stay as they are."""
    rows, heads, kept, angles = shape
    wide = normal(rows, (heads + 2 * kept) * 2 * angles + 16, dtype=dtype, device=device)
    x_TC = wide[:, 16:]
    turn = normal(2, rows, angles, dtype=torch.float32, device=device, seed=1).sin().unbind()
    count = max(9, 2 * rows)
    slot_T = torch.randperm(count, generator=torch.Generator().manual_seed(2))[: 2 * rows].int().to(device)[::2]
    found, wanted = (
        tuple(normal(count, kept, 2 * angles, dtype=dtype, device=device, seed=s) for s in (3, 4)) for _ in range(2)
    )
    got = rotate_heads(x_TC, *turn, Into(*found, slot_T) if kept else None, "triton")
    want = torch_rotate_heads(x_TC, *turn, Into(*wanted, slot_T) if kept else None)
    assert got.is_contiguous() and got.shape == (rows, heads, 2 * angles)
    torch.testing.assert_close(got, want, **tolerance(dtype))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance(dtype))


def check_rows(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Each operation against its twin; a table of another dtype, rows of wider tensors, the stream that is changed."""
    rows, size = shape
    weight = normal(size, dtype=dtype, device=device)
    table = normal(11, size, dtype=torch.float32, device=device, seed=1)
    ids = torch.randint(0, 11, (rows, 2), generator=torch.Generator().manual_seed(2)).to(device)[:, 1]
    for a, b in zip(
        embed_norm(ids, table, weight, 1e-5, "triton"), torch_embed_norm(ids, table, weight, 1e-5), strict=True
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, **tolerance(dtype))
    more = normal(rows, size + 8, dtype=dtype, device=device, seed=3)[:, 8:]
    one, other = (normal(rows, size, dtype=dtype, device=device, seed=4) for _ in range(2))
    got, want = add_norm(more, one, weight, 1e-5, "triton"), torch_add_norm(more, other, weight, 1e-5)
    torch.testing.assert_close(got, want, **tolerance(dtype))
    torch.testing.assert_close(one, other, **tolerance(dtype))  # the interpreter cuts bfloat16 off
    both = 4 * normal(rows, 2 * size + 8, dtype=dtype, device=device, seed=5)[:, 8:]
    torch.testing.assert_close(gated_silu(both, "triton"), torch_gated_silu(both), **tolerance(dtype))


def check_choices(rows: int, count: int, dtype: torch.dtype, device: str) -> None:
    """Ties of a few different numbers, the largest anywhere, -inf, a row that is -inf throughout; columns of a wider tensor."""
    logits = normal(rows, count + 8, dtype=dtype, device=device).mul(2).round()[:, 8:]
    logits[:, : count // 2] = float("-inf")
    logits[-1] = float("-inf")
    ids = (torch.randperm(3 * count, generator=torch.Generator().manual_seed(1))[:count]).to(device)
    assert torch.equal(best_id(logits, ids, "triton"), torch_best_id(logits, ids))
    logits[0, count // 3 :: 5] = 100.0
    logits[0, : count // 3] = float("nan")  # no number is not the largest one
    assert int(best_id(logits, ids, "triton")[0]) == int(ids[count // 3])
    assert torch.equal(best_place(logits, "triton"), torch_best_place(logits))
    assert int(best_place(logits, "triton")[0]) == count // 3


def check_windows(window: int, size: int, steps: int, device: str) -> None:
    """Rings that began at 0, later, and behind the position; columns of a wider tensor, as the server's inputs are."""
    given = torch.tensor([[3, 0, 2, 1], [1000, 0, 3, 70]], device=device).repeat_interleave(2, 1)
    row_B, position_B = given[0, ::2], given[1, ::2]
    first_Q = torch.tensor([0, 68, 1, 990], device=device)
    args = row_B, position_B, first_Q, steps, window, size
    for got, want in zip(ring_windows(*args, "triton"), torch_ring_windows(*args), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
