"""Trees of both kinds of drafts in the server, over the same state as their chains.

A tree's nodes are kept beside the state, not in it: what a chain leaves behind for its successor is written when tokens are
committed (LongSpec) or observed (EAGLE-3).

Legend: B requests, M nodes of one depth, W page-list width, H query heads, D head size, N draft vocabulary.
"""

from collections.abc import Sequence

import torch

from longdraft.draft_models.draft_tree import DraftStep, TreeDraft
from longdraft.draft_models.tree_steps import LongSpecTreeStep, rows_plan
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.tree import Tree
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.cross_attention import Cache, read_layers
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.tree_shape import TreeShape


def roots_of(requests: list[DraftRequest], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Newest tokens and their positions, int64 ``[B]`` each."""
    facts = torch.tensor([[r.tokens.newest, r.tokens.cached] for r in requests], device=device)
    return facts[:, 0], facts[:, 1]


def grow(
    step: DraftStep,
    requests: list[DraftRequest],
    roots: tuple[torch.Tensor, torch.Tensor],
    id_N: torch.Tensor | None,
    params: RowParams,
    shape: TreeShape,
) -> Tree:
    """The trees of one round.

    Args:
        step: the draft.
        requests: one row of ``params`` each; a node is never deeper than its request's limit.
        roots: of :func:`roots_of`.
        id_N: target ids of the draft's vocabulary; None where it is the target's.
        params: says how likely the target's choice is to be a token, the request's noise included.
        shape: of the trees.
    """
    root_B, position_B = roots

    def score(logits_BMN: torch.Tensor, depth: int) -> torch.Tensor:
        return params.scores(logits_BMN, position_B + depth, id_N)

    limit_B = torch.tensor([r.limit for r in requests], device=root_B.device)
    return shape.grow(TreeDraft(step, score, id_N, limit_B), root_B)


def longspec_step(
    state: WindowState,
    rows: list[int],
    position_B: torch.Tensor,
    pages: list[torch.Tensor],
    layers: Sequence[Cache],
    runs: int,
    attention: str | None,
) -> LongSpecTreeStep:
    """A LongSpec draft over rings and over what it reads of the target's cache.

    Args:
        state: rings.
        rows: each request's ring.
        position_B: of the roots.
        pages: cache slots that each request's draft reads.
        layers: keys and values of the layers that it reads.
        runs: nodes that the draft runs on.
        attention: backend.
    """
    pages_BW, lens_B = _lists(pages, position_B.device)

    def cross_attend(q_BMHD: torch.Tensor) -> torch.Tensor:
        batch, count = q_BMHD.shape[:2]
        plan = rows_plan(batch, count, q_BMHD.device, pages_BW, lens_B)
        return read_layers(q_BMHD.flatten(0, 1), layers, plan, attention).view_as(q_BMHD)

    row_B = torch.tensor(rows, device=position_B.device)
    return LongSpecTreeStep(state, row_B, position_B, cross_attend, runs, attention)


class Eagle3Rows:
    """Attention over an EAGLE-3 draft's rows of the text, as far as nodes of a depth see them.

    Args:
        cache: the draft's keys and values.
        rows: slots of each request's rows before the root's own, in order.
        window, sinks: a node sees so many rows back, itself included, and so many first ones.
        attention: backend.
    """

    def __init__(self, cache: Cache, rows: list[torch.Tensor], window: int, sinks: int, attention: str | None) -> None:
        self.cache, self.rows, self.window, self.sinks = cache, rows, window, sinks
        self.attention = attention
        self.whole = _lists(rows, cache[0].device)

    def __call__(self, depth: int, q_BMHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.whole
        if any(len(rows) + depth + 1 > self.window + self.sinks for rows in self.rows):
            seen = _lists([self._visible(rows, depth) for rows in self.rows], q_BMHD.device)
        batch, count = q_BMHD.shape[:2]
        plan = rows_plan(batch, count, q_BMHD.device, *seen)
        scale = q_BMHD.shape[-1] ** -0.5
        return prefix_attention(q_BMHD.flatten(0, 1), *self.cache, plan, scale, self.attention)

    def _visible(self, rows: torch.Tensor, depth: int) -> torch.Tensor:
        first = len(rows) + depth + 1 - self.window  # of the window of a node at this depth
        return rows if first <= self.sinks else torch.cat([rows[: self.sinks], rows[first:]])


def _lists(pages: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Page lists of unequal length as int32 ``[B, W]``, and their lengths."""
    pages_BW = torch.nn.utils.rnn.pad_sequence([p.int() for p in pages], batch_first=True)
    if not pages_BW.shape[1]:
        pages_BW = torch.zeros(len(pages), 1, dtype=torch.int32, device=device)
    return pages_BW, torch.tensor([len(p) for p in pages], dtype=torch.int32, device=device)
