"""Rounds of chains that never wait for the device: drafting, verification and acceptance are launched, and the host goes on.

What a round needs of the one before, the newest token and the length of every request, stays on the device, by row of SGLang's
page table; the scheduler reads tokens back when it processes the result. So a round can be launched while the host is still a
round behind (SGLang's overlap schedule). Requests that need their text on the host for the next choice (a grammar, penalties,
stop strings) take :class:`DecodeStep`'s rounds, and the scheduler is asked to finish the round before first.

Legend: B requests, K drafted tokens, T = K + 1 new tokens of a request, N tokens of a run, R rows of SGLang's page table.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.utils.logprob import compute_spec_v2_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.draft_models.acceptance import accepted_drafts
from longdraft.kernels.transfer import to_device
from longdraft.serve import stats
from longdraft.serve.decode_step import DecodeStep, give_up, logits_output
from longdraft.serve.device_verify import verify_running
from longdraft.serve.drafters.running import Running
from longdraft.serve.emission import room
from longdraft.serve.roster import Roster, needs_text
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.simulate import simulated, simulated_acceptance
from longdraft.serve.spec_inputs import DraftInput
from longdraft.serve.step_clock import OFF, StepClock
from longdraft.serve.tokens import Tokens
from longdraft.serve.verify import Verified

HOSTED = ("flashinfer", "torch")  # backends that plan on the host


@dataclass(frozen=True)
class Drafts:
    """A round's drafts, int64 ``[B, K]``, and how many of each request count."""

    id_BK: torch.Tensor
    limit_B: torch.Tensor


@dataclass(frozen=True)
class Gained:
    """What each request returns: the first ``count_B`` of ``id_BN``, chosen behind ``place_BN`` of its verified tokens."""

    id_BN: torch.Tensor
    count_B: torch.Tensor
    place_BN: torch.Tensor


