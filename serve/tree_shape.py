"""The shapes in which a server drafts: a chain, LongSpec's beam tree, EAGLE-2's ranked tree.

Legend: B requests.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from longdraft.draft_models.draft_tree import TreeDraft, beam_tree, ranked_tree
from longdraft.errors import UserError, shown
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_attention import MAX_TREE

CHAIN, AUTO = "chain", "auto"
HELP = (
    "chain, the widths of a beam such as 4,16,16, eagle2:depth,branch,places such as eagle2:5,8,60, auto for the chain of at most "
    "--steps drafts that pays best round by round, or auto:TREE for a chain of at most the tree's depth or this tree"
)


@dataclass(frozen=True)
class TreeShape:
    """Trees of one shape.

    Attributes:
        name: as it stands in settings, statistics and cost tables.
        places: of a tree, its root among them: the new tokens of a request in a verification.
        depth: edges between the root and the deepest nodes.
        runs: nodes of a request that the draft runs on.
        widest: most tokens taken from one row of the draft's scores.
        grow: the tree of a round.
        chain: whether each place stands behind the one before it.
    """

    name: str
    places: int
    depth: int
    runs: int
    widest: int
    grow: Callable[[TreeDraft, torch.Tensor], Tree]
    chain: bool = False


def parse_tree(text: str) -> TreeShape | None:
    """The tree of a ``tree`` setting; None where there is none beside chains.

    Raises:
        UserError: anything else than :data:`HELP` says, or a tree that no verification or no draft can hold.
    """
    if text in (CHAIN, AUTO):
        return None
    tree = text.removeprefix(f"{AUTO}:")
    ranked = tree.removeprefix("eagle2:") if tree.startswith("eagle2:") else None
    parts = (tree if ranked is None else ranked).split(",")
    # int() takes signs, spaces, underscores and the digits of any script.
    numbers = [int(part) for part in parts] if all(re.fullmatch("[0-9]{1,6}", part) for part in parts) else []
    if not numbers or min(numbers) < 1 or (ranked is not None and len(numbers) != 3):
        raise UserError(f"tree={shown(text)} is no shape: write {HELP}")
    shape = _beam(tree, numbers) if ranked is None else _ranked(tree, *numbers)
    if max(shape.places, shape.runs) > MAX_TREE:
        raise UserError(
            f"tree={shown(text)} has {shape.places} places and {shape.runs} drafted on, a verification and a draft hold {MAX_TREE}: "
            "make it smaller"
        )
    return shape


def chain_shape(depth: int) -> TreeShape:
    """A chain as a tree of one node a depth; of depth 0 the root alone, which is plain decoding and is never grown."""
    return replace(_beam(f"{CHAIN}{depth}", [1] * depth), chain=True)


def candidates(text: str, steps: int) -> list[TreeShape]:
    """Shapes among which a server of a ``tree`` setting chooses, the shallowest first; none where it drafts chains alone.

    Args:
        text: the setting.
        steps: of the longest chain.
    """
    tree = parse_tree(text)
    given = [] if tree is None else [tree]
    automatic = text.partition(":")[0] == AUTO
    return [*(chain_shape(depth) for depth in range(steps + 1)), *given] if automatic else given


def _beam(name: str, widths: list[int]) -> TreeShape:
    def grow(draft: TreeDraft, root_B: torch.Tensor) -> Tree:
        return beam_tree(draft, root_B, widths)

    return TreeShape(name, 1 + sum(widths), len(widths), 1 + sum(widths[:-1]), max(widths, default=0), grow)


def _ranked(text: str, depth: int, branch: int, places: int) -> TreeShape:
    pool = 1 + branch + (depth - 1) * branch * branch
    if not depth + 1 <= places <= pool:
        raise UserError(
            f"tree={text!r} keeps {places} places of a pool of {pool}, and a path has {depth + 1}: give {depth + 1} to {pool}"
        )

    def grow(draft: TreeDraft, root_B: torch.Tensor) -> Tree:
        return ranked_tree(draft, root_B, depth, branch, places)

    return TreeShape(text, places, depth, 1 + (depth - 1) * branch, branch, grow)
