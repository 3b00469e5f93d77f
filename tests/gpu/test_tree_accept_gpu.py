"""The acceptance of trees on a GPU against a walk, and inside a CUDA graph."""

import random

import pytest
import torch
from grown_tree import check_accepted, random_tree

from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import tree_accept

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_card(tree: Tree) -> Tree:
    return Tree.build(tree.token_BT.cuda(), tree.parent_BT.cuda(), tree.depth_BT.cuda(), tree.depth)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("count", [1, 5, 64, 69, 128])
def test_paths_equal_a_walk(count: int, batch: int, backend: str) -> None:
    tree = random_tree(batch, count, 2, random.Random(count), ordered=False)
    choice = torch.randint(0, 2, (batch, count), generator=torch.Generator().manual_seed(count))
    check_accepted(tree_accept(on_card(tree), choice.cuda(), backend), tree, choice)


def test_a_captured_acceptance_serves_later_trees() -> None:
    """Nothing waits for the device: a graph could not be captured otherwise. Bits are made inside of it."""
    trees = [random_tree(4, 69, 2, random.Random(seed)) for seed in range(3)]
    choices = [torch.randint(0, 2, (4, 69), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    depth = max(tree.depth for tree in trees)
    held = [x.cuda() for x in (trees[0].token_BT, trees[0].parent_BT, trees[0].depth_BT, choices[0])]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        got = tree_accept(Tree.build(held[0], held[1], held[2], depth), held[3])
        return got.token_BD1, got.count_B

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_BD1, count_B = step()
    for tree, choice in zip(trees, choices, strict=True):
        for place, new in zip(held, (tree.token_BT, tree.parent_BT, tree.depth_BT, choice), strict=True):
            place.copy_(new)
        graph.replay()
        want = tree_accept(Tree.build(tree.token_BT, tree.parent_BT, tree.depth_BT, depth), choice)
        assert torch.equal(token_BD1.cpu(), want.token_BD1)
        assert torch.equal(count_B.cpu(), want.count_B)
