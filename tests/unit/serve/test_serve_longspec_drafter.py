"""The served LongSpec drafter: it drafts what the reference chain drafts, whatever happened to its rings before (D2, D7)."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import SAMPLING, row_params, same_trees
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.tree import Tree
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.cross_attention import Cache
from longdraft.serve.drafters.inputs import GREEDY
from longdraft.serve.drafters.longspec import ON_DEVICE, LongSpecDrafter
from longdraft.serve.drafters.running import Running
from longdraft.serve.drafters.trees import first_trees
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import parse_tree

WINDOW, STEPS, LENGTH, SLOTS = 6, 3, 40, 100
TARGET = tiny_target("llama")
DRAFT = tiny_draft(TARGET, window=WINDOW)
TEXTS = {rid: torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(ord(rid))) for rid in "abcd"}
PAGES = dict(zip("abcd", torch.randperm(SLOTS * 2).view(4, -1)[:, :LENGTH].int(), strict=True))
SEEN = {rid: TARGET.capture(ids, torch.arange(LENGTH), [0, LENGTH]) for rid, ids in TEXTS.items()}
SCALE = 16**-0.5


@pytest.fixture(autouse=True, params=["module", "fused"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds for the module and for the step that takes its place on a card, here over its twins."""
    if request.param == "fused":
        monkeypatch.setattr(FusedStep, "of", staticmethod(FusedStep))


def make(rows: int = 3, context: int = 64, sinks: int = 4) -> LongSpecDrafter:
    """A drafter over a cache whose slots hold the texts' keys, and NaN elsewhere."""
    drafter = LongSpecDrafter(DRAFT, rows, STEPS, context, sinks, "torch")
    k, v = (torch.full((SLOTS * 2, 2, 16), float("nan")) for _ in range(2))
    for rid, seen in SEEN.items():
        k[PAGES[rid].long()], v[PAGES[rid].long()] = seen.k_TKD, seen.v_TKD
    drafter.bind_cache(Cache(k, v))
    return drafter


def request(rid: str, at: int, limit: int = STEPS) -> DraftRequest:
    """A request whose newest token is its text's token at ``at``."""
    ids = TEXTS[rid][: at + 1].tolist()
    req = SimpleNamespace(origin_input_ids=array("q", ids[:1]), output_ids=array("q", ids[1:]))
    return DraftRequest(rid, Tokens(req), PAGES[rid][:at], limit)


