"""FlashAttention-3 as SGLang ships it (``sgl_kernel``), over page lists of single slots.

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


def _call(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    lens_B: torch.Tensor,
    scale: float,
    causal: bool,
    lse: bool,
) -> Any:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q=q_THD,
        k_cache=k_SKD.unsqueeze(1),
        v_cache=v_SKD.unsqueeze(1),
        page_table=plan.pages_BW,
        cache_seqlens=lens_B,
        cu_seqlens_q=plan.cu_rows_B1,
        max_seqlen_q=plan.max_rows,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=lse,
    )


def fa3_prefix_attention(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, plan: AttentionPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.prefix_attention.prefix_attention` on FlashAttention-3 (natural log-sum-exp)."""
    out_THD, lse_HT, *_ = _call(q_THD, k_SKD, v_SKD, plan, plan.lens_B, scale, causal=False, lse=True)
    lse_TH = lse_HT.transpose(0, 1)
    # FA3 marks an empty row with +inf in some builds and with -inf in others.
    return out_THD, torch.where(torch.isinf(lse_TH), float("-inf"), lse_TH)


def fa3_chain_attention(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """A whole chain verification in one call: causal over the prefix and the new tokens' own slots."""
    rows_B = plan.cu_rows_B1[1:] - plan.cu_rows_B1[:-1]
    return _call(q_THD, k_SKD, v_SKD, plan, plan.lens_B + rows_B, scale, causal=True, lse=False)
