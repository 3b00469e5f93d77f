"""Steps of modes ``exact`` and ``partial``: rounds on a view of the cache, and a full verification behind them.

``exact``: a few partial rounds draft for one full verification, which returns what it confirms. Its tokens are the target's own
choices behind the exact cache, so the output is that of plain decoding whatever the view is. ``partial`` (SpecPV, section 3):
every partial round returns what the view verified; a full verification now and then computes the pending tokens' keys and values
anew, in place, and chooses the view anew. Both are one thing here: a last verification that starts at a request's first pending
token. Nothing waits for the device; the host plans by what rounds usually gain (:mod:`longdraft.serve.views.cycle_plan`).

Legend: B requests, K drafted tokens, T tokens of a verification, N tokens of a run, V vocabulary.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.draft_models.acceptance import accepted_drafts
from longdraft.kernels.transfer import to_device
from longdraft.serve import stats
from longdraft.serve.device_step import DeviceStep, Drafts, Gained
from longdraft.serve.device_verify import View, verify_running
from longdraft.serve.drafters.running import Running
from longdraft.serve.roster import Roster
from longdraft.serve.settings import VIEWED
from longdraft.serve.simulate import forced_confirmations, simulated, simulated_acceptance
from longdraft.serve.step_clock import Renamed
from longdraft.serve.tokens import Tokens
from longdraft.serve.verify import Verified
from longdraft.serve.views.chooser import ViewChooser
from longdraft.serve.views.cycle import Last, Ready, Returned
from longdraft.serve.views.cycle_plan import CyclePlan, CyclePlanner, Ledger
from longdraft.serve.views.missed_mass import MissedMass
from longdraft.serve.views.view_state import ViewState

logger = logging.getLogger(__name__)

# Of a batch: who is verified fully, on the device, what its rounds gave, and its last verification.
Verification = Callable[[ScheduleBatch, Roster, Running, CyclePlan], tuple[torch.Tensor, Ready, Last]]
UNUSED = 8  # times as rarely a view is chosen that no partial round reads


class ViewStep(DeviceStep):
    """As :class:`DeviceStep`, with views; requests that need their text on the host are verified fully, one round a step."""

    views: ViewState
    planner: CyclePlanner
    chooser: ViewChooser
    missed: MissedMass | None = None  # where what a view misses asks for a refresh
    view_width = 0  # cached tokens at most that a partial verification reads of a request with a view

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chain = self.stride - self.settings.pending  # new tokens of a request in a partial round
        self.ended: tuple[float, list[Any]] | None = None  # when the latest cycle was processed, and whose it was

    def prefilled(self, batch: ScheduleBatch) -> None:
        super().prefilled(batch)
        row_B, length_B = batch.req_pool_indices, batch.seq_lens.to(torch.int64)
        self.views.prefilled(row_B, length_B)
        lengths = batch.seq_lens_cpu.tolist()
        for req, length in zip(batch.reqs, lengths, strict=True):
            stats.attach(req, self.mode_of(req)).ledger = Ledger(length, length)
        if not any(self.mode_of(r) in VIEWED for r in batch.reqs):
            return
        try:
            queries = self.chooser.tap.of_prefill()
            table = batch.req_to_token_pool.req_to_token
            self.views.choose(row_B, self.chooser.choose(queries, row_B, table, length_B, max(lengths)))
        except Exception:
            logger.exception(
                "longdraft: no view could be chosen behind a prefill, its requests read sinks and the newest tokens"
            )

    def prefill_waits(self, waits: bool) -> None:
        self.planner.prefill_waits = waits

    def _ledger(self, req: Any) -> Ledger:
        counters = stats.attach(req, self.mode_of(req))
        if counters.ledger is None:
            cached = Tokens(req).cached
            counters.ledger = Ledger(cached, cached)
        return counters.ledger

    def exact_of(self, req: Any) -> int | None:
        """Leading tokens of a request's cache that are exact, as far as the host knows; None: all that it has returned."""
        counters = stats.attached(req)
        return (
            None if counters is None or counters.mode != "partial" or counters.ledger is None else counters.ledger.exact
        )

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        roster = self._roster(batch)
        if not roster.hosted:
            return super()._run(batch)
        exact = [self._repair(batch, roster)] * len(roster.reqs) if "partial" in roster.modes else None
        before = [self._ledger(r) for r in roster.reqs]
        result = super()._run(batch)
        row_B, new_B = batch.req_pool_indices, result.new_seq_lens
        for b, (req, length) in enumerate(zip(roster.reqs, new_B.tolist(), strict=True)):
            kept = exact is None or exact[b] or roster.modes[b] != "partial"
            until = length if kept else before[b].exact
            self.views.exact_R[row_B[b]] = until
            stats.attach(req, self.mode_of(req)).ledger = Ledger(length, until)
        return result

    def _repair(self, batch: ScheduleBatch, roster: Roster) -> bool:
        """Compute pending tokens anew: a round on the host reads the whole cache. Says whether that could be done."""
        assert self.newest_R is not None, "a prefill comes first"
        row_B, table_RW = batch.req_pool_indices, batch.req_to_token_pool.req_to_token
        running = Running(roster.rids, row_B, table_RW, batch.seq_lens, self.newest_R[row_B])
        none_B, lead_B = torch.zeros_like(running.length_B), running.length_B - self.views.exact_R[row_B]
        if int(lead_B.max()) >= self.stride:
            return False
        try:
            self.views.remember(row_B, running.length_B, running.newest_B[:, None])
            ready = Ready(running, none_B, none_B, lead_B, self._no_drafts(len(row_B), running))
            self._verify_last(batch, roster, running, ready, self.stride, None)
        except Exception:
            logger.exception("longdraft: pending tokens could not be computed anew, they stay as they are")
            return False
        return True

    def _learn(self, reqs: list[Any], more: Any, gained: list[int]) -> None:
        (plan, lengths), facts_4B = more
        self._time(reqs, plan, lengths)
        proposed, confirmed, doubtful, first = facts_4B.tolist()
        for tokens in first:
            self.planner.choice.gained(tokens)
        for b, req in enumerate(reqs):
            if req.finished() or req.is_retracted:
                continue
            counters = stats.attach(req, self.settings.mode)
            counted = proposed[b] if counters.mode == "exact" and not plan.everything[b] else 0
            fell = self.planner.processed(
                self._ledger(req), gained[b] + 1, counted, min(confirmed[b], counted), bool(doubtful[b])
            )
            counters.cycles.add(plan.rounds, plan.full[b], counted, min(confirmed[b], counted), fell)

    def _round(self, batch: ScheduleBatch, roster: Roster, running: Running) -> GenerationBatchResult:
        ledgers = [self._ledger(r) for r in roster.reqs]
        lengths = [Tokens(r).cached for r in roster.reqs]
        plan = self.planner.plan(ledgers, roster.modes, lengths)
        try:
            done = self._returned_by(batch, roster, running, plan, lengths, self._cycle)
        except Exception:
            logger.exception("longdraft: a cycle failed, its requests are verified without what was proposed")
            done = None
        if done is None:  # and the exception is gone, and with it the tensors that its frames hold
            self._unlaunch()
            self.planner.failed()
            plan = replace(plan, full=tuple(mode != "partial" for mode in roster.modes), rounds=0, room=0)
            done = self._returned_by(batch, roster, running, plan, lengths, self._bare)
        self.planner.launched(ledgers, plan)
        with self.clock.phase("select"):
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
        first_B = torch.where(full_B, ready.first_B, gained.count_B * (ready.drafts.limit_B == self.chain - 1))
        facts_4B = torch.stack([ready.gained_B, confirmed_B, doubtful_B, first_B])
        with self.clock.phase("keep"):
            row_B, exact_B = running.row_B, running.length_B + gained.count_B
            self.views.remember(row_B, running.length_B + 1, gained.id_BN)
            kept_B, last_B = torch.where(full_B, exact_B, self.views.exact_R[row_B]), last.lead_B + gained.count_B - 1
            result = self._returned(batch, running, gained, last.seen)
            self._launch(roster, last.limit_B - last.lead_B, ((plan, lengths), facts_4B))
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
        width = self.chain + plan.room
        view = None if all(plan.full) else self._last_view(running, ready, plan, full_B, everything_B, width)
        return full_B, ready, self._verify_last(batch, roster, running, ready, width, view)

    def _time(self, reqs: list[Any], plan: CyclePlan, lengths: list[int]) -> None:
        """From the end of one cycle to that of the next of the same requests; what else ran in between makes an outlier."""
        now, before = time.perf_counter(), self.ended
        self.ended = now, reqs
        if before is not None and before[1] is reqs and all(plan.full):
            self.planner.choice.timed(1e3 * (now - before[0]), plan.rounds, lengths)

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
                logger.exception("longdraft: a partial round failed, what there is of its cycle is verified")
                break
            gained_B = gained_B + more_B
        with self.clock.phase("draft"):
            drafts = self._draft(roster, self._reading(at))
        if not all(plan.full):  # what a partial verification gains stays pending
            left_B = (self.settings.pending - 1 - running.length_B + self.views.exact_R[running.row_B]).clamp_min(0)
            limit_B = torch.where(full_B, drafts.limit_B, torch.minimum(drafts.limit_B, left_B))
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
        in_graph = self._graph_width(len(roster.reqs), self.chain, everything_B is None) is not None
        view = (
            self.views.layer_pages(at, self.view_width, self.chain)
            if everything_B is None
            else self.views.pages(at, everything_B, self.columns, self.chain)
        )
        given = drafts.id_BK, limit_B, roster.params, self.observer
        clock = Renamed(self.clock, "verify", "partial")
        seen = verify_running(self.target_worker, batch, roster.reqs, at, *given, in_graph, clock, view)
        run_BT, kept_B = self._kept_run(Drafts(drafts.id_BK, limit_B), seen)
        more_B = torch.minimum(kept_B + 1, room_B)
        self.views.remember(at.row_B, at.length_B + 1, run_BT)
        last_B = run_BT.gather(1, (more_B - 1).clamp_min(0)[:, None])[:, 0]
        newest_B = torch.where(more_B > 0, last_B, at.newest_B)
        return more_B, replace(at, length_B=at.length_B + more_B, newest_B=newest_B)

    def _reading(self, running: Running) -> Running:
        """The batch with what its drafts read chosen: of a request without a list too much, so that they read sinks and the newest."""
        pages_BW, lens_B = self.views.pages(running, None, self.view_width, 0)
        short_B = running.length_B <= self.view_width
        lens_B = torch.where(self.views.listed(running.row_B) | short_B, lens_B, pages_BW.shape[1] + 1)
        return replace(running, chosen=(pages_BW, lens_B))

    def _chain_limits(self, roster: Roster, running: Running) -> torch.Tensor:
        return super()._chain_limits(roster, running).clamp_max(self.chain - 1)

    def _last_view(
        self,
        running: Running,
        ready: Ready,
        plan: CyclePlan,
        full_B: torch.Tensor,
        everything_B: torch.Tensor | None,
        width: int,
    ) -> View:
        """What a last verification reads where some requests have a partial one.

        Beside a request that reads everything all layers share one list, the last layer's, also where each has its own: lists as wide
        as the page table for every layer are 0.8 GB in each set of graphs (32 layers, 48 requests, 128K tokens), for a point or two
        of agreement.
        """
        all_B = full_B if everything_B is None else full_B | everything_B
        base = replace(running, length_B=running.length_B - ready.lead_B)
        if any(plan.full) or any(plan.everything):
            return self.views.pages(base, all_B, self.columns, width)
        return self.views.layer_pages(base, self.view_width, width)

    def _verify_last(
        self, batch: ScheduleBatch, roster: Roster, running: Running, ready: Ready, width: int, view: View | None
    ) -> Last:
        """Verify everything from each request's first pending token on."""
        start_B, drafts = running.length_B - ready.lead_B, ready.drafts
        first_B, id_BK = running.newest_B, drafts.id_BK
        if width != self.chain:
            id_BT = self.views.recall(running.row_B, start_B, width)
            first_B, id_BK = id_BT[:, 0], id_BT[:, 1:]
        end_B = (roster.end_B - 2).clamp_max(self.columns - 1) - start_B
        limit_B = torch.minimum(ready.lead_B + ready.gained_B + drafts.limit_B, end_B.clamp(0, width - 1))
        limit_B = torch.maximum(limit_B, ready.lead_B)  # one that has ended, which the host does not know yet
        base = replace(running, length_B=start_B, newest_B=first_B)
        narrow = view is not None and view[0].shape[-1] == self.view_width + self.chain
        in_graph = self._graph_width(len(roster.reqs), width, narrow) is not None
        given = id_BK, limit_B, roster.params, self.observer
        seen = verify_running(self.target_worker, batch, roster.reqs, base, *given, in_graph, self.clock, view)
        return Last(seen, id_BK, limit_B, ready.lead_B, self._kept_last(seen, id_BK, limit_B, ready), view)

    def _bare(
        self, batch: ScheduleBatch, roster: Roster, running: Running, plan: CyclePlan
    ) -> tuple[torch.Tensor, Ready, Last]:
        """As :meth:`_cycle`, of the newest tokens alone, each request by itself if need be."""
        full_B, none_B = to_device(plan.full, torch.bool, running.length_B.device), torch.zeros_like(running.length_B)
        self.views.remember(running.row_B, running.length_B, running.newest_B[:, None])
        seen, drafts = self._verify(batch, roster, running, self._no_drafts(len(roster.reqs), running))
        ready = Ready(running, none_B, none_B, none_B, drafts)
        return full_B, ready, Last(seen, drafts.id_BK, drafts.limit_B, none_B, none_B)

    def _kept_last(self, seen: Verified, id_BK: torch.Tensor, limit_B: torch.Tensor, ready: Ready) -> torch.Tensor:
        """How many of the tokens behind the pending ones are the target's own choices."""
        steps, lead_B = id_BK.shape[1], ready.lead_B
        if simulated(self.settings.simulate_accept_length):
            confirmed_B = forced_confirmations(ready.gained_B, self.settings.simulate_confirmed_share)
            tail_B = torch.minimum(self._forced(len(lead_B), lead_B.device), ready.drafts.limit_B)
            all_B = torch.where(confirmed_B < ready.gained_B, confirmed_B, ready.gained_B + tail_B)
            return torch.minimum(all_B, limit_B - lead_B)
        choice_BT = seen.choice_T.view(-1, steps + 1)
        returned_BK = torch.arange(steps, device=lead_B.device) < lead_B[:, None]
        agreed_BK = torch.where(returned_BK, id_BK, choice_BT[:, :-1])
        return accepted_drafts(id_BK, torch.cat([agreed_BK, choice_BT[:, -1:]], 1), limit_B) - lead_B

    def _kept_run(self, drafts: Drafts, seen: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """What a chain's verification gains ``[B, T]``, and how many of the drafts are kept."""
        batch, steps = drafts.id_BK.shape
        choice_BT = seen.choice_T.view(batch, steps + 1)
        if not simulated(self.settings.simulate_accept_length):
            return choice_BT, accepted_drafts(drafts.id_BK, choice_BT, drafts.limit_B)
        kept_B = torch.minimum(self._forced(batch, drafts.limit_B.device), drafts.limit_B)
        drafted_BT = torch.cat([drafts.id_BK, choice_BT[:, -1:]], 1)
        offset_T = torch.arange(steps + 1, device=kept_B.device)
        return torch.where(offset_T < kept_B[:, None], drafted_BT, choice_BT), kept_B

    def _forced(self, batch: int, device: torch.device) -> torch.Tensor:
        drawn = simulated_acceptance([self.chain - 1] * batch, self.settings.simulate_accept_length, self.chain)
        return to_device(drawn, torch.int64, device)

    def _gain(self, roster: Roster, last: Last) -> Gained:
        """What each request returns: what was kept behind its pending tokens, and the target's choice behind that."""
        width = last.id_BK.shape[1] + 1
        offset_N = torch.arange(width, device=last.kept_B.device)
        place_BN = (last.lead_B[:, None] + offset_N).clamp_max(width - 1)
        run_BN = last.seen.choice_T.view(-1, width).gather(1, place_BN)
        if width > 1:
            drafted_BN = last.id_BK.gather(1, place_BN.clamp_max(width - 2))
            run_BN = torch.where(offset_N < last.kept_B[:, None], drafted_BN, run_BN)
        return Gained(run_BN, roster.returned(run_BN, last.kept_B), place_BN)

    def _doubtful(self, roster: Roster, running: Running, plan: CyclePlan, last: Last, gained: Gained) -> torch.Tensor:
        """Requests that return a token whose logit was not far enough ahead of the next, or whose view misses too much."""
        least, none_B = self.settings.refresh_margin, torch.zeros_like(gained.count_B)
        if all(plan.full):
            return none_B
        missed_B = none_B if self.missed is None or last.view is None else self._missed(roster, running, last, gained)
        if least is None:
            return missed_B
        two_T2 = last.seen.logits_TV.topk(2).values
        narrow_BN = (two_T2[:, 0] - two_T2[:, 1] < least).view(len(gained.count_B), -1).gather(1, gained.place_BN)
        offset_N = torch.arange(narrow_BN.shape[1], device=narrow_BN.device)
        return missed_B | (narrow_BN & (offset_N < gained.count_B[:, None])).any(1).long()

    def _missed(self, roster: Roster, running: Running, last: Last, gained: Gained) -> torch.Tensor:
        assert self.missed is not None and last.view is not None
        base = replace(running, length_B=running.length_B - last.lead_B)
        place_B, end_B = last.lead_B + gained.count_B - 1, running.length_B + gained.count_B
        longest = max(r.kv_allocated_len for r in roster.reqs)
        try:
            return self.missed.over(last.view, base, last.id_BK.shape[1] + 1, place_B, end_B, longest).long()
        except Exception:
            logger.exception("longdraft: what views miss could not be measured, their requests go on as they are")
            return torch.zeros_like(end_B)

    def _choose_views(self, roster: Roster, running: Running, plan: CyclePlan, done: Returned) -> None:
        """New views for the requests that were just verified fully, by the queries of what they returned."""
        due = []
        for req, mode, full in zip(roster.reqs, roster.modes, plan.full, strict=True):
            counters = stats.attach(req, mode)
            since = counters.verified_since_choice = counters.verified_since_choice + (full and mode in VIEWED)
            every = self.settings.view_every * (1 if plan.room else UNUSED)
            due.append(full and mode in VIEWED and since >= every)
            if due[-1]:
                counters.verified_since_choice = 0
        if not any(due) or self.chooser.selector.once:
            return
        try:
            queries = self.chooser.tap.of_verification(done.width, done.last_B)
            table, longest = running.table_RW, max(r.kv_allocated_len for r in roster.reqs)
            chosen = self.chooser.choose(queries, running.row_B, table, done.exact_B, longest)
            where_B = None if all(due) else to_device(due, torch.bool, running.row_B.device)
            self.views.choose(running.row_B, chosen, where_B)
        except Exception:
            logger.exception("longdraft: no view could be chosen, its requests keep theirs")
