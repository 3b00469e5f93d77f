"""Visibility bits from parents, on the device, against walking up the tree."""

import random

import pytest
import torch
from attention_case import ancestor_mask, bits_of, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kernels.tree_bits import ancestor_bits, unpack_bits, words


def walked(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        up = node if parent >= -1 else -1
        while up >= 0:
            mask[node, up] = True
            up = parents[up]
    return mask


@settings(max_examples=40, deadline=None)
@given(count=st.sampled_from([0, 1, 2, 5, 63, 64, 65, 127, 128]), seed=st.integers(0, 99))
def test_nodes_read_themselves_and_their_ancestors(count: int, seed: int) -> None:
    """Several trees at once, of several roots, in any order of nodes, with rows that are none of the tree's."""
    rng = random.Random(seed)
    trees = []
    for _ in range(3):
        order = rng.sample(range(count), count)
        parents = [-1] * count
        for i, node in enumerate(order):
            parents[node] = order[rng.randrange(i)] if i and rng.random() < 0.9 else -1
        leaves = [node for node in range(count) if node not in parents]
        for node in rng.sample(leaves, min(3, len(leaves))):
            parents[node] = -2
        trees.append(parents)
    bits = ancestor_bits(torch.tensor(trees, dtype=torch.int32).view(3, count))
    assert bits.shape == (3, count, words(count))
    assert bits.dtype == torch.int64
    for tree, parents in zip(bits, trees, strict=True):
        assert torch.equal(unpack_bits(tree, count), walked(parents))
        assert not unpack_bits(tree, words(count) * 64)[:, count:].any()


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 7, 8])
def test_a_known_depth_is_enough(depth: int) -> None:
    """The deepest node of a chain has all its ancestors after the rounds that its depth asks for."""
    parents = torch.arange(depth + 1)[None] - 1
    assert torch.equal(ancestor_bits(parents, depth), ancestor_bits(parents))
    assert unpack_bits(ancestor_bits(parents, depth)[0], depth + 1).equal(
        torch.ones(depth + 1, depth + 1).tril().bool()
    )


def test_a_chain_of_128_reaches_the_sign_bit_of_both_words() -> None:
    bits = ancestor_bits(torch.arange(128)[None] - 1)[0]
    assert bits[127].tolist() == [-1, -1]
    assert bits[63].tolist() == [-1, 0]
    assert bits[62].tolist() == [2**63 - 1, 0]


def test_a_loop_ends() -> None:
    """Broken parents cannot hang a device: both nodes of the loop read each other."""
    assert unpack_bits(ancestor_bits(torch.tensor([[1, 0, -1]]))[0], 3).int().tolist() == [
        [1, 1, 0],
        [1, 1, 0],
        [0, 0, 1],
    ]


def test_the_masks_that_tests_are_made_of_are_the_same_trees() -> None:
    parents = [random_parents(n, random.Random(n)) for n in (70, 70)]
    masks = [ancestor_mask(p) for p in parents]
    assert all(torch.equal(mask, walked(p)) for mask, p in zip(masks, parents, strict=True))
    assert torch.equal(bits_of(masks), ancestor_bits(torch.tensor(parents)).flatten(0, 1))
