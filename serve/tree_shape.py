"""The shapes in which a server drafts: a chain, LongSpec's beam tree, EAGLE-2's ranked tree.

Legend: B requests.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longdraft.draft_models.draft_tree import TreeDraft, beam_tree, ranked_tree
from longdraft.errors import UserError, shown
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_attention import MAX_TREE

CHAIN = "chain"
HELP = "chain, the widths of a beam such as 4,16,16, or eagle2:depth,branch,places such as eagle2:5,8,60"


@dataclass(frozen=True)
class TreeShape:
    """Trees of one shape.

    Attributes:
        places: of a tree, its root among them: the new tokens of a request in a verification.
        depth: edges between the root and the deepest nodes.
        runs: nodes of a request that the draft runs on.
        widest: most tokens taken from one row of the draft's scores.
        grow: the tree of a round.
    """

    places: int
    depth: int
    runs: int
    widest: int
    grow: Callable[[TreeDraft, torch.Tensor], Tree]


def parse_tree(text: str) -> TreeShape | None:
    """The shape of a ``tree`` setting; None for a chain.

    Raises:
        UserError: anything else than :data:`HELP` says, or a tree that no verification or no draft can hold.
    """
    if text == CHAIN:
        return None
    ranked = text.removeprefix("eagle2:") if text.startswith("eagle2:") else None
    parts = (text if ranked is None else ranked).split(",")
    # int() takes signs, spaces, underscores and the digits of any script.
    numbers = [int(part) for part in parts] if all(re.fullmatch("[0-9]{1,6}", part) for part in parts) else []
    if not numbers or min(numbers) < 1 or (ranked is not None and len(numbers) != 3):
        raise UserError(f"tree={shown(text)} is no shape: write {HELP}")
    shape = _beam(numbers) if ranked is None else _ranked(text, *numbers)
    if max(shape.places, shape.runs) > MAX_TREE:
        raise UserError(
            f"tree={shown(text)} has {shape.places} places and {shape.runs} drafted on, a verification and a draft hold {MAX_TREE}: "
            "make it smaller"
        )
    return shape


def _beam(widths: list[int]) -> TreeShape:
    def grow(draft: TreeDraft, root_B: torch.Tensor) -> Tree:
        return beam_tree(draft, root_B, widths)

    return TreeShape(1 + sum(widths), len(widths), 1 + sum(widths[:-1]), max(widths), grow)


def _ranked(text: str, depth: int, branch: int, places: int) -> TreeShape:
    pool = 1 + branch + (depth - 1) * branch * branch
    if not depth + 1 <= places <= pool:
        raise UserError(
            f"tree={text!r} keeps {places} places of a pool of {pool}, and a path has {depth + 1}: give {depth + 1} to {pool}"
        )

    def grow(draft: TreeDraft, root_B: torch.Tensor) -> Tree:
        return ranked_tree(draft, root_B, depth, branch, places)

    return TreeShape(places, depth, 1 + (depth - 1) * branch, branch, grow)
