# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Rotation of a packed projection's heads in Triton: one program a token and head, which writes the head where it belongs.

Cosines and sines are given: a card's own are rough at angles of 100,000, and a chain's steps share one computation of them.

Legend: T tokens, C columns, S cache slots, H query heads, K key/value heads, D head size, A = D / 2 angles.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.rotate import Into


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, slot_ptr,
    x_row, cos_row, sin_row, k_slot, k_head, v_slot, v_head, slot_step,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ANGLES: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, A)
    there = at < ANGLES
    x_at = x_ptr + row * x_row + head * (2 * ANGLES) + at
    a = tl.load(x_at, mask=there, other=0.0)
    b = tl.load(x_at + ANGLES, mask=there, other=0.0)
    if head >= HEADS + KV_HEADS:
        slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
        v_at = v_ptr + slot * v_slot + (head - HEADS - KV_HEADS) * v_head + at
        tl.store(v_at, a.to(v_ptr.dtype.element_ty), mask=there)
        tl.store(v_at + ANGLES, b.to(v_ptr.dtype.element_ty), mask=there)
    else:
        cos = tl.load(cos_ptr + row * cos_row + at, mask=there, other=0.0)
        sin = tl.load(sin_ptr + row * sin_row + at, mask=there, other=0.0)
        left = a.to(tl.float32) * cos - b.to(tl.float32) * sin
        right = b.to(tl.float32) * cos + a.to(tl.float32) * sin
        if head >= HEADS:
            slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
            k_at = k_ptr + slot * k_slot + (head - HEADS) * k_head + at
            tl.store(k_at, left.to(k_ptr.dtype.element_ty), mask=there)
            tl.store(k_at + ANGLES, right.to(k_ptr.dtype.element_ty), mask=there)
        else:
            q_at = q_ptr + (row * HEADS + head) * (2 * ANGLES) + at
            tl.store(q_at, left.to(q_ptr.dtype.element_ty), mask=there)
            tl.store(q_at + ANGLES, right.to(q_ptr.dtype.element_ty), mask=there)


def triton_rotate_heads(
    x_TC: torch.Tensor, cos_TA: torch.Tensor, sin_TA: torch.Tensor, into: Into | None
) -> torch.Tensor:
    """:func:`longdraft.kernels.rotate.rotate_heads` in Triton, for projections no wider than float32."""
    rows, angles = cos_TA.shape
    assert x_TC.dtype != torch.float64 and x_TC.stride(1) == cos_TA.stride(1) == sin_TA.stride(1) == 1
    kept = 0 if into is None else into.k_SKD.shape[1]
    heads = x_TC.shape[1] // (2 * angles) - 2 * kept
    q_THD = torch.empty(rows, heads, 2 * angles, dtype=x_TC.dtype, device=x_TC.device)
    if not x_TC.numel():
        return q_THD
    # Where nothing is put away any pointer will do: no program comes to it.
    k_SKD, v_SKD, slot_T = into or Into(q_THD, q_THD, q_THD)
    assert k_SKD.stride(2) == v_SKD.stride(2) == 1
    _rotate_kernel[(rows, heads + 2 * kept)](
        x_TC, cos_TA, sin_TA, q_THD, k_SKD, v_SKD, slot_T, x_TC.stride(0), cos_TA.stride(0), sin_TA.stride(0),
        *k_SKD.stride()[:2], *v_SKD.stride()[:2], slot_T.stride(0),
        HEADS=heads, KV_HEADS=kept, ANGLES=angles, A=triton.next_power_of_2(angles), num_warps=1,
    )  # fmt: skip
    return q_THD
