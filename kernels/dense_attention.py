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
    k_KDN = k_NKD.permute(1, 2, 0)
    v_KND = v_NKD.transpose(0, 1)
    if visible_TN is not None:
        # A key that no row reads may hold anything: zero times NaN is NaN, so take such keys out.
        read_N = visible_TN.any(0)
        if not bool(read_N.all()):
            k_KDN = k_KDN.masked_fill(~read_N, 0)
            v_KND = v_KND.masked_fill(~read_N[:, None], 0)
    score_KRN = torch.matmul(q_KRD, k_KDN).to(work) * scale
    if visible_TN is not None:
        score_KRN = score_KRN.masked_fill(~visible_TN.repeat(group, 1), float("-inf"))
    lse_KR = torch.logsumexp(score_KRN, -1)
    # A row without keys has log-sum-exp -inf; exp(-inf - 0) = 0 leaves zeros where -inf - -inf would leave NaN.
    weight_KRN = torch.exp(score_KRN - torch.where(torch.isneginf(lse_KR), 0.0, lse_KR)[..., None])
    out_KRD = torch.matmul(weight_KRN.to(v_KND.dtype), v_KND)
    out_THD = out_KRD.view(kv_heads, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)
    lse_TH = lse_KR.view(kv_heads, group, rows).permute(2, 0, 1).reshape(rows, heads)
    return out_THD.to(q_THD.dtype), lse_TH
