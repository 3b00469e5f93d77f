"""What a hostile review of modes ``exact`` and ``partial`` found: failures, lags and requests that others left behind."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_rounds import TABLE, Server, plainly
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from test_serve_device_step import RULES, DeviceDrafter
from test_serve_view_step import CHAIN, PENDING, ViewedTarget, requests, view_step

from longdraft.serve import ranks
from longdraft.serve import view_step as view_step_module
from longdraft.serve.decode_step import gave_up
from longdraft.serve.drafters.running import Running
from longdraft.serve.hooks import waits_for_host
from longdraft.serve.settings import ServeSettings
from longdraft.serve.views.choose import choose_columns
from longdraft.serve.views.cycle_plan import CyclePlanner, Ledger
from longdraft.serve.views.round_choice import Bytes, RoundChoice
from longdraft.serve.views.view_state import ViewState

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 1, 2, 3, 1]]


def slots_hold_their_tokens(target: ViewedTarget, req: Any, exact: int) -> bool:
    """Whether every cached token that is called exact stands in its own slot, at its own position."""
    start = len(req.origin_input_ids)
    tokens = [*req.origin_input_ids, *req.output_ids][start:exact]
    held = target.place_S[TABLE[req.req_pool_idx, start:exact].long()]
    return held[:, 0].tolist() == tokens and held[:, 1].tolist() == list(range(start, start + len(tokens)))


@pytest.mark.parametrize("paused", [0, 5])
def test_a_full_verification_of_pending_tokens_has_room_for_them(paused: int) -> None:
    """A paused request of mode partial is verified fully; what is pending then needs the wide verification."""
    planner = CyclePlanner(ServeSettings(mode="partial", allow_lossy=True), CHAIN, RoundChoice(Bytes(1.0, 0.1, 1.0, 4)))
    ledger = Ledger(5003, 5000, paused=paused)
    plan = planner.plan([ledger], ["partial"], [5003])
    assert not plan.full[0] or plan.room


@pytest.mark.parametrize(
    ("floor", "length", "off", "rule"), [(0.7, 15, 2, "oracle"), (0.9, 7, 4, "oracle"), (0.8, 9, 3, "often right")]
)
def test_a_partial_request_that_an_exact_one_left_keeps_its_cache(
    floor: float, length: int, off: int, rule: str
) -> None:
    """It is paused by the exact request's last cycle, which is processed when its next round on a view is on its way."""
    target = ViewedTarget(off=off)
    step = view_step(target, DeviceDrafter(RULES[rule]), mode="partial", confirm_floor=floor, rounds=1)
    reqs = requests(PROMPTS, [26, length], ["partial", "exact"], ignore_eos=True)
    Server(step, True).run(reqs)
    exact = step.exact_of(reqs[0])
    assert exact is not None and slots_hold_their_tokens(target, reqs[0], exact)
    assert not target.dirty


def test_a_failure_before_the_host_knows_keeps_a_short_partial_requests_cache() -> None:
    """One verification fails, the next cycle is planned before the host sees what the failed one returned."""
    target, calls = ViewedTarget(off=3), [0]

    def broken(forward: Any) -> bool:
        calls[0] += len(forward.input_ids) > 1
        return calls[0] == 1 and len(forward.input_ids) > 1

    target.broken = broken
    step = view_step(target, DeviceDrafter(RULES["oracle"]), mode="partial")
    step.planner.settings = step.settings  # views of 256 tokens hold these requests
    [req] = requests(PROMPTS[:1], [20], ["partial"], ignore_eos=True)
    [plain] = requests(PROMPTS[:1], [20], [None], ignore_eos=True)
    Server(step, True).run([req])
    exact = step.exact_of(req)
    assert exact is not None and slots_hold_their_tokens(target, req, exact)
    assert list(req.output_ids) == plainly(plain)


