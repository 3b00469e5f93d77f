"""The Triton acceptance kernel in Triton's interpreter (run by test_kernels_tree_accept.py)."""

import random

import pytest
import torch
from grown_tree import check_accepted, random_tree, tree_of

from longdraft.kernels.tree import NO_NODE, Tree
from longdraft.kernels.tree_accept import Accepted, torch_tree_accept
from longdraft.kernels.triton_tree_accept import triton_tree_accept


def accept(tree: Tree, choice_BT: torch.Tensor) -> Accepted:
    return Accepted(*triton_tree_accept(tree, choice_BT))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 63, 64, 65, 69, 128, 130])
def test_paths_equal_a_walk(count: int, ordered: bool) -> None:
    rng = random.Random(count)
    tree = random_tree(5, count, 2, rng, ordered)
    for seed in range(3):
        choice = torch.randint(0, 2, (5, count), generator=torch.Generator().manual_seed(seed))
        check_accepted(accept(tree, choice), tree, choice)


def test_a_whole_chain_of_127_drafts_is_kept() -> None:
    draft = torch.arange(1, 128)[None]
    tree = Tree.chain(torch.zeros(1, dtype=torch.int64), draft)
    choice = torch.arange(1, 129)[None]
    got = accept(tree, choice)
    assert got.count_B.tolist() == [127]
    assert got.token_BD1.tolist() == choice.tolist()


def test_columns_that_are_views_are_read_as_they_are() -> None:
    """Parents of a chain are one row for the whole batch."""
    tree = Tree.chain(torch.tensor([3, 4, 5]), torch.tensor([[1, 2], [1, 1], [2, 2]]))
    assert tree.parent_BT.stride(0) == 0
    choice = torch.tensor([[1, 2, 9], [1, 2, 8], [1, 2, 7]])
    check_accepted(accept(tree, choice), tree, choice)


def test_a_row_without_a_root_is_the_twins() -> None:
    tree = tree_of([[0, 1], [0, 1]], [[NO_NODE, NO_NODE], [-1, 0]], depth=1)
    choice = torch.tensor([[5, 6], [1, 7]])
    for got, want in zip(
        vars(accept(tree, choice)).values(), vars(torch_tree_accept(tree, choice)).values(), strict=True
    ):
        assert torch.equal(got, want)
