"""How much of a query row's attention falls on each block of cached keys: what chooses a KV view by attention mass.

A flash kernel does not give probabilities. One pass over the keys (no values) gives the log-sum-exp of every block, and the
log-sum-exp over the blocks is the row's own: so the shares need no second pass.

Legend: B requests, T query rows of all requests (R of one), S cache slots, W page-list width, H query heads, K key/value heads
(G query heads each), D head size, N blocks, C columns of a block.
"""

import torch

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import gather_slots
from longdraft.kernels.twin import score_backend


def count_blocks(plan: AttentionPlan, block: int, blocks: int | None) -> int:
    """``blocks``, or as many as the page lists have room for.

    Raises:
        ValueError: a block of no columns.
    """
    if block < 1:
        raise ValueError(f"block={block}: a block has at least one column")
    return -(-plan.pages_BW.shape[1] * plan.page_size // block) if blocks is None else blocks


def work_dtype(q_THD: torch.Tensor) -> torch.dtype:
    """What scores are computed in and returned as: float32, or float64 for float64 queries."""
    return torch.float64 if q_THD.dtype == torch.float64 else torch.float32


def torch_block_lse(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float, block: int, blocks: int
) -> torch.Tensor:
    """The torch twin of :func:`block_lse`; it waits for the device where that alone knows the lengths."""
    work = work_dtype(q_THD)
    lse_THN = torch.full((*q_THD.shape[:2], blocks), float("-inf"), dtype=work, device=q_THD.device)
    for b, length in enumerate(plan.lens):
        length = min(length, blocks * block)
        q_RHD = q_THD[plan.rows_of(b)].to(work)
        if not length or not len(q_RHD):
            continue
        k_NKD = gather_slots(k_SKD, plan.slots(b, length)).to(work)
        rows, heads, size = q_RHD.shape
        group = heads // k_NKD.shape[1]
        q_KRD = q_RHD.unflatten(1, (-1, group)).permute(1, 0, 2, 3).reshape(-1, rows * group, size)
        score_KRN = torch.matmul(q_KRD, k_NKD.permute(1, 2, 0)) * scale
        used = -(-length // block)
        score_KRN = torch.nn.functional.pad(score_KRN, (0, used * block - length), value=float("-inf"))
        found_KRN = score_KRN.unflatten(-1, (used, block)).logsumexp(-1)
        found_RHN = found_KRN.view(-1, rows, group, used).permute(1, 0, 2, 3).reshape(rows, heads, used)
        lse_THN[plan.rows_of(b), :, :used] = found_RHN
    return lse_THN


def block_lse(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    block: int = 16,
    blocks: int | None = None,
    backend: str | None = None,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Log-sum-exp of the scores of each query row and head over each block of consecutive page-list columns.

    Args:
        q_THD: rotated queries, bfloat16, float16 or float32 (the torch twin: float64 too).
        k_SKD: one layer's keys, of the queries' dtype or float8 (e4m3).
        plan: page lists and row offsets; block n of request b is its columns ``n * block`` and on, of which those below
            ``plan.lens[b]`` count. No other slot, whatever it holds, has any influence. Nothing waits for the device (but
            the torch twin), and shapes alone decide what runs, so that a CUDA graph serves any lengths.
        scale: factor of the scores.
        block: columns of a block; 1 gives the score of every column.
        blocks: how many blocks to return; None takes as many as the page lists have room for.
        backend: ``"triton"`` or ``"torch"``; None takes the first on a GPU.
        kv_scale: what keys in the cache are to be multiplied by, for float8.

    Returns:
        ``lse_THN``: natural logarithms, float32 (float64 for float64 queries); -inf where a block has no column.

    Raises:
        UserError: a backend that is unknown or cannot serve this call.
    """
    blocks = count_blocks(plan, block, blocks)
    if score_backend(backend, q_THD, k_SKD, plan, "blocks") == "torch":
        return torch_block_lse(q_THD, k_SKD, plan, scale * kv_scale, block, blocks)
    from longdraft.kernels.triton_block_lse import triton_block_lse  # no Triton, no harm

    return triton_block_lse(q_THD, k_SKD, plan, scale * kv_scale, block, blocks)


def block_mass(lse_THN: torch.Tensor) -> torch.Tensor:
    """Each block's share of its row's attention, from :func:`block_lse`; zeros in a row that reads nothing.

    Returns:
        ``mass_THN`` of the same dtype; a row sums to one.
    """
    total_TH1 = torch.logsumexp(lse_THN, -1, keepdim=True)
    # exp(-inf - 0) = 0 leaves zeros where -inf - -inf would leave NaN.
    return torch.exp(lse_THN - total_TH1.masked_fill(torch.isneginf(total_TH1), 0.0))
