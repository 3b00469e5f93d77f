"""Attention among the new tokens of each request, under a causal or an ancestor mask, with log-sum-exp.

Legend: B requests, T new tokens of all requests, H query heads, K key/value heads, D head size.
A request has at most 128 new tokens.
"""

import torch

from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.plan import AttentionPlan

MAX_TREE = 128


def ancestor_mask(parents: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Visibility inside a tree, ``[n, n]`` bool: a node sees itself and its ancestors.

    Args:
        parents: parent index of each node, -1 for the root; a parent comes before its children.

    Raises:
        ValueError: a parent that does not come before its child.
    """
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ValueError(f"parents[{node}] = {parent} must be smaller than {node}: list parents before children")
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask.to(device)


def tree_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    masks: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tree part of hybrid tree attention (LongSpec, section 3.3).

    Args:
        q_THD, k_TKD, v_TKD: the new tokens' queries, keys and values.
        plan: its row offsets say which rows belong together.
        scale: factor of the scores.
        masks: one bool ``[n_b, n_b]`` matrix a request, True where a row may read a column; None means a chain
            (causal).

    Returns:
        ``(out_THD, lse_TH)`` as in :func:`longdraft.kernels.prefix_attention.prefix_attention`.

    Raises:
        ValueError: a request with more than 128 new tokens.
    """
    parts = []
    for b in range(len(plan)):
        rows = plan.rows_of(b)
        n = rows.stop - rows.start
        if n > MAX_TREE:
            raise ValueError(f"request {b} has {n} new tokens, tree attention takes at most {MAX_TREE}: draft fewer")
        mask = masks[b] if masks is not None else torch.ones(n, n, dtype=torch.bool, device=q_THD.device).tril()
        parts.append(dense_attention(q_THD[rows], k_TKD[rows], v_TKD[rows], scale, mask))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
