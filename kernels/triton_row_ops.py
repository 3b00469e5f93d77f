# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Row operations in Triton. A norm is one program a row, which holds the whole row.

Legend: T rows, N choices, V table rows, E row size (in kernels: rounded up to a power of two), F = half of a gated projection.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # columns of one program of the gate
CHOICES = 8192  # that a program looks at in a turn: 16 numbers of each of 512 threads


@triton.jit
def _norm(x, there, weight_ptr, at, eps, SIZE: tl.constexpr):
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight


@triton.jit
def _embed_norm_kernel(
    id_ptr, table_ptr, weight_ptr, h_ptr, x_ptr, id_step, table_row, eps, SIZE: tl.constexpr, E: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E)
    there = at < SIZE
    token = tl.load(id_ptr + row * id_step)
    h = tl.load(table_ptr + token * table_row + at, mask=there, other=0.0).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row * SIZE + at, h, mask=there)
    tl.store(x_ptr + row * SIZE + at, _norm(h, there, weight_ptr, at, eps, SIZE).to(x_ptr.dtype.element_ty), mask=there)


@triton.jit
def _add_norm_kernel(
    more_ptr, h_ptr, weight_ptr, x_ptr, more_row, h_row, eps, SIZE: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E)
    there = at < SIZE
    more = tl.load(more_ptr + row * more_row + at, mask=there, other=0.0)
    h = tl.load(h_ptr + row * h_row + at, mask=there, other=0.0)
    h = (h.to(tl.float32) + more.to(tl.float32)).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row * h_row + at, h, mask=there)
    tl.store(x_ptr + row * SIZE + at, _norm(h, there, weight_ptr, at, eps, SIZE).to(x_ptr.dtype.element_ty), mask=there)


@triton.jit
def _gated_silu_kernel(both_ptr, out_ptr, both_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < SIZE
    gate = tl.load(both_ptr + row * both_row + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * both_row + SIZE + at, mask=there, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _best_id_kernel(logits_ptr, id_ptr, out_ptr, logits_row, count, NAMED: tl.constexpr, CHOICES: tl.constexpr):
    """Every lane keeps the first of its own largest numbers; then the lanes are compared."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHOICES)
    top = tl.full([CHOICES], float("-inf"), tl.float32)
    best = lane
    for start in range(0, count, CHOICES):
        at = start + lane
        x = tl.load(logits_ptr + row * logits_row + at, mask=at < count, other=float("-inf")).to(tl.float32)
        better = x > top
        top = tl.where(better, x, top)
        best = tl.where(better, at, best)
    first = tl.min(tl.where(top == tl.max(top, 0), best, count - 1), 0)
    tl.store(out_ptr + row, tl.load(id_ptr + first) if NAMED else first.to(tl.int64))


def _warps(wide: int) -> int:
    return min(max(wide // 512, 1), 16)


def triton_embed_norm(
    id_T: torch.Tensor, table_VE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.row_ops.embed_norm` in Triton, for a norm no wider than float32."""
    assert id_T.dtype == torch.int64 and table_VE.stride(1) == 1 and weight_E.dtype != torch.float64
    size, wide = len(weight_E), triton.next_power_of_2(len(weight_E))
    h_TE, x_TE = (torch.empty(len(id_T), size, dtype=weight_E.dtype, device=weight_E.device) for _ in range(2))
    if len(id_T):
        _embed_norm_kernel[(len(id_T),)](
            id_T, table_VE, weight_E, h_TE, x_TE, id_T.stride(0), table_VE.stride(0), eps,
            SIZE=size, E=wide, num_warps=_warps(wide),
        )  # fmt: skip
    return h_TE, x_TE


def triton_add_norm(more_TE: torch.Tensor, h_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`longdraft.kernels.row_ops.add_norm` in Triton, for rows no wider than float32."""
    assert more_TE.stride(1) == h_TE.stride(1) == 1 and h_TE.dtype == more_TE.dtype != torch.float64
    rows, size = h_TE.shape
    wide = triton.next_power_of_2(size)
    x_TE = torch.empty(rows, size, dtype=h_TE.dtype, device=h_TE.device)
    if rows:
        _add_norm_kernel[(rows,)](
            more_TE, h_TE, weight_E, x_TE, more_TE.stride(0), h_TE.stride(0), eps,
            SIZE=size, E=wide, num_warps=_warps(wide),
        )  # fmt: skip
    return x_TE


def triton_gated_silu(both_T2F: torch.Tensor) -> torch.Tensor:
    """:func:`longdraft.kernels.row_ops.gated_silu` in Triton, for projections no wider than float32."""
    assert both_T2F.stride(1) == 1 and both_T2F.dtype != torch.float64
    rows, size = both_T2F.shape[0], both_T2F.shape[1] // 2
    out_TF = torch.empty(rows, size, dtype=both_T2F.dtype, device=both_T2F.device)
    if rows:
        _gated_silu_kernel[(rows, triton.cdiv(size, BLOCK))](
            both_T2F, out_TF, both_T2F.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4
        )
    return out_TF


def triton_best_id(logits_TN: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
    """:func:`longdraft.kernels.row_ops.best_id` in Triton, for numbers no wider than float32."""
    assert id_N.dtype == torch.int64 and id_N.is_contiguous() and len(id_N) == logits_TN.shape[1]
    return _best(logits_TN, id_N)


def triton_best_place(logits_TV: torch.Tensor) -> torch.Tensor:
    """:func:`longdraft.kernels.row_ops.best_place` in Triton, for numbers no wider than float32."""
    return _best(logits_TV, None)


def _best(logits_TN: torch.Tensor, id_N: torch.Tensor | None) -> torch.Tensor:
    rows, count = logits_TN.shape
    assert logits_TN.stride(1) == 1 and logits_TN.dtype != torch.float64
    out_T = torch.empty(rows, dtype=torch.int64, device=logits_TN.device)
    if rows:
        choices = min(CHOICES, triton.next_power_of_2(count))
        _best_id_kernel[(rows,)](
            logits_TN, out_T if id_N is None else id_N, out_T, logits_TN.stride(0), count,
            NAMED=id_N is not None, CHOICES=choices, num_warps=_warps(choices),
        )  # fmt: skip
    return out_T
