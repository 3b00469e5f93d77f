"""Causal attention within packed documents: sliding window, and the lagged slices of Flash Noisy Training.

Legend: T packed tokens, H query heads, K key/value heads, D head size. Document i is tokens ``cu[i] .. cu[i + 1]``.
"""

from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CHUNK = 512  # query rows a block where torch attends, so that a 32K document never makes an [L, L] mask
# Not cuDNN, which torch 2.11 asks first for 16-bit tensors on Hopper. Its backward pass is known to return gradients that
# are not finite where the forward pass is right (pytorch issue 196678 is one case), and a 16-bit run on an H200 met an
# infinite gradient beside a sound loss.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@cache
def flash_varlen():  # type: ignore[no-untyped-def]
    """The ``flash_attn_varlen_func`` with a backward pass, or None. FlashAttention-4 owns the package's name without it."""
    if not torch.cuda.is_available():
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _sdpa_document(q_LHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, window: int | None) -> torch.Tensor:
    length, heads = q_LHD.shape[:2]
    if window is None or window >= length:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_LHD, k_LKD, v_LKD))
        with sdpa_kernel(BACKENDS):  # the backward pass is that of the kernel chosen here
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)
    # With a mask, grouped heads would leave a GPU nothing but the kernel that writes all scores to memory.
    group = heads // k_LKD.shape[1]
    q, k, v = (
        x.transpose(0, 1)[None] for x in (q_LHD, k_LKD.repeat_interleave(group, 1), v_LKD.repeat_interleave(group, 1))
    )
    outs = []
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        first = max(0, start - window + 1)
        distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        mask = (distance >= 0) & (distance < window)
        part = k[:, :, first:end], v[:, :, first:end]
        with sdpa_kernel(BACKENDS):
            outs.append(scaled_dot_product_attention(q[:, :, start:end], *part, attn_mask=mask))
    return torch.cat(outs, 2)[0].transpose(0, 1)


def packed_causal_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: list[int], window: int | None = None
) -> torch.Tensor:
    """Causal attention inside each document, scores scaled by ``D ** -0.5``.

    Args:
        q_THD, k_TKD, v_TKD: packed documents.
        cu: document offsets from 0 to T.
        window: keys visible including self; None for all earlier keys.

    Returns:
        ``[T, H, D]`` in the queries' dtype, differentiable in all three inputs.
    """
    flash = flash_varlen() if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16) else None
    if flash is None:
        outs = [
            _sdpa_document(q_THD[a:b], k_TKD[a:b], v_TKD[a:b], window)
            for a, b in zip(cu, cu[1:], strict=False)
            if b > a
        ]
        return torch.cat(outs) if outs else torch.zeros_like(q_THD)
    offsets = torch.tensor(cu, dtype=torch.int32, device=q_THD.device)
    longest = max(b - a for a, b in zip(cu, cu[1:], strict=False))
    reach = (-1, -1) if window is None else (window - 1, 0)
    return flash(q_THD, k_TKD, v_TKD, offsets, offsets, longest, longest, causal=True, window_size=reach)


def lagged_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: list[int], lag: int
) -> torch.Tensor:
    """Query t of a document sees its keys 0 .. t - lag (Flash Noisy Training, LongSpec section 3.2), by slicing.

    The first ``lag`` queries and the last ``lag`` keys of each document drop out; the rest is plain causal attention, so
    any causal kernel computes it. Never across documents.

    Args:
        q_THD, k_TKD, v_TKD, cu: as in :func:`packed_causal_attention`.
        lag: at least 1.

    Returns:
        ``[T, H, D]``; the first ``lag`` rows of each document are zero.

    Raises:
        ValueError: ``lag`` below 1.
    """
    if lag < 1:
        raise ValueError(f"lag = {lag}: a query's own key does not exist yet when it is drafted, use 1 or more")
    rows, keys, lens = [], [], [0]
    for a, b in zip(cu, cu[1:], strict=False):
        kept = max(b - a - lag, 0)
        rows.append(torch.arange(b - kept, b))
        keys.append(torch.arange(a, a + kept))
        if kept:
            lens.append(lens[-1] + kept)
    row_N, key_N = (torch.cat(x).to(q_THD.device) for x in (rows, keys))
    out_THD = torch.zeros_like(q_THD)
    if not row_N.numel():
        return out_THD
    return out_THD.index_copy(0, row_N, packed_causal_attention(q_THD[row_N], k_TKD[key_N], v_TKD[key_N], lens))