def greedy(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def reference(rid: str, at: int, columns: list[int] | None = None) -> list[int]:
    """The chain from a fresh ring over the named columns of the target's cache."""
    state = WindowState(DRAFT, 1, STEPS)
    state.rebuild(0, TEXTS[rid][:at].tolist(), at)
    pick = slice(0, at) if columns is None else columns
    keys, values = SEEN[rid].k_TKD[pick], SEEN[rid].v_TKD[pick]
    position = torch.tensor([at])
    out = propose_chain(
        state, torch.tensor([0]), TEXTS[rid][position], position, STEPS,
        lambda q: dense_attention(q, keys, values, SCALE)[0],
    )  # fmt: skip
    return out[0].tolist()


def test_a_batch_drafts_the_reference_chains_up_to_each_limit() -> None:
    got = make().propose([request("a", 30), request("b", 3, 1), request("c", 17, 2)], greedy)
    assert got == [reference("a", 30), reference("b", 3)[:1], reference("c", 17)[:2]]


def test_rounds_with_commits_draft_what_a_fresh_drafter_drafts() -> None:
    """D7 in the server: accepted runs of every width, the text instead of the drafts."""
    drafter, at = make(), 10
    for width in (1, 3, 2, 4, 1, 2):
        now = request("a", at)
        assert drafter.propose([now], greedy) == [reference("a", at)]
        drafter.committed(now, TEXTS["a"][at + 1 : at + 1 + width].tolist())
        assert drafter.held["a"] == at + width, "carried, not rebuilt"
        at += width


def test_a_round_that_nobody_told_of_rebuilds_the_ring() -> None:
    """Undrafted steps, retractions and prefix hits move a request without a commit."""
    drafter = make()
    for at in (10, 12, 30, 5):
        assert drafter.propose([request("a", at)], greedy) == [reference("a", at)]
    drafter.committed(request("a", 20), [1, 2])  # not where the ring stands
    assert drafter.propose([request("a", 21)], greedy) == [reference("a", 21)]


def test_interleaved_requests_keep_their_own_rings() -> None:
    drafter = make(rows=2)
    for at in (8, 9, 15, 16):
        assert drafter.propose([request("b", at + 3), request("a", at)], greedy) == [
            reference("b", at + 3),
            reference("a", at),
        ]
    assert sorted(drafter.rows.values()) == [0, 1]


def test_more_requests_than_rows_take_rings_of_absent_ones() -> None:
    """A ring is a cache of a pure function: losing it costs a rebuild."""
    drafter = make(rows=2)
    for pair in ("ab", "bc", "cd", "da", "ad"):
        batch = [request(rid, 12) for rid in pair]
        assert drafter.propose(batch, greedy) == [reference(rid, 12) for rid in pair]
        assert len(set(drafter.rows.values())) == len(drafter.rows) <= 2


def test_forgetting_frees_the_row_and_clearing_all() -> None:
    drafter = make(rows=1)
    drafter.propose([request("a", 9)], greedy)
    drafter.forget("a")
    drafter.forget("unknown")
    assert drafter.propose([request("b", 9)], greedy) == [reference("b", 9)]
    drafter.clear()
    assert not drafter.rows
    assert not drafter.held
    assert drafter.propose([request("b", 9)], greedy) == [reference("b", 9)]


@pytest.mark.parametrize(("context", "sinks"), [(8, 2), (8, 0), (8, 8), (8, 99), (16, 15), (30, 4), (31, 4)])
def test_cross_attention_reads_sinks_and_the_most_recent_tokens(context: int, sinks: int) -> None:
    """At most ``context`` columns and none twice, also where the sinks fill it."""
    at = 30
    first = min(sinks, context)
    columns = list(range(at)) if at <= context else [*range(first), *range(at - (context - first), at)]
    drafter = make(context=context, sinks=sinks)
    assert drafter.propose([request("a", at)], greedy) == [reference("a", at, columns)]
    assert drafter.inputs.lens_B[0] == len(columns)
    assert drafter.inputs.pages_BW[0, : len(columns)].tolist() == PAGES["a"][columns].tolist()


def test_the_pick_sees_the_position_of_each_token_read() -> None:
    """Shared noise is keyed by it: the target's choice behind the same token uses the same position."""
    heard: list[list[int]] = []

    def pick(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        heard.append(at.tolist())
        return logits.argmax(-1)

    make().propose([request("a", 20), request("b", 4)], pick)
    assert heard == [[20, 4], [21, 5], [22, 6]]


def test_a_first_token_drafts_from_nothing() -> None:
    """A prompt of one token: no target cache, no window."""
    assert make().propose([request("a", 0)], greedy) == [reference("a", 0)]


def test_drafting_before_the_cache_is_bound_says_so() -> None:
    drafter: Any = LongSpecDrafter(DRAFT, 1, STEPS, 64, 4, "torch")
    with pytest.raises(AssertionError, match="bind_cache"):
        drafter.propose([request("a", 3)], greedy)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_padded_static_buffers_draft_what_the_plain_path_drafts(sampling: dict[str, Any]) -> None:
    """The graph's twin: batches of changing size in one set of buffers, none of whose padding reaches a request's drafts."""
    plain, padded = make(rows=8), make(rows=8)
    padded.use_graphs([2, 4, 6])
    for ids in ("abcd", "ba", "c", "dab", "abcd"):
        batch = [request(rid, 10 + ord(rid) % 7) for rid in ids]
        params = row_params(ids, sampling)
        assert padded.propose(batch, params) == plain.propose(batch, params)


@pytest.mark.parametrize("sampling", SAMPLING[:2])
def test_a_ranked_head_drafts_the_same_through_its_own_rows(sampling: dict[str, Any]) -> None:
    """Greedy requests are answered from the head's rows, others from the whole vocabulary: ids and ties are the same."""
    draft = tiny_draft(TARGET, window=WINDOW)
    draft.narrow_head(torch.randperm(256, generator=torch.Generator().manual_seed(0))[:60])
    drafter = make()
    ranked = LongSpecDrafter(draft, 3, STEPS, 64, 4, "torch")
    ranked.bind_cache(*drafter.layers)
    batch, params = [request("a", 30), request("b", 3), request("c", 17)], row_params("abc", sampling)
    got = ranked.propose(batch, params)
    assert got == ranked.propose(batch, params.choose)
    assert draft.head_ids is not None and {i for ids in got for i in ids} <= set(draft.head_ids.tolist())


def chain_of(tree: Tree) -> list[list[int]]:
    """Drafts of trees of one node a depth."""
    return [
        [t for t, p in zip(*row, strict=True) if p >= 0]
        for row in zip(tree.token_BT.tolist(), tree.parent_BT.tolist(), strict=True)
    ]


@pytest.mark.parametrize("sampling", SAMPLING[:2])  # filters cut a chain's choice, and only dim a tree's scores
@pytest.mark.parametrize(("context", "sinks"), [(64, 4), (8, 2)])
def test_a_beam_of_one_drafts_the_chain(context: int, sinks: int, sampling: dict[str, Any]) -> None:
    chains, trees = make(rows=4, context=context, sinks=sinks), make(rows=4, context=context, sinks=sinks)
    shape = parse_tree("1,1,1")
    assert shape is not None
    batch = [request("a", 30), request("b", 3, 1), request("c", 17, 2)]
    params = row_params("abc", sampling)
    assert chain_of(trees.propose_tree(batch, params, shape)) == chains.propose(batch, params)


def test_trees_leave_the_rings_as_they_were() -> None:
    """What a tree drafts is kept beside the ring: committed tokens alone enter it, and a request without drafts takes no ring."""
    drafter, at = make(rows=3), 10
    shape = parse_tree("2,3,2")
    assert shape is not None
    for width in (1, 3, 2, 4):
        now = request("a", at)
        tree = drafter.propose_tree(
            [request("b", 20, 0), now, request("c", 9, 0)], row_params("bac", SAMPLING[0]), shape
        )
        assert tree.valid_BT.sum(1).tolist() == [1, 8, 1]
        assert tree.token_BT[1, 1:3].tolist()[0] == reference("a", at)[0], "the best child is the chain's"
        drafter.committed(now, TEXTS["a"][at + 1 : at + 1 + width].tolist())
        assert drafter.held == {"a": at + width}
        at += width


def running(places: dict[str, int]) -> Running:
    """A batch as the device knows it: newest tokens and lengths, and a page table that is longer than any of them."""
    at = torch.tensor(list(places.values()))
    newest = torch.stack([TEXTS[rid][place] for rid, place in places.items()])
    table = torch.cat([torch.stack(list(PAGES.values())), torch.zeros(4, 30, dtype=torch.int32)], 1)
    return Running(tuple(places), torch.tensor(["abcd".index(rid) for rid in places]), table, at, newest)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("sizes", [[], [2, 4]])
@pytest.mark.parametrize(("context", "sinks"), [(64, 4), (8, 2), (8, 0), (8, 8)])
def test_a_batch_of_the_device_drafts_what_the_hosts_drafts(
    context: int, sinks: int, sizes: list[int], sampling: dict[str, Any]
) -> None:
    """D7 without the host: whatever is kept of a round, up to all of it, the rings hold without being told."""
    device = make(rows=4, context=context, sinks=sinks)
    device.use_graphs(sizes)
    places = {"c": 4, "a": 12, "b": 1}
    for rid, place in places.items():
        device.follow(rid, request(rid, place).tokens, place)
    params = row_params("cab", sampling)
    for kept in ((1, 0, 3), (3, 3, 0), (0, 2, 1), (2, 1, 3)):
        host = make(rows=4, context=context, sinks=sinks)
        batch = [request(rid, place) for rid, place in places.items()]
        drafted = device.propose_running(running(places), params)
        assert drafted.tolist() == host.propose(batch, params)
        for rid, count, ids in zip(list(places), kept, drafted, strict=True):  # the text goes on as the target kept it
            place = places[rid]
            TEXTS[rid][place + 1 : place + 1 + count] = ids[:count]
            places[rid] = place + count + 1
    assert device.held == dict.fromkeys("cab", ON_DEVICE)


def test_rounds_of_the_host_and_of_the_device_take_turns() -> None:
    """A request is followed again after rounds on the host, and one that is not followed disturbs nobody."""
    drafter = make(rows=2)
    drafter.follow("a", request("a", 10).tokens, 10)
    assert drafter.follows("a") and not drafter.follows("b")
    assert drafter.propose_running(running({"b": 7, "a": 10}), greedy)[1].tolist() == reference("a", 10)
    now = request("a", 11)
    assert drafter.propose([now], greedy) == [reference("a", 11)]
    drafter.committed(now, TEXTS["a"][12:14].tolist())
    assert not drafter.follows("a")
    drafter.follow("a", request("a", 13).tokens, 13)
    assert drafter.propose_running(running({"a": 13}), greedy).tolist() == [reference("a", 13)]
    assert "b" not in drafter.rows


def test_a_request_that_is_settled_is_rebuilt_when_it_went_on_without_the_drafter() -> None:
    drafter = make(rows=2)
    drafter.follow("a", request("a", 10).tokens, 10)
    drafter.settle("a", 10)
    drafter.settle("b", 10)
    assert drafter.held == {"a": 10}
    assert drafter.propose([request("a", 14)], greedy) == [reference("a", 14)]


def test_a_ring_for_a_new_request_is_the_one_not_used_for_longest() -> None:
    drafter = make(rows=2)
    for rid in "ab":
        drafter.follow(rid, request(rid, 10).tokens, 10)
    drafter.propose_running(running({"a": 10}), greedy)
    drafter.follow("c", request("c", 10).tokens, 10)
    assert drafter.follows("a") and drafter.follows("c") and not drafter.follows("b")


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("text", ["2,3,2", "eagle2:3,2,8", "1,1"])
def test_padded_static_buffers_grow_the_trees_of_the_plain_path(text: str, sampling: dict[str, Any]) -> None:
    """The graph's twin for trees: batches of changing size, limits and shapes in one set of buffers."""
    shape, other = parse_tree(text), parse_tree("3,1,2")
    assert shape is not None and other is not None
    plain, padded = make(rows=8), make(rows=8)
    padded.use_graphs([2, 4, 6], [shape, other])
    for ids in ("abcd", "ba", "c", "dab", "abcd"):
        batch = [request(rid, 10 + ord(rid) % 7, limit) for rid, limit in zip(ids, (3, 1, 0, 2), strict=False)]
        params = row_params(ids, sampling)
        assert same_trees(padded.propose_tree(batch, params, shape), plain.propose_tree(batch, params, shape))
        plain.propose_tree(batch, params, other)
        padded.propose_tree(batch, params, other)


def test_a_tree_does_not_change_with_the_batch_around_it() -> None:
    shape = parse_tree("2,3,2")
    assert shape is not None
    drafter = make(rows=8)
    drafter.use_graphs([4], [shape])
    alone = drafter.propose_tree([request("a", 30)], row_params("a", SAMPLING[1]), shape)
    alone = first_trees(Tree.build(*(x.clone() for x in (alone.token_BT, alone.parent_BT, alone.depth_BT)), 3), 1)
    batch = [request("a", 30), request("b", 3, 1), request("c", 17)]
    beside = drafter.propose_tree(batch, row_params("abc", SAMPLING[1]), shape)
    assert same_trees(first_trees(beside, 1), alone)


def test_a_tree_loop_leaves_its_inputs_as_they_are() -> None:
    """A graph's work runs several times before it is captured."""
    shape = parse_tree("2,3,2")
    assert shape is not None
    drafter = make(rows=8)
    tree = drafter.propose_tree([request("a", 30)], row_params("a", SAMPLING[0]), shape)
    once = tree.token_BT.clone()
    drafter.trees.runner.run(1, (shape, GREEDY))
    assert torch.equal(tree.token_BT, once)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("sizes", [[], [2, 4]])
@pytest.mark.parametrize("text", ["2,3,2", "eagle2:3,2,6"])
def test_trees_of_the_device_are_the_hosts(text: str, sizes: list[int], sampling: dict[str, Any]) -> None:
    """Kept runs of every width enter the rings on the device; what stands behind them does not."""
    shape = parse_tree(text)
    assert shape is not None
    device, params = make(rows=4, context=8, sinks=2), row_params("cab", sampling)
    device.use_graphs(sizes, [shape])
    places, limits = {"c": 4, "a": 12, "b": 1}, [3, 2, 0]
    for rid, place in places.items():
        device.follow(rid, request(rid, place).tokens, place)
    for kept in ((1, 3, 1), (4, 1, 1), (2, 2, 1)):
        host, now = make(rows=4, context=8, sinks=2), running(places)
        want = host.propose_tree(
            [request(r, p, n) for (r, p), n in zip(places.items(), limits, strict=True)], params, shape
        )
        got = device.propose_trees_running(now, torch.tensor(limits), params, shape)
        assert got.parent_BT.tolist() == want.parent_BT.tolist()
        assert torch.equal(got.token_BT[got.valid_BT], want.token_BT[want.valid_BT])
        ids = torch.stack([torch.nn.functional.pad(TEXTS[r][p : p + 4], (0, 4))[:4] for r, p in places.items()])
        device.keep(now, ids.where(torch.arange(4) < torch.tensor(kept)[:, None], 9), torch.tensor(kept))
        places = {rid: place + count for (rid, place), count in zip(places.items(), kept, strict=True)}
    assert device.held == dict.fromkeys("cab", ON_DEVICE)
