"""Rounds of mode ``sparse`` over a made-up target: beside every other mode, with refreshes and without, under failures (P11).

The target of :mod:`test_serve_view_step` chooses otherwise on a set, and notes of every cache slot whether its writer read everything.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_rounds import TABLE, Server, plainly
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serve_device_step import RULES, DeviceDrafter
from test_serve_view_step import CHAIN, AnyChooser, ViewedTarget, requests, view_step

from longdraft.serve import recompute_step, stats
from longdraft.serve.drafters.running import Running
from longdraft.serve.roster import Roster
from longdraft.serve.view_step import ViewStep

BUDGET = 8


class AnySets:
    """Any columns in every round, and now and then a set that lacked much."""

    viewed = None

    def __init__(self, step: ViewStep) -> None:
        self.step, self.any, self.chosen = step, AnyChooser(), 0
        self.rows: list[list[int]] = []

    def prefilled(self, row_B: torch.Tensor) -> None: ...

    def verified(self, row_B: torch.Tensor, width: int, last_B: torch.Tensor) -> None:
        self.rows.append(last_B.tolist())
        assert bool((last_B >= 0).all() & (last_B < (width or len(last_B) * CHAIN)).all())

    def choose(
        self, roster: Roster, budgets: Sequence[int], running: Running, longest: int, drafted: bool
    ) -> tuple[bool, torch.Tensor | None]:
        assert drafted == roster.drafting and longest >= int(running.length_B.max())
        if "sparse" not in roster.modes:
            return True, None
        self.chosen += 1
        chosen = self.any.choose([], running.row_B, running.table_RW, running.length_B, longest)
        fits_B = running.length_B <= BUDGET
        chosen = chosen._replace(
            count_B=chosen.count_B.masked_fill(fits_B, 0), start_B=chosen.start_B.masked_fill(fits_B, 0)
        )
        self.step.views.choose(running.row_B, chosen, roster.sparse_B)
        return True, torch.rand(len(budgets), generator=self.any.draw)


def sparse_step(target: ViewedTarget, rule: str = "oracle", **changes: Any) -> ViewStep:
    step = view_step(target, DeviceDrafter(RULES[rule]), **{"mode": "sparse", "allow_lossy": True, **changes})
    step.settings = step.settings.model_copy(update={"sparse_tokens": BUDGET})  # smaller than settings may be
    step.sparse = AnySets(step)  # type: ignore[assignment]
    step.set_width = 12
    return step


def slots(req: Any, count: int) -> torch.Tensor:
    return TABLE[req.req_pool_idx, :count].long()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=14), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 24), min_size=4, max_size=4),
    modes=st.lists(st.sampled_from(["sparse", "sparse", "partial", "exact", "full", "off"]), min_size=4, max_size=4),
    refresh=st.sampled_from([None, None, 3, 9]),
    missed=st.sampled_from([None, 0.7]),
    off=st.integers(2, 6),
    behind=st.booleans(),
    hosted=st.sampled_from([{}, {}, {}, {"frequency_penalty": 0.1}]),
)
@pytest.mark.parametrize("rule", ["oracle", "often right"])
def test_sparse_requests_share_a_batch_with_every_mode(
    rule: str, prompts: list[list[int]], lengths: list[int], modes: list[str], refresh: int | None, missed: float | None,
    off: int, behind: bool, hosted: dict[str, Any],
) -> None:  # fmt: skip
    """What others return is theirs, and what a request hands back was written by those that read everything."""
    target = ViewedTarget(off)
    step = sparse_step(target, rule, refresh_every=refresh, refresh_missed_mass=missed)
    plain = [plainly(r) for r in requests(prompts, lengths, modes, ignore_eos=True)]
    reqs = requests(prompts, lengths, modes, ignore_eos=True, **hosted)
    # A set may hold everything, and a round on the host reads everything: what is pending of a sparse request too.
    target.excused = {r.req_pool_idx for r, mode in zip(reqs, modes, strict=False) if mode == "sparse"}
    Server(step, behind).run(reqs)
    assert not target.dirty
    for req, mode, length, wanted in zip(reqs, modes, lengths, plain, strict=False):
        assert len(req.output_ids) == length
        if mode not in ("partial", "sparse") and not hosted:
            assert list(req.output_ids) == wanted
        exact = step.exact_of(req)
        if exact is not None:
            assert bool(target.exact_S[slots(req, exact)].all())
            start = len(req.origin_input_ids)
            said = [*req.origin_input_ids, *req.output_ids][start:exact]
            assert target.place_S[slots(req, exact)[start:], 0].tolist() == said


def run_one(length: int = 28, behind: bool = False, rule: str = "oracle", **changes: Any) -> tuple[Any, Any, ViewStep]:
    target = ViewedTarget(off=100)
    step = sparse_step(target, rule, **changes)
    [req] = requests([[1, 2, 3, 4, 5, 6, 1, 2]], [length], ["sparse"], ignore_eos=True)
    Server(step, behind).run([req])
    counters = stats.attached(req)
    assert counters is not None
    return counters, req, step


@pytest.mark.parametrize("behind", [False, True])
def test_without_a_refresh_all_that_a_set_verified_stays_pending(behind: bool) -> None:
    counters, req, step = run_one(behind=behind)
    assert step.exact_of(req) == 8 and counters.cycles.refreshes == 0 == counters.cycles.full
    assert counters.cycles.approximate == 27
    assert counters.cycles.partial == counters.rounds <= 27 / CHAIN + 2, "pending tokens hold back no draft"
    assert isinstance(step.sparse, AnySets) and step.sparse.chosen - counters.rounds in (0, int(behind))


@pytest.mark.parametrize(("refresh", "least"), [(6, 3), (14, 1)])
@pytest.mark.parametrize("behind", [False, True])
def test_a_refresh_makes_the_cache_exact_again(behind: bool, refresh: int, least: int) -> None:
    """A stride is 15 tokens, so that the longer refresh is one verification and the shorter one too."""
    counters, req, step = run_one(behind=behind, refresh_every=refresh)
    assert counters.cycles.refreshes >= least and counters.cycles.full == 0
    exact = step.exact_of(req)
    assert exact is not None and 8 + 28 - 1 - exact <= refresh + 2 * CHAIN


@pytest.mark.parametrize(("rows", "of_one", "pieces"), [(1, 128, 2), (512, 128, 1), (512, 16, 2)])
def test_a_refresh_of_more_than_a_stride(rows: int, of_one: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one verification where that many rows, and that many of one request, may be verified; piece by piece where not."""
    monkeypatch.setattr(recompute_step, "ROWS", rows)
    monkeypatch.setattr(recompute_step, "MAX_TREE", of_one)
    target = ViewedTarget(off=100)
    step = sparse_step(target, refresh_every=22)
    widths = []
    run = target.forward_batch_generation

    def noted(batch: None, forward_batch: Any, is_verify: bool) -> Any:
        if forward_batch.spec_info.view is None:
            widths.append(len(forward_batch.input_ids))
        return run(batch, forward_batch, is_verify)

    target.forward_batch_generation = noted  # type: ignore[method-assign]
    reqs = requests([[1, 2, 3, 4, 5, 6, 1, 2], [4, 3, 2]], [30, 20], ["sparse", "off"], ignore_eos=True)
    Server(step, False).run(reqs)
    counters = stats.attached(reqs[0])
    assert counters is not None and counters.cycles.refreshes == 1
    assert len([w for w in widths if w >= step.stride]) == pieces, "the other request is not read again"
    exact = step.exact_of(reqs[0])
    assert exact is not None and exact > 8 + step.stride
    assert bool(target.exact_S[slots(reqs[0], exact)].all())
    assert list(reqs[1].output_ids) == plainly(requests([[4, 3, 2]], [20], ["off"], ignore_eos=True)[0])


