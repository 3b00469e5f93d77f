"""Attention of rows over a few keys that are each one row's own: a chain of drafts behind its row, in elementwise products.

Legend: C rows of a block, S keys of a row, H query heads, K key/value heads (H = K * G), D head size.
"""

from collections.abc import Iterator

import torch

BLOCK = 1 << 27  # bytes of a block's keys in working precision: 4096 rows of seven steps at an 8B's shape


def row_blocks(rows: int, keys: int, like_XKD: torch.Tensor, work: torch.dtype) -> Iterator[slice]:
    """Ranges of rows whose own keys take bounded memory.

    Args:
        rows: how many.
        keys: S of each.
        like_XKD: a tensor with the keys' heads and size.
        work: working precision.
    """
    if not keys:
        return
    size = keys * like_XKD.shape[1] * like_XKD.shape[2] * work.itemsize
    step = max(1, BLOCK // size)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _grouped(x_CHX: torch.Tensor, own_CKSD: torch.Tensor) -> torch.Tensor:
    return x_CHX.unflatten(1, (own_CKSD.shape[1], -1))


def _scores(q_CHD: torch.Tensor, own_CKSD: torch.Tensor, scale: float, visible_CS: torch.Tensor | None) -> torch.Tensor:
    """``[C, K, G, S]`` scaled scores in working precision, -inf where a row does not see its own key."""
    score = torch.einsum("ckgd,cksd->ckgs", _grouped(q_CHD.to(own_CKSD.dtype), own_CKSD), own_CKSD) * scale
    return score if visible_CS is None else score.masked_fill(~visible_CS[:, None, None], float("-inf"))


def row_keys_forward(
    q_CHD: torch.Tensor, k_CKSD: torch.Tensor, v_CKSD: torch.Tensor, scale: float, visible_CS: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out_CHD, lse_CH)`` in the keys' dtype, which is the working precision; every row sees one key at least."""
    score = _scores(q_CHD, k_CKSD, scale, visible_CS)
    lse = torch.logsumexp(score, -1)
    out = torch.einsum("ckgs,cksd->ckgd", torch.exp(score - lse[..., None]), v_CKSD)
    return out.flatten(1, 2), lse.flatten(1)


def row_keys_backward(
    dout_CHD: torch.Tensor,
    q_CHD: torch.Tensor,
    k_CKSD: torch.Tensor,
    v_CKSD: torch.Tensor,
    total_CH: torch.Tensor,
    delta_CH: torch.Tensor,
    scale: float,
    visible_CS: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dq_CHD, dk_CKSD, dv_CKSD)`` of these keys' part in a merged softmax.

    Args:
        total_CH: log-sum-exp over all parts.
        delta_CH: product of the merged output and its gradient.
    """
    work = total_CH.dtype
    weight = torch.exp(_scores(q_CHD, k_CKSD, scale, visible_CS) - _grouped(total_CH[..., None], k_CKSD))
    dout = _grouped(dout_CHD.to(work), k_CKSD)
    dweight = torch.einsum("ckgd,cksd->ckgs", dout, v_CKSD)
    dscore = weight * (dweight - _grouped(delta_CH[..., None], k_CKSD)) * scale
    dq = torch.einsum("ckgs,cksd->ckgd", dscore, k_CKSD).flatten(1, 2)
    dk = torch.einsum("ckgs,ckgd->cksd", dscore, _grouped(q_CHD.to(work), k_CKSD))
    return dq, dk, torch.einsum("ckgs,ckgd->cksd", weight, dout)
