"""What a hostile review of modes ``exact`` and ``partial`` found: failures, lags and requests that others left behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_rounds import TABLE, Server, plainly
from test_serve_device_step import RULES, DeviceDrafter
from test_serve_view_step import CHAIN, PENDING, ViewedTarget, requests, view_step

from longdraft.serve import view_step as view_step_module
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
    planner = CyclePlanner(ServeSettings(mode="partial"), CHAIN, RoundChoice(Bytes(1.0, 0.1, 1.0, 4)))
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
    step = SimpleNamespace(views=views, view_width=width)
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
    given = ServeSettings(mode="partial", view_selector="snapkv", view_tokens=256, view_sinks=32, view_recent=128)
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