@pytest.mark.parametrize("chosen", [True, False])
def test_a_batch_of_sets_has_short_lists_whatever_fits_into_one(chosen: bool) -> None:
    """And where none could be chosen, one that is verified fully reads its cache as in any other batch."""
    target, widths = ViewedTarget(off=3), set()
    step = sparse_step(target)
    assert isinstance(step.sparse, AnySets)
    choose, read = step.sparse.choose, step._last_view
    step.sparse.choose = lambda *given: (chosen, choose(*given)[1])  # type: ignore[method-assign]

    def noted(*given: Any) -> Any:
        pages, read_B = read(*given)
        widths.add((pages.shape[-1] - CHAIN, any(given[3].full)))
        return pages, read_B

    step._last_view = noted  # type: ignore[method-assign]
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], [3]]
    reqs = requests(prompts, [20, 20], ["sparse"] * 2, ignore_eos=True)
    Server(step, False).run(reqs)
    if chosen:
        assert {w for w, _ in widths} == {step.set_width} and {full for _, full in widths} == {False, True}
    else:
        assert {w for w, full in widths if full} == {step.columns}


def test_a_set_that_lacked_much_asks_for_a_refresh() -> None:
    counters, _, _ = run_one(refresh_missed_mass=0.5)
    assert counters.cycles.refreshes >= 1


