# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernel of the tree part: attention among a request's new tokens, onto a part that is there already.

A program holds a tile of packed rows (the heads of a group x rows of one request) and reads the request's keys a block at a
time; at most 128, so that nothing is split. Rows stay on the device and the grid depends on shapes alone: one captured CUDA
graph serves any lengths. Given another part (the prefix's), the epilogue merges it while the tree's is still in registers: a
launch a layer is saved, and the write and read of the tree part's output with it.

What a row may not read is never computed with, NaN included: zero times NaN is NaN, so values that are not finite are taken
out of the product, and shown as NaN to the rows that read them.

Legend: B requests, T query rows of all requests, N keys of all requests, W words, H query heads, K key/value heads, D head
size, G = H / K. In the kernel: M rows of a tile (G heads x rows), N keys of a block.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree_bits import WORD

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tree_kernel(
    q_ptr, k_ptr, v_ptr, bits_ptr, cu_rows_ptr, cu_keys_ptr, part_ptr, part_lse_ptr, out_ptr, lse_ptr, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, bits_row, part_row, part_head, part_lse_row, part_lse_head, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, ONTO: tl.constexpr,
    WORD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile of one request and key/value head: its keys in blocks, then the other part."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    begin = tl.load(cu_rows_ptr + request)
    rows = tl.load(cu_rows_ptr + request + 1) - begin
    if tile * M >= rows * GROUP:
        return
    key_begin = tl.load(cu_keys_ptr + request)
    keys = tl.load(cu_keys_ptr + request + 1) - key_begin
    packed = tile * M + tl.arange(0, M)
    local = packed // GROUP
    query_head = head * GROUP + packed % GROUP
    live = local < rows
    row = (begin + local).to(tl.int64)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    in_head = d < SIZE
    here = live[:, None] & in_head[None, :]
    q = tl.load(q_ptr + (row * q_row + query_head * q_head)[:, None] + d[None, :], mask=here, other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    broken_reads = tl.zeros([M], tl.int32)
    if BITS:
        last = keys
    else:  # causal
        last = tl.minimum(keys, (tile * M + M - 1) // GROUP + 1)
    for start in range(0, last, N):
        key = start + n
        there = key < keys
        at = (key_begin + key).to(tl.int64)
        seen = there[:, None] & in_head[None, :]
        k = tl.load(k_ptr + (at * k_row + head * k_head)[:, None] + d[None, :], mask=seen, other=0.0)
        v = tl.load(v_ptr + (at * v_row + head * v_head)[:, None] + d[None, :], mask=seen, other=0.0)
        if BITS:  # a block's keys are in one word, N being a divisor of WORD
            word = tl.load(bits_ptr + row * bits_row + start // WORD, mask=live, other=0)
            visible = ((word[:, None] >> (key % WORD).to(tl.int64)[None, :]) & 1) != 0
        else:
            visible = key[None, :] <= local[:, None]
        visible = visible & there[None, :]
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: exp2(-inf - 0) = 0
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        broken = tl.max(tl.where(finite, 0, 1), 1)
        broken_reads = tl.maximum(broken_reads, tl.max(tl.where(visible, broken[None, :], 0), 1))
        v = tl.where(finite, v, 0.0).to(q.dtype)
        acc = tl.dot(weight.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top

    lse = (top + tl.log2(total)) * LN2  # -inf in a row that has seen nothing
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    out = tl.where(broken_reads[:, None] != 0, float("nan"), out)
    if ONTO:
        part_lse = tl.load(
            part_lse_ptr + row * part_lse_row + query_head * part_lse_head, mask=live, other=float("-inf")
        )
        part_at = (row * part_row + query_head * part_head)[:, None] + d[None, :]
        part = tl.load(part_ptr + part_at, mask=here, other=0.0).to(tl.float32)
        most = tl.maximum(lse, part_lse)
        most = tl.where(most == float("-inf"), 0.0, most)
        mine = tl.exp(lse - most)
        theirs = tl.exp(part_lse - most)
        both = mine + theirs
        # An empty part's output is not computed with, whatever it holds; a NaN weight is no zero and shows.
        out = out * mine[:, None] + tl.where(theirs[:, None] != 0, part * theirs[:, None], 0.0)
        out = out / tl.where(both == 0, 1.0, both)[:, None]
        lse = most + tl.log(both)
    out_at = (row * out_row + query_head * out_head)[:, None] + d[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(lse_ptr + row * (KV_HEADS * GROUP) + query_head, lse, mask=live)


def tile_for(units: int, packed: int, wide: int, element: int, cores: int) -> tuple[int, int]:
    """Packed rows and keys of a tile: the most rows that leave every multiprocessor a program, and no spilled register.

    Args:
        units: requests times key/value heads.
        packed: packed rows of the longest request.
        wide: head size, rounded up to a power of two, at most 256.
        element: bytes of a number; four are multiplied without tensor cores, which takes many registers.
        cores: multiprocessors.
    """
    if element == 4:
        return 16, 16
    for rows in (64, 32):
        if rows * wide <= 8192 and packed > rows // 2 and units * triton.cdiv(packed, rows) >= cores:
            return rows, min(WORD, 4096 // wide)
    return 16, min(WORD, 4096 // wide)


def triton_tree_attention(
    q_THD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    bits_TW: torch.Tensor | None = None,
    cu_keys_B1: torch.Tensor | None = None,
    onto: tuple[torch.Tensor, torch.Tensor] | None = None,
    tile: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.tree_attention.tree_attention` in Triton, for bfloat16, float16 and float32.

    ``tile`` names packed rows and keys of a tile, powers of two from 16, keys up to 64; None takes :func:`tile_for`'s.
    """
    rows, heads, size = q_THD.shape
    kv_heads, device = k_NKD.shape[1], q_THD.device
    out_THD = torch.empty(rows, heads, size, dtype=q_THD.dtype, device=device)
    lse_TH = torch.empty(rows, heads, dtype=torch.float32, device=device)
    if not rows:
        return out_THD, lse_TH
    q_THD, k_NKD, v_NKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_NKD, v_NKD))
    batch, group, wide = len(plan), heads // kv_heads, max(16, triton.next_power_of_2(size))
    if tile is None:
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        tile = tile_for(batch * kv_heads, plan.max_rows * group, wide, q_THD.element_size(), cores)
    part, part_lse = onto or (out_THD, lse_TH)
    part = part if part.stride(-1) == 1 else part.contiguous()
    bits = plan.cu_rows_B1 if bits_TW is None else bits_TW
    assert bits.stride(-1) == 1 and WORD % tile[1] == 0
    shape: dict[str, Any] = {
        "KV_HEADS": kv_heads, "GROUP": group, "SIZE": size, "BITS": bits_TW is not None, "ONTO": onto is not None,
        "WORD": WORD, "M": tile[0], "N": tile[1], "D": wide,
    }  # fmt: skip
    _tree_kernel[(batch, kv_heads, triton.cdiv(plan.max_rows * group, tile[0]))](
        q_THD, k_NKD, v_NKD, bits, plan.cu_rows_B1, plan.cu_rows_B1 if cu_keys_B1 is None else cu_keys_B1,
        part, part_lse, out_THD, lse_TH, scale * LOG2E, *q_THD.stride()[:2], *k_NKD.stride()[:2], *v_NKD.stride()[:2],
        bits.stride(0), *part.stride()[:2], *part_lse.stride(), *out_THD.stride()[:2], **shape, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out_THD, lse_TH
