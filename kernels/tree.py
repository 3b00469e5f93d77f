"""A round's draft trees, of one fixed shape for the whole batch, so that no size ever has to come back from the device.

Node 0 is the root: the request's newest token, which the target verifies with the rest. A chain is the tree whose node t has
parent t - 1. Every place of the fixed shape that holds no node says so by its parent.

Legend: B requests, T places of a tree, K drafted tokens of a chain, W words of bits, ``W = ceil(T / 64)``.
"""

from dataclasses import dataclass

import torch

from longdraft.kernels.tree_bits import ancestor_bits

NO_NODE = -2  # the parent of a place without a node; a root's is -1, as kernels/tree_bits.py has it


@dataclass(frozen=True)
class Tree:
    """Trees of a batch; everything is on one device.

    Attributes:
        token_BT: int64 token ids; places without a node hold some id of the vocabulary.
        parent_BT: int64 parents among the request's own places: -1 for the root, which is place 0, and
            :data:`NO_NODE` for a place without a node. Nodes may stand in any order behind the root.
        depth_BT: int64 edges to the root.
        bits_BTW: int64 bits of each node's ancestors, itself included; none for a place without a node.
        depth: edges between a root and its deepest node at most.
    """

    token_BT: torch.Tensor
    parent_BT: torch.Tensor
    depth_BT: torch.Tensor
    bits_BTW: torch.Tensor
    depth: int

    @staticmethod
    def build(token_BT: torch.Tensor, parent_BT: torch.Tensor, depth_BT: torch.Tensor, depth: int) -> "Tree":
        """A tree with its bits; the arguments are those of the attributes."""
        return Tree(token_BT, parent_BT, depth_BT, ancestor_bits(parent_BT, depth), depth)

    @staticmethod
    def chain(root_B: torch.Tensor, draft_BK: torch.Tensor, drafted_B: torch.Tensor | None = None) -> "Tree":
        """A chain of K drafts behind each root.

        Args:
            root_B: int64 newest tokens.
            draft_BK: int64 drafts, in order.
            drafted_B: how many of each row are drafts, the rest is padding; None: all.
        """
        batch, count = draft_BK.shape
        at_T = torch.arange(count + 1, device=root_B.device)
        parent_BT = (at_T - 1).expand(batch, -1)
        if drafted_B is not None:
            parent_BT = torch.where(at_T > drafted_B[:, None], NO_NODE, parent_BT)
        token_BT = torch.cat([root_B[:, None], draft_BK], 1)
        return Tree.build(token_BT, parent_BT, at_T.expand(batch, -1), count)

    @property
    def valid_BT(self) -> torch.Tensor:
        """Which places hold a node, bool."""
        return self.parent_BT > NO_NODE

    def position_BT(self, root_position_B: torch.Tensor) -> torch.Tensor:
        """Positions of the nodes in their texts, given their roots'."""
        return root_position_B[:, None] + self.depth_BT
