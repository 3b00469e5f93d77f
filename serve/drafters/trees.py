"""Trees of both kinds of drafts in the server, over the same state as their chains.

All depths of a batch's trees are one function over static buffers, which a :class:`GraphRunner` replays. A tree's nodes are kept
beside the draft's state, not in it: what a chain leaves behind for its successor is written when tokens are committed (LongSpec)
or observed (EAGLE-3).

Legend: B requests, M nodes of one depth, T places of a tree, W page-list width, H query heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longdraft.draft_models.draft_tree import DraftStep, TreeDraft
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.kinds import AnyDraft
from longdraft.draft_models.tree_steps import LongSpecTreeStep, rows_plan
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_bits import words
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.cross_attention import Cache, newest_rows, read_layers
from longdraft.serve.drafters.inputs import GREEDY, LoopInputs
from longdraft.serve.drafters.running import Running
from longdraft.serve.graph_runner import CudaGraphRunner, make_runner
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.tree_shape import TreeShape

StepOf = Callable[[int, TreeShape], DraftStep]  # batch size, shape -> the draft, over the static inputs


class TreeLoop:
    """Grows a batch's trees from static inputs into static trees, of which there is one set a shape."""

    def __init__(self, draft: AnyDraft, inputs: LoopInputs, step_of: StepOf) -> None:
        """Take what the trees are grown with.

        Args:
            draft: whose vocabulary the steps' logits are over.
            inputs: are filled for every batch.
            step_of: makes the draft's steps of one round; it reads nothing but ``inputs`` and the draft's own static state.
        """
        self.draft, self.inputs, self.step_of = draft, inputs, step_of
        self.limit_B = torch.zeros_like(inputs.ids_3B[0])
        self.grown: dict[TreeShape, Tree] = {}
        self.use_graphs([], [])

    def use_graphs(self, sizes: Sequence[int], shapes: Sequence[TreeShape]) -> None:
        """Pad batches to these sizes from now on; on a card capture what greedy requests need of the shapes."""
        self.runner = make_runner(self._grow, sizes, self.limit_B.device)
        for shape in shapes:
            self._trees(shape)
            if isinstance(self.runner, CudaGraphRunner):
                self.runner.capture((shape, GREEDY))

    def run(
        self,
        requests: list[DraftRequest],
        rows: list[int],
        pages: list[torch.Tensor],
        params: RowParams,
        shape: TreeShape,
    ) -> Tree:
        """A tree behind each request's newest token, never deeper than its limit; views, which the next batch overwrites.

        Args:
            requests: of a batch.
            rows: where each one's draft state lies.
            pages: cache slots that each one's draft reads.
            params: how the target will choose, one row a request.
            shape: of the trees.
        """
        count, size = len(requests), self.runner.padded(len(requests))
        roots, positions = [r.tokens.newest for r in requests], [r.tokens.cached for r in requests]
        variant = self.inputs.fill(rows, roots, positions, pages, params, size)
        limits = [r.limit for r in requests] + [0] * (size - count)
        self.limit_B[:size].copy_(torch.tensor(limits), non_blocking=True)
        return self._run(count, shape, variant)

    def run_running(
        self,
        row_B: torch.Tensor,
        running: Running,
        view: tuple[torch.Tensor, torch.Tensor],
        limit_B: torch.Tensor,
        params: RowParams,
        shape: TreeShape,
    ) -> Tree:
        """:meth:`run` for a batch that the device alone knows; the arguments are those of :meth:`LoopInputs.take` and its limits."""
        count = len(row_B)
        size = self.runner.padded(count)
        variant = self.inputs.take(row_B, running, view, params, size)
        self.limit_B[:count] = limit_B
        self.limit_B[count:size] = 0
        return self._run(count, shape, variant)

    def _run(self, count: int, shape: TreeShape, variant: Any) -> Tree:
        grown = self._trees(shape)
        self.runner.run(count, (shape, variant))
        return first_trees(grown, count)

    def _trees(self, shape: TreeShape) -> Tree:
        """The static trees of a shape."""
        if shape not in self.grown:
            most, places = len(self.limit_B), shape.places
            token_BT, parent_BT, depth_BT = self.limit_B.new_zeros(3, most, places)
            bits_BTW = self.limit_B.new_zeros(most, places, words(places))
            self.grown[shape] = Tree(token_BT, parent_BT, depth_BT, bits_BTW, shape.depth)
        return self.grown[shape]

    def _grow(self, size: int, variant: Any) -> None:
        shape, sampling = variant
        given, id_N = self.inputs, self.draft.target_ids
        _, root_B, position_B = given.ids_3B[:, :size]

        def score(logits_BMN: torch.Tensor, depth: int) -> torch.Tensor:
            return given.scores(logits_BMN, position_B + depth, id_N, sampling)

        tree = shape.grow(TreeDraft(self.step_of(size, shape), score, id_N, self.limit_B[:size]), root_B)
        into = first_trees(self.grown[shape], size)
        into.token_BT.copy_(tree.token_BT)
        into.parent_BT.copy_(tree.parent_BT)
        into.depth_BT.copy_(tree.depth_BT)
        into.bits_BTW.copy_(tree.bits_BTW)


