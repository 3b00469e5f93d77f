"""Acceptance of trees and chains: the torch twin against a walk, the chain's own rule, oracles; the Triton kernel, interpreted."""

import random

import pytest
import torch
from grown_tree import check_accepted, random_tree, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import run_interpreted

from longdraft.draft_models.acceptance import accepted_drafts
from longdraft.kernels.tree import NO_NODE, Tree
from longdraft.kernels.tree_accept import tree_accept
from longdraft.kernels.tree_bits import pack_bits, unpack_bits


def test_the_triton_kernel_in_the_interpreter() -> None:
    run_interpreted("tree_accept_cases.py")


@settings(max_examples=60, deadline=None)
@given(
    count=st.sampled_from([1, 2, 3, 17, 64, 65, 128]),
    batch=st.integers(1, 4),
    vocab=st.integers(1, 3),
    seed=st.integers(0, 999),
    ordered=st.booleans(),
)
def test_kept_paths_equal_a_walk(count: int, batch: int, vocab: int, seed: int, ordered: bool) -> None:
    """V1: duplicate siblings, places without nodes, children before parents, a vocabulary of one (everything is kept)."""
    tree = random_tree(batch, count, vocab, random.Random(seed), ordered)
    choice = torch.randint(0, vocab, (batch, count), generator=torch.Generator().manual_seed(seed))
    check_accepted(tree_accept(tree, choice), tree, choice)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 12), seed=st.integers(0, 999))
def test_a_chain_is_accepted_as_by_the_chains_rule(count: int, seed: int) -> None:
    """V7: ragged chains in one batch."""
    g = torch.Generator().manual_seed(seed)
    draft, choice = torch.randint(0, 2, (6, count), generator=g), torch.randint(0, 2, (6, count + 1), generator=g)
    drafted, root = torch.randint(0, count + 1, (6,), generator=g), torch.randint(0, 2, (6,), generator=g)
    got = tree_accept(Tree.chain(root, draft, drafted), choice)
    assert torch.equal(got.count_B, accepted_drafts(draft, choice, drafted))
    assert torch.equal(got.next_B, choice.gather(1, got.count_B[:, None])[:, 0])
    for row, (count_, tokens) in enumerate(zip(got.count_B.tolist(), got.token_BD1.tolist(), strict=True)):
        assert tokens[:count_] == draft[row, :count_].tolist(), "what is emitted are the drafts that are kept"


def test_an_oracle_gains_its_depth_and_one_and_a_stranger_gains_one() -> None:
    """V2."""
    tree = tree_of([[9, 1, 2, 3, 4, 5]], [[-1, 0, 0, 1, 3, 4]])
    oracle = torch.tensor([[1, 3, 0, 4, 5, 8]])
    got = tree_accept(tree, oracle)
    assert got.path_BD1.tolist() == [[0, 1, 3, 4, 5]]
    assert got.token_BD1.tolist() == [[1, 3, 4, 5, 8]]
    stranger = tree_accept(tree, torch.full((1, 6), 7))
    assert (stranger.count_B.tolist(), stranger.next_B.tolist()) == ([0], [7])


def test_of_duplicate_siblings_the_one_that_goes_further_is_taken() -> None:
    tree = tree_of([[9, 1, 1, 1, 2, 2]], [[-1, 0, 0, 0, 2, 3]])
    assert tree_accept(tree, torch.tensor([[1, 2, 2, 2, 0, 0]])).path_BD1.tolist() == [[0, 2, 4]]
    assert tree_accept(tree, torch.tensor([[1, 6, 6, 6, 0, 0]])).path_BD1.tolist() == [[0, 1, 1]]


def test_a_place_without_a_node_is_never_kept() -> None:
    """A1's counterpart: its token is the target's choice wherever it is put."""
    tree = tree_of([[9, 1, 1]], [[-1, NO_NODE, NO_NODE]], depth=2)
    assert tree_accept(tree, torch.ones(1, 3, dtype=torch.int64)).count_B.tolist() == [0]
    assert tree.valid_BT.tolist() == [[True, False, False]]


def test_order_of_the_nodes_changes_no_token() -> None:
    rng = random.Random(3)
    tree = random_tree(8, 40, 2, rng)
    choice = torch.randint(0, 2, (8, 40), generator=torch.Generator().manual_seed(3))
    order = torch.tensor([0, *rng.sample(range(1, 40), 39)])  # new place -> old
    place = order.argsort()
    parent = tree.parent_BT[:, order]
    moved = Tree.build(
        tree.token_BT[:, order],
        torch.where(parent >= 0, place[parent.clamp_min(0)], parent),
        tree.depth_BT[:, order],
        tree.depth,
    )
    one, other = tree_accept(tree, choice), tree_accept(moved, choice[:, order])
    assert torch.equal(one.token_BD1, other.token_BD1)
    assert torch.equal(one.count_B, other.count_B)


def test_positions_are_the_roots_and_depths() -> None:
    tree = tree_of([[9, 1, 2], [9, 1, 2]], [[-1, 0, 1], [-1, 0, 0]])
    assert tree.position_BT(torch.tensor([10, 20])).tolist() == [[10, 11, 12], [20, 21, 21]]


@pytest.mark.parametrize("keys", [0, 1, 63, 64, 65, 128])
def test_packed_bits_unpack(keys: int) -> None:
    mask = torch.rand(3, 2, keys, generator=torch.Generator().manual_seed(keys)) < 0.5
    assert torch.equal(unpack_bits(pack_bits(mask), keys), mask)
