"""What a view misses asks for a refresh: the measure against a twin in double precision, and what the steps make of it."""

from typing import Any

import pytest
import torch
from device_rounds import make_request
from llama_on_pages import COLUMNS, LlamaTarget, PagedServer
from test_serve_view_cache import CHAIN, MODEL, NEW, PENDING, PROMPTS, KnownTextDrafter

from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.serve import stats
from longdraft.serve.drafters.running import Running
from longdraft.serve.make_step import make_step
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.view_step import ViewStep
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.cycle_plan import CyclePlanner, Ledger
from longdraft.serve.views.missed_mass import MissedMass
from longdraft.serve.views.round_choice import Bytes, RoundChoice
from longdraft.serve.views.setup import keep_views
from longdraft.serve.views.view_state import ViewState

BLOCK = 16


class Followed:
    """A server of requests of mode ``partial`` whose steps are written down.

    Attributes:
        full: of each step that had any pending request, whether each request was verified fully.
        shares: what every request was found to miss, where its verification left something out.
        wanted: the same by the twin.
    """

    def __init__(
        self, wanted: list[int], behind: bool = False, modes: dict[int, str] | None = None, **more: Any
    ) -> None:
        target, drafter = LlamaTarget(MODEL), KnownTextDrafter()
        given = ServeSettings(
            **{
                "mode": "partial",
                "allow_lossy": True,
                "pending": PENDING,
                "view_tokens": 64,
                "view_sinks": 16,
                "view_recent": 16,
                **more,
            }
        )
        step = make_step([], target, drafter, Observer(drafter), given, CHAIN + PENDING, viewed=True)
        assert isinstance(step, ViewStep)
        keep_views(step, given, target.model_runner, drafter, len(wanted), {})
        self.step, self.target, target.step = step, target, step
        self.full: list[tuple[bool, ...]] = []
        self.shares: list[float] = []
        self.wanted: list[float] = []
        plan = step.planner.plan

        def planned(*args: Any) -> Any:
            self.full.append((made := plan(*args)).full)
            return made

        step.planner.plan = planned  # type: ignore[method-assign]
        if step.missed is not None:
            self.measure = step.missed.missed
            step.missed.missed = self.measured  # type: ignore[method-assign]
        self.reqs = [
            make_request(
                f"r{i}", i + 1, PROMPTS[i], max_new_tokens=NEW, ignore_eos=True,
                custom_params={"longdraft": {"mode": (modes or {}).get(i, "partial")}},
            )
            for i in wanted
        ]  # fmt: skip
        for req in self.reqs:
            req.kv_allocated_len = COLUMNS
        PagedServer(step, target, behind, lambda: None).run(self.reqs)
        assert not target.wrong

    def measured(self, view: Any, running: Running, *rest: Any) -> torch.Tensor:
        share_B = self.measure(view, running, *rest)
        end_B = rest[2].tolist()
        layers = self.step.chooser.selector.layers(len(self.target.layers))
        heads = self.target.layers[0].tp_q_head_num
        for b, (row, length, end) in enumerate(
            zip(running.row_B.tolist(), running.length_B.tolist(), end_B, strict=True)
        ):
            read = int(view[1].view(-1, len(end_B))[-1, b])
            if read == length:
                assert float(share_B[b]) == 0.0
                continue
            total = 0.0
            for layer in layers:
                mass_P = self.target.twin.mass(row, [end - 1], [layer], end, 1)
                positions = self.target.seen(row, length, [read] * view[1].view(-1, len(end_B)).shape[0])[layer]
                mass_P[[*positions, *range(length, end)]] = 0.0
                total += float(mass_P.sum()) / heads
            self.shares.append(float(share_B[b]))
            self.wanted.append(total / len(layers))
        return share_B


@pytest.mark.parametrize("lists", ["shared", "layers"])
def test_what_is_missed_is_the_attention_outside_of_the_view(lists: str) -> None:
    """Of requests in all modes at once, with refreshes at different times, so that some read everything in a round."""
    run = Followed([0, 1, 2, 3], modes={3: "full"}, view_lists=lists, refresh_missed_mass=0.99)
    assert len(run.shares) > 20 and max(run.wanted) - min(run.wanted) > 0.02
    torch.testing.assert_close(torch.tensor(run.shares), torch.tensor(run.wanted), rtol=1e-4, atol=1e-5)


