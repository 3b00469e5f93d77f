"""Attention of a few query rows on a few chosen heads, over a whole context: what tokens a sparse verification should read.

Dustin scores every cached token by the softmax probabilities of some (head, layer) pairs and query rows, summed (Eq. 5). A flash
kernel does not give them, and a sparse verification never scores what it does not read; so they are computed beside it, from the
keys alone, and only from the key heads that the chosen query heads read.

Legend: B requests, T query rows of all requests (R of one at most), S cache slots, W page-list width, H query heads, A chosen ones of
them, K key/value heads (G query heads each), D head size, N columns of a page list.
"""

from collections.abc import Sequence

import torch

from longdraft.errors import UserError
from longdraft.kernels.block_lse import count_blocks, work_dtype
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import gather_slots
from longdraft.kernels.twin import score_backend


def check_heads(heads: Sequence[int], query_heads: int) -> tuple[int, ...]:
    """The chosen heads as numbers.

    Raises:
        UserError: none, one that there is not, or one named twice.
    """
    chosen = tuple(int(h) for h in heads)
    if not chosen or min(chosen) < 0 or max(chosen) >= query_heads or len(set(chosen)) < len(chosen):
        raise UserError(
            f"heads={list(chosen)}: name one or more of the layer's {query_heads} query heads, 0 to {query_heads - 1}, "
            "each once"
        )
    return chosen


def torch_head_mass(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    heads: tuple[int, ...],
    rows_valid_BR: torch.Tensor | None,
    out_BN: torch.Tensor,
) -> None:
    """The torch twin of :func:`head_mass`, added to ``out_BN``; it waits for the device where that alone knows the lengths."""
    work = out_BN.dtype
    group = q_THD.shape[1] // k_SKD.shape[1]
    for b, length in enumerate(plan.lens):
        length = min(length, out_BN.shape[1])
        q_RAD = q_THD[plan.rows_of(b)][:, list(heads)].to(work)
        if not length or not len(q_RAD):
            continue
        k_NAD = gather_slots(k_SKD, plan.slots(b, length))[:, [h // group for h in heads]].to(work)
        prob_ARN = (torch.matmul(q_RAD.transpose(0, 1), k_NAD.permute(1, 2, 0)) * scale).softmax(-1)
        if rows_valid_BR is not None:
            # Not a product: a row that does not count may hold anything.
            prob_ARN = torch.where(rows_valid_BR[b, : len(q_RAD), None], prob_ARN, 0.0)
        out_BN[b, :length] += prob_ARN.sum((0, 1))


def head_mass(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    heads: Sequence[int],
    rows_valid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    kv_scale: float = 1.0,
    columns: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax probabilities over the cached columns, summed over query rows and chosen heads of one layer (Dustin, Eq. 5).

    Args:
        q_THD: rotated queries of all heads, bfloat16, float16 or float32 (the torch twin: float64 too).
        k_SKD: the layer's keys, of the queries' dtype or float8 (e4m3); key head ``h // (H // K)`` belongs to query head h.
        plan: page lists and row offsets; every row of request b sees its first ``plan.lens[b]`` columns, all of them and no
            other key. Nothing waits for the device (but the torch twin), and shapes alone decide what runs, so that a CUDA
            graph serves any lengths.
        scale: factor of the attention's scores.
        heads: the chosen query heads, known on the host. Only their key heads are read. Which ones they are is brought to the
            device at the first call, so that comes before a capture.
        rows_valid: bool ``[B, R]``, R at least ``plan.max_rows``: the rows of each request that count; None: all of its rows.
            What the others hold has no influence.
        out: a score, of the result's dtype, to add to and to return, so that layers add up; None: a new one.
        kv_scale: what keys in the cache are to be multiplied by, for float8.
        columns: N; None takes as many as the page lists have room for. With ``out``, what that has.
        backend: ``"triton"`` or ``"torch"``; None takes the first on a GPU.

    Returns:
        ``score_BN``: float32 (float64 for float64 queries), contiguous. Zero from a request's length on and where no row counts. A
        request's scores sum to its number of rows that count times the number of heads.

    Raises:
        UserError: heads that there are not, or a backend that is unknown or cannot serve this call.
        ValueError: ``rows_valid`` says nothing of some row.
    """
    chosen = check_heads(heads, q_THD.shape[1])
    if rows_valid is not None and (len(rows_valid) != len(plan) or rows_valid.shape[1] < plan.max_rows):
        raise ValueError(
            f"rows_valid of {list(rows_valid.shape)} for {len(plan)} requests of up to {plan.max_rows} rows: give one of each"
        )
    assert out is None or (out.dtype == work_dtype(q_THD) and len(out) == len(plan) and out.stride(1) == 1)
    columns = count_blocks(plan, 1, columns) if out is None else out.shape[1]
    if score_backend(backend, q_THD, k_SKD, plan, "heads") == "torch":
        if out is None:
            out = torch.zeros(len(plan), columns, dtype=work_dtype(q_THD), device=q_THD.device)
        torch_head_mass(q_THD, k_SKD, plan, scale * kv_scale, chosen, rows_valid, out)
        return out
    from longdraft.kernels.triton_head_mass import triton_head_mass  # no Triton, no harm

    return triton_head_mass(q_THD, k_SKD, plan, scale * kv_scale, chosen, rows_valid, out, columns)
