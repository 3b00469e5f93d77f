"""What the option ``tree`` takes, and that a shape's numbers are those of the trees that it grows."""

import pytest
import torch

from longdraft.draft_models.draft_tree import Frontier, TreeDraft
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tree_shape import parse_tree


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", (4, 1, 1)),
        ("4,16,16", (37, 3, 21)),
        ("1,1,1", (4, 3, 3)),
        ("eagle2:3,2,8", (8, 3, 5)),
        ("eagle2:1,4,3", (3, 1, 1)),
    ],
)
def test_a_shapes_numbers_are_those_of_its_trees(text: str, numbers: tuple[int, int, int]) -> None:
    shape = parse_tree(text)
    assert shape is not None
    assert (shape.places, shape.depth, shape.runs) == numbers
    runs = 0

    def step(nodes: Frontier) -> torch.Tensor:
        nonlocal runs
        runs += nodes.token_BM.shape[1]
        return torch.randn(*nodes.token_BM.shape, 40)

    tree = shape.grow(TreeDraft(step), torch.tensor([5, 6]))
    assert tree.token_BT.shape == (2, shape.places)
    assert int(tree.depth_BT.max()) <= tree.depth == shape.depth
    assert runs == shape.runs


def test_a_chain_is_no_tree() -> None:
    assert parse_tree("chain") is None
    assert ServeSettings().tree == "chain"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("", "is no shape: write chain, the widths"),
        ("beam", "is no shape"),
        ("4,0", "is no shape"),
        ("4,x", "is no shape"),
        ("4,1_6", "is no shape"),
        ("+4, 16", "is no shape"),
        ("\u0664,\u0968", "is no shape"),
        ("4," * 5000, r"tree='4,4,[4,]{60,80}\.\.\. \(10002 characters\) is no shape"),
        ("eagle2:5,8", "is no shape"),
        ("eagle3:5,8,60", "is no shape"),
        ("64,64", "has 129 places"),
        ("eagle2:2,2,9", r"keeps 9 places of a pool of 7, and a path has 3: give 3 to 7"),
        ("eagle2:5,8,4", r"keeps 4 places .* give 6 to"),
    ],
)
def test_what_is_no_shape_is_refused_with_what_is_one(text: str, pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        parse_tree(text)
    with pytest.raises(ValueError, match=pattern):
        ServeSettings(tree=text)
    with pytest.raises(UserError, match=pattern) as error:
        validate(ServeSettings, {"tree": text})
    assert len(str(error.value)) < 500
