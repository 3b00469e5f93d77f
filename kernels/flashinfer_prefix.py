"""The prefix part on FlashInfer, whose log-sum-exp is base 2 and whose work is planned on the host.

Legend: B requests, T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

import math
import weakref
from functools import cache
from typing import Any

import torch

from longdraft.kernels.fa3 import paged
from longdraft.kernels.plan import AttentionPlan

WORKSPACE = 256 << 20  # bytes for the pieces of split contexts
_planned: dict[tuple[Any, ...], tuple[Any, "weakref.ref[AttentionPlan]"]] = {}


@cache
def flashinfer_available() -> bool:
    """True with a GPU and FlashInfer."""
    if not torch.cuda.is_available():
        return False
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def page_counts(lens: list[int], page_size: int) -> tuple[list[int], list[int]]:
    """Pages that hold each request's slots, and how many slots of its last page it reads (0 of none)."""
    return [-(-n // page_size) for n in lens], [(n - 1) % page_size + 1 if n else 0 for n in lens]


def _wrapper(q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float) -> Any:
    """A wrapper planned for this batch; one plan serves all layers, and the wrapper is kept for the next batch."""
    heads, size, kv_heads = *q_THD.shape[1:], k_SKD.shape[1]
    key = (q_THD.device, heads, size, kv_heads, q_THD.dtype, k_SKD.dtype, plan.page_size, scale)
    wrapper, owner = _planned.get(key, (None, None))
    if owner is not None and owner() is plan:
        return wrapper
    if wrapper is None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(q_THD.device), "NHD")
    counts, last = page_counts(plan.lens, plan.page_size)
    wrapper.plan(
        torch.tensor(plan.cu_rows, dtype=torch.int32),
        torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.cat([plan.pages_BW[b, :n] for b, n in enumerate(counts)]),
        torch.tensor(last, dtype=torch.int32),
        heads,
        kv_heads,
        size,
        plan.page_size,
        causal=False,
        sm_scale=scale,
        q_data_type=q_THD.dtype,
        kv_data_type=k_SKD.dtype,
    )
    _planned[key] = wrapper, weakref.ref(plan)
    return wrapper


def flashinfer_prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.prefix_attention.prefix_attention` on FlashInfer; the plan's lengths must be on the host."""
    if not any(plan.lens):
        return torch.zeros_like(q_THD), q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
    cache_kv = paged(k_SKD, plan.page_size), paged(v_SKD, plan.page_size)
    wrapper = _wrapper(q_THD, k_SKD, plan, scale * kv_scales[0])
    out_THD, lse_TH = wrapper.run(q_THD.contiguous(), cache_kv, v_scale=kv_scales[1], return_lse=True)
    lse_TH = lse_TH * math.log(2)
    for b, length in enumerate(plan.lens):
        if not length:
            out_THD[plan.rows_of(b)] = 0
            lse_TH[plan.rows_of(b)] = float("-inf")
    return out_THD, lse_TH
