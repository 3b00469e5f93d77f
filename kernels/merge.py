"""Merge attention parts over disjoint key sets by their log-sum-exp.

Legend: P parts, T query rows, H heads, D head size. Log-sum-exps are natural logarithms; -inf means an empty part.
"""

import torch


def torch_merge_attention(out_PTHD: torch.Tensor, lse_PTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of :func:`merge_attention`."""
    top_TH = lse_PTH.amax(0)
    top_TH = torch.where(torch.isneginf(top_TH), torch.zeros_like(top_TH), top_TH)
    weight_PTH = torch.exp(lse_PTH - top_TH)
    total_TH = weight_PTH.sum(0)
    share_PTH = weight_PTH / total_TH.clamp_min(torch.finfo(total_TH.dtype).tiny)
    # A part without keys has weight zero, and zero times whatever it holds must stay zero; a NaN weight stays visible.
    parts = torch.where(share_PTH[..., None] != 0, out_PTHD.to(lse_PTH.dtype) * share_PTH[..., None], 0.0)
    return parts.sum(0).to(out_PTHD.dtype), torch.log(total_TH) + top_TH


def merge_attention(out_PTHD: torch.Tensor, lse_PTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the union of the parts' keys (LongSpec, section 3.3).

    Args:
        out_PTHD: each part's normalised output, any float dtype; what an empty part's rows hold does not matter.
        lse_PTH: each part's log-sum-exp, float32 or float64.

    Returns:
        ``(out_THD, lse_TH)``: the merged output in ``out_PTHD``'s dtype and its log-sum-exp. Where every part is empty the
        output is zero and the log-sum-exp is -inf.
    """
    if out_PTHD.is_cuda and torch.float64 not in (out_PTHD.dtype, lse_PTH.dtype):
        from longdraft.kernels.triton_merge import triton_merge_attention  # no Triton, no harm

        return triton_merge_attention(out_PTHD, lse_PTH)
    return torch_merge_attention(out_PTHD, lse_PTH)
