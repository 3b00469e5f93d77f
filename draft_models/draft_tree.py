"""Trees that a draft grows on the device, in shapes that are known beforehand: LongSpec's beam tree and EAGLE-2's ranked tree.

Both ask the draft for scores depth by depth and keep the nodes with the largest sums of scores along their paths. A score must
say how likely the target's choice is to be that token: then a sum is the log-probability that a whole path is kept.

**Greedy.** The score is ``log q``, as both papers have it.

**Shared noise.** The target's choice is ``argmax(log p + G)`` with noise G that the draft knows, so its best candidates are those
with the largest ``log q + G`` (perturbed top-k). These must not be summed as they are: the largest ``log q + G`` of *any* node is a
standard Gumbel variable, so a path that passes a luckily drawn node would win whatever its chances are. What counts is how far
a candidate is behind the best one at its own node. With errors of the draft that are Gumbel noise too, ``log p = log q + G'``,
the choice is ``argmax(log q + G + G')``, which is token v with probability ``softmax(log q + G)_v``. So the score is
``log_softmax(log q + G)``; without noise the same argument gives the greedy score. It orders the candidates of one node by
``log q + G``, so the first child is the chain's draft.

Ties are broken by the parent's rank, then by the token's id, so that one tree grows from equal scores everywhere.

Legend: B requests, M nodes of one depth, N draft vocabulary, k candidates of a node, P candidates of a pool, T places of a tree,
W words of bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longdraft.kernels.stable_topk import stable_topk
from longdraft.kernels.tree import NO_NODE, Tree
from longdraft.kernels.tree_bits import words


@dataclass(frozen=True)
class Frontier:
    """Nodes of one depth, which the draft runs on now.

    The draft keeps the keys and values of every node that it has run on, in the order in which it was asked; bits speak of that
    order. At depth 0 it is asked for the root alone.

    Attributes:
        depth: edges to the root; a node stands that many positions behind it.
        token_BM: int64 ids of the target.
        parent_BM: int64 index of each node's parent in the frontier before, whose hidden rows an EAGLE-3 draft goes on from.
        first: nodes that the draft ran on before these, for each request.
        bits_BMW: int64 bits of the nodes that each one reads: its ancestors and itself.
    """

    depth: int
    token_BM: torch.Tensor
    parent_BM: torch.Tensor
    first: int
    bits_BMW: torch.Tensor

    @staticmethod
    def root(root_B: torch.Tensor, runs: int) -> "Frontier":
        """The roots, of trees that run on ``runs`` nodes in all."""
        bits_BMW = torch.zeros(len(root_B), 1, words(runs), dtype=torch.int64, device=root_B.device)
        bits_BMW[..., 0] = 1
        return Frontier(0, root_B[:, None], torch.zeros_like(root_B)[:, None], 0, bits_BMW)

    def below(self, token_BM: torch.Tensor, parent_BM: torch.Tensor) -> "Frontier":
        """The next depth: these tokens behind those nodes of this one."""
        first = self.first + self.token_BM.shape[1]
        place_M = first + torch.arange(token_BM.shape[1], device=token_BM.device)
        at_W = torch.arange(self.bits_BMW.shape[2], device=token_BM.device)
        own_MW = torch.where(
            place_M[:, None] // 64 == at_W, torch.ones_like(place_M)[:, None] << place_M[:, None] % 64, 0
        )
        bits_BMW = self.bits_BMW.gather(1, parent_BM[..., None].expand(-1, -1, len(at_W)))
        return Frontier(self.depth + 1, token_BM, parent_BM, first, bits_BMW | own_MW)


DraftStep = Callable[[Frontier], torch.Tensor]  # -> logits_BMN
Score = Callable[[torch.Tensor, int], torch.Tensor]  # logits_BMN, depth -> float32 scores_BMN, none above 0


def log_probabilities(logits_BMN: torch.Tensor, depth: int) -> torch.Tensor:
    """The greedy score."""
    return logits_BMN.float().log_softmax(-1)


@dataclass(frozen=True)
class TreeDraft:
    """A draft for one round.

    Attributes:
        step: logits of the nodes that it is asked for, depth by depth.
        score: of its logits.
        id_N: int64 target ids of the draft's vocabulary, ascending; None where it is the target's.
        limit_B: int64, the deepest drafts that each request can use; None: all.
    """

    step: DraftStep
    score: Score = log_probabilities
    id_N: torch.Tensor | None = None
    limit_B: torch.Tensor | None = None

    def candidates(self, nodes: Frontier, sum_BM: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best children of each node: sums of scores ``[B, M, k]``, and target ids. A sum of -inf is no child, nor is NaN."""
        score_BMN = self.score(self.step(nodes), nodes.depth)
        score_BMk, id_BMk = stable_topk(score_BMN, min(k, score_BMN.shape[-1]))
        # No child before its parent in any order, even where scores are rounded.
        sum_BMk = sum_BM[..., None] + score_BMk.clamp_max(0).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        if self.limit_B is not None:
            sum_BMk = torch.where((nodes.depth < self.limit_B)[:, None, None], sum_BMk, float("-inf"))
        return sum_BMk, id_BMk if self.id_N is None else self.id_N[id_BMk]