def first_trees(tree: Tree, count: int) -> Tree:
    """Views of the first trees."""
    return Tree(tree.token_BT[:count], tree.parent_BT[:count], tree.depth_BT[:count], tree.bits_BTW[:count], tree.depth)


def longspec_step(
    state: WindowState,
    inputs: LoopInputs,
    size: int,
    layers: Sequence[Cache],
    runs: int,
    attention: str | None,
    fused: FusedStep | None = None,
    ranks: Ranks = ALONE,
) -> LongSpecTreeStep:
    """A LongSpec draft over rings and over what it reads of the target's cache.

    Args:
        state: rings.
        inputs: each request's ring, root position and page list.
        size: batch size with padding.
        layers: keys and values of the layers that it reads.
        runs: nodes that the draft runs on.
        attention: backend.
        fused: the draft's step for serving; None runs the module.
        ranks: that serve together.
    """
    row_B, _, position_B = inputs.ids_3B[:, :size]
    pages_BW, lens_B = inputs.pages_BW[:size], inputs.lens_B[:size]

    def cross_attend(q_BMHD: torch.Tensor) -> torch.Tensor:
        plan = rows_plan(size, q_BMHD.shape[1], q_BMHD.device, pages_BW, lens_B)
        return read_layers(q_BMHD.flatten(0, 1), layers, plan, attention).view_as(q_BMHD)

    newest_BF = newest_rows(state.draft, layers, pages_BW, lens_B, position_B, ranks)
    return LongSpecTreeStep(state, row_B, position_B, cross_attend, runs, attention, newest_BF, fused)


class Eagle3Rows:
    """Attention over an EAGLE-3 draft's rows of the text, as far as nodes of a depth see them.

    Args:
        cache: the draft's keys and values.
        pages_BW, lens_B: slots of each request's rows before the root's own, in order, int32; of more than ``sinks + window``
            rows the first and the last.
        window, sinks: a node sees so many rows back, itself included, and so many first ones.
        attention: backend.
    """

    def __init__(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        pages_BW: torch.Tensor,
        lens_B: torch.Tensor,
        window: int,
        sinks: int,
        attention: str | None,
    ) -> None:
        self.cache, self.pages_BW, self.lens_B = cache, pages_BW, lens_B
        self.window, self.sinks, self.attention = window, sinks, attention

    def __call__(self, depth: int, q_BMHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, count = q_BMHD.shape[:2]
        plan = rows_plan(batch, count, q_BMHD.device, *self.visible(depth))
        scale = q_BMHD.shape[-1] ** -0.5
        return prefix_attention(q_BMHD.flatten(0, 1), *self.cache, plan, scale, self.attention)

    def visible(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page lists of what a node at this depth sees, and their lengths: the oldest rows behind the sinks have left the window."""
        most = self.sinks + max(self.window - 1 - depth, 0)
        left_B1 = (self.lens_B - most).clamp_min(0)[:, None]
        at_W = torch.arange(self.pages_BW.shape[1], device=self.pages_BW.device)
        from_BW = torch.where(at_W < self.sinks, at_W, at_W + left_B1).clamp_max(len(at_W) - 1)
        return self.pages_BW.gather(1, from_BW), self.lens_B.clamp_max(most)
