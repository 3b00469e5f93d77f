"""Rank 0's drafts, views, tokens and clock are what every rank goes on with, whatever the others would have done."""

from typing import Any

import pytest
import torch
from device_rounds import MadeUpTarget, Server, plainly
from test_serve_device_step import RULES, DeviceDrafter, step_of
from test_serve_view_step import ViewedTarget, requests, view_step
from thread_ranks import ThreadRanks, run_ranks

PROMPTS = [[1, 2, 3, 4, 5, 6, 1, 2], [3], [2, 2, 7, 1, 5], [0, 4, 4, 1, 6, 3, 2, 5, 1, 1, 7, 3]]
LENGTHS = [24, 20, 22, 23]
WORDS = ("often right", "adversary")  # what each rank's drafter is


def outputs(reqs: list[Any]) -> list[list[int]]:
    return [list(r.output_ids) for r in reqs]


def differing(ranks: list[ThreadRanks]) -> set[str]:
    """What ranks would have said differently."""
    first, second = (r.messages for r in ranks)
    assert [what for what, _ in first] == [what for what, _ in second], "ranks that do different things"
    pairs = zip(first, second, strict=True)
    return {a[0] for a, b in pairs if any(not torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))}


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("tree", "hosted"),
    [("chain", {}), ("2,2,2", {}), ("chain", {"frequency_penalty": 0.1})],
    ids=["chain", "tree", "host"],
)
def test_ranks_verify_the_drafts_of_the_first(tree: str, hosted: dict[str, Any], behind: bool) -> None:

    def on_rank(ranks: ThreadRanks) -> tuple[list[list[int]], ThreadRanks, Any]:
        target = MadeUpTarget()
        step = step_of(DeviceDrafter(RULES[WORDS[ranks.rank]]), target, tree)
        step.ranks = ranks
        reqs = requests(PROMPTS, LENGTHS, ["full"] * 4, ignore_eos=True, **hosted)
        Server(step, behind).run(reqs)
        return outputs(reqs), ranks, target.place_S

    (first, one, slots), (second, two, others) = run_ranks(2, on_rank)
    assert first == second
    if not hosted:
        assert first == outputs_plain(["full"] * 4)
    assert torch.equal(slots, others), "every rank writes the same tokens to the same slots"
    assert differing([one, two]) == ({"drafts"} if tree == "chain" else {"trees"})


def outputs_plain(modes: list[str]) -> list[list[int]]:
    return [plainly(r) for r in requests(PROMPTS, LENGTHS, modes, ignore_eos=True)]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_ranks_read_the_views_of_the_first_and_plan_by_its_clock(mode: str, behind: bool) -> None:
    """Where a view lacks something the made-up target chooses otherwise, so other views would give other tokens."""
    modes = [mode, "full", mode, mode if mode == "partial" else "off"]

    def on_rank(ranks: ThreadRanks) -> tuple[list[list[int]], ThreadRanks, Any]:
        target = ViewedTarget(off=3)
        step = view_step(target, DeviceDrafter(RULES[WORDS[ranks.rank]]), mode=mode, rounds=None)
        step.chooser.draw.manual_seed(ranks.rank)  # type: ignore[attr-defined]
        step.ranks = ranks
        reqs = requests(PROMPTS, LENGTHS, modes, ignore_eos=True)
        Server(step, behind).run(reqs)
        assert not target.dirty and target.partial
        return outputs(reqs), ranks, step.planner.choice

    (first, one, choice), (second, two, other) = run_ranks(2, on_rank)
    assert first == second
    for got, want, name in zip(first, outputs_plain(modes), modes, strict=True):
        assert name == "partial" or got == want
    assert "views and drafts" in differing([one, two])
    assert choice.ms == other.ms and choice.gain == other.gain
    assert (len(choice.ms) > 0) == (mode == "exact"), "cycles of which somebody stays pending are not timed"


def test_a_single_rank_times_its_own_cycles() -> None:
    """And has nothing to carry along."""
    step = view_step(ViewedTarget(off=3), DeviceDrafter(RULES["often right"]), rounds=None)
    Server(step, True).run(requests(PROMPTS, LENGTHS, ["exact"] * 4, ignore_eos=True))
    assert step.planner.choice.ms and step.took is None
