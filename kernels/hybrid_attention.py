"""Hybrid tree attention: a page-list prefix part and a masked part over the new tokens, merged by log-sum-exp.

Legend: B requests, T new tokens of all requests, W words, S cache slots, H query heads, K key/value heads, D head size.
"""

import torch

from longdraft.kernels.fa3 import fa3_chain_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import checked_backend, prefix_attention
from longdraft.kernels.tree_attention import tree_attention


def hybrid_tree_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    bits_TW: torch.Tensor | None = None,
    backend: str | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """One verification's attention in one layer (LongSpec, section 3.3).

    Args:
        q_THD, k_TKD, v_TKD: the new tokens' queries, keys and values.
        k_SKD, v_SKD: one layer's cache. A chain on FlashAttention-3 reads the new tokens from it too, so they must be
            stored already at the slots that the plan names behind the prefix.
        plan: page lists, lengths and row offsets.
        scale: factor of the scores.
        bits_TW: a tree's visibility, int64 bits a row (:mod:`longdraft.kernels.tree_bits`); None means a chain.
        backend: the prefix part's backend; None takes the fastest that is there. ``"torch"`` is the twin of the whole.
        kv_scales: what a float8 cache's keys and values are to be multiplied by. The new tokens' own are given unscaled, and
            read as the cache keeps them: as plain decoding reads its newest token.

    Returns:
        Output ``[T, H, D]`` in the queries' dtype; zeros in a row for which both parts are empty.
    """
    backend = checked_backend(backend, q_THD, k_SKD, plan)
    if backend == "fa3" and bits_TW is None:
        return fa3_chain_attention(q_THD, k_SKD, v_SKD, plan, scale, kv_scales)
    prefix = prefix_attention(q_THD, k_SKD, v_SKD, plan, scale, backend, kv_scales)
    k_TKD, v_TKD = (as_cached(x, k_SKD.dtype, s) for x, s in zip((k_TKD, v_TKD), kv_scales, strict=True))
    tree_backend = "torch" if backend == "torch" else "triton"
    return tree_attention(q_THD, k_TKD, v_TKD, plan, scale, bits_TW, onto=prefix, backend=tree_backend)[0]


def as_cached(x_TKD: torch.Tensor, cache_dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache gives back of keys or values: rounded where it is float8, as they are elsewhere."""
    if cache_dtype != torch.float8_e4m3fn:
        return x_TKD
    kept = (x_TKD if scale == 1.0 else x_TKD / scale).to(cache_dtype).to(x_TKD.dtype)
    return kept if scale == 1.0 else kept * scale
