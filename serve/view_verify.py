"""The verifications of a cycle on views: what its last one reads, and what requests gain by it.

Legend: B requests, K drafted tokens, T tokens of a verification, N tokens of a run, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from longdraft.draft_models.acceptance import accepted_drafts
from longdraft.kernels.transfer import to_device
from longdraft.serve.device_step import Drafts, Gained
from longdraft.serve.device_verify import View, verify_running
from longdraft.serve.drafters.running import Running
from longdraft.serve.recompute_step import RecomputeStep
from longdraft.serve.roster import Roster
from longdraft.serve.simulate import forced_confirmations, simulated, simulated_acceptance
from longdraft.serve.verify import Verified
from longdraft.serve.views.cycle import Last, Ready
from longdraft.serve.views.cycle_plan import CyclePlan
from longdraft.serve.views.missed_mass import MissedMass


class ViewVerify(RecomputeStep):
    """As :class:`RecomputeStep`, with verifications on views.

    Attributes:
        missed: where what a view misses asks for a refresh.
        view_width: cached tokens at most that a partial verification reads of a request with a view.
        set_width: the same of a request of mode ``sparse``.
        lacked_B: share of the newest history's attention that each request's former set lacked; None where nothing was measured.
    """

    missed: MissedMass | None = None
    view_width = 0
    set_width = 0
    lacked_B: torch.Tensor | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chain = self.stride - self.settings.pending  # new tokens of a request in a partial round

    def _chain_limits(self, roster: Roster, running: Running) -> torch.Tensor:
        return super()._chain_limits(roster, running).clamp_max(self.chain - 1)

    def _last_view(
        self, running: Running, ready: Ready, all_B: torch.Tensor | None, plan: CyclePlan, width: int
    ) -> View:
        """What a last verification reads where some requests have a partial one, and those of ``all_B`` read everything.

        None means a batch of sets: then a request that is verified fully has one that holds all of its cache.

        Beside a request that reads everything all layers share one list, the last layer's, also where each has its own: lists as wide
        as the page table for every layer are 0.8 GB in each set of graphs (32 layers, 48 requests, 128K tokens), for a point or two
        of agreement.
        """
        base = replace(running, length_B=running.length_B - ready.lead_B)
        if all_B is None:
            return self.views.layer_pages(base, self.set_width, width)
        if any(plan.full) or any(plan.everything):
            return self.views.pages(base, all_B, self.columns, width)
        return self.views.layer_pages(base, self.view_width, width)

    def _told_reads(
        self, running: Running, id_BK: torch.Tensor, limit_B: torch.Tensor, view: View | None
    ) -> tuple[Running, torch.Tensor, torch.Tensor, View | None]:
        """What a verification in a cycle reads, as rank 0 has it: newest tokens and lengths, drafts, and the page list of a view."""
        if self.ranks.size == 1:
            return running, id_BK, limit_B, view
        given = running.newest_B, running.length_B, id_BK, limit_B, *(view or ())
        newest_B, length_B, id_BK, limit_B, *pages = self.ranks.first("views and drafts", *given)
        view = (pages[0], pages[1]) if pages else None
        return replace(running, newest_B=newest_B, length_B=length_B), id_BK, limit_B, view

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
        base, id_BK, limit_B, view = self._told_reads(base, id_BK, limit_B, view)
        columns = None if view is None else view[0].shape[-1] - self.chain
        columns = columns if columns in (self.view_width, self.set_width) else None
        in_graph = self._graph_width(len(roster.reqs), width, columns) is not None
        given = id_BK, limit_B, roster.params, self.observer
        seen = verify_running(self.target_worker, batch, roster.reqs, base, *given, in_graph, self.clock, view)
        sure_B = torch.where(roster.sparse_B, ready.gained_B, ready.lead_B)  # what a set verified is returned as it is
        return Last(seen, id_BK, limit_B, ready.lead_B, self._kept_last(seen, id_BK, limit_B, ready, sure_B), view)

    def _kept_last(
        self, seen: Verified, id_BK: torch.Tensor, limit_B: torch.Tensor, ready: Ready, sure_B: torch.Tensor
    ) -> torch.Tensor:
        """How many of the tokens behind the pending ones are the target's own choices; the first ``sure_B`` are not asked about."""
        steps, lead_B = id_BK.shape[1], ready.lead_B
        if simulated(self.settings.simulate_accept_length):
            confirmed_B = forced_confirmations(ready.gained_B, self.settings.simulate_confirmed_share)
            confirmed_B = torch.minimum(torch.maximum(confirmed_B, sure_B - lead_B), ready.gained_B)
            tail_B = torch.minimum(self._forced(len(lead_B), lead_B.device), ready.drafts.limit_B)
            all_B = torch.where(confirmed_B < ready.gained_B, confirmed_B, ready.gained_B + tail_B)
            return torch.minimum(all_B, limit_B - lead_B)
        choice_BT = seen.choice_T.view(-1, steps + 1)
        sure_BK = torch.arange(steps, device=lead_B.device) < sure_B[:, None]
        agreed_BK = torch.where(sure_BK, id_BK, choice_BT[:, :-1])
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
        missed_B = none_B if last.view is None else self._missed(roster, running, last, gained)
        if least is None:
            return missed_B
        two_T2 = last.seen.logits_TV.topk(2).values
        narrow_BN = ~(two_T2[:, 0] - two_T2[:, 1] >= least)  # no number is no margin
        narrow_BN = narrow_BN.view(len(gained.count_B), -1).gather(1, gained.place_BN)
        offset_N = torch.arange(narrow_BN.shape[1], device=narrow_BN.device)
        return missed_B | (narrow_BN & (offset_N < gained.count_B[:, None])).any(1).long()

    def _missed(self, roster: Roster, running: Running, last: Last, gained: Gained) -> torch.Tensor:
        """Requests whose view, or whose set of the round before, lacked too much of the attention."""
        missed_B, share = torch.zeros_like(gained.count_B), self.settings.refresh_missed_mass
        if share is not None and self.lacked_B is not None:
            missed_B = ((self.lacked_B > share) & roster.sparse_B).long()
        if self.missed is None or last.view is None or all(mode == "sparse" for mode in roster.modes):
            return missed_B
        base = replace(running, length_B=running.length_B - last.lead_B)
        place_B, end_B = last.lead_B + gained.count_B - 1, running.length_B + gained.count_B
        longest = max(r.kv_allocated_len for r in roster.reqs)
        try:
            over_B = self.missed.over(last.view, base, last.id_BK.shape[1] + 1, place_B, end_B, longest).long()
            return torch.where(roster.sparse_B, missed_B, over_B)
        except Exception:
            self.ranks.failed("longdraft: what views miss could not be measured, their requests go on as they are")
            return missed_B
