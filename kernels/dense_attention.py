"""Masked softmax attention of a few query rows over one key block, with log-sum-exp: the torch twin that others build on.

Legend: T query rows, N keys, H query heads, K key/value heads (H = K * G), D head size.
"""

import torch


def dense_attention(
    q_THD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, scale: float, visible_TN: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with grouped heads under an optional visibility mask.

    Args:
        q_THD, k_NKD, v_NKD: queries, keys and values of one dtype and device; keys and values may be strided views.
        scale: factor of the scores, usually ``D ** -0.5``.
        visible_TN: bool, True where a query may read a key; None means everywhere. What a row may not read is never
            computed with, NaN included.

    Returns:
        ``(out_THD, lse_TH)``: output in the queries' dtype (zeros in a row that sees nothing) and the natural
        log-sum-exp in float32 (float64 for float64 inputs; -inf in a row that sees nothing).
    """
    rows, heads, size = q_THD.shape
    count, kv_heads = k_NKD.shape[:2]
    work = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    if count == 0:
        return torch.zeros_like(q_THD), q_THD.new_full((rows, heads), float("-inf"), dtype=work)
    group = heads // kv_heads
    q_KRD = q_THD.view(rows, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, size)
    if visible_TN is None and q_THD.device.type == "cpu" and not torch.is_grad_enabled():
        return _fused_on_cpu(q_KRD, k_NKD, v_NKD, scale, q_THD)
    k_KDN = k_NKD.permute(1, 2, 0)
    v_KND = v_NKD.transpose(0, 1)
    # Scores are float32 or wider: rounded to bfloat16 a sharp one is off by tenths, and float16 overflows before the scale.
    score_KRN = torch.matmul(q_KRD.to(work), k_KDN.to(work)) * scale
    hidden_RN = None if visible_TN is None else ~visible_TN.repeat(group, 1)
    if hidden_RN is not None:
        score_KRN = score_KRN.masked_fill(hidden_RN, float("-inf"))
    lse_KR = torch.logsumexp(score_KRN, -1)
    # A row without keys has log-sum-exp -inf; exp(-inf - 0) = 0 leaves zeros where -inf - -inf would leave NaN.
    weight_KRN = torch.exp(score_KRN - torch.where(torch.isneginf(lse_KR), 0.0, lse_KR)[..., None])
    touched_KR = None
    if hidden_RN is not None and not bool(v_KND.isfinite().all()):
        # Zero times NaN is NaN: such values are taken out, and shown only to the rows that read them.
        broken_KN = ~v_KND.isfinite().all(-1)
        touched_KR = (broken_KN[:, None] & ~hidden_RN).any(-1)
        v_KND = v_KND.masked_fill(broken_KN[..., None], 0)
    out_KRD = torch.matmul(weight_KRN.to(v_KND.dtype), v_KND)
    if touched_KR is not None:
        out_KRD = out_KRD.masked_fill(touched_KR[..., None], float("nan"))
    out_THD = out_KRD.view(kv_heads, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)
    lse_TH = lse_KR.view(kv_heads, group, rows).permute(2, 0, 1).reshape(rows, heads)
    return out_THD.to(q_THD.dtype), lse_TH


def _fused_on_cpu(
    q_KRD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, scale: float, q_THD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own fused CPU kernel, which returns the natural log-sum-exp; the heads of a group are rows of one head."""
    rows, heads, size = q_THD.shape
    kv_heads = k_NKD.shape[1]
    out_KRD, lse_KR = (
        part[0]
        for part in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_KRD[None], k_NKD.transpose(0, 1)[None], v_NKD.transpose(0, 1)[None], scale=scale
        )
    )
    out_THD = out_KRD.view(kv_heads, heads // kv_heads, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)
    return out_THD, lse_KR.view(kv_heads, heads // kv_heads, rows).permute(2, 0, 1).reshape(rows, heads)
