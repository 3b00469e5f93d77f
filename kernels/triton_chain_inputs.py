# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernels of :mod:`longdraft.kernels.chain_inputs`: one program a request.

Legend: B requests, K drafted tokens, T = K + 1 new tokens of a request (in the kernel: rounded up to a power of two), R rows of the
page table, C its columns; N tokens of a run, I remembered tokens.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.chain_inputs import ChainInputs


@triton.jit(do_not_specialize=["columns"])
def _inputs_kernel(
    newest_ptr, draft_ptr, limit_ptr, length_ptr, row_ptr, table_ptr, id_ptr, position_ptr, slot_ptr,
    newest_step, draft_row, draft_step, table_row, columns, width, T: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, T)
    there = offset < width
    limit = tl.load(limit_ptr + b)
    at = tl.minimum(offset, limit)
    position = tl.load(length_ptr + b) + at
    token = tl.load(draft_ptr + b * draft_row + (at - 1) * draft_step, mask=there & (at > 0), other=0)
    token = tl.where(at > 0, token, tl.load(newest_ptr + b * newest_step))
    counts = there & (offset <= limit) & (position < columns)
    slot = tl.load(table_ptr + tl.load(row_ptr + b) * table_row + position, mask=counts, other=0)
    out = b * width + offset
    tl.store(id_ptr + out, token, mask=there)
    tl.store(position_ptr + out, position, mask=there)
    tl.store(slot_ptr + out, slot.to(tl.int64), mask=there)


@triton.jit
def _remember_kernel(ring_ptr, row_ptr, position_ptr, id_ptr, ring_row, ring, id_row, id_step, count, N: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, N)
    there = offset < count
    token = tl.load(id_ptr + b * id_row + offset * id_step, mask=there, other=0)
    at = (tl.load(position_ptr + b) + offset) % ring
    tl.store(ring_ptr + tl.load(row_ptr + b) * ring_row + at, token, mask=there)


def triton_chain_inputs(
    newest_B: torch.Tensor,
    draft_BK: torch.Tensor,
    limit_B: torch.Tensor,
    length_B: torch.Tensor,
    row_B: torch.Tensor,
    table_RC: torch.Tensor,
) -> ChainInputs:
    """:func:`longdraft.kernels.chain_inputs.chain_inputs` in Triton."""
    batch, width = len(newest_B), draft_BK.shape[1] + 1
    made = ChainInputs(*torch.empty(3, batch, width, dtype=torch.int64, device=newest_B.device))
    if batch:
        limit_B, length_B, row_B = (x.contiguous() for x in (limit_B, length_B, row_B))
        _inputs_kernel[(batch,)](
            newest_B, draft_BK, limit_B, length_B, row_B, table_RC, *made,
            newest_B.stride(0), *draft_BK.stride(), table_RC.stride(0), table_RC.shape[1], width,
            T=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return made


def triton_remember(id_RI: torch.Tensor, row_B: torch.Tensor, position_B: torch.Tensor, id_BN: torch.Tensor) -> None:
    """:func:`longdraft.kernels.chain_inputs.remember` in Triton."""
    batch, count = id_BN.shape
    if batch and count:
        _remember_kernel[(batch,)](
            id_RI, row_B.contiguous(), position_B.contiguous(), id_BN, id_RI.stride(0), id_RI.shape[1],
            *id_BN.stride(), count, N=triton.next_power_of_2(count), num_warps=1,
        )  # fmt: skip