def test_refreshes_that_fail_often_leave_a_request_its_tokens() -> None:
    """More is pending then than the refresh has rows for."""
    target, calls = ViewedTarget(off=100), [0]

    def broken(forward: Any) -> bool:
        wide = len(forward.input_ids) > CHAIN
        calls[0] += wide
        return wide and calls[0] <= 8

    target.broken = broken
    step = view_step(target, DeviceDrafter(RULES["oracle"]), mode="partial")
    [req] = requests(PROMPTS[:1], [28], ["partial"], ignore_eos=True)
    Server(step, False).run([req])  # asserts that every round returns something
    assert calls[0] == CHAIN, "then it goes on over its whole cache as it is"
    exact = step.exact_of(req)
    assert exact is not None and slots_hold_their_tokens(target, req, exact)
    assert exact <= len(req.origin_input_ids) + PENDING


def test_a_repair_that_fails_ends_no_server() -> None:
    """A request that is served on the host joins; the pending tokens of the batch cannot be computed anew just now."""
    target = ViewedTarget(off=3)
    target.broken = lambda forward: len(forward.input_ids) > 2 * CHAIN and forward.spec_info.view is None
    step = view_step(target, DeviceDrafter(RULES["oracle"]), mode="partial")
    reqs = requests(PROMPTS, [20, 17], ["partial"] * 2, ignore_eos=True)
    reqs[1].sampling_params.frequency_penalty = 0.1
    Server(step, False).run(reqs)


def drafted_columns(length: int, views: ViewState, width: int) -> list[int]:
    table = torch.arange(4 * 300, dtype=torch.int32).view(4, 300)
    running = Running(("a",), torch.tensor([0]), table, torch.tensor([length]), torch.tensor([1]))
    step = SimpleNamespace(views=views, view_width=width, sparse=None)
    chosen = view_step_module.ViewStep._reading(step, running)  # type: ignore[arg-type]
    pages, count = chosen.read(4, width - 4)
    return pages[0, : int(count)].tolist()


def test_the_draft_of_a_request_without_a_view_reads_its_sinks() -> None:
    """Beside a server that keeps views, a request of mode full drafts as on any other server."""
    views = ViewState(4, 300, 32, 64, torch.device("cpu"))
    views.prefilled(torch.tensor([0]), torch.tensor([200]))
    assert drafted_columns(200, views, 100)[:4] == [0, 1, 2, 3]


def test_a_view_chosen_once_keeps_its_sinks_when_the_prompt_was_short() -> None:
    """``snapkv``: the prompt fits the budget, the text outgrows it."""
    given = ServeSettings(mode="exact", view_selector="snapkv", view_tokens=256, view_sinks=32, view_recent=128)
    views = ViewState(4, 600, given.budget().columns, 64, torch.device("cpu"))
    row_B, length_B = torch.tensor([0]), torch.tensor([100])
    views.prefilled(row_B, length_B)
    views.choose(row_B, choose_columns(torch.zeros(1, 7), length_B, given.budget()))
    table = torch.arange(4 * 600, dtype=torch.int32).view(4, 600)
    running = Running(("a",), row_B, table, torch.tensor([500]), torch.tensor([1]))
    pages, count = views.pages(running, None, given.view_width(5), 5)
    assert 0 in pages[0, : int(count)].tolist()


