"""Attention of a few query rows a request over a page list of cached keys, with log-sum-exp.

Legend: B requests, T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable

import torch

from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.fa3 import fa3_available, fa3_prefix_attention
from longdraft.kernels.merge import merge_attention
from longdraft.kernels.plan import AttentionPlan, consecutive_runs

PrefixResult = tuple[torch.Tensor, torch.Tensor]


def gather_slots(cache_SKD: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
    """Rows of the cache in page-list order, ``[N, K, D]``; a view where they lie so on a CPU."""
    runs = consecutive_runs(slots_N, most=1)
    return cache_SKD[slots_N.long()] if runs is None else cache_SKD[runs[0]]


def torch_prefix_attention(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, plan: AttentionPlan, scale: float
) -> PrefixResult:
    """The torch twin of :func:`prefix_attention`."""
    parts = []
    for b, (length, runs) in enumerate(zip(plan.lens, plan.runs, strict=True)):
        places = runs or (plan.pages_BW[b, :length].long(),)
        pieces = [dense_attention(q_THD[plan.rows_of(b)], k_SKD[at], v_SKD[at], scale) for at in places]
        outs, lses = zip(*pieces, strict=True)
        parts.append(pieces[0] if len(pieces) == 1 else merge_attention(torch.stack(outs), torch.stack(lses)))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


BACKENDS: dict[str, Callable[..., PrefixResult]] = {"torch": torch_prefix_attention, "fa3": fa3_prefix_attention}


def choose_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest backend there is for this device and dtype."""
    half = dtype in (torch.bfloat16, torch.float16)
    return "fa3" if device.type == "cuda" and half and fa3_available() else "torch"


def prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    backend: str | None = None,
) -> PrefixResult:
    """Non-causal attention over the slots that a page list names (the prefix part of LongSpec, section 3.3).

    Args:
        q_THD: queries, float.
        k_SKD, v_SKD: one layer's cache, page size 1; keys carry their rotation, so the order of slots does not matter.
        plan: page lists and row offsets; every row of request b sees its first ``plan.lens[b]`` slots.
        scale: factor of the scores.
        backend: ``"fa3"`` or ``"torch"``; None takes the fastest that is there.

    Returns:
        ``(out_THD, lse_TH)``: output in the queries' dtype and the natural log-sum-exp, float32 or wider; zeros and
        -inf where a prefix is empty.
    """
    return BACKENDS[backend or choose_backend(q_THD.device, q_THD.dtype)](q_THD, k_SKD, v_SKD, plan, scale)
