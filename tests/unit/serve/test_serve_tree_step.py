"""Tree steps over a made-up target that reads its text back from the cache: any tree gives the target's own tokens."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grown_tree import random_tree
from tree_world import (
    COLUMNS,
    SHAPES,
    SLOTS,
    VOCAB,
    Pool,
    Target,
    TreeDrafter,
    World,
    fresh,
    make_request,
    plainly,
    tokens_of,
)

from longdraft.kernels.tree import Tree
from longdraft.serve import stats
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.make_step import make_step
from longdraft.serve.measure_costs import measured_costs
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.settings import ServeSettings
from longdraft.serve.shape_costs import CostTable
from longdraft.serve.slot_mover import SlotMover
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape
from longdraft.serve.tree_step import TreeStep, forced_path


@pytest.mark.parametrize("bonus", [0.0, 1.5, 99.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_tree_gives_the_targets_own_tokens(shape: str, bonus: float) -> None:
    world = World(shape, fresh(), TreeDrafter(bonus))
    world.run()
    assert tokens_of(world) == [plainly(r) for r in fresh()]
    for req in world.reqs:
        counts = stats.attach(req, "full").accept
        assert counts.accepted + counts.verifications == len(req.output_ids)


def test_trees_keep_paths_that_are_not_the_first_branch() -> None:
    """Else nothing was ever moved, and the test above tests chains."""
    world = World("3,4,4,2", fresh()[:1], TreeDrafter(1.5))
    moved = []
    key = world.target.pool

    class Watching(Pool):
        def get_key_buffer(self, layer: int) -> torch.Tensor:
            moved.append(layer)
            return key.key

        def get_value_buffer(self, layer: int) -> torch.Tensor:
            return key.value

    world.target.model_runner.token_to_kv_pool = Watching()
    world.run()
    assert len(moved) > 2
    assert stats.attach(world.reqs[0], "full").accept.accepted > 10


@pytest.mark.parametrize("sizes", [[1, 2], [1, 4, 8]])
def test_moves_over_static_lists_keep_what_plain_moves_keep(sizes: list[int]) -> None:
    """The graph's twin, in batches that shrink as requests end, and of a batch that no graph holds; slot 0 alone may differ."""
    plain, static = World("3,4,4,2", fresh(), TreeDrafter(1.5)), World("3,4,4,2", fresh(), TreeDrafter(1.5))
    mover = SlotMover(static.target.pool, sizes, 5)
    used = []
    mover.move = lambda requests, to, source, move=mover.move: (used.append(requests), move(requests, to, source))  # type: ignore[method-assign,misc]
    assert isinstance(static.step, TreeStep)
    static.step.mover = mover
    for world in (plain, static):
        world.run()
    assert tokens_of(static) == tokens_of(plain)
    assert len(set(used)) > 1, "one batch size only"
    for a, b in ((plain.target.pool.key, static.target.pool.key), (plain.target.pool.value, static.target.pool.value)):
        assert torch.equal(a[1:], b[1:])


def test_a_move_reads_every_source_before_it_writes() -> None:
    """A path's node moves to the place of the node before it: each target is the next one's source."""
    pool = Pool()
    pool.key, pool.value = torch.arange(SLOTS), torch.arange(SLOTS) * 2
    SlotMover(pool, [4], 5).move(2, torch.tensor([3, 4, 5, 9]), torch.tensor([4, 5, 6, 3]))
    assert pool.key[[3, 4, 5, 6, 9]].tolist() == [4, 5, 6, 6, 3]
    assert pool.value[[3, 9, 10]].tolist() == [8, 6, 20]


def test_an_oracle_gains_the_whole_depth() -> None:
    world = World("2,2,2", [make_request("a", [1, 2], max_new_tokens=40, ignore_eos=True)], TreeDrafter(99.0))
    world.run()
    assert stats.attach(world.reqs[0], "full").accept.tau == 4


