"""Chooses the columns of views from queries that the target has just computed.

Legend: B requests, Q query rows of a request, H query heads, D head size, R rows and W columns of SGLang's page table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.cache_format import UNSCALED, Scales
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.choose import Chosen, choose_columns
from longdraft.serve.views.query_tap import QueryTap
from longdraft.serve.views.selectors import Selector


class ViewChooser:
    """A selector over the target's cache, with the queries that it wants."""

    def __init__(
        self,
        selector: Selector,
        budget: Budget,
        pool: Any,
        tap: QueryTap,
        scale: float,
        scales: Mapping[int, Scales],
        by_layer: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Take what is read.

        Args:
            selector: scores blocks.
            budget: of a view.
            pool: the target's cache pool.
            tap: keeps the selector's queries.
            scale: of the target's attention scores.
            scales: of the layers whose cache has any.
            by_layer: whether every layer has a list of its own; the tap keeps the queries of all layers then.
            ranks: that have the heads together, whose scores are added up.
        """
        self.by_layer, self.ranks = by_layer, ranks
        self.selector, self.budget, self.tap, self.scale = selector, budget, tap, scale
        self.keys = [pool.get_key_buffer(layer) for layer in tap.layers]
        self.key_scales = [scales.get(layer, UNSCALED)[0] for layer in tap.layers]

    def choose(
        self,
        queries: Sequence[torch.Tensor],
        row_B: torch.Tensor,
        table_RW: torch.Tensor,
        length_B: torch.Tensor,
        longest: int,
    ) -> Chosen:
        """The columns of each request's view; by layer, of every layer's list of every request, one layer behind the other.

        Args:
            queries: ``[B * Q, H, D]`` of each layer that the selector wants.
            row_B: rows of the page table.
            table_RW: SGLang's page table.
            length_B: int64 cached tokens of each request.
            longest: none has more.
        """
        plan = self.plan(row_B, table_RW, length_B, min(longest, table_RW.shape[1]), self.tap.rows)
        blocks = -(-plan.pages_BW.shape[1] // self.budget.block)
        if not self.by_layer:
            score_BN = self.selector.score(queries, self.keys, plan, self.scale, blocks, self.key_scales)
            return choose_columns(self._total(score_BN), length_B, self.budget)
        scores = self.selector.score_layers(queries, self.keys, plan, self.scale, blocks, self.key_scales)
        score_XN = self._total(torch.cat(scores))
        return choose_columns(score_XN, length_B.repeat(len(self.keys)), self.budget)

    def _total(self, score_BN: torch.Tensor) -> torch.Tensor:
        """Scores of all heads; of a mean over heads a multiple, which chooses the same."""
        return self.ranks.total(score_BN) if self.selector.rows else score_BN

    def plan(
        self, row_B: torch.Tensor, table_RW: torch.Tensor, length_B: torch.Tensor, longest: int, rows: int
    ) -> AttentionPlan:
        """What ``rows`` queries of each request are scored over; arguments as in :meth:`choose`."""
        batch = len(row_B)
        pages_BW = table_RW[row_B, :longest].int()
        if row_B.device.type == "cpu":
            return AttentionPlan.build(pages_BW, length_B.tolist(), [rows] * batch)
        cu_B1 = torch.arange(batch + 1, dtype=torch.int32, device=row_B.device) * rows
        return AttentionPlan.on_device(pages_BW, length_B.int(), cu_B1, [rows * b for b in range(batch + 1)])
