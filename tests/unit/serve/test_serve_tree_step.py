"""Tree steps over a made-up target that reads its text back from the cache: any tree gives the target's own tokens."""

import itertools
import random
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grown_tree import random_tree
from serve_fakes import BareRequest, PieceTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.draft_models.draft_tree import Frontier, TreeDraft
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_bits import unpack_bits
from longdraft.serve import stats
from longdraft.serve.drafters.base import Computed, Drafter, DraftRequest, Pick
from longdraft.serve.make_step import make_step
from longdraft.serve.measure_costs import measured_costs
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.settings import ServeSettings
from longdraft.serve.shape_costs import CostTable
from longdraft.serve.slot_mover import SlotMover
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape, candidates
from longdraft.serve.tree_step import TreeStep, forced_path

VOCAB, COLUMNS, SLOTS = 8, 96, 400
SHAPES = ["3,4,4,2", "1,1,1", "2", "eagle2:4,3,12", "eagle2:2,3,3"]


def next_of(text: list[int]) -> int:
    return zlib.crc32(bytes(text)) % VOCAB


class Pool:
    """One layer whose keys are tokens and whose values are positions."""

    layer_num = 1

    def __init__(self) -> None:
        self.key, self.value = torch.full((SLOTS,), -1), torch.full((SLOTS,), -1)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.key

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.value


class Target:
    """Chooses by what lies in the cache and on a node's path; a wrong slot, mask or position changes its tokens."""

    def __init__(self, table: torch.Tensor, features: bool = False) -> None:
        self.pool, self.table, self.features, self.fails = Pool(), table, features, False
        config = SimpleNamespace(vocab_size=VOCAB)
        self.model_runner = SimpleNamespace(model_config=config, device="cpu", token_to_kv_pool=self.pool)

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        fb, plan, bits = forward_batch, forward_batch.spec_info.plan, forward_batch.spec_info.bits_TW
        if self.fails and bits is not None:
            raise RuntimeError("kernel failed")
        self.pool.key[fb.out_cache_loc], self.pool.value[fb.out_cache_loc] = fb.input_ids, fb.positions
        logits = torch.zeros(len(fb.input_ids), VOCAB)
        for b, cached in enumerate(plan.lens):
            rows = plan.rows_of(b)
            count = rows.stop - rows.start
            mask = torch.ones(count, count).tril().bool() if bits is None else unpack_bits(bits[rows], count)
            slots = plan.slots(b, cached)
            assert self.pool.value[slots].tolist() == list(range(cached))
            text, ids = self.pool.key[slots].tolist(), fb.input_ids[rows]
            for t in range(count):
                path = ids[mask[t]].tolist()
                if path and (t == 0 or fb.out_cache_loc[rows][t]):  # else a place without a node
                    assert fb.positions[rows][t] == cached + len(path) - 1
                    logits[rows.start + t, next_of(text + path)] = 1
        hidden = fb.input_ids[:, None].float() if self.features else None
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))


class TreeDrafter(Drafter):
    """Trees by noise and a rule that knows the target; notes what it is told."""

    def __init__(self, bonus: float, features: bool = False) -> None:
        self.bonus, self.told, self.cleared = bonus, [], 0
        self.computed: list[Computed] = []
        self.observed_layers = (1,) if features else None
        self.noise = torch.Generator().manual_seed(0)

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        raise AssertionError("a tree step drafts no chains")

    def propose_tree(self, requests: list[DraftRequest], params: RowParams, shape: TreeShape) -> Tree:
        paths = [[r.tokens.slice(0, len(r.tokens))] for r in requests]

        def step(nodes: Frontier) -> torch.Tensor:
            if nodes.depth:
                pairs = [
                    zip(t, p, strict=True)
                    for t, p in zip(nodes.token_BM.tolist(), nodes.parent_BM.tolist(), strict=True)
                ]
                paths[:] = [[[*old[p], t] for t, p in pair] for old, pair in zip(paths, pairs, strict=True)]
            logits = torch.randn(*nodes.token_BM.shape, VOCAB, generator=self.noise)
            for b, texts in enumerate(paths):
                for m, text in enumerate(texts):
                    logits[b, m, next_of(text)] += self.bonus
            return logits

        limit_B = torch.tensor([r.limit for r in requests])
        return shape.grow(TreeDraft(step, limit_B=limit_B), torch.tensor([r.tokens.newest for r in requests]))

    def observe(self, computed: Computed) -> None:
        self.computed.append(computed)

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        self.told.append((request.rid, tokens))

    def forget(self, rid: str) -> None: ...

    def clear(self) -> None:
        self.cleared += 1


class World:
    """Requests in a page table over a shuffled pool, and SGLang's loop."""

    def __init__(self, shape: str, reqs: list[BareRequest], drafter: TreeDrafter, **changes: Any) -> None:
        order = 1 + torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(1))
        self.table = order[: COLUMNS * 4].view(4, COLUMNS).int()
        self.target = Target(self.table, drafter.observed_layers is not None)
        shapes = candidates(shape, 3)
        stride = max(s.places for s in shapes)
        args = (self.target, drafter, Observer(drafter), ServeSettings(tree=shape, **changes), stride)
        step = make_step(shapes, *args)
        assert isinstance(step, TreeStep)
        self.step, self.reqs, self.drafter = step, reqs, drafter
        for row, req in enumerate(reqs):
            req.req_pool_idx = row
            slots = self.table[row, : Tokens(req).cached].long()
            self.target.pool.key[slots] = torch.tensor(Tokens(req).slice(0, Tokens(req).cached), dtype=torch.int64)
            self.target.pool.value[slots] = torch.arange(len(slots))

    def run(self, steps: int = 80) -> None:
        for _ in range(steps):
            live = [r for r in self.reqs if not r.finished()]
            if not live:
                return
            lens = torch.tensor([len(Tokens(r)) for r in live])
            batch: Any = SimpleNamespace(
                reqs=live, seq_lens=lens, return_logprob=False, spec_algorithm=None, sampling_info=None,
                req_pool_indices=torch.tensor([r.req_pool_idx for r in live]),
                req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            )  # fmt: skip
            result = self.step.run(batch)
            rows = result.next_token_ids.view(len(live), -1).tolist()
            for req, row, count in zip(live, rows, result.accept_lens.tolist(), strict=True):
                req.gain(row[:count])
        raise AssertionError("a request never ended")


def make_request(rid: str, prompt: list[int], allocated: int = COLUMNS, **params: Any) -> BareRequest:
    req = BareRequest(SamplingParams(temperature=0.0, **params), PieceTokenizer("abcdefgh", eos=7), prompt)
    req.rid, req.kv_allocated_len, req.prefix_indices = rid, allocated, torch.zeros(0)
    return req


def fresh(**params: Any) -> list[BareRequest]:
    return [
        make_request("a", [1, 2, 3], max_new_tokens=40, ignore_eos=True, **params),
        make_request("b", [4], max_new_tokens=31, ignore_eos=True, **params),
        make_request("c", [5, 5], max_new_tokens=40, **params),
        make_request("d", [6, 1], max_new_tokens=33, ignore_eos=True, stop="ab", **params),
    ]


def plainly(req: BareRequest) -> list[int]:
    while not req.finished():
        req.gain([next_of(Tokens(req).slice(0, len(Tokens(req))))])
    return list(req.output_ids)


def tokens_of(world: World) -> list[list[int]]:
    return [list(r.output_ids) for r in world.reqs]


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