@pytest.mark.parametrize("params", [{"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"min_new_tokens": 9}])
def test_penalties_follow_the_paths(params: dict[str, Any]) -> None:
    """A step of one node at a time is plain decoding by the same code."""
    deep, flat = World("3,4,4,2", fresh(**params), TreeDrafter(1.5)), World("1", fresh(**params), TreeDrafter(-99.0))
    for world in (deep, flat):
        world.run()
    assert tokens_of(deep) == tokens_of(flat)
    assert tokens_of(deep) != [plainly(r) for r in fresh()] or "min_new_tokens" in params


def test_the_drafter_sees_the_kept_tokens_where_they_stand_and_nothing_else() -> None:
    drafter = TreeDrafter(1.5, features=True)
    world = World("3,4,4,2", fresh()[:2], drafter)
    world.run()
    for row, req in enumerate(world.reqs):
        text = Tokens(req).slice(0, len(Tokens(req)))
        slots = world.table[row].tolist()
        seen = [
            (int(p), int(i), int(a), int(s), int(before))
            for c in drafter.computed
            for i, p, s, before, a in zip(c.id_T, c.position_T, c.slot_T, c.before_T, c.aux_TA[:, 0], strict=True)
            if int(s) in slots
        ]
        start = len(req.origin_input_ids) - 1
        # A stop may cut a run: what was not returned is computed again.
        assert {p for p, *_ in seen} == set(range(start, len(text) - 1))
        assert all(
            (i, a) == (text[p],) * 2 and s == slots[p] and before == slots[max(p - 1, 0)] for p, i, a, s, before in seen
        )


def test_a_request_without_slots_for_a_tree_decodes_plainly_beside_others() -> None:
    reqs = fresh()[:2]
    reqs[1].kv_allocated_len = 4  # less than the tree's places, and its first slots only
    world = World("3,4,4,2", reqs, TreeDrafter(99.0))
    allocated = reqs[1]
    for _ in range(30):
        if all(r.finished() for r in reqs):
            break
        allocated.kv_allocated_len = Tokens(allocated).cached + 1
        with pytest.raises(AssertionError, match="never ended"):
            world.run(1)
    assert tokens_of(world)[0] == plainly(fresh()[0])
    assert list(reqs[1].output_ids) == plainly(fresh()[1])[: len(reqs[1].output_ids)]
    assert stats.attach(reqs[1], "full").accept.drafted == 0
    assert stats.attach(reqs[0], "full").accept.accepted > 20


def test_off_drafts_nothing_beside_full() -> None:
    off = {"custom_params": {"longdraft": {"mode": "off"}}}
    reqs = [make_request("a", [1, 2], max_new_tokens=20, ignore_eos=True), *fresh(**off)[:2]]
    world = World("2,2", reqs, TreeDrafter(99.0))
    world.run()
    assert tokens_of(world)[1:] == [plainly(r) for r in fresh()[:2]]
    assert [stats.attach(r, "?").accept.drafted > 0 for r in reqs] == [True, False, False]
    assert {rid for rid, _ in world.drafter.told} == {"a"}


class Failing(TreeDrafter):
    def propose_tree(self, requests: list[DraftRequest], params: RowParams, shape: TreeShape) -> Tree:
        raise RuntimeError("draft failed")


@pytest.mark.parametrize("fail", ["draft", "verification"])
def test_what_fails_costs_speed_only(fail: str) -> None:
    drafter = Failing(0.0) if fail == "draft" else TreeDrafter(1.5)
    world = World("3,4", fresh(), drafter)
    world.target.fails = fail == "verification"
    world.run()
    assert tokens_of(world) == [plainly(r) for r in fresh()]
    assert (drafter.cleared > 0) == (fail == "draft")


def test_simulated_acceptance_keeps_a_prefix_of_a_path() -> None:
    world = World(
        "2,3,3",
        [make_request("a", [1, 2], max_new_tokens=60, ignore_eos=True)],
        TreeDrafter(0.0),
        simulate_accept_length=3.0,
    )
    world.run()
    assert 2.2 < stats.attach(world.reqs[0], "full").accept.tau < 3.8


@pytest.mark.parametrize("bonus", [0.0, 1.5, 99.0])
@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 1.5}], ids=str)
def test_any_choice_of_shapes_gives_the_targets_own_tokens(bonus: float, params: dict[str, Any]) -> None:
    """Another shape every round, plain decoding among them; what was chosen is counted."""
    off = {"custom_params": {"longdraft": {"mode": "off"}}}
    undrafted, alone = (make_request("e", [2, 2], max_new_tokens=20, **params, **changes) for changes in (off, {}))
    world = World("auto:3,4,2", [*fresh(**params)[:3], undrafted], TreeDrafter(bonus))
    flat = World("1", [*fresh(**params)[:3], alone], TreeDrafter(-99.0))
    turns = itertools.cycle(world.step.choice.shapes.values())
    world.step.choice.pick = lambda batch: next(turns)  # type: ignore[method-assign]
    world.run()
    flat.run()
    assert tokens_of(world) == tokens_of(flat)
    assert "shapes" not in stats.attach(undrafted, "full").summary()
    for req in world.reqs[:3]:
        summary = stats.attach(req, "full").summary()
        assert sum(summary["shapes"].values()) == summary["rounds"]
        assert set(summary["shapes"]) <= {"chain0", "chain1", "chain2", "chain3", "3,4,2"}
    assert "shapes" not in stats.attach(flat.reqs[0], "full").summary(), "where there is no choice none is counted"
    rates = world.step.choice.rates
    assert rates.tried["chain"][0] > 0 and rates.tried["3,4,2"][0] > 0
    assert params or (rates.kept["chain"][0] == rates.tried["chain"][0]) == (bonus == 99.0)