def test_a_cycle_is_timed_by_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host a round behind, cycle after cycle on a device that takes 10 ms a round: what is learned must say so."""
    now, ended = [0.0], [0.0]
    monkeypatch.setattr(view_step_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    step = view_step(ViewedTarget(off=100), DeviceDrafter(RULES["adversary"]))
    turns, planned, seen = iter([1, 1, 1, 3] * 20), [], []
    step.planner._rounds = lambda on_view, lengths: planned.append(next(turns)) or planned[-1]  # type: ignore
    step.planner.choice.timed = lambda ms, rounds, lengths: seen.append((round(ms), rounds))  # type: ignore

    class Device(Server):
        ends: list[float] = []

        def process(self) -> None:
            now[0] = max(now[0], self.ends.pop(0))  # the host waits for the device
            super().process()

    server, run = Device(step, True), step.run

    def launched(batch: Any) -> Any:
        result = run(batch)
        ended[0] = max(now[0], ended[0]) + 0.010 * (planned[-1] + 1)
        server.ends.append(ended[0])
        return result

    step.run = launched  # type: ignore[method-assign]
    server.run(requests([PROMPTS[0]], [26], ["exact"], ignore_eos=True))
    steady = seen[2:]
    assert len(steady) > 6
    assert all(ms == 10 * (rounds + 1) for ms, rounds in steady), steady


def test_what_cannot_be_admitted_shortens_no_cycle() -> None:
    """SGLang prefers prefills: beside a decode batch the queue holds what waits for requests to end, not for a step."""
    told: list[bool] = []
    scheduler = SimpleNamespace(
        model_worker=SimpleNamespace(prefill_waits=told.append), waiting_queue=[object()],
        running_batch=SimpleNamespace(batch_is_full=True), chunked_req=None, result_queue=[],
    )  # fmt: skip
    waits_for_host(lambda self, batch: False, scheduler, None)
    assert told != [True]


def runs_out_of_memory(step: Any, point: str, turns: set[int], after: bool = False) -> list[int]:
    """Counts the calls of a method of the step or of a part of it; those with these numbers find no memory, before or behind their work."""
    *parts, name = point.split(".")
    owner = getattr(step, parts[0]) if parts else step
    work, calls = getattr(owner, name), [0]

    def planted(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        fails = calls[0] in turns
        if fails and not after:
            raise torch.OutOfMemoryError("planted")
        result = work(*given, **more)
        if fails:
            raise torch.OutOfMemoryError("planted")
        return result

    setattr(owner, name, planted)
    return calls


POINTS = ["_cycle", "_draft", "_reading", "_last_view", "_verify_last", "_gain", "_doubtful", "_returned", "_launch"]
POINTS += ["views.remember", "views.recall", "views.choose", "chooser.choose"]


@pytest.mark.parametrize(("behind", "after"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("point", POINTS)
def test_memory_that_runs_out_behind_a_verification_costs_what_was_proposed(
    point: str, mode: str, behind: bool, after: bool
) -> None:
    """Wherever it does, and whatever had been done until then: nothing is kept of a cycle that was not returned."""
    target = ViewedTarget(off=3)
    step = view_step(target, DeviceDrafter(RULES["oracle"]), mode=mode)
    # Two in a row would be one too many: the cycle without proposals is the last resort.
    calls = runs_out_of_memory(step, point, {1, 4, 7, 12}, after)
    prompts, lengths = [*PROMPTS, [3, 2, 1, 2, 3, 4, 5, 6]], [28, 20, 17]
    modes: list[str | None] = [mode, mode, "full"]
    reqs = requests(prompts, lengths, modes, ignore_eos=True)
    plain = [plainly(r) for r in requests(prompts, lengths, modes, ignore_eos=True)]
    Server(step, behind).run(reqs)
    assert calls[0] or (point, mode) == ("_last_view", "exact")
    assert [len(r.output_ids) for r in reqs] == lengths and not step.launched
    for req, name, wanted in zip(reqs, modes, plain, strict=True):
        exact = step.exact_of(req)
        assert exact is None or slots_hold_their_tokens(target, req, exact)
        assert name == "partial" or list(req.output_ids) == wanted
    assert mode == "partial" or not target.dirty, "a bare verification reads pending tokens as they are"


def ended_with_an_error(req: Any) -> bool:
    return isinstance(req.finished_reason, FINISH_ABORT) and req.finished_reason.status_code == 500 and gave_up(req)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("point", ["_gain", "_returned", "_launch", "_roster"])
def test_where_nothing_helps_the_requests_of_the_batch_end_and_the_step_goes_on(point: str, behind: bool) -> None:
    target = ViewedTarget(off=3)
    step = view_step(target, DeviceDrafter(RULES["oracle"]), mode="partial")
    runs_out_of_memory(step, point, {3} if point == "_roster" else {3, 4})  # the last resort finds none either
    reqs = requests(PROMPTS, [28, 20], ["exact", "partial"], ignore_eos=True)
    server = Server(step, behind)
    server.run(reqs)
    assert all(ended_with_an_error(r) for r in reqs) and not step.launched
    later = requests(PROMPTS, [20, 17], ["exact", "exact"], ignore_eos=True)
    for req in later:
        req.rid += "later"
    server.run(later)
    assert [list(r.output_ids) for r in later] == [
        plainly(r) for r in requests(PROMPTS, [20, 17], [None] * 2, ignore_eos=True)
    ]
    assert not target.dirty


def test_a_batch_served_on_the_host_ends_with_an_error_too() -> None:
    step = view_step(ViewedTarget(off=3), DeviceDrafter(RULES["oracle"]), mode="partial")
    runs_out_of_memory(step, "_keep", {3})
    reqs = requests(PROMPTS, [20, 17], ["partial", "exact"], ignore_eos=True, frequency_penalty=0.1)
    Server(step, True).run(reqs)
    assert all(ended_with_an_error(r) for r in reqs) and not step.launched


def test_the_cycle_that_failed_is_gone_before_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception's frames hold what took the memory."""
    monkeypatch.setattr(ranks.logger, "exception", lambda *_: None)  # pytest keeps what is logged
    step = view_step(ViewedTarget(off=3), DeviceDrafter(RULES["oracle"]))
    held: list[Any] = []
    gain, bare = step._gain, step._bare

    def failing(roster: Any, last: Any) -> Any:
        if not held:
            big = torch.zeros(1000)
            held.append(weakref.ref(big))
            raise torch.OutOfMemoryError(f"planted: {len(big)} more do not fit")
        return gain(roster, last)

    def tried(*given: Any) -> Any:
        held.append(held[0]() is None)
        return bare(*given)

    step._gain, step._bare = failing, tried  # type: ignore[method-assign]
    Server(step, False).run(requests(PROMPTS, [20, 17], ["exact"] * 2, ignore_eos=True))
    assert held[1:] == [True]


