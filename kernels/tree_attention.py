"""Attention among the new tokens of each request, under a causal or an ancestor mask, with log-sum-exp.

Legend: B requests, T query rows of all requests, N keys of all requests, W words, H query heads, K key/value heads,
D head size. A request has at most 128 new tokens.
"""

from itertools import pairwise

import torch

from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.merge import torch_merge_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree_bits import WORD, unpack_bits

MAX_TREE = 128


def torch_tree_attention(
    q_THD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    bits_TW: torch.Tensor | None = None,
    cu_keys_B1: torch.Tensor | None = None,
    onto: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of :func:`tree_attention`."""
    parts = []
    cu_keys = plan.cu_rows if cu_keys_B1 is None else cu_keys_B1.tolist()
    for b, (first, last) in enumerate(pairwise(cu_keys)):
        rows, keys = plan.rows_of(b), slice(first, last)
        if bits_TW is None:
            mask = torch.ones(last - first, last - first, dtype=torch.bool, device=q_THD.device).tril()
        else:
            mask = unpack_bits(bits_TW[rows], last - first)
        parts.append(dense_attention(q_THD[rows], k_NKD[keys], v_NKD[keys], scale, mask))
    out_THD, lse_TH = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    if onto is None:
        return out_THD, lse_TH
    return torch_merge_attention(torch.stack([out_THD, onto[0]]), torch.stack([lse_TH, onto[1]]))


def tree_attention(
    q_THD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    bits_TW: torch.Tensor | None = None,
    cu_keys_B1: torch.Tensor | None = None,
    onto: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tree part of hybrid tree attention (LongSpec, section 3.3).

    Args:
        q_THD, k_NKD, v_NKD: the new tokens' queries, keys and values.
        plan: its row offsets say which rows belong together.
        scale: factor of the scores.
        bits_TW: int64 bits of what each row reads among its request's keys, see :mod:`longdraft.kernels.tree_bits`; None
            means a chain (causal).
        cu_keys_B1: int32 offsets of the requests in the keys, where a request's rows are not its keys: the nodes of one depth
            that read a tree so far. None means the row offsets; otherwise ``bits_TW`` must be given.
        onto: output and log-sum-exp of attention over other keys (the prefix's), to be merged with.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU, torch elsewhere and in float64.

    Returns:
        ``(out_THD, lse_TH)`` as in :func:`longdraft.kernels.prefix_attention.prefix_attention`, over the tree and ``onto``.

    Raises:
        ValueError: a request with more than 128 new tokens, or with more than its bits can name.
    """
    most = MAX_TREE if bits_TW is None else min(MAX_TREE, bits_TW.shape[1] * WORD)
    if cu_keys_B1 is None and plan.max_rows > most:
        what = f"tree attention takes at most {MAX_TREE}" if most == MAX_TREE else f"its bits name {most}"
        raise ValueError(f"a request has {plan.max_rows} new tokens, {what}: draft fewer")
    assert bits_TW is not None or cu_keys_B1 is None
    if backend is None:
        backend = "triton" if q_THD.is_cuda and q_THD.dtype != torch.float64 else "torch"
    if backend == "torch":
        return torch_tree_attention(q_THD, k_NKD, v_NKD, plan, scale, bits_TW, cu_keys_B1, onto)
    from longdraft.kernels.triton_tree import triton_tree_attention  # no Triton, no harm

    return triton_tree_attention(q_THD, k_NKD, v_NKD, plan, scale, bits_TW, cu_keys_B1, onto)