@pytest.mark.parametrize("asked", [1, 1000])
def test_costs_are_measured_without_a_trace(asked: int) -> None:
    """Positive times for every shape, none of which the served code fails on; the page table and the drafter are as before."""
    world = World("auto:2,2", [], TreeDrafter(0.0))
    world.table[:] = 0
    world.target.pool.key, world.target.pool.value = (
        torch.zeros(SLOTS).long(),
        (torch.arange(SLOTS) - 1) % (COLUMNS - 2 * world.step.stride),
    )  # the position of each of a probe's tokens
    runner: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=world.table), token_to_kv_pool=world.target.pool, device="cpu",
        spec_algorithm=None,
    )  # fmt: skip
    assert isinstance(world.step, TreeStep)
    costs = measured_costs(world.step, runner, asked)
    most = min(asked, len(world.table) - 1)  # SGLang may allow fewer requests than were asked for
    assert (costs.batches, list(costs.ms)) == (
        (1,) if asked == 1 else (1, most),
        ["chain0", "chain1", "chain2", "chain3", "2,2"],
    )
    assert all(ms > 0 for row in costs.ms.values() for ms in row)
    assert not world.table.any()
    assert world.drafter.cleared == 1
    assert world.drafter.told == []


def test_a_server_that_chooses_settles_on_what_pays() -> None:
    """An oracle's drafts are worth their cost; where a round costs as much a token, none are."""
    for ms, best in (((10.0, 11.0, 12.0, 13.0, 30.0), "chain3"), ((10.0, 21.0, 32.0, 43.0, 60.0), "chain0")):
        reqs = [make_request("a", [1, 2], max_new_tokens=60, ignore_eos=True)]
        world = World("auto:2,2,2", reqs, TreeDrafter(99.0))
        names = list(world.step.choice.shapes)
        world.step.choice.costs = CostTable((1,), {name: (cost,) for name, cost in zip(names, ms, strict=True)})
        world.run()
        assert stats.attach(reqs[0], "full").shapes == {best: stats.attach(reqs[0], "full").rounds}


def test_forced_paths_are_prefixes_of_the_way_to_the_deepest_node() -> None:
    tree = random_tree(6, 12, VOCAB, random.Random(3))
    choice_BT = torch.randint(0, VOCAB, (6, 12))
    parents, depths = tree.parent_BT.tolist(), torch.where(tree.valid_BT, tree.depth_BT, -1).tolist()
    for count in range(4):
        kept = forced_path(tree, choice_BT, [count] * 6)
        for b in range(6):
            way = [depths[b].index(max(depths[b]))]
            while parents[b][way[0]] >= 0:
                way.insert(0, parents[b][way[0]])
            want = way[: count + 1]
            assert int(kept.count_B[b]) == len(want) - 1
            assert kept.path_BD1[b, : len(want)].tolist() == want
            gained = [*(int(tree.token_BT[b, place]) for place in want[1:]), int(choice_BT[b, want[-1]])]
            assert kept.token_BD1[b, : len(want)].tolist() == gained


def test_chains_keep_their_step() -> None:
    drafter = TreeDrafter(0.0)
    target = Target(torch.zeros(1, 1))
    step: Callable[..., Any] = type(make_step([], target, drafter, Observer(drafter), ServeSettings(), 5))
    assert step.__name__ == "DecodeStep"
