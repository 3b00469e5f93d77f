"""FlashAttention-3 as SGLang ships it (``sgl_kernel``), over page lists.

Legend: B requests, T new tokens of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

from functools import cache
from typing import Any

import torch

from longdraft.kernels.plan import AttentionPlan


@cache
def fa3_available() -> bool:
    """True on a Hopper card with SGLang's FlashAttention-3 build."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        import sgl_kernel.flash_attn
        import sgl_kernel.flash_ops  # noqa: F401
    except ImportError:
        return False
    return True


def paged(cache_SKD: torch.Tensor, page_size: int) -> torch.Tensor:
    """A cache as pages ``[S / page_size, page_size, K, D]``, a view; slots behind the last whole page belong to no page."""
    return cache_SKD[: len(cache_SKD) // page_size * page_size].unflatten(0, (-1, page_size))


def _call(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    lens_B: torch.Tensor,
    scale: float,
    kv_scales: tuple[float, float],
    causal: bool,
    lse: bool,
) -> Any:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    dtype = q_THD.dtype
    if k_SKD.dtype == torch.float8_e4m3fn:
        # The kernel multiplies float8 by float8, so the queries are rounded too. Unscaled, as SGLang does it: a scale of the
        # batch would let a row's result depend on the other rows, drafts among them.
        most = torch.finfo(k_SKD.dtype).max
        q_THD = q_THD.clamp(-most, most).to(k_SKD.dtype)
    found = flash_attn_with_kvcache(
        q=q_THD,
        k_cache=paged(k_SKD, plan.page_size),
        v_cache=paged(v_SKD, plan.page_size),
        page_table=plan.pages_BW,
        cache_seqlens=lens_B,
        cu_seqlens_q=plan.cu_rows_B1,
        max_seqlen_q=plan.max_rows,
        softmax_scale=scale * kv_scales[0],
        causal=causal,
        return_softmax_lse=lse,
    )
    out_THD, *rest = found if lse else (found,)
    if kv_scales[1] != 1.0:
        out_THD = out_THD * kv_scales[1]
    return out_THD.to(dtype), *rest


def fa3_prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.prefix_attention.prefix_attention` on FlashAttention-3 (natural log-sum-exp)."""
    out_THD, lse_HT, *_ = _call(q_THD, k_SKD, v_SKD, plan, plan.lens_B, scale, kv_scales, causal=False, lse=True)
    lse_TH = lse_HT.transpose(0, 1)
    # FA3 marks an empty row with +inf in some builds and with -inf in others.
    return out_THD, torch.where(torch.isinf(lse_TH), float("-inf"), lse_TH)


def fa3_prefix_output(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """The output of :func:`fa3_prefix_attention` alone."""
    return _call(q_THD, k_SKD, v_SKD, plan, plan.lens_B, scale, kv_scales, causal=False, lse=False)[0]


def fa3_chain_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """A whole chain verification in one call: causal over the prefix and the new tokens' own slots."""
    rows_B = plan.cu_rows_B1[1:] - plan.cu_rows_B1[:-1]
    return _call(q_THD, k_SKD, v_SKD, plan, plan.lens_B + rows_B, scale, kv_scales, causal=True, lse=False)[0]
