"""Causal attention within packed documents: sliding window, and the lagged slices of Flash Noisy Training.

On a GPU in 16 bit the number of kernels does not depend on the number of documents: with hundreds of short ones in a step, the
CPU could not launch them as fast as the GPU runs them.

Legend: T packed tokens, H query heads, K key/value heads, D head size, G query heads a key/value head, N rows that ranges name.
Document i is tokens ``cu[i] .. cu[i + 1]``.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.varlen_flash import HALF, flash_documents, takes_flash

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


class _OwnValue(torch.autograd.Function):
    """Attention of rows that see themselves alone: no kernel for one key a row. Queries and keys get a gradient of zero, not
    none, so that engines which wait for every weight's go on."""

    @staticmethod
    def forward(ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q_THD, k_TKD)
        group = q_THD.shape[1] // k_TKD.shape[1]
        return v_TKD[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q_THD, k_TKD = ctx.saved_tensors
        dout_TKGD = grads[0].unflatten(1, (k_TKD.shape[1], -1))
        return torch.zeros_like(q_THD), torch.zeros_like(k_TKD), dout_TKGD.sum(2)


@lru_cache(maxsize=8)
def _offsets(cu: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Offsets of the documents that are not empty, int32; kept, since all layers of a target ask for the same."""
    full = [cu[0], *(b for a, b in pairwise(cu) if b > a)]
    return torch.tensor(full, dtype=torch.int32).to(device, non_blocking=True)


def packed_causal_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: Sequence[int], window: int | None = None
) -> torch.Tensor:
    """Causal attention inside each document, scores scaled by ``D ** -0.5``.

    Args:
        q_THD, k_TKD, v_TKD: packed documents.
        cu: document offsets from 0 to T.
        window: keys visible including self; None for all earlier keys.

    Returns:
        ``[T, H, D]`` in the queries' dtype, differentiable in all three inputs.
    """
    longest = max((b - a for a, b in pairwise(cu)), default=0)
    if window is None or window >= longest:
        window = None
    if window == 1 or longest <= 1:
        own_THD: torch.Tensor = _OwnValue.apply(q_THD, k_TKD, v_TKD)
        return own_THD
    package = flash_varlen() if q_THD.is_cuda and q_THD.dtype in HALF else None
    if package is not None:
        offsets, reach = _offsets(tuple(cu), q_THD.device), (-1, -1) if window is None else (window - 1, 0)
        return package(q_THD, k_TKD, v_TKD, offsets, offsets, longest, longest, causal=True, window_size=reach)
    if takes_flash(q_THD):
        left = None if window is None else window - 1
        return flash_documents(q_THD, k_TKD, v_TKD, _offsets(tuple(cu), q_THD.device), longest, left)
    outs = [_sdpa_document(q_THD[a:b], k_TKD[a:b], v_TKD[a:b], window) for a, b in pairwise(cu) if b > a]
    return torch.cat(outs)


def ranges(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Indices ``start .. start + count - 1`` of every range, one behind the other: int64 ``[N]``.

    Made on the device from one small copy: indices from the CPU would be as long as the tokens, and a copy of that size from
    ordinary memory waits for all that the device has still to do.
    """
    count_D, start_D = torch.tensor(counts, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64)
    shift_D = start_D - (count_D.cumsum(0) - count_D)
    count_D, shift_D = torch.stack([count_D, shift_D]).to(device, non_blocking=True)
    total = sum(counts)
    which_N = torch.repeat_interleave(count_D, output_size=total)
    return shift_D.index_select(0, which_N) + torch.arange(total, device=device)


def lagged_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: Sequence[int], lag: int
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
    kept = {a: b - a - lag for a, b in pairwise(cu) if b - a > lag}
    out_THD = torch.zeros_like(q_THD)
    if not kept:
        return out_THD
    key_N = ranges(list(kept), list(kept.values()), q_THD.device)
    row_N = key_N + lag
    q, k, v = (x.index_select(0, n) for x, n in ((q_THD, row_N), (k_TKD, key_N), (v_TKD, key_N)))
    return out_THD.index_copy(0, row_N, packed_causal_attention(q, k, v, [0, *accumulate(kept.values())]))
