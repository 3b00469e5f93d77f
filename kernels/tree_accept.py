"""Acceptance of drafted trees on the device: one rule, of which the chain's is a case, for greedy and for shared noise.

A node is kept where its token is the target's choice behind its parent and all its ancestors are kept. The choice is an argmax,
or an argmax under the noise of that seed and position (design: shared noise); what is emitted are the target's choices along
the kept path, so no draft can change them.

Legend: B requests, T places of a tree, W words of bits, D edges of the deepest node, D1 = D + 1.
"""

from dataclasses import dataclass

import torch

from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_bits import pack_bits, unpack_bits


@dataclass(frozen=True)
class Accepted:
    """What a verification keeps, on the device.

    Attributes:
        path_BD1: int64 kept nodes from the root on; behind the last one it repeats, so that every entry may be gathered by.
        count_B: int64 kept drafts, 0 .. D; the request gains one more token, :attr:`next_B`.
        next_B: int64 target's choice behind the last kept node, the next round's root.
        token_BD1: int64 tokens that the request gains, ``count + 1`` of them; behind them the last one repeats.
    """

    path_BD1: torch.Tensor
    count_B: torch.Tensor
    next_B: torch.Tensor
    token_BD1: torch.Tensor


def torch_tree_accept(tree: Tree, choice_BT: torch.Tensor) -> Accepted:
    """The torch twin of :func:`tree_accept`."""
    count = tree.token_BT.shape[1]
    hit_BT = tree.token_BT == choice_BT.gather(1, tree.parent_BT.clamp_min(0))
    hit_BT = (hit_BT & (tree.parent_BT >= 0)) | (tree.parent_BT == -1)
    missed_BTW = tree.bits_BTW & ~pack_bits(hit_BT)[:, None]
    kept_BT = (missed_BTW == 0).all(-1) & tree.valid_BT
    # The deepest kept node, the first of several: they can only be duplicates, or the root.
    at_T = torch.arange(count, device=choice_BT.device)
    rank_BT = torch.where(kept_BT, tree.depth_BT * count + (count - 1 - at_T), -1)
    rank_BT[:, 0].clamp_min_(count - 1)  # a row without a root ends at place 0
    last_B1 = rank_BT.argmax(1, keepdim=True)
    return path_to(tree, last_B1, choice_BT)


def path_to(tree: Tree, last_B1: torch.Tensor, choice_BT: torch.Tensor) -> Accepted:
    """What a verification keeps that ends at these nodes, int64 places."""
    count = tree.token_BT.shape[1]
    count_B1 = tree.depth_BT.gather(1, last_B1)
    bits_B1W = tree.bits_BTW.gather(1, last_B1[..., None].expand(-1, -1, tree.bits_BTW.shape[2]))
    on_path_BT = unpack_bits(bits_B1W, count)[:, 0]
    # Places beside the path go to a column that is cut off.
    column_BT = torch.where(on_path_BT, tree.depth_BT, tree.depth + 1)
    at_BT = torch.arange(count, device=choice_BT.device).expand_as(column_BT)
    path_BD = last_B1.repeat(1, tree.depth + 2).scatter(1, column_BT, at_BT)
    path_BD1 = path_BD[:, : tree.depth + 1].contiguous()
    return Accepted(path_BD1, count_B1[:, 0], choice_BT.gather(1, last_B1)[:, 0], choice_BT.gather(1, path_BD1))


def tree_accept(tree: Tree, choice_BT: torch.Tensor, backend: str | None = None) -> Accepted:
    """The longest path of drafts that are the target's own choices.

    Args:
        tree: the verified trees.
        choice_BT: int64 target's choice behind each node; anything at places without a node.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU.

    Returns:
        Kept paths. Nothing waits for the device. Of duplicate siblings the one whose descendants are kept further is taken.
    """
    if backend is None:
        backend = "triton" if choice_BT.is_cuda else "torch"
    if backend == "torch":
        return torch_tree_accept(tree, choice_BT)
    from longdraft.kernels.triton_tree_accept import triton_tree_accept  # no Triton, no harm

    return Accepted(*triton_tree_accept(tree, choice_BT))
