"""Chooses the one set of tokens that a round verifies on, behind its drafting: by what the target looked at last and by what
the draft was looking for (Dustin, section 4.1).

History is the attention of the target's row that was accepted last, in one layer; lookahead that of the draft's steps. Both are
computed anew over the whole context, since a verification on a set never scores what it does not read. Nothing waits for the device;
on a card the usual choice is a CUDA graph, for it is made of many small kernels.

Legend: B requests, R rows and W columns of SGLang's page table, N columns of a context, H query heads, D head size, V chosen columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.kernels.block_lse import work_dtype
from longdraft.kernels.head_mass import head_mass
from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.drafters.base import Lookahead
from longdraft.serve.drafters.running import Running
from longdraft.serve.graph_runner import CudaGraphRunner, make_runner
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.views.query_tap import QueryTap
from longdraft.serve.views.token_set import SparseBudget, choose_tokens
from longdraft.serve.views.view_state import ViewState

SHORTEST = 4096  # columns that a graph scores at least; each next one scores twice as many


@dataclass(frozen=True)
class Group:
    """Requests of a batch that have the same budget; ``where_B`` says which, None: all."""

    budget: SparseBudget
    where_B: torch.Tensor | None


@dataclass(frozen=True)
class History:
    """The target's layer whose queries are the history: its keys, its heads that count, and the factors of its scores.

    Of several ranks ``heads`` are this one's, which may be none; ``count`` is how many all have.
    """

    k_SKD: torch.Tensor
    heads: tuple[int, ...]
    scale: float
    kv_scale: float = 1.0
    count: int = 0

    def __post_init__(self) -> None:
        if not self.count:
            object.__setattr__(self, "count", len(self.heads))


@dataclass(frozen=True)
class Choice:
    """What changes the work of a choice: columns that are scored, groups, and whether the draft looks ahead."""

    columns: int
    groups: tuple[Group, ...]
    looks: bool


class SetChooser:
    """Keeps the history's queries by row of the page table, and writes sets into the views."""

    def __init__(
        self,
        history: History,
        tap: QueryTap,
        views: ViewState,
        table_RW: torch.Tensor,
        lookahead: Callable[[Running], list[Lookahead]],
        measures: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Take what is read and written.

        Args:
            history: of the target.
            tap: keeps the queries of the history's layer alone, one row of each request, with buffers.
            views: of the requests, wide enough for every budget.
            table_RW: SGLang's page table.
            lookahead: of the drafter, over static buffers.
            measures: whether it is measured what sets lack.
            ranks: that have the heads together, whose scores are added up.
        """
        self.ranks = ranks
        self.history, self.tap, self.views, self.table_RW = history, tap, views, table_RW
        self.lookahead, self.measures = lookahead, measures
        [buffer] = tap.buffers.values()
        rows = len(views.start_R)
        self.query_RHD = buffer.new_zeros(rows, *buffer.shape[1:])
        self.at_2B = torch.zeros(2, rows, dtype=torch.int64, device=buffer.device)  # rows and lengths of a batch
        self.missed_B = torch.zeros(rows, device=buffer.device)
        self.use_graphs([], [])

    def use_graphs(self, sizes: Sequence[int], budgets: Sequence[SparseBudget]) -> None:
        """Pad batches to these sizes from now on and, on a card, replay graphs.

        Args:
            sizes: of batches.
            budgets: that batches usually have, all requests the same; graphs are made for these alone, since requests may name any. Those
                of the first are made now, the others' at first use.
        """
        self.usual = frozenset(budgets)
        self.runner = make_runner(self._work, [n for n in sizes if n < self.at_2B.shape[1]], self.at_2B.device)
        if isinstance(self.runner, CudaGraphRunner) and budgets:
            for columns in self._widths():
                self.runner.capture(Choice(columns, (Group(budgets[0], None),), True))

    def _widths(self) -> list[int]:
        """Columns that graphs score."""
        most = self.table_RW.shape[1]
        return sorted({min(SHORTEST << times, most) for times in range(most.bit_length())})

    def prefilled(self, row_B: torch.Tensor) -> None:
        """A prefill, or a chunk of one, has ended: its last rows are the newest that the target has accepted."""
        [self.query_RHD[row_B]] = self.tap.of_prefill()

    def verified(self, row_B: torch.Tensor, width: int, last_B: torch.Tensor) -> None:
        """A verification has ended.

        Args:
            row_B: rows of its requests.
            width: tokens of each request in it; 0 where these differ, and ``last_B`` are rows of all requests' tokens.
            last_B: the last of them that was accepted; the token that the target chose behind it has no query yet.
        """
        [self.query_RHD[row_B]] = self.tap.of_verification(width, last_B)

    def choose(self, running: Running, groups: Sequence[Group], looks: bool, longest: int) -> torch.Tensor | None:
        """New sets for the requests of ``groups``.

        Args:
            running: the batch; all its cached tokens are committed.
            groups: by budget.
            looks: whether the draft's latest chains look ahead; without them the history chooses in their place.
            longest: nobody has more cached tokens.

        Returns:
            Float32 ``[B]``: the share of the newest history's attention that the sets before lacked; None where nothing is measured.
        """
        count, columns = len(running.row_B), min(longest, self.table_RW.shape[1])
        usual = len(groups) == 1 and groups[0].where_B is None and groups[0].budget in self.usual
        size = self.runner.padded(count) if usual else count
        self.at_2B[0, :count], self.at_2B[1, :count] = running.row_B, running.length_B
        self.at_2B[:, count:size] = 0  # row 0 is nobody's
        if usual:
            columns = next(n for n in self._widths() if n >= columns)
            self.runner.run(count, Choice(columns, tuple(groups), looks))
        else:
            self._work(count, Choice(columns, tuple(groups), looks))
        return self.missed_B[:count].clone() if self.measures else None

    def _work(self, size: int, choice: Any) -> None:
        row_B, length_B = self.at_2B[:, :size]
        running = Running((), row_B, self.table_RW, length_B, row_B)
        target_BN, draft_BN = self._scores(running, self.lookahead(running) if choice.looks else [], choice.columns)
        # Behind a capture, which has run the work already, this sees the new sets once: they lack little.
        if self.measures:
            self.missed_B[:size] = self._missed(running, target_BN)
        for group in choice.groups:
            chosen = choose_tokens(draft_BN, target_BN, length_B, group.budget)
            self.views.choose(row_B, chosen, group.where_B)

    def _scores(
        self, running: Running, looks: Sequence[Lookahead], longest: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """History and lookahead of every column (Eq. 5)."""
        past, table_RW = self.history, running.table_RW
        plan = _plan(table_RW, running, 1, 0, longest)
        q_BHD = self.query_RHD[running.row_B]
        if past.heads:
            given = plan, past.scale, past.heads
            target_BN = head_mass(q_BHD, past.k_SKD, *given, kv_scale=past.kv_scale)
        else:  # other ranks have them all
            target_BN = torch.zeros(len(plan), plan.pages_BW.shape[1], dtype=work_dtype(q_BHD), device=q_BHD.device)
        draft_BN = torch.zeros_like(target_BN) if looks else None
        for look in looks:
            assert draft_BN is not None
            rows, heads = len(look.q_NHD) // len(plan), range(look.q_NHD.shape[1]) if look.heads is None else look.heads
            if not heads:
                continue
            own = _plan(table_RW if look.table_RW is None else look.table_RW, running, rows, look.first, longest)
            out_BN = draft_BN[:, look.first :]
            head_mass(look.q_NHD, look.k_SKD, own, look.scale, heads, out=out_BN, kv_scale=look.kv_scale)
        if self.ranks.size == 1:
            return target_BN, draft_BN
        if draft_BN is None:
            return self.ranks.total(target_BN), None
        target_BN, draft_BN = self.ranks.total(torch.stack([target_BN, draft_BN]))
        return target_BN, draft_BN

    def _missed(self, running: Running, target_BN: torch.Tensor) -> torch.Tensor:
        """1 - ARR (Eq. 1) of the sets as they are, by the scores of one row and some heads."""
        views, row_B, columns = self.views, running.row_B, target_BN.shape[1]
        count_B, start_B, column_BV = views.count_LR[-1, row_B], views.start_R[row_B], views.column_LRV[-1, row_B]
        there_BV = torch.arange(column_BV.shape[1], device=row_B.device) < count_B[:, None]
        chosen_BV = target_BN.gather(1, column_BV.long().clamp_max(columns - 1)).masked_fill(~there_BV, 0.0)
        later_BN = torch.arange(columns, device=row_B.device) >= start_B[:, None]
        seen_B = chosen_BV.sum(1) + target_BN.masked_fill(~later_BN, 0.0).sum(1)
        return 1.0 - seen_B / self.history.count


def _plan(table_RW: torch.Tensor, running: Running, rows: int, first: int, longest: int) -> AttentionPlan:
    """``rows`` queries of each request over its cached tokens from ``first`` on."""
    batch, row_B = len(running.row_B), running.row_B
    pages_BW, lens_B = table_RW[row_B, first:longest].int(), (running.length_B - first).clamp_min(0)
    if row_B.device.type == "cpu":
        return AttentionPlan.build(pages_BW, lens_B.tolist(), [rows] * batch)
    cu_B1 = torch.arange(batch + 1, dtype=torch.int32, device=row_B.device) * rows
    return AttentionPlan.on_device(pages_BW, lens_B.int(), cu_B1, [rows * b for b in range(batch + 1)])