@torch.no_grad()
def beam_tree(draft: TreeDraft, root_B: torch.Tensor, widths: Sequence[int]) -> Tree:
    """LongSpec's dynamic beam tree: at each depth the ``widths[depth]`` best of all children of the depth before.

    Nodes that win no child stay in the tree. The draft runs once a depth, on 1, ``widths[0]``, ... ``widths[-2]`` nodes a request.

    Args:
        draft: of this round.
        root_B: int64 newest tokens.
        widths: nodes of each depth, such as (4, 16, 16, 16, 16).

    Returns:
        Trees of ``1 + sum(widths)`` places, depth by depth, best first. Where there are too few candidates with a finite score,
        places hold no node.

    Raises:
        ValueError: more nodes than there are candidates.
    """
    nodes = Frontier.root(root_B, 1 + sum(widths[:-1]))
    sum_BM = torch.zeros_like(root_B, dtype=torch.float32)[:, None]
    tokens, parents, depths = (
        [root_B[:, None]],
        [torch.full_like(root_B, -1)[:, None]],
        [torch.zeros_like(root_B)[:, None]],
    )
    first = 0
    for depth, width in enumerate(widths, 1):
        sum_BMk, id_BMk = draft.candidates(nodes, sum_BM, width)
        sum_BM, at_BM = stable_topk(sum_BMk.flatten(1), width)
        parent_BM, token_BM = at_BM // sum_BMk.shape[2], id_BMk.flatten(1).gather(1, at_BM)
        tokens.append(token_BM)
        parents.append(torch.where(sum_BM.isneginf(), NO_NODE, first + parent_BM))
        first += nodes.token_BM.shape[1]
        depths.append(torch.full_like(token_BM, depth))
        if depth < len(widths):
            nodes = nodes.below(token_BM, parent_BM)
    return Tree.build(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), len(widths))


@torch.no_grad()
def ranked_tree(draft: TreeDraft, root_B: torch.Tensor, depth: int, branch: int, places: int) -> Tree:
    """EAGLE-2's tree: grow a pool, then keep the best of it.

    At each depth the ``branch`` best nodes of the depth before get ``branch`` children each; all children are candidates. Of all
    candidates of all depths the ``places - 1`` with the largest sums stay. A parent's sum is never below its child's and it
    stands before it, so it stays with it. If ``places - 1`` is not above ``branch``, no other tree has larger sums.

    Args:
        draft: of this round.
        root_B: int64 newest tokens.
        depth: of the deepest candidates; the draft runs so often, on ``branch`` nodes a request behind the root.
        branch: candidates of a node, and nodes of a depth that are expanded.
        places: of the tree, the root among them.

    Returns:
        Trees, depth by depth. Where there are too few candidates with a finite score, places hold no node.

    Raises:
        ValueError: more places than the pool has candidates.
    """
    nodes = Frontier.root(root_B, 1 + (depth - 1) * branch)
    sum_BM = torch.zeros_like(root_B, dtype=torch.float32)[:, None]
    pooled_BM = torch.zeros_like(root_B)[:, None]  # the frontier's places in the pool; the root is its first
    sums, tokens = [torch.full_like(sum_BM, float("inf"))], [root_B[:, None]]
    parents, depths = [torch.full_like(root_B, -1)[:, None]], [torch.zeros_like(root_B)[:, None]]
    size = 1
    for deep in range(1, depth + 1):
        sum_BMk, id_BMk = draft.candidates(nodes, sum_BM, branch)
        k = sum_BMk.shape[2]
        sums.append(sum_BMk.flatten(1))
        tokens.append(id_BMk.flatten(1))
        parents.append(pooled_BM.repeat_interleave(k, 1))
        depths.append(torch.full_like(tokens[-1], deep))
        if deep < depth:
            sum_BM, at_BM = stable_topk(sums[-1], min(branch, sums[-1].shape[1]))
            pooled_BM = size + at_BM
            nodes = nodes.below(tokens[-1].gather(1, at_BM), at_BM // k)
        size += tokens[-1].shape[1]
    sum_BP, token_BP, parent_BP, depth_BP = (torch.cat(x, 1) for x in (sums, tokens, parents, depths))
    kept_BT = stable_topk(sum_BP, places)[1].sort(1).values
    at_T = torch.arange(places, device=root_B.device).expand(len(root_B), -1)
    place_BP = torch.full_like(parent_BP, NO_NODE).scatter(1, kept_BT, at_T)
    parent_BT = place_BP.gather(1, parent_BP.gather(1, kept_BT).clamp_min(0))
    parent_BT = torch.where(sum_BP.gather(1, kept_BT).isneginf(), NO_NODE, parent_BT)
    parent_BT[:, 0] = -1
    return Tree.build(token_BP.gather(1, kept_BT), parent_BT, depth_BP.gather(1, kept_BT), depth)