@pytest.mark.parametrize("rule", ["oracle", "adversary"])
def test_the_history_is_the_last_accepted_row(rule: str) -> None:
    counters, _, step = run_one(rule=rule)
    assert isinstance(step.sparse, AnySets)
    if rule == "adversary":
        assert all(last == [0] for last in step.sparse.rows)
    else:
        assert [CHAIN - 1] in step.sparse.rows
    assert len(step.sparse.rows) == counters.rounds


def test_a_request_may_ask_for_a_refresh_of_its_own() -> None:
    target = ViewedTarget(off=100)
    step = sparse_step(target)
    reqs = requests([[1, 2, 3, 4, 5, 6, 1, 2]] * 2, [28, 28], ["sparse"] * 2, ignore_eos=True)
    reqs[0].sampling_params.custom_params["longdraft"]["refresh"] = 6
    Server(step, False).run(reqs)
    first, second = (stats.attached(r) for r in reqs)
    assert first is not None and second is not None
    assert first.cycles.refreshes >= 3 and not second.cycles.refreshes


def test_the_target_decodes_on_sets_without_a_draft() -> None:
    from longdraft.serve.drafters.nothing import NothingDrafter

    target = ViewedTarget(off=3)
    step = view_step(target, NothingDrafter(), chain=1, mode="sparse", allow_lossy=True, self_draft=True)
    step.settings = step.settings.model_copy(update={"sparse_tokens": BUDGET})
    step.sparse, step.set_width = AnySets(step), 12  # type: ignore[assignment]
    [req] = requests([[1, 2, 3, 4, 5, 6, 1, 2]], [20], ["sparse"], ignore_eos=True)
    Server(step, True).run([req])
    counters = stats.attached(req)
    assert counters is not None and counters.cycles.partial == 19 and len(req.output_ids) == 20


@pytest.mark.parametrize("phase", ["sparse", "refresh", "choice"])
def test_what_fails_costs_a_round_and_no_key(phase: str) -> None:
    target, calls = ViewedTarget(off=3), []

    def broken(forward: Any) -> bool:
        on_set = forward.spec_info.view is not None
        if phase != "choice" and on_set == (phase == "sparse") and len(forward.input_ids) > 2:
            calls.append(forward)
            return len(calls) % 2 == 0
        return False

    target.broken = broken
    step = sparse_step(target, refresh_every=6)
    if phase == "choice":
        assert step.sparse is not None
        step.sparse.choose = lambda *given: calls.append(given)  # type: ignore[method-assign,assignment,func-returns-value]
    reqs = requests([[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 1, 2, 3, 1]], [20, 17], ["sparse"] * 2, ignore_eos=True)
    Server(step, False).run(reqs)
    assert calls and [len(r.output_ids) for r in reqs] == [20, 17]
    for req in reqs:
        assert bool(target.exact_S[slots(req, step.exact_of(req) or 0)].all())


def test_forced_acceptance_is_of_the_wanted_length() -> None:
    """What is timed with random weights: chains alone are drawn, since nothing of a sparse round is confirmed."""
    torch.manual_seed(0)
    accepted = rounds = 0
    for trial in range(40):
        target = ViewedTarget(off=100)
        step = sparse_step(target, "adversary", simulate_accept_length=3.0, simulate_confirmed_share=0.5)
        [req] = requests([[1, 2, 3, 4, 5, 6, 1, 2]], [28], ["sparse"], ignore_eos=True)
        req.rid = f"t{trial}"
        Server(step, False).run([req])
        counters = stats.attached(req)
        assert counters is not None
        accepted, rounds = accepted + counters.accept.accepted, rounds + counters.rounds
    assert 2.7 < 1 + accepted / rounds < 3.2


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rule", ["oracle", "often right"])
def test_a_sparse_request_gains_in_every_round_beside_an_exact_one(rule: str, behind: bool) -> None:
    """On sets that change nothing its text is the target's own, and all that its rounds gained is returned."""
    target = ViewedTarget(off=100)
    step = sparse_step(target, rule, rounds=2)
    prompts, lengths = [[1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 7, 1, 2, 3, 1, 5]], [26, 26]
    reqs = requests(prompts, lengths, ["sparse", "exact"], ignore_eos=True)
    Server(step, behind).run(reqs)
    assert [list(r.output_ids) for r in reqs] == [
        plainly(r) for r in requests(prompts, lengths, [None] * 2, ignore_eos=True)
    ]
    first, second = (stats.attached(r) for r in reqs)
    assert first is not None and second is not None and not target.dirty
    assert first.cycles.partial > 2 * first.rounds and first.cycles.approximate == 25
    assert abs(first.rounds - second.rounds) <= 1
    assert step.exact_of(reqs[0]) == 9
