"""One scheduler step of mode ``full``: draft, verify on the whole cache, keep what the target chose itself.

Legend: B requests, T new tokens of all requests, V vocabulary.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.utils.logprob import compute_spec_v2_logprobs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.draft_models.acceptance import accepted_drafts
from longdraft.serve import stats
from longdraft.serve.drafters.base import Drafter, DraftRequest
from longdraft.serve.emission import emitted, room
from longdraft.serve.observer import Observer
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.sampling.target_choice import target_choice
from longdraft.serve.settings import ServeSettings, request_settings
from longdraft.serve.simulate import simulated, simulated_acceptance
from longdraft.serve.spec_inputs import DraftInput
from longdraft.serve.step_clock import make_clock
from longdraft.serve.target_graphs import TargetGraphs
from longdraft.serve.tokens import Tokens
from longdraft.serve.verify import Verified, verify

UNVERIFIED = "longdraft could not verify this request: see the server's log"


class DecodeStep:
    """Drafts and verifies a batch. Whatever fails costs the requests it touches their drafts, or ends them; never the server."""

    def __init__(
        self,
        target_worker: Any,
        drafter: Drafter,
        observer: Observer,
        settings: ServeSettings,
        stride: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.target_worker = target_worker
        self.drafter = drafter
        self.observer = observer
        self.settings = settings
        self.stride = stride
        self.clock = make_clock(
            None if ranks.rank else settings.step_times, torch.device(target_worker.model_runner.device)
        )
        self.graphs: TargetGraphs | None = None  # of the target's verification, where SGLang made some
        self.vocab: int = target_worker.model_runner.model_config.vocab_size

    def prefilled(self, batch: ScheduleBatch) -> None:
        """The target has computed a prefill, or a chunk of one."""

    def remember(self, batch: ScheduleBatch, newest_B: torch.Tensor) -> None:
        """The newest token of each request from now on, on the device."""

    def exact_of(self, req: Any) -> int | None:
        """Leading tokens of a request's cache that are exact, as far as the host knows; None: all that it has returned."""
        return None

    def prefill_waits(self, waits: bool) -> None:
        """Whether a prefill waits for the next step to end."""

    def needs_host(self, batch: ScheduleBatch) -> bool:
        """Whether a round of the batch has to see on the host everything that its requests have gained so far."""
        return True

    def processed(self, gained: list[int]) -> None:
        """The scheduler comes to the tokens of the earliest round that it has not processed: so many drafts of each request."""

    def run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Every request of the batch gains at least one token; if all else fails (no memory, say), all of them end with an error."""
        with self.clock.step(len(batch.reqs)):
            try:
                return self._run(batch)
            except Exception:
                self.ranks.failed("longdraft: a step failed, its %d requests are aborted", len(batch.reqs))
            # Only here is the exception gone, and with it the tensors that its frames hold.
            return self._ended(batch)

    def _ended(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """The result of a batch whose requests end with an error: one token each, of no meaning."""
        for req in batch.reqs:
            end_with_error(req)
        size, device = len(batch.reqs), batch.seq_lens.device
        one_B = torch.ones(size, dtype=torch.int64, device=device)
        output = logits_output(torch.zeros(size, 1, device=device))
        if batch.return_logprob:
            blank_logprobs(batch, output, self.stride)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=torch.zeros(size * self.stride, dtype=torch.int64, device=device),
            accept_lens=one_B,
            new_seq_lens=batch.seq_lens + 1,
            speculative_num_draft_tokens=self.stride,
            next_draft_input=DraftInput(),
            can_run_cuda_graph=False,
        )

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        with self.clock.phase("draft"):
            drafts = self._agreed(self._propose(batch))
        everyone = list(range(len(batch.reqs)))
        try:
            width = self._graph_width(len(everyone), 1 + max(len(d) for d in drafts))
            seen = verify(self.target_worker, batch, everyone, drafts, self.observer, width, self.clock)
        except Exception:
            self.ranks.failed("longdraft: a verification failed, its requests are verified one by one without drafts")
            drafts = [[] for _ in everyone]
            seen = Verified.join([self._verify_alone(batch, i) for i in everyone])
        seen = replace(seen, choice_T=self.ranks.first("choices", seen.choice_T)[0])
        with self.clock.phase("keep"):
            runs = self._keep(batch, drafts, seen)
            return self._result(batch, runs, seen)

    def _agreed(self, drafts: list[list[int]]) -> list[list[int]]:
        """Rank 0's drafts."""
        if self.ranks.size == 1:
            return drafts
        room = [[len(d), *d, *[0] * (self.stride - 1 - len(d))] for d in drafts]
        [told] = self.ranks.first("drafts", torch.tensor(room, device=self.target_worker.model_runner.device))
        return [row[1 : 1 + row[0]] for row in told.tolist()]

    def _graph_width(self, requests: int, rows: int, columns: int | None = None) -> int | None:
        """Rows a request of the graphs that verify so many, over views of so many cached tokens or (None) whole caches; None: without
        graphs.
        """
        return None if self.graphs is None else self.graphs.select(requests, rows, columns)

    def mode_of(self, req: Any) -> str:
        """The request's mode, read once; its counters are attached with it."""
        counters = stats.attached(req)
        if counters is None:
            own = request_settings(own_params(req))
            counters = stats.attach(req, own.mode or self.settings.mode)
            counters.own = own
        return counters.mode

    def _propose(self, batch: ScheduleBatch) -> list[list[int]]:
        """Draft tokens of each request; a drafter that fails costs its requests nothing but speed."""
        drafts: list[list[int]] = [[] for _ in batch.reqs]
        wanting: dict[int, DraftRequest] = {}
        for index, req in enumerate(batch.reqs):
            mode = self.mode_of(req)
            tokens = Tokens(req)
            limit = min(self.stride - 1, room(req) - 1, req.kv_allocated_len - tokens.cached - 1)
            if mode != "off" and limit > 0 and not req.finished():
                pages = batch.req_to_token_pool.req_to_token[req.req_pool_idx, : tokens.cached]
                wanting[index] = DraftRequest(req.rid, tokens, pages, limit)
        if not wanting:
            return drafts
        members = [batch.reqs[index] for index in wanting]
        try:
            params = RowParams.build(members, [1] * len(members), batch.seq_lens.device)
            proposed = self.drafter.propose(list(wanting.values()), params)
        except Exception:
            self.ranks.failed("longdraft: the drafter failed, its requests go on without drafts for this step")
            self.drafter.clear()
            for req in members:
                stats.attach(req, self.settings.mode).failures += 1
            return drafts
        for index, ids in zip(wanting, proposed, strict=True):
            drafts[index] = [min(max(i, 0), self.vocab - 1) for i in ids]
        return drafts

    def first_choice(
        self, logits_BV: torch.Tensor, reqs: list[Any], position_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:func:`target_choice` behind a prefill; a request for which it fails ends with an error, alone."""
        try:
            return target_choice(logits_BV, reqs, [[] for _ in reqs], position_B)
        except Exception:
            self.ranks.failed("longdraft: first tokens could not be chosen together, each is chosen alone")
        parts = []
        for i, req in enumerate(reqs):
            try:
                parts.append(target_choice(logits_BV[i : i + 1], [req], [[]], position_B[i : i + 1]))
            except Exception:
                give_up(req, self.ranks)
                parts.append((torch.zeros_like(position_B[:1]), torch.zeros_like(logits_BV[:1], dtype=torch.float32)))
        return torch.cat([choice for choice, _ in parts]), torch.cat([logits for _, logits in parts])

    def _verify_alone(self, batch: ScheduleBatch, index: int) -> Verified:
        """Plain decoding of one request; if even that fails, the request ends with an error."""
        try:
            return verify(self.target_worker, batch, [index], [[]], self.observer, self._graph_width(1, 1))
        except Exception:
            req = batch.reqs[index]
            give_up(req, self.ranks)
            device = batch.seq_lens.device
            last = torch.tensor([Tokens(req).newest], device=device)
            return Verified(last, torch.zeros(1, self.vocab, device=device), [0, 1])

    def _keep(self, batch: ScheduleBatch, drafts: list[list[int]], seen: Verified) -> list[list[int]]:
        """The run that each request returns now, counted and told to the drafter."""
        choices = seen.choices()
        kept = self._kept(drafts, choices)
        runs = []
        for req, drafted, choice, count in zip(batch.reqs, drafts, choices, kept, strict=True):
            run = [*drafted[:count], choice[count]]
            run = emitted(req, run)
            runs.append(run)
            if req.finished():  # since this batch was made: what it would return is dropped
                continue
            counters = stats.attach(req, self.settings.mode)
            tokens = Tokens(req)
            counters.count(len(drafted), min(count, len(run) - 1), tokens.cached)
            if drafted:
                self.drafter.committed(DraftRequest(req.rid, tokens, req.prefix_indices, 0), run)
        return runs

    def _kept(self, drafts: list[list[int]], choices: list[list[int]]) -> list[int]:
        forced = self.settings.simulate_accept_length
        if simulated(forced):
            return simulated_acceptance([len(d) for d in drafts], forced, self.stride)
        width = max(len(d) for d in drafts)
        draft_BK = torch.tensor([d + [-1] * (width - len(d)) for d in drafts], dtype=torch.int64).view(
            len(drafts), width
        )
        choice_BK1 = torch.tensor([c + [-1] * (width + 1 - len(c)) for c in choices])
        return accepted_drafts(draft_BK, choice_BK1, torch.tensor([len(d) for d in drafts])).tolist()

    def _result(self, batch: ScheduleBatch, runs: list[list[int]], seen: Verified) -> GenerationBatchResult:
        device = batch.seq_lens.device
        output = logits_output(seen.logits_TV)
        if batch.return_logprob:
            spans = zip(seen.cu, seen.cu[1:], strict=False)
            index = torch.tensor([[a + min(j, b - a - 1) for j in range(self.stride)] for a, b in spans], device=device)
            compute_spec_v2_logprobs(batch, output, seen.choice_T, index, self.stride - 1)
        lens_B = torch.tensor([len(r) for r in runs], device=device)
        padded = torch.tensor([r + [0] * (self.stride - len(r)) for r in runs], device=device)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=padded.view(-1),
            accept_lens=lens_B,
            new_seq_lens=batch.seq_lens + lens_B,
            speculative_num_draft_tokens=self.stride,
            next_draft_input=DraftInput(),
            can_run_cuda_graph=False,
        )


def give_up(req: Any, ranks: Ranks) -> None:
    """End a request with an error; called where its exception is handled."""
    ranks.failed("longdraft: request %s cannot be verified and is aborted", req.rid)
    end_with_error(req)


def end_with_error(req: Any) -> None:
    """Have SGLang end a request with an error when it processes the step."""
    req.to_finish = FINISH_ABORT(UNVERIFIED, 500, "InternalServerError")


def gave_up(req: Any) -> bool:
    """Whether :func:`give_up` ended the request."""
    return isinstance(req.finished_reason, FINISH_ABORT) and req.finished_reason.message == UNVERIFIED


def logits_output(logits_TV: torch.Tensor) -> Any:
    """What SGLang's result processing reads of a logits output, and no more."""
    empty = (
        "next_token_logprobs",
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
        "input_token_logprobs",
        "hidden_states",
        "customized_info",
    )
    return SimpleNamespace(next_token_logits=logits_TV, **dict.fromkeys(empty))


def blank_logprobs(batch: ScheduleBatch, output: Any, stride: int) -> None:
    """What SGLang reads where requests want logprobs, and there are none: zeros for every one of ``stride`` tokens."""
    size = len(batch.reqs)
    output.next_token_logprobs = torch.zeros(size, stride, device=batch.seq_lens.device)
    tops = [torch.zeros(count) for count in batch.top_logprobs_nums or [0] * size for _ in range(stride)]
    output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx = tops, [t.long() for t in tops]
    named = [ids or [] for ids in batch.token_ids_logprobs or [None] * size for _ in range(stride)]
    output.next_token_token_ids_logprobs_val = [torch.zeros(len(ids)) for ids in named]
    output.next_token_token_ids_logprobs_idx = named


def own_params(req: Any) -> Any:
    """The request's ``custom_params`` without the entry that SGLang adds for itself."""
    params = req.sampling_params.custom_params
    return {k: v for k, v in params.items() if k != "__req__"} if isinstance(params, dict) else params
