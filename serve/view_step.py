"""Steps of modes ``exact``, ``partial`` and ``sparse``: rounds on a view of the cache, and a full verification behind them.

``exact``: a few partial rounds draft for one full verification, which returns what it confirms. Its tokens are the target's own
choices behind the exact cache, so the output is that of plain decoding whatever the view is. ``partial`` (SpecPV, section 3):
every partial round returns what the view verified; a full verification now and then computes the pending tokens' keys and values
anew, in place, and chooses the view anew. Both are one thing here: a last verification that starts at a request's first pending
token. ``sparse`` (Dustin): every round verifies on a set of tokens that was chosen behind its drafting, and returns that; pending
tokens stay as they are, unless a refresh is asked for. Nothing waits for the device; the host plans by what rounds usually gain
(:mod:`longdraft.serve.views.cycle_plan`).

Legend: B requests, K drafted tokens, T tokens of a verification, N tokens of a run, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.kernels.transfer import to_device
from longdraft.serve import stats
from longdraft.serve.device_step import Drafts, Gained
from longdraft.serve.device_verify import verify_running
from longdraft.serve.drafters.running import Running
from longdraft.serve.roster import Roster
from longdraft.serve.settings import LOSSY, VIEWED
from longdraft.serve.sparse_rounds import SparseRounds
from longdraft.serve.step_clock import Renamed
from longdraft.serve.tokens import Tokens
from longdraft.serve.verify import Verified
from longdraft.serve.view_verify import ViewVerify
from longdraft.serve.views.chooser import ViewChooser
from longdraft.serve.views.cycle import Last, Ready, Returned
from longdraft.serve.views.cycle_plan import REPAIRED, CyclePlan, CyclePlanner, Ledger

# Of a batch: who is verified fully, on the device, what its rounds gave, and its last verification.
Verification = Callable[[ScheduleBatch, Roster, Running, CyclePlan], tuple[torch.Tensor, Ready, Last]]
Timed = tuple[int, list[int]]  # rounds of a cycle, and the lengths of its requests
UNUSED = 8  # times as rarely a view is chosen that no partial round reads


class ViewStep(ViewVerify):
    """As :class:`DeviceStep`, with views; requests that need their text on the host are verified fully, one round a step."""

    planner: CyclePlanner
    chooser: ViewChooser
    sparse: SparseRounds | None = None  # where requests may have sets of tokens

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ended: tuple[float, list[Any]] | None = None  # when the latest cycle was processed, and whose it was
        self.took: tuple[float, int, list[int]] | None = None  # of several ranks: a cycle's time, rounds and lengths
        self.drafted = False  # whether the latest drafts are the drafter's

    def prefilled(self, batch: ScheduleBatch) -> None:
        super().prefilled(batch)
        row_B, length_B = batch.req_pool_indices, batch.seq_lens.to(torch.int64)
        self.views.prefilled(row_B, length_B)
        lengths = batch.seq_lens_cpu.tolist()
        for req, length in zip(batch.reqs, lengths, strict=True):
            stats.attach(req, self.mode_of(req)).ledger = self._new_ledger(req, length, length)
        if not any(self.mode_of(r) in VIEWED for r in batch.reqs):
            return
        if self.sparse is not None:
            self.sparse.prefilled(row_B)
        try:
            queries = self.chooser.tap.of_prefill()
            table = batch.req_to_token_pool.req_to_token
            self.views.choose(row_B, self.chooser.choose(queries, row_B, table, length_B, max(lengths)))
        except Exception:
            self.ranks.failed(
                "longdraft: no view could be chosen behind a prefill, its requests read sinks and the newest tokens"
            )

    def prefill_waits(self, waits: bool) -> None:
        self.planner.prefill_waits = waits

    def _ledger(self, req: Any) -> Ledger:
        counters = stats.attach(req, self.mode_of(req))
        if counters.ledger is None:
            cached = Tokens(req).cached
            counters.ledger = self._new_ledger(req, cached, cached)
        return counters.ledger

    def _new_ledger(self, req: Any, length: int, exact: int) -> Ledger:
        mode, own = self.mode_of(req), stats.attach(req, self.settings.mode).own
        budget = own.budget or self.settings.sparse_tokens if mode == "sparse" else 0
        return Ledger(length, exact, chance=self.planner.chance, budget=budget, refresh=own.refresh)

    def exact_of(self, req: Any) -> int | None:
        """Leading tokens of a request's cache that are exact, as far as the host knows; None: all that it has returned."""
        counters = stats.attached(req)
        return (
            None if counters is None or counters.mode not in LOSSY or counters.ledger is None else counters.ledger.exact
        )

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        roster = self._roster(batch)
        if not roster.hosted:
            return super()._run(batch)
        before = [self._ledger(r) for r in roster.reqs]
        exact = self._repair(batch, roster, before)
        result = super()._run(batch)
        row_B, new_B = batch.req_pool_indices, result.new_seq_lens
        for b, (req, length) in enumerate(zip(roster.reqs, new_B.tolist(), strict=True)):
            until = length if exact[b] else before[b].exact
            self.views.exact_R[row_B[b]] = until
            stats.attach(req, self.mode_of(req)).ledger = self._new_ledger(req, length, until)
        return result

    def _result(self, batch: ScheduleBatch, runs: list[list[int]], seen: Verified) -> GenerationBatchResult:
        """Of a round on the host, whose rows are as many of each request as it had drafts, or as a graph has."""
        if self.sparse is not None:
            width = self._graph_width(len(runs), max(b - a for a, b in pairwise(seen.cu)))
            starts = seen.cu if width is None else range(0, width * len(runs), width)
            last = [start + len(run) - 1 for start, run in zip(starts, runs, strict=False)]
            self.sparse.verified(batch.req_pool_indices, 0, to_device(last, torch.int64, seen.choice_T.device))
        return super()._result(batch, runs, seen)

    def _repair(self, batch: ScheduleBatch, roster: Roster, ledgers: list[Ledger]) -> list[bool]:
        """Compute pending tokens anew: a round on the host reads the whole cache. Says whose cache is exact then.

        Pending tokens of sparse requests stay as they are: there may be any number of them.
        """
        assert self.newest_R is not None, "a prefill comes first"
        exact = [mode not in LOSSY or not ledger.pending(1) for mode, ledger in zip(roster.modes, ledgers, strict=True)]
        members = [b for b, mode in enumerate(roster.modes) if mode == "partial" and not exact[b]]
        most = max((ledgers[b].length - ledgers[b].exact for b in members), default=0)
        if not 0 < most < self.stride:
            return exact
        row_B, table_RW = batch.req_pool_indices, batch.req_to_token_pool.req_to_token
        running = Running(roster.rids, row_B, table_RW, batch.seq_lens, self.newest_R[row_B])
        done = self._recomputed(batch, roster, running, members, most)
        return [kept or (done and b in members) for b, kept in enumerate(exact)]

    def _learn(self, reqs: list[Any], more: Any, gained: list[int]) -> None:
        (plan, lengths, timed), facts_FB = more
        proposed, confirmed, doubtful, first, *micros = facts_FB.tolist()
        if timed is not None:
            self.planner.choice.timed(1e-3 * micros[0][0], *timed)
        self._time(reqs, plan, lengths)
        for tokens in first:
            self.planner.choice.gained(tokens)
        for b, req in enumerate(reqs):
            if req.finished() or req.is_retracted:
                continue
            counters = stats.attach(req, self.settings.mode)
            counted = proposed[b] if counters.mode == "exact" and not plan.everything[b] else 0
            ledger = self._ledger(req)
            read = self.planner.read(plan, b, ledger)
            fell = self.planner.processed(ledger, gained[b] + 1, counted, min(confirmed[b], counted), bool(doubtful[b]))
            counters.cycles.add(plan.rounds, plan.full[b], counted, min(confirmed[b], counted), fell, read)
            if counters.mode in LOSSY:
                renewed = plan.kind(b) == REPAIRED or (plan.full[b] and not plan.everything[b])
                counters.cycles.lossy(0 if plan.full[b] else gained[b] + 1, renewed)

    def _read(self, req: Any) -> int:
        return 0

    def _round(self, batch: ScheduleBatch, roster: Roster, running: Running) -> GenerationBatchResult:
        ledgers = [self._ledger(r) for r in roster.reqs]
        lengths = [Tokens(r).cached for r in roster.reqs]
        plan = self.planner.plan(ledgers, roster.modes, lengths)
        if members := [b for b, due in enumerate(plan.repaired) if due]:
            most = int(max(ledgers[b].pending(self.stride) for b in members))
            if not self._recomputed(batch, roster, running, members, most):
                self.planner.unrepaired()
                plan = replace(plan, repaired=())
        try:
            done = self._returned_by(batch, roster, running, plan, lengths, self._cycle)
        except Exception:
            self.ranks.failed("longdraft: a cycle failed, its requests are verified without what was proposed")
            done = None
        if done is None:  # and the exception is gone, and with it the tensors that its frames hold
            self._unlaunch()
            self.planner.failed()
            plan = replace(plan, full=tuple(mode not in LOSSY for mode in roster.modes), rounds=0, room=0)
            done = self._returned_by(batch, roster, running, plan, lengths, self._bare)
        self.planner.launched(ledgers, plan)
        with self.clock.phase("select"):
            if self.sparse is not None:
                self.sparse.verified(running.row_B, done.width, done.last_B)
            self._choose_views(roster, running, plan, done)
        return done.result

    def _returned_by(
        self,
        batch: ScheduleBatch,
        roster: Roster,
        running: Running,
        plan: CyclePlan,
        lengths: list[int],
        verified: Verification,
    ) -> Returned:
        """What a cycle returns that ``verified`` (:meth:`_cycle` or :meth:`_bare`) verifies.

        What is kept from cycle to cycle is changed last, so that a cycle that fails can be made good by another one.
        """
        full_B, ready, last = verified(batch, roster, running, plan)
        gained = self._gain(roster, last)
        confirmed_B = torch.minimum(last.kept_B, ready.gained_B)
        doubtful_B = self._doubtful(roster, running, plan, last, gained)
        chains_B = gained.count_B * (ready.drafts.limit_B == self.chain - 1)
        first_B = ready.first_B if plan.rounds else torch.where(full_B, ready.first_B, chains_B)
        facts_4B = torch.stack([ready.gained_B, confirmed_B, doubtful_B, first_B])
        gained, facts_FB, timed = self._told(gained, facts_4B)
        with self.clock.phase("keep"):
            row_B, exact_B = running.row_B, running.length_B + gained.count_B
            self.views.remember(row_B, running.length_B + 1, gained.id_BN)
            kept_B, last_B = torch.where(full_B, exact_B, self.views.exact_R[row_B]), last.lead_B + gained.count_B - 1
            result = self._returned(batch, running, gained, last.seen)
            self._launch(roster, last.limit_B - last.lead_B, ((plan, lengths, timed), facts_FB))
            self.views.exact_R[row_B] = kept_B
        return Returned(result, last.id_BK.shape[1] + 1, last_B, exact_B)

    def _cycle(
        self, batch: ScheduleBatch, roster: Roster, running: Running, plan: CyclePlan
    ) -> tuple[torch.Tensor, Ready, Last]:
        """Partial rounds, and the last verification; and who is verified fully in it, on the device."""
        device = running.length_B.device
        full_B = to_device(plan.full, torch.bool, device)
        everything_B = to_device(plan.everything, torch.bool, device) if any(plan.everything) else None
        self.views.remember(running.row_B, running.length_B, running.newest_B[:, None])
        ready = self._rounds(batch, roster, running, plan, full_B, everything_B)
        width, view = self.chain + plan.room, None
        if not all(plan.full):
            of_sets = self._choose_sets(roster, running) and all(mode == "sparse" for mode in roster.modes)
            all_B = full_B if everything_B is None else full_B | everything_B
            view = self._last_view(running, ready, None if of_sets else all_B, plan, width)
        return full_B, ready, self._verify_last(batch, roster, running, ready, width, view)

    def _choose_sets(self, roster: Roster, at: Running) -> bool:
        """New sets of tokens, where requests have such; says whether everybody who has one got one."""
        self.lacked_B = None
        if self.sparse is None:
            return False
        with self.clock.phase("select"):
            budgets = [self._ledger(req).budget for req in roster.reqs]
            longest = max(r.kv_allocated_len for r in roster.reqs)
            chosen, self.lacked_B = self.sparse.choose(roster, budgets, at, longest, self.drafted)
            return chosen

    def _draft(self, roster: Roster, running: Running) -> Drafts:
        self.drafted = roster.drafting
        return super()._draft(roster, running)

    def _failed(self, roster: Roster) -> None:
        self.drafted = False
        super()._failed(roster)

    def _time(self, reqs: list[Any], plan: CyclePlan, lengths: list[int]) -> None:
        """From the end of one cycle to that of the next of the same requests; what else ran in between makes an outlier."""
        now, before = time.perf_counter(), self.ended
        self.ended = now, reqs
        if before is None or before[1] is not reqs or not all(plan.full):
            return
        took = 1e3 * (now - before[0]), plan.rounds, lengths
        if self.ranks.size == 1:
            self.planner.choice.timed(*took)
        else:
            self.took = took

    def _told(self, gained: Gained, facts_4B: torch.Tensor) -> tuple[Gained, torch.Tensor, Timed | None]:
        """Rank 0's outcome of a cycle, behind which its latest time goes along as one more fact: all ranks plan by its clock, and learn
        of it when they process this cycle.

        Returns:
            The outcome, the facts, and the rounds and lengths of the cycle whose microseconds are the last of them, if one was timed.
        """
        if self.ranks.size == 1:
            return gained, facts_4B, None
        took, self.took = self.took, None
        micros_B = torch.full_like(gained.count_B, 0 if took is None else round(1e3 * took[0]))
        told = self.ranks.first("tokens", gained.id_BN, gained.count_B, facts_4B, apart=[micros_B])
        id_BN, count_B, facts_4B, micros_B = told
        facts_5B = torch.cat([facts_4B, micros_B[None]])
        return replace(gained, id_BN=id_BN, count_B=count_B), facts_5B, None if took is None else took[1:]

    def _rounds(
        self,
        batch: ScheduleBatch,
        roster: Roster,
        running: Running,
        plan: CyclePlan,
        full_B: torch.Tensor,
        everything_B: torch.Tensor | None,
    ) -> Ready:
        """The partial rounds of a cycle, and drafts behind them."""
        at, gained_B = running, torch.zeros_like(running.length_B)
        first_B, at_first = gained_B, True
        lead_B = (running.length_B - self.views.exact_R[running.row_B]) * full_B
        for _ in range(plan.rounds):
            try:
                left_B = plan.room - lead_B - gained_B
                more_B, at = self._partial_round(batch, roster, at, left_B, everything_B)
                if at_first:
                    whole_B = roster.end_B - 2 - running.length_B >= self.chain
                    first_B, at_first = more_B * whole_B, False
            except Exception:
                self.ranks.failed("longdraft: a partial round failed, what there is of its cycle is verified")
                break
            gained_B = gained_B + more_B
        with self.clock.phase("draft"):
            drafts = self._draft(roster, self._reading(at))
        if not all(plan.full):  # what a partial verification gains stays pending
            left_B = (self.settings.pending - 1 - running.length_B + self.views.exact_R[running.row_B]).clamp_min(0)
            limit_B = torch.where(full_B | roster.sparse_B, drafts.limit_B, torch.minimum(drafts.limit_B, left_B))
            drafts = Drafts(drafts.id_BK, limit_B)
        if plan.room:
            self.views.remember(at.row_B, at.length_B + 1, drafts.id_BK)
        return Ready(at, gained_B, first_B, lead_B, drafts)

    def _partial_round(
        self,
        batch: ScheduleBatch,
        roster: Roster,
        at: Running,
        left_B: torch.Tensor,
        everything_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Running]:
        """Draft and verify on the view: how many tokens each request gains, at most ``left_B``, and the batch behind them."""
        with self.clock.phase("draft"):
            drafts = self._draft(roster, self._reading(at))
        end_B = (roster.end_B - 2).clamp_max(self.columns - 1)
        room_B = torch.minimum(end_B - at.length_B, left_B).clamp_min(0) * roster.drafts_B
        limit_B = torch.minimum(drafts.limit_B, (room_B - 1).clamp_min(0))
        self._choose_sets(roster, at)
        columns = self.view_width if everything_B is None else None
        in_graph = self._graph_width(len(roster.reqs), self.chain, columns) is not None
        view = (
            self.views.layer_pages(at, self.view_width, self.chain)
            if everything_B is None
            else self.views.pages(at, everything_B, self.columns, self.chain)
        )
        at, id_BK, limit_B, read = self._told_reads(at, drafts.id_BK, limit_B, view)
        given = id_BK, limit_B, roster.params, self.observer
        clock = Renamed(self.clock, "verify", "partial")
        seen = verify_running(self.target_worker, batch, roster.reqs, at, *given, in_graph, clock, read)
        run_BT, kept_B = self._kept_run(Drafts(id_BK, limit_B), seen)
        more_B = torch.minimum(kept_B + 1, room_B)
        if self.sparse is not None:
            self.sparse.verified(at.row_B, self.chain, (more_B - 1).clamp_min(0))
        self.views.remember(at.row_B, at.length_B + 1, run_BT)
        last_B = run_BT.gather(1, (more_B - 1).clamp_min(0)[:, None])[:, 0]
        newest_B = torch.where(more_B > 0, last_B, at.newest_B)
        return more_B, replace(at, length_B=at.length_B + more_B, newest_B=newest_B)

    def _reading(self, running: Running) -> Running:
        """The batch with what its drafts read chosen: of a request without a list too much, so that they read sinks and the newest."""
        pages_BW, lens_B = self.views.pages(running, None, self.view_width, 0, fill=self.sparse is not None)
        short_B = running.length_B <= self.view_width
        lens_B = torch.where(self.views.listed(running.row_B) | short_B, lens_B, pages_BW.shape[1] + 1)
        return replace(running, chosen=(pages_BW, lens_B))

    def _bare(
        self, batch: ScheduleBatch, roster: Roster, running: Running, plan: CyclePlan
    ) -> tuple[torch.Tensor, Ready, Last]:
        """As :meth:`_cycle`, of the newest tokens alone, each request by itself if need be."""
        full_B, none_B = to_device(plan.full, torch.bool, running.length_B.device), torch.zeros_like(running.length_B)
        self.views.remember(running.row_B, running.length_B, running.newest_B[:, None])
        seen, drafts = self._verify(batch, roster, running, self._no_drafts(len(roster.reqs), running))
        ready = Ready(running, none_B, none_B, none_B, drafts)
        return full_B, ready, Last(seen, drafts.id_BK, drafts.limit_B, none_B, none_B)

    def _choose_views(self, roster: Roster, running: Running, plan: CyclePlan, done: Returned) -> None:
        """New views for the requests that were just verified fully, by the queries of what they returned."""
        due = []
        for req, mode, full in zip(roster.reqs, roster.modes, plan.full, strict=True):
            counters = stats.attach(req, mode)
            chooses = full and mode in VIEWED and mode != "sparse"
            since = counters.verified_since_choice = counters.verified_since_choice + chooses
            every = self.settings.view_every * (1 if plan.room else UNUSED)
            due.append(chooses and since >= every)
            if due[-1]:
                counters.verified_since_choice = 0
        by_round = self.sparse is not None and self.sparse.viewed is not None
        if not any(due) or self.chooser.selector.once or by_round:
            return
        try:
            queries = self.chooser.tap.of_verification(done.width, done.last_B)
            table, longest = running.table_RW, max(r.kv_allocated_len for r in roster.reqs)
            chosen = self.chooser.choose(queries, running.row_B, table, done.exact_B, longest)
            where_B = None if all(due) else to_device(due, torch.bool, running.row_B.device)
            self.views.choose(running.row_B, chosen, where_B)
        except Exception:
            self.ranks.failed("longdraft: no view could be chosen, its requests keep theirs")
