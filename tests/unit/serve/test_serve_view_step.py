"""Modes ``exact`` and ``partial`` over a made-up target that chooses otherwise on a view, and notes what wrote every cache slot.

Legend: B requests, T new tokens of a request, W columns of a page list.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_rounds import COLUMNS, ROWS, TABLE, VOCAB, MadeUpTarget, Server, make_request, next_of, plainly
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serve_device_step import RULES, DeviceDrafter

from longdraft.serve import stats
from longdraft.serve.drafters.nothing import NothingDrafter
from longdraft.serve.drafters.running import Running
from longdraft.serve.make_step import make_step
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.static_plan import StaticPlan
from longdraft.serve.view_step import ViewStep
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.cycle_plan import CyclePlanner
from longdraft.serve.views.round_choice import Bytes, RoundChoice
from longdraft.serve.views.view_state import ViewState

PENDING, CHAIN, VIEW = 10, 5, 8


class ViewedTarget(MadeUpTarget):
    """Chooses the next token but one wherever a view lacks something, and knows of every slot whether its writer read everything.

    Whoever reads everything must find only slots that such a one wrote; ``dirty`` counts the others, but for ``excused`` rows.
    """

    def __init__(self, off: int, **given: Any) -> None:
        super().__init__(**given)
        self.off, self.dirty, self.partial, self.layered = off, 0, 0, 0
        self.excused: set[int] = set()
        self.exact_S = torch.ones(len(self.place_S), dtype=torch.bool)

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        result = super().forward_batch_generation(batch, forward_batch, is_verify)
        lens, spec = forward_batch.seq_lens.tolist(), forward_batch.spec_info
        width = len(forward_batch.input_ids) // len(lens)
        by_layer = spec.view is not None and spec.view[0].dim() == 3
        if by_layer:
            self.layered += 1
            for pages_BW, read_B in zip(*spec.view, strict=True):
                for b, (length, read) in enumerate(zip(lens, read_B.tolist(), strict=True)):
                    row = TABLE[forward_batch.req_pool_indices[b]].tolist()
                    assert len(set(pages_BW[b, :read].tolist()) & set(row[:length])) == read
        pages_BW, read_B = (
            (TABLE[forward_batch.req_pool_indices], forward_batch.seq_lens) if spec.view is None else spec.view
        )
        if by_layer:
            pages_BW, read_B = pages_BW[0], read_B[0]
        for b, (length, read) in enumerate(zip(lens, read_B.tolist(), strict=True)):
            new = slice(b * width, (b + 1) * width)
            slots, own = pages_BW[b, :read].long(), forward_batch.out_cache_loc[new]
            row = TABLE[forward_batch.req_pool_indices[b]].tolist()
            assert set(slots.tolist()) <= set(row[:length]) and len(set(slots.tolist())) == read
            whole = read == length
            self.partial += not whole
            clean = bool(self.exact_S[slots].all())
            self.dirty += whole and not clean and int(forward_batch.req_pool_indices[b]) not in self.excused
            self.exact_S[own] = whole and clean
            if not whole:
                position_T = forward_batch.positions[new]
                wrong_T = (next_of(forward_batch.input_ids[new], position_T) + (position_T % self.off == 0)) % VOCAB
                result.logits_output.next_token_logits[new] = torch.nn.functional.one_hot(wrong_T, VOCAB).float()
        self.exact_S[0] = True
        return result


class AnyChooser:
    """Any columns, drawn at random, for so many lists of each request."""

    def __init__(self, lists: int = 1) -> None:
        self.lists = lists
        self.tap = SimpleNamespace(of_prefill=list, of_verification=lambda width, last_B: [last_B])
        self.selector = SimpleNamespace(once=False)
        self.draw = torch.Generator().manual_seed(0)
        self.chosen = 0

    def choose(
        self, queries: Any, row_B: torch.Tensor, table_RW: torch.Tensor, length_B: torch.Tensor, longest: int
    ) -> Chosen:
        self.chosen += 1
        length_B = length_B.repeat(self.lists)
        start_B = (length_B - 3).clamp_min(0)
        count_B = torch.minimum(start_B, torch.randint(0, 3, start_B.shape, generator=self.draw))
        column_BV = (
            torch.stack([torch.randperm(max(VIEW, int(n)), generator=self.draw)[:VIEW].int() for n in start_B.tolist()])
            .sort(1)
            .values
        )
        return Chosen(column_BV, torch.where(column_BV[:, 1] < start_B, count_B, 0).int(), start_B)


def view_step(target: ViewedTarget, drafter: Any, chain: int = CHAIN, **changes: Any) -> ViewStep:
    given = ServeSettings(
        **{"mode": "exact", "allow_lossy": True, "pending": PENDING, "rounds": 2, "view_tokens": 256, **changes}
    )
    step = make_step([], target, drafter, Observer(drafter), given, chain + PENDING, viewed=True)
    assert isinstance(step, ViewStep)
    step.view_width = 20
    step.views = ViewState(ROWS, COLUMNS, VIEW, 64, torch.device("cpu"))
    step.chooser = AnyChooser()  # type: ignore[assignment]
    small = given.model_copy(update={"view_tokens": 2 * chain})  # smaller than settings may be
    step.planner = CyclePlanner(small, chain, RoundChoice(Bytes(1.0, 0.1, 1.0, 4)))
    return step


def requests(prompts: list[list[int]], lengths: list[int], modes: list[str | None], **more: Any) -> list[Any]:
    return [
        make_request(
            f"r{i}", i + 1, prompt, max_new_tokens=length,
            custom_params=None if mode is None else {"longdraft": {"mode": mode}}, **more,
        )
        for i, (prompt, length, mode) in enumerate(zip(prompts, lengths, modes, strict=False))
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=14), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 24), min_size=4, max_size=4),
    modes=st.lists(st.sampled_from([None, "exact", "full", "off"]), min_size=4, max_size=4),
    rounds=st.sampled_from([None, 0, 1, 2, 3]),
    off=st.integers(1, 6),
    ignore_eos=st.booleans(),
    hosted=st.sampled_from([{}, {}, {"stop": "ba"}, {"frequency_penalty": 0.1}]),
    behind=st.booleans(),
)
@pytest.mark.parametrize("rule", ["oracle", "adversary", "often right"])
def test_exact_gives_the_targets_own_tokens(
    rule: str, prompts: list[list[int]], lengths: list[int], modes: list[str | None], rounds: int | None, off: int,
    ignore_eos: bool, hosted: dict[str, Any], behind: bool,
) -> None:  # fmt: skip
    """V1, P8: whatever the view, the drafts and the rounds; and nothing that reads everything reads approximate keys."""
    target = ViewedTarget(off)
    step = view_step(target, DeviceDrafter(RULES[rule]), rounds=rounds)
    params = {"ignore_eos": ignore_eos, **hosted}
    wanted = [plainly(r) for r in requests(prompts, lengths, modes, **params)] if not hosted else None
    reqs = requests(prompts, lengths, modes, **params)
    Server(step, behind).run(reqs)
    if wanted is not None:
        assert [list(r.output_ids) for r in reqs] == wanted
    assert not target.dirty


def test_partial_rounds_confirm_more_than_one_chain_a_full_verification() -> None:
    target = ViewedTarget(off=100)
    step = view_step(target, DeviceDrafter(RULES["oracle"]), rounds=2)
    [req] = requests([[1, 2, 3, 4, 5, 6, 1, 2]], [24], ["exact"], ignore_eos=True)
    Server(step, False).run([req])
    counters = stats.attached(req)
    assert counters is not None and target.partial
    cycles = counters.cycles
    assert cycles.full < 24 / CHAIN and cycles.partial == 2 * cycles.full
    assert 0.9 * cycles.proposed <= cycles.confirmed <= cycles.proposed


def test_a_request_that_confirms_badly_reads_everything_for_a_while() -> None:
    target = ViewedTarget(off=1)
    step = view_step(target, DeviceDrafter(RULES["oracle"]), rounds=2)
    [req] = requests([[1, 2, 3, 4, 5, 6, 1, 2]], [26], ["exact"], ignore_eos=True)
    wanted = plainly(requests([[1, 2, 3, 4, 5, 6, 1, 2]], [26], ["exact"], ignore_eos=True)[0])
    Server(step, False).run([req])
    counters = stats.attached(req)
    assert counters is not None and counters.cycles.fallbacks >= 1
    assert list(req.output_ids) == wanted


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=14), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 24), min_size=4, max_size=4),
    modes=st.lists(st.sampled_from(["partial", "exact", "full", "off"]), min_size=4, max_size=4),
    off=st.integers(2, 6),
    behind=st.booleans(),
    hosted=st.sampled_from([{}, {}, {"frequency_penalty": 0.1}]),
)
@pytest.mark.parametrize("rule", ["oracle", "often right"])
def test_partial_keeps_the_cache_repairable(
    rule: str, prompts: list[list[int]], lengths: list[int], modes: list[str], off: int, behind: bool, hosted: dict[str, Any]
) -> None:  # fmt: skip
    """Mixed modes: exact requests beside partial ones stay exact, pending tokens stay few, and a release hands back exact keys."""
    target = ViewedTarget(off)
    step = view_step(target, DeviceDrafter(RULES[rule]), mode="partial")
    plain = [plainly(r) for r in requests(prompts, lengths, modes, ignore_eos=True)]
    reqs = requests(prompts, lengths, modes, ignore_eos=True, **hosted)
    Server(step, behind).run(reqs)
    assert not target.dirty
    for req, mode, length, wanted in zip(reqs, modes, lengths, plain, strict=False):
        assert len(req.output_ids) == length
        if mode != "partial" and not hosted:
            assert list(req.output_ids) == wanted
        exact = step.exact_of(req)
        if mode == "partial" and exact is not None:
            row = TABLE[req.req_pool_idx, :exact].long()
            assert bool(target.exact_S[row].all())
            tokens = [*req.origin_input_ids, *req.output_ids][:exact]
            start = len(req.origin_input_ids)
            assert target.place_S[row[start:], 0].tolist() == tokens[start:]
            assert len(req.origin_input_ids) + length - 1 - exact <= PENDING + 2 * CHAIN


def test_partial_on_a_view_of_everything_is_full() -> None:
    """P1."""
    target = ViewedTarget(off=1)
    step = view_step(target, DeviceDrafter(RULES["often right"]), mode="partial")
    step.chooser.choose = lambda queries, row_B, table, length_B, longest: Chosen(  # type: ignore[method-assign]
        torch.zeros(len(row_B), VIEW, dtype=torch.int32), torch.zeros_like(row_B).int(), torch.zeros_like(row_B)
    )
    step.view_width = COLUMNS
    prompts, lengths = [[1, 2, 3], [4, 5, 6, 7, 1]], [20, 17]
    reqs = requests(prompts, lengths, ["partial"] * 2, ignore_eos=True)
    Server(step, True).run(reqs)
    assert [list(r.output_ids) for r in reqs] == [
        plainly(r) for r in requests(prompts, lengths, [None] * 2, ignore_eos=True)
    ]
    assert not target.partial


@pytest.mark.parametrize("off", [2, 7])
@pytest.mark.parametrize("behind", [False, True])
def test_the_target_drafts_for_itself(behind: bool, off: int) -> None:
    target = ViewedTarget(off)
    step = view_step(target, NothingDrafter(), chain=1, rounds=4, self_draft=True)
    prompts, lengths = [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 1, 2, 3, 1]], [20, 17]
    reqs = requests(prompts, lengths, ["exact"] * 2, ignore_eos=True)
    Server(step, behind).run(reqs)
    assert [list(r.output_ids) for r in reqs] == [
        plainly(r) for r in requests(prompts, lengths, [None] * 2, ignore_eos=True)
    ]
    assert target.partial and not target.dirty
    counters = stats.attached(reqs[0])
    assert counters is not None and counters.cycles.confirmed > 0


@pytest.mark.parametrize("phase", ["partial", "full"])
@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_a_failed_verification_costs_what_was_proposed(mode: str, phase: str) -> None:
    target, calls = ViewedTarget(off=3), []

    def broken(forward: Any) -> bool:
        is_partial = forward.spec_info.view is not None
        if is_partial == (phase == "partial") and len(forward.input_ids) > 2:
            calls.append(forward)
            return len(calls) % 2 == 0
        return False

    target.broken = broken
    step = view_step(target, DeviceDrafter(RULES["oracle"]), mode=mode)
    prompts, lengths = [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 1, 2, 3, 1]], [20, 17]
    reqs = requests(prompts, lengths, [mode] * 2, ignore_eos=True)
    Server(step, False).run(reqs)
    assert calls
    assert [len(r.output_ids) for r in reqs] == lengths
    for req in reqs:
        assert bool(target.exact_S[TABLE[req.req_pool_idx, : step.exact_of(req)].long()].all())
    if mode == "exact":
        assert not target.dirty
        assert [list(r.output_ids) for r in reqs] == [
            plainly(r) for r in requests(prompts, lengths, [None] * 2, ignore_eos=True)
        ]


def test_forced_confirmations_make_cycles_of_the_wanted_length() -> None:
    torch.manual_seed(0)
    drafter = DeviceDrafter(RULES["adversary"])
    step = view_step(
        ViewedTarget(off=1),
        drafter,
        rounds=2,
        simulate_accept_length=4.0,
        simulate_confirmed_share=0.95,
        confirm_floor=0.0,
    )
    gained = []
    for trial in range(60):
        [req] = requests([[1, 2, 3, 4, 5, 6, 1, 2]], [28], ["exact"], ignore_eos=True)
        req.rid = f"t{trial}"
        Server(step, False).run([req])
        counters = stats.attached(req)
        assert counters is not None
        gained.append(counters.cycles.confirmed / counters.cycles.proposed)
    mean = sum(gained) / len(gained)
    assert 0.75 < mean < 0.95, mean  # eight pending tokens: (c - c^9) / (1 - c) / 8 = 0.80


@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_every_layer_may_have_a_list_of_its_own(mode: str) -> None:
    target = ViewedTarget(off=3)
    step = view_step(target, DeviceDrafter(RULES["often right"]), mode=mode)
    step.views = ViewState(ROWS, COLUMNS, VIEW, 64, torch.device("cpu"), lists=3)
    step.chooser = AnyChooser(3)  # type: ignore[assignment]
    prompts, lengths = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], [4, 5, 6, 7, 1, 2, 3, 1, 5, 6, 7, 2, 3]], [20, 17]
    reqs = requests(prompts, lengths, [mode] * 2, ignore_eos=True)
    Server(step, True).run(reqs)
    assert target.layered and target.partial and not target.dirty
    if mode == "exact":
        wanted = [plainly(r) for r in requests(prompts, lengths, [None] * 2, ignore_eos=True)]
        assert [list(r.output_ids) for r in reqs] == wanted


def test_plans_of_layers_read_their_own_lists() -> None:
    table = torch.arange(60, dtype=torch.int32).view(2, 30)
    running = Running(("a", "b"), torch.tensor([0, 1]), table, torch.tensor([20, 12]), torch.tensor([1, 2]))
    views = ViewState(2, 30, VIEW, 16, torch.device("cpu"), lists=2)
    columns = torch.zeros(4, VIEW, dtype=torch.int32)
    columns[:, :2] = torch.tensor([[1, 4], [2, 3], [5, 6], [0, 1]])
    views.choose(running.row_B, Chosen(columns, torch.tensor([2, 2, 2, 1]).int(), torch.tensor([17, 10, 17, 10])))
    view = views.layer_pages(running, 8, 2)
    assert view[1].tolist() == [[5, 4], [5, 3]]
    plans = running.view_plan(view, 2)
    assert isinstance(plans, list)
    assert [p.slots(0, 7).tolist() for p in plans] == [[1, 4, 17, 18, 19, 20, 21], [5, 6, 17, 18, 19, 20, 21]]
    spec = VerifyInput(plans)
    assert spec.plan_of(1) is plans[1] and VerifyInput(plans[0]).plan_of(7) is plans[0]
    static = StaticPlan(4, 2, 8, torch.device("cpu"), lists=2)
    static.fill_view(*view, 3)
    kept = static.plan(3)
    assert isinstance(kept, list)
    for own, plan in zip(plans, kept, strict=True):
        assert torch.equal(plan.pages_BW[:2], own.pages_BW) and plan.lens == [*own.lens, 1]
    assert torch.equal(views.pages(running, None, 8, 2)[0], view[0][1]), "the draft reads the last layer's"
    static.fill_view(*views.pages(running, None, 8, 2), 2)
    assert torch.equal(static.pages_LBW[0, :2], static.pages_LBW[1, :2]), "one list serves all layers"


def test_running_reads_what_was_chosen() -> None:
    table = torch.arange(60, dtype=torch.int32).view(2, 30)
    running = Running(("a", "b"), torch.tensor([0, 1]), table, torch.tensor([20, 5]), torch.tensor([1, 2]))
    views = ViewState(2, 30, VIEW, 16, torch.device("cpu"))
    chosen = torch.tensor([[1, 4, 5, 0, 0, 0, 0, 0], [0] * 8], dtype=torch.int32)
    views.choose(running.row_B, Chosen(chosen, torch.tensor([3, 0], dtype=torch.int32), torch.tensor([17, 0])))
    pages_BW, read_B = views.pages(running, None, 10, 2)
    assert read_B.tolist() == [6, 5]
    assert pages_BW[0, :8].tolist() == [1, 4, 5, 17, 18, 19, 20, 21]
    assert pages_BW[1, :7].tolist() == [30, 31, 32, 33, 34, 35, 36]
    whole_BW, all_B = views.pages(running, torch.tensor([True, False]), 30, 2)
    assert all_B.tolist() == [20, 5] and whole_BW[0, :22].tolist() == list(range(22))
    short_BW, short_B = views.pages(running, None, 5, 1)
    assert short_B.tolist() == [5, 5] and short_BW[0, :6].tolist() == [1, 4, 5, 18, 19, 20]
