"""An upper bound of a query row's scores in each block of cached keys, from the block's smallest and largest numbers alone
(Quest, section 3.2). It reads the keys themselves and keeps no summaries, so it is right after a rollback and on rewritten slots.

Legend: B requests, T query rows of all requests (R of one), S cache slots, H query heads, K key/value heads (G query heads each),
D head size, N blocks, C columns of a block.
"""

from typing import Literal

import torch

from longdraft.kernels.block_lse import count_blocks, work_dtype
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import gather_slots
from longdraft.kernels.twin import score_backend

Rule = Literal["quest", "specpv"]


def torch_block_bound(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, block: int, blocks: int, scale: float, rule: Rule
) -> torch.Tensor:
    """The torch twin of :func:`block_bound`; it waits for the device where that alone knows the lengths."""
    work = work_dtype(q_THD)
    bound_THN = torch.full((*q_THD.shape[:2], blocks), float("-inf"), dtype=work, device=q_THD.device)
    for b, length in enumerate(plan.lens):
        length = min(length, blocks * block)
        q_RHD = q_THD[plan.rows_of(b)].to(work)
        if not length or not len(q_RHD):
            continue
        used = -(-length // block)
        k_NKD = gather_slots(k_SKD, plan.slots(b, length)).to(work)
        low_NKD, high_NKD = (
            torch.cat([k_NKD, k_NKD.new_full((used * block - length, *k_NKD.shape[1:]), empty)])
            for empty in (float("inf"), float("-inf"))
        )
        low_NKD, high_NKD = low_NKD.unflatten(0, (used, block)).amin(1), high_NKD.unflatten(0, (used, block)).amax(1)
        q_RKGD = q_RHD.unflatten(1, (k_SKD.shape[1], -1))
        # The larger of q * low and q * high is q * high for a positive q and q * low for a negative one.
        parts = (q_RKGD, q_RKGD) if rule == "specpv" else (q_RKGD.clamp(min=0), q_RKGD.clamp(max=0))
        above, below = (torch.einsum("rkgd,nkd->rkgn", q, k) for q, k in zip(parts, (high_NKD, low_NKD), strict=True))
        found_RKGN = torch.maximum(above, below) if rule == "specpv" else above + below
        bound_THN[plan.rows_of(b), :, :used] = found_RKGN.flatten(1, 2) * scale
    return bound_THN


def block_bound(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    block: int = 16,
    blocks: int | None = None,
    backend: str | None = None,
    scale: float = 1.0,
    rule: Rule = "quest",
) -> torch.Tensor:
    """Quest's bound of the scores in each block of consecutive page-list columns: ``sum_d max(q_d * low_d, q_d * high_d)``.

    Args:
        q_THD: rotated queries, bfloat16, float16 or float32 (the torch twin: float64 too).
        k_SKD: one layer's keys, of the queries' dtype or float8 (e4m3).
        plan, block, blocks, backend: as in :func:`longdraft.kernels.block_lse.block_lse`.
        scale: positive factor of the results; the softmax's scale times that of a float8 cache bounds the attention scores.
        rule: ``"specpv"`` takes ``max(q . low, q . high)``, as SpecPV's code does. That bounds nothing: the largest score may
            lie above it.

    Returns:
        ``bound_THN``: float32 (float64 for float64 queries); -inf where a block has no column.

    Raises:
        UserError: a backend that is unknown or cannot serve this call.
    """
    blocks = count_blocks(plan, block, blocks)
    if score_backend(backend, q_THD, k_SKD, plan, "blocks") == "torch":
        return torch_block_bound(q_THD, k_SKD, plan, block, blocks, scale, rule)
    from longdraft.kernels.triton_block_bound import triton_block_bound  # no Triton, no harm

    return triton_block_bound(q_THD, k_SKD, plan, block, blocks, scale, rule)