def test_a_view_that_misses_mass_is_refreshed_at_once() -> None:
    """Seven tenths of the attention of this model lie outside of a view of 64 tokens."""
    run = Followed([2], refresh_missed_mass=0.3)
    assert min(run.shares) > 0.3
    assert run.full[:6] == [(False,), (True,)] * 3, "after every round on the view comes a full one"
    assert (True,) not in Followed([2]).full[:3]


def test_with_the_host_a_round_behind_one_flag_asks_for_one_refresh() -> None:
    run = Followed([2], behind=True, refresh_missed_mass=0.3)
    assert run.full[:9] == [(False,), (False,), (True,)] * 3


@pytest.mark.parametrize("tokens", [240, 64])
def test_views_that_hold_enough_are_refreshed_as_ever(tokens: int) -> None:
    """One that first holds everything and then all but a block or two; and one that misses less than may be missed."""
    given = {"view_tokens": tokens}
    run = Followed([2], **given, refresh_missed_mass=0.3 if tokens == 240 else 0.95)
    assert run.full == Followed([2], **given).full
    counters = stats.attached(run.reqs[0])
    assert counters is not None and counters.cycles.partial > counters.cycles.full
    assert not run.shares or max(run.shares) < (0.3 if tokens == 240 else 0.95)


def test_a_measure_that_fails_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(MissedMass, "missed", broken)
    run = Followed([2], refresh_missed_mass=0.3)
    assert len(run.reqs[0].output_ids) == NEW


def test_only_requests_on_a_view_are_measured() -> None:
    """A batch of mode exact never asks."""
    run = Followed([0, 2], modes={0: "exact", 2: "full"}, refresh_missed_mass=0.3)
    assert not run.shares and [len(r.output_ids) for r in run.reqs] == [NEW] * 2


def test_blocks_of_a_view() -> None:
    """Chosen blocks, and all from the block on in which the recent tokens begin; sinks of a view that grew out of everything."""
    table = torch.arange(3 * 400, dtype=torch.int32).view(3, 400)
    running = Running(("a", "b", "c"), torch.arange(3), table, torch.tensor([200, 100, 200]), torch.ones(3).long())
    views = ViewState(3, 400, 64, 16, torch.device("cpu"), sinks=32)
    columns = torch.zeros(3, 64, dtype=torch.int32)
    columns[0, :32] = torch.tensor([*range(16, 32), *range(64, 80)])
    start_B = torch.tensor([176, 0, 0])
    views.choose(running.row_B, Chosen(columns, torch.tensor([32, 0, 0]).int(), start_B))
    seen_BN = views.blocks(running, 0, 120, BLOCK, 14)
    assert seen_BN[0].nonzero().flatten().tolist() == [1, 4, 11, 12, 13]
    assert bool(seen_BN[1].all()), "a short one reads everything"
    assert seen_BN[2].nonzero().flatten().tolist() == [0, 1, 7, 8, 9, 10, 11, 12, 13], "200 - (120 - 32) = 112 = 7 * 16"


def test_a_flag_of_a_round_before_a_refresh_asks_for_no_second_one() -> None:
    made = CyclePlanner(ServeSettings(mode="partial", allow_lossy=True), CHAIN, RoundChoice(Bytes(1.0, 0.1, 1.0, 4)))
    ledger = Ledger(9000, 9000, waiting=[False, True])
    made.processed(ledger, 3, 0, 0, True)
    assert not ledger.doubtful
    ledger.waiting = [False, False]
    made.processed(ledger, 3, 0, 0, True)
    assert ledger.doubtful


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"view_selector": "streaming"}, ["refresh_missed_mass=0.1", "'streaming'", "no queries", "take 'mass'"]),
        ({"view_selector": "snapkv"}, ["refresh_missed_mass=0.1", "'snapkv'", "once", "leave it out"]),
        ({"refresh_missed_mass": 1.0}, ["refresh_missed_mass=1.0", "less than 1"]),
        ({"refresh_missed_mass": 0.0}, ["refresh_missed_mass=0.0", "greater than 0"]),
    ],
)
def test_where_it_cannot_be_measured_it_is_refused(given: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        validate(ServeSettings, {"mode": "partial", "allow_lossy": True, "refresh_missed_mass": 0.1, **given})
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("selector", ["mass", "quest", "specpv", "worst"])
def test_selectors_with_queries_can_have_it(selector: str) -> None:
    assert validate(ServeSettings, {"mode": "exact", "view_selector": selector, "refresh_missed_mass": 0.1})