class DeviceStep(DecodeStep):
    """As :class:`DecodeStep`, for drafters that draft on the device; a failure costs drafts, or ends its request, as there."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.newest_R: torch.Tensor | None = None
        self.columns = 0  # of SGLang's page table
        self.roster: Roster | None = None
        # Rounds that the scheduler has not processed yet, with the number of drafts of each request, which is on its way to the
        # host; None for a round that was counted when it ran.
        self.launched: deque[tuple[list[Any], torch.Tensor, Any] | None] = deque()
        self.unprocessed = 0  # of them when the latest round began

    def remember(self, batch: ScheduleBatch, newest_B: torch.Tensor) -> None:
        if self.newest_R is None:
            rows, self.columns = batch.req_to_token_pool.req_to_token.shape
            self.newest_R = torch.zeros(rows, dtype=torch.int64, device=newest_B.device)
        self.newest_R[batch.req_pool_indices] = newest_B

    def prefilled(self, batch: ScheduleBatch) -> None:
        for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            tokens = Tokens(req)
            if self.mode_of(req) != "off" and end == len(tokens) and room(req) > 1:
                self._follow(req, tokens, end)

    def needs_host(self, batch: ScheduleBatch) -> bool:
        return any(needs_text(req) or not self._known(req, self.mode_of(req)) for req in batch.reqs)

    def processed(self, gained: list[int]) -> None:
        launched = self.launched.popleft()
        if launched is None:
            return
        reqs, drafted_B, more = launched
        if more is not None:
            self._learn(reqs, more, gained)
        for req, drafted, count in zip(reqs, drafted_B.tolist(), gained, strict=True):
            if req.finished() or req.is_retracted:
                continue
            counters = stats.attach(req, self.settings.mode)
            counters.count(drafted, count, self._read(req))

    def run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self.unprocessed = len(self.launched)
        return super().run(batch)

    def _ended(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._unlaunch()
        self.launched.append(None)
        return super()._ended(batch)

    def _unlaunch(self) -> None:
        """Forget the latest round, which has failed, if it was launched."""
        while len(self.launched) > self.unprocessed:
            self.launched.pop()

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        roster = self._roster(batch)
        if roster.hosted:
            self.launched.append(None)
            for req in roster.reqs:  # a round on the host need not draft for it, and then shows the drafter nothing
                self.drafter.settle(req.rid, Tokens(req).cached)
            return super()._run(batch)
        for req, mode in zip(roster.reqs, roster.modes, strict=True):
            if not self._known(req, mode) and not req.finished():
                self._follow(req, Tokens(req), Tokens(req).cached)
        assert self.newest_R is not None, "a prefill comes first"
        row_B, table_RW = batch.req_pool_indices, batch.req_to_token_pool.req_to_token
        hosted = self.settings.attention in HOSTED
        running = Running(roster.rids, row_B, table_RW, batch.seq_lens, self.newest_R[row_B], hosted)
        return self._round(batch, roster, running)

    def _round(self, batch: ScheduleBatch, roster: Roster, running: Running) -> GenerationBatchResult:
        with self.clock.phase("draft"):
            drafts = self._draft(roster, running)
        return self._chains(batch, roster, running, drafts)

    def _chains(
        self, batch: ScheduleBatch, roster: Roster, running: Running, drafts: Drafts, more: Any = None
    ) -> GenerationBatchResult:
        seen, drafts = self._verify(batch, roster, running, drafts)
        self._launch(roster, drafts.limit_B, more)
        with self.clock.phase("keep"):
            run_BT, count_B = self.ranks.first("tokens", *self._accept(roster, drafts, seen))
            place_T = torch.arange(run_BT.shape[1], device=run_BT.device)
            return self._returned(batch, running, Gained(run_BT, count_B, place_T.expand_as(run_BT)), seen)

    def _launch(self, roster: Roster, drafted_B: torch.Tensor, more: Any = None) -> None:
        """Note the round for :meth:`processed`; ``more`` is what :meth:`_learn` then gets."""
        if more is not None:
            more = (more[0], more[1].to("cpu", non_blocking=True))
        self.launched.append((roster.reqs, drafted_B.to("cpu", non_blocking=True), more))

    def _learn(self, reqs: list[Any], more: Any, gained: list[int]) -> None:
        """What a kind of rounds learns from one when its tokens are there."""

    def _read(self, req: Any) -> int:
        """Cached tokens that the round read, which the scheduler comes to, beside those that :meth:`_learn` counts."""
        return Tokens(req).cached

    def _roster(self, batch: ScheduleBatch) -> Roster:
        if self.roster is None or not self.roster.of(batch.reqs):
            self.roster = Roster.build(
                batch.reqs, [self.mode_of(r) for r in batch.reqs], batch.seq_lens.device, self.vocab
            )
        return self.roster

    def _known(self, req: Any, mode: str) -> bool:
        return mode == "off" or self.drafter.follows(req.rid)

    def _follow(self, req: Any, tokens: Tokens, end: int) -> None:
        try:
            self.drafter.follow(req.rid, tokens, end)
        except Exception:
            self.ranks.failed("longdraft: the drafter cannot follow request %s, its drafts are worse", req.rid)
            self.drafter.forget(req.rid)

    def _chain_limits(self, roster: Roster, running: Running) -> torch.Tensor:
        """Drafts of each request that are verified: within its length and its row of the page table."""
        left_B = (roster.end_B - 2).clamp_max(self.columns - 1) - running.length_B
        return left_B.clamp(0, self.stride - 1) * roster.drafts_B

    def _draft(self, roster: Roster, running: Running) -> Drafts:
        """Drafts of every request; none where nobody drafts or drafting fails."""
        if not roster.drafting:
            return self._no_drafts(len(roster.reqs), running)
        try:
            id_BK = self.drafter.propose_running(running, roster.params)
        except Exception:
            self._failed(roster)
            return self._no_drafts(len(roster.reqs), running)
        return Drafts(id_BK.clamp(0, self.vocab - 1), self._chain_limits(roster, running))

    def _failed(self, roster: Roster) -> None:
        self.ranks.failed("longdraft: the drafter failed, its requests go on without drafts for this step")
        self.drafter.clear()
        for req, mode in zip(roster.reqs, roster.modes, strict=True):
            stats.attach(req, mode).failures += mode != "off"

    def _no_drafts(self, count: int, running: Running, together: int | None = None) -> Drafts:
        """Nothing drafted for ``count`` requests, as wide as the graphs of ``together`` want it (None: of all)."""
        width = self._graph_width(together or count, 1) or 1
        id_BK = torch.zeros(count, width - 1, dtype=torch.int64, device=running.length_B.device)
        return Drafts(id_BK, id_BK.new_zeros(count))

    def _verify(
        self, batch: ScheduleBatch, roster: Roster, running: Running, drafts: Drafts
    ) -> tuple[Verified, Drafts]:
        """What the target chose, and behind which drafts: rank 0's, or none, where it failed to verify all requests together."""
        drafts = Drafts(*self.ranks.first("drafts", drafts.id_BK, drafts.limit_B))
        try:
            return self._verified(batch, roster.reqs, running, drafts, roster.params, self.clock), drafts
        except Exception:
            self.ranks.failed("longdraft: a verification failed, its requests are verified one by one without drafts")
        parts, alone = [], self._no_drafts(1, running, 1)
        for b, req in enumerate(roster.reqs):
            one = running.only(b)
            try:
                params = RowParams.build([req], [1], one.length_B.device)
                seen = self._verified(batch, [req], one, alone, params, OFF)
                # Greedy choices leave the logits where a graph wrote them, and will write the next request's.
                parts.append(replace(seen, logits_TV=seen.logits_TV.clone()))
            except Exception:
                give_up(req, self.ranks)
                width = alone.id_BK.shape[1] + 1
                blank_TV = torch.zeros(width, self.vocab, device=one.length_B.device)
                parts.append(Verified(one.newest_B.repeat(width), blank_TV, [0, width]))
        return Verified.join(parts), self._no_drafts(len(parts), running, 1)

    def _verified(
        self,
        batch: ScheduleBatch,
        reqs: list[Any],
        running: Running,
        drafts: Drafts,
        params: RowParams,
        clock: StepClock,
    ) -> Verified:
        in_graph = self._graph_width(len(reqs), drafts.id_BK.shape[1] + 1) is not None
        given = drafts.id_BK, drafts.limit_B, params, self.observer
        return verify_running(self.target_worker, batch, reqs, running, *given, in_graph, clock)

    def _accept(self, roster: Roster, drafts: Drafts, seen: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """What each request returns ``[B, T]``, and how much of it: up to the first token that ends it (:mod:`emission`)."""
        draft_BK, limit_B = drafts.id_BK, drafts.limit_B
        batch, steps = draft_BK.shape
        choice_BT = seen.choice_T.view(batch, steps + 1)
        forced = self.settings.simulate_accept_length
        if simulated(forced):
            drawn = simulated_acceptance([steps] * batch, forced, self.stride)
            kept_B = torch.minimum(to_device(drawn, torch.int64, limit_B.device), limit_B)
        else:
            kept_B = accepted_drafts(draft_BK, choice_BT, limit_B)
        offset_T = torch.arange(steps + 1, device=limit_B.device)
        drafted_BT = torch.cat([draft_BK, choice_BT[:, -1:]], 1)
        run_BT = torch.where(offset_T < kept_B[:, None], drafted_BT, choice_BT)
        return run_BT, roster.returned(run_BT, kept_B)

    def _returned(
        self, batch: ScheduleBatch, running: Running, gained: Gained, seen: Verified
    ) -> GenerationBatchResult:
        output, (size, width) = logits_output(seen.logits_TV), gained.id_BN.shape
        if batch.return_logprob:
            offset_S = torch.arange(self.stride, device=seen.choice_T.device).clamp_max(width - 1)
            first_B1 = torch.arange(size, device=seen.choice_T.device)[:, None] * (len(seen.choice_T) // size)
            row_BS = first_B1 + gained.place_BN[:, offset_S]
            compute_spec_v2_logprobs(batch, output, seen.choice_T, row_BS, self.stride - 1)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=torch.nn.functional.pad(gained.id_BN, (0, self.stride - width)).flatten(),
            accept_lens=gained.count_B,
            new_seq_lens=running.length_B + gained.count_B,
            speculative_num_draft_tokens=self.stride,
            next_draft_input=DraftInput(),
            can_run_cuda_graph=False,
        )