@pytest.mark.parametrize(("tops", "named"), [(None, None), ([0, 3], [None, None]), ([2, 0], [[5, 6, 7], []])])
def test_a_batch_that_ends_has_the_logprobs_that_sglang_reads(tops: Any, named: Any) -> None:
    step = view_step(ViewedTarget(off=3), DeviceDrafter(RULES["oracle"]))
    reqs = requests(PROMPTS, [20, 17], ["exact"] * 2, ignore_eos=True)
    batch = Server(step, False).batch(reqs)
    batch.return_logprob, batch.top_logprobs_nums, batch.token_ids_logprobs = True, tops, named
    step._run = broken_run  # type: ignore[method-assign]
    result = step.run(batch)
    output = result.logits_output
    assert output.next_token_logprobs.shape == (2, step.stride)
    for b in range(2):
        first = b * step.stride
        wanted = tops[b] if tops else 0
        assert len(output.next_token_top_logprobs_val[first].tolist()) == wanted
        assert len(output.next_token_top_logprobs_idx[first].tolist()) == wanted
        ids = (named or [None, None])[b] or []
        assert output.next_token_token_ids_logprobs_idx[first] == ids
        assert len(output.next_token_token_ids_logprobs_val[first].tolist()) == len(ids)
    assert result.accept_lens.tolist() == [1, 1]
    assert result.new_seq_lens.tolist() == (batch.seq_lens + 1).tolist()


def broken_run(batch: Any) -> Any:
    raise torch.OutOfMemoryError("planted")
