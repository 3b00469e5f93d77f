"""The served EAGLE-3 drafter: it drafts what a recomputation from the target's features drafts, whatever slots were shared (D2, D7)."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import SAMPLING, row_params, same_trees
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.aux_features import aux_features
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_chain import propose_eagle3_chain
from longdraft.kernels.dense_attention import dense_attention
from longdraft.serve.drafters.base import Computed, DraftRequest
from longdraft.serve.drafters.eagle3 import Eagle3Drafter
from longdraft.serve.drafters.running import Running
from longdraft.serve.drafters.trees import Eagle3Rows
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import parse_tree

STEPS, LENGTH, SLOTS = 4, 40, 200
TARGET = tiny_target("llama", num_hidden_layers=5)
DRAFT = tiny_eagle3(TARGET, draft_vocab_size=100, fc_norm=True)
TEXTS = {rid: torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(ord(rid))) for rid in "abc"}
PAGES = dict(
    zip("abc", torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))[:120].view(3, -1), strict=True)
)


def features(text: torch.Tensor, draft: Eagle3Draft = DRAFT) -> torch.Tensor:
    with torch.no_grad(), aux_features(TARGET.model, draft.config.aux_layers) as seen:
        TARGET.model(text[None])
        return seen.take()[0]


def make(draft: Eagle3Draft = DRAFT, rows: int = 3, context: int = 64, sinks: int = 4) -> Eagle3Drafter:
    drafter = Eagle3Drafter(draft, rows, STEPS, context, sinks, "torch")
    drafter.allocate(SLOTS, "cpu")
    for buffer in (drafter.k_SKD, drafter.v_SKD, drafter.hidden_SE):
        buffer[:SLOTS] = float("nan")  # what is read without having been written shows
    return drafter


def show(drafter: Eagle3Drafter, text: torch.Tensor, pages: torch.Tensor, start: int, end: int) -> None:
    """The target computes tokens ``start .. end`` of a text."""
    at = torch.arange(start, end)
    before = pages[(at - 1).clamp(min=0)]
    drafter.observe(Computed(text[at], at, pages[at], before, features(text, drafter.draft)[at]))


def request(text: torch.Tensor, pages: torch.Tensor, at: int, limit: int = STEPS, rid: str = "r") -> DraftRequest:
    """A request whose newest token is its text's token at ``at``."""
    ids = text[: at + 1].tolist()
    req = SimpleNamespace(origin_input_ids=array("q", ids[:1]), output_ids=array("q", ids[1:]))
    return DraftRequest(rid, Tokens(req), pages[:at].int(), limit)


def known(rid: str, at: int, limit: int = STEPS) -> DraftRequest:
    return request(TEXTS[rid], PAGES[rid], at, limit, rid)


def greedy(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@torch.no_grad()
def reference(text: torch.Tensor, at: int, draft: Eagle3Draft = DRAFT, window: int = 1000, sinks: int = 0) -> list[int]:
    """The chain behind ``text[: at + 1]`` by computing every row of every step again, under an explicit mask."""
    hidden = draft.fuse(features(text, draft)[:at])
    ids, out = text[1 : at + 1].tolist(), []
    for _ in range(STEPS):
        rows = torch.arange(len(ids))
        distance = rows[:, None] - rows[None]
        mask = (distance >= 0) & ((distance < window) | (rows[None] < sinks))
        x = draft.attention_input(torch.tensor(ids), hidden)
        k, v = draft.key_value(x, rows)
        attended = dense_attention(draft.query(x, rows), k, v, draft.config.head_dim**-0.5, mask)[0]
        normed, following = draft.finish(hidden, attended)
        out.append(int(draft.logits(normed)[-1].argmax()))
        ids.append(out[-1])
        hidden = torch.cat(
            [hidden, following[-1:]]
        )  # the text's rows keep their features, the chain's recycle their own
    return out


def test_a_batch_drafts_the_recomputed_chains_up_to_each_limit() -> None:
    drafter = make()
    for rid, at in (("a", 30), ("b", 3), ("c", 17)):
        show(drafter, TEXTS[rid], PAGES[rid], 0, at)
    got = drafter.propose([known("a", 30), known("b", 3, 1), known("c", 17, 2)], greedy)
    assert got == [reference(TEXTS["a"], 30), reference(TEXTS["b"], 3)[:1], reference(TEXTS["c"], 17)[:2]]


def test_drafts_are_ids_of_the_target() -> None:
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    (drafted,) = drafter.propose([known("a", 30)], greedy)
    assert set(drafted) <= set(DRAFT.target_ids.tolist())
    assert any(i >= DRAFT.config.vocab_size for i in DRAFT.target_ids.tolist()), "the map must not be the identity"


@pytest.mark.parametrize("cuts", [[0, 25], [0, 1, 25], [0, 7, 8, 20, 25], list(range(26))])
def test_chunks_leave_what_one_prefill_leaves(cuts: list[int]) -> None:
    drafter = make()
    for start, end in zip(cuts, cuts[1:], strict=False):
        show(drafter, TEXTS["a"], PAGES["a"], start, end)
    assert drafter.propose([known("a", 25)], greedy) == [reference(TEXTS["a"], 25)]


def test_rejected_drafts_leave_nothing_behind() -> None:
    """A verification writes all of its chain; what was not kept is written again before it is read."""
    drafter, text, at = make(), TEXTS["a"], 10
    show(drafter, text, PAGES["a"], 0, at)
    for kept in (0, 2, 4, 1, 3):
        assert drafter.propose([known("a", at)], greedy) == [reference(text, at)]
        chain = torch.cat([text[: at + 1 + kept], (text[at + 1 + kept : at + STEPS + 1] + 7) % 256])
        show(drafter, chain, PAGES["a"], at, at + STEPS + 1)
        at += kept + 1


@pytest.mark.parametrize("shared", [1, 2, 12, 24])
def test_a_shared_prefix_brings_its_rows(shared: int) -> None:
    """A radix hit: slots of another request's prefix, whose next token was another one; only the rest is computed."""
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    text = torch.cat([TEXTS["a"][:shared], TEXTS["b"][shared:]])
    pages = torch.cat([PAGES["a"][:shared], PAGES["b"][shared:]])
    show(drafter, text, pages, shared, 25)
    batch = [request(text, pages, 25, rid="b"), known("a", 30)]
    assert drafter.propose(batch, greedy) == [reference(text, 25), reference(TEXTS["a"], 30)]


def test_slots_are_used_again_by_other_texts() -> None:
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    show(drafter, TEXTS["b"], PAGES["a"], 0, 20)
    assert drafter.propose([request(TEXTS["b"], PAGES["a"], 20)], greedy) == [reference(TEXTS["b"], 20)]


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (3, 0), (3, 2), (8, 4), (24, 0), (25, 0), (40, 2)])
def test_the_drafts_own_window_moves_with_every_step(window: int, sinks: int) -> None:
    draft = tiny_eagle3(TARGET, window=window, sinks=sinks)
    drafter = make(draft)
    show(drafter, TEXTS["a"], PAGES["a"], 0, 25)
    assert drafter.propose([known("a", 25)], greedy) == [reference(TEXTS["a"], 25, draft, window, sinks)]


@pytest.mark.parametrize(("context", "sinks"), [(12, 4), (12, 0), (12, 50)])
def test_a_draft_without_a_window_reads_no_more_than_it_is_given(context: int, sinks: int) -> None:
    drafter = make(context=context, sinks=sinks)
    first = min(sinks, context - 1)
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    want = reference(TEXTS["a"], 30, window=context - first, sinks=first)
    assert drafter.propose([known("a", 30)], greedy) == [want]


def test_the_pick_sees_the_position_of_each_token_read() -> None:
    heard: list[list[int]] = []

    def pick(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        heard.append(at.tolist())
        return logits.argmax(-1)

    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 20)
    show(drafter, TEXTS["b"], PAGES["b"], 0, 5)
    drafter.propose([known("a", 20, 3), known("b", 5, 2)], pick)
    assert heard == [[20, 5], [21, 6], [22, 7], [23, 8]]


def test_a_prompt_of_one_token_has_one_feature_and_no_row() -> None:
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 1)
    assert drafter.propose([known("a", 1), known("b", 0)], greedy) == [reference(TEXTS["a"], 1), []]
    assert drafter.propose([known("b", 0)], greedy) == [[]]


def test_what_could_not_be_observed_is_read_as_nothing() -> None:
    """Stale rows of a slot's former text, NaN here, must not reach later drafts."""
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 12)
    drafter.unobserved(PAGES["a"][12:20])
    show(drafter, TEXTS["a"], PAGES["a"], 20, 30)
    heard: list[torch.Tensor] = []

    def pick(logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        heard.append(logits)
        return logits.argmax(-1)

    drafter.propose([known("a", 30)], pick)
    missing = ~torch.isin(torch.arange(TARGET.spec.vocab_size), DRAFT.target_ids)
    assert len(heard) == STEPS
    for logits in heard:
        assert logits[0, ~missing].isfinite().all()
        assert bool((logits[0, missing] == float("-inf")).all())


def test_an_updated_target_lends_its_new_embedding() -> None:
    drafter = make(tiny_eagle3(TARGET, draft_vocab_size=100, fc_norm=True))
    drafter.bind_target(SimpleNamespace(embedding_VE=TARGET.embedding_VE.flip(0).contiguous()))
    show(drafter, TEXTS["a"], PAGES["a"], 0, 20)
    assert drafter.propose([known("a", 20)], greedy) == [reference(TEXTS["a"], 20, drafter.draft)]
    assert reference(TEXTS["a"], 20, drafter.draft) != reference(TEXTS["a"], 20)


def test_its_memory_is_what_it_says() -> None:
    drafter = make()
    buffers = (drafter.k_SKD, drafter.v_SKD, drafter.hidden_SE)
    assert sum(b[0].numel() * b.element_size() for b in buffers) == drafter.bytes_per_slot


def test_the_pools_slots_are_the_drafters_first_ones() -> None:
    drafter = Eagle3Drafter(DRAFT, 2, STEPS, 64, 4, None)
    with pytest.raises(AssertionError, match="bind_pool"):
        drafter.propose([known("a", 3)], greedy)
    drafter.bind_pool(SimpleNamespace(get_key_buffer=lambda layer: torch.zeros(17, 1, 1)), {})
    assert len(drafter.hidden_SE) == 17
    assert drafter.scratch.flatten().tolist() == list(range(17, 17 + 2 * STEPS))


def test_state_survives_what_makes_other_drafters_forget() -> None:
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    drafter.committed(known("a", 30), [1])
    drafter.forget("a")
    drafter.clear()
    assert drafter.propose([known("a", 30)], greedy) == [reference(TEXTS["a"], 30)]


def test_the_chain_asks_for_each_step_at_its_row() -> None:
    asked: list[Any] = []

    def attend(step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        asked.append((step, q.shape, k.shape))
        return q

    rows = torch.zeros(2, TARGET.spec.hidden_size)
    out = propose_eagle3_chain(DRAFT, rows, torch.tensor([3, 4]), torch.tensor([5, 1]), 3, attend)
    assert out.shape == (2, 3)
    assert [step for step, _, _ in asked] == [0, 1, 2]
    assert asked[0][1:] == ((2, 4, 16), (2, 2, 16))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("context", [12, 64])
def test_padded_static_buffers_draft_what_the_plain_path_drafts(context: int, sampling: dict[str, Any]) -> None:
    """The graph's twin, within the context and past it, where every step's row takes the place of the oldest."""
    plain, padded = make(rows=8, context=context), make(rows=8, context=context)
    padded.use_graphs([2, 4, 6])
    for drafter in (plain, padded):
        for rid in "abc":
            show(drafter, TEXTS[rid], PAGES[rid], 0, 30)
    for ids in ("abc", "ba", "c", "cab"):
        batch = [known(rid, 8 + ord(rid) % 7) for rid in ids]
        params = row_params(ids, sampling)
        assert padded.propose(batch, params) == plain.propose(batch, params)


def test_a_loop_leaves_its_inputs_as_they_are() -> None:
    """A graph's work runs several times before it is captured."""
    drafter = make(context=12)
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    drafted = drafter.propose([known("a", 30)], greedy)
    drafter.runner.run(1, greedy)
    assert drafter.inputs.drafted_BK[:1].tolist() == drafted


@pytest.mark.parametrize("sampling", SAMPLING[:2])  # filters cut a chain's choice, and only dim a tree's scores
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (5, 0), (8, 4), (40, 2)])
def test_a_beam_of_one_drafts_the_chain(window: int | None, sinks: int, sampling: dict[str, Any]) -> None:
    draft = DRAFT if window is None else tiny_eagle3(TARGET, window=window, sinks=sinks)
    chains, trees = make(draft), make(draft)
    for drafter in (chains, trees):
        for rid in "abc":
            show(drafter, TEXTS[rid], PAGES[rid], 0, 30)
    batch = [known("a", 28), known("b", 3, 1), known("c", 17, 2)]
    shape = parse_tree("1,1,1,1")
    assert shape is not None
    params = row_params("abc", sampling)
    tree = trees.propose_tree(batch, params, shape)
    drafted = [
        [t for t, p in zip(*row, strict=True) if p >= 0]
        for row in zip(tree.token_BT.tolist(), tree.parent_BT.tolist(), strict=True)
    ]
    assert drafted == chains.propose(batch, params)


def test_a_tree_of_a_request_that_knows_nothing_is_its_root() -> None:
    drafter = make()
    show(drafter, TEXTS["a"], PAGES["a"], 0, 30)
    shape = parse_tree("eagle2:3,2,8")
    assert shape is not None
    tree = drafter.propose_tree([known("b", 0, 0), known("a", 30)], row_params("ba", SAMPLING[0]), shape)
    assert tree.valid_BT.sum(1).tolist() == [1, 8]
    assert tree.token_BT[:, 0].tolist() == [int(TEXTS["b"][0]), int(TEXTS["a"][30])]
    assert reference(TEXTS["a"], 30)[0] in tree.token_BT[1, tree.depth_BT[1] == 1].tolist()


def show_all(drafter: Eagle3Drafter) -> None:
    """The first 35 tokens of each text."""
    for rid in "abc":
        show(drafter, TEXTS[rid], PAGES[rid], 0, 35)


def running(places: dict[str, int]) -> Running:
    """A batch that the device alone knows: each request's newest token is its text's at that place."""
    table = torch.nn.functional.pad(torch.stack(list(PAGES.values())).int(), (0, 30))
    newest = torch.stack([TEXTS[rid][place] for rid, place in places.items()])
    rows = torch.tensor(["abc".index(rid) for rid in places])
    return Running(tuple(places), rows, table, torch.tensor(list(places.values())), newest)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("sizes", [[], [2, 4]])
@pytest.mark.parametrize(("window", "context", "sinks"), [(None, 64, 4), (None, 12, 4), (8, 64, 2), (40, 64, 2)])
def test_a_batch_of_the_device_drafts_what_the_hosts_drafts(
    window: int | None, context: int, sinks: int, sizes: list[int], sampling: dict[str, Any]
) -> None:
    draft = DRAFT if window is None else tiny_eagle3(TARGET, window=window, sinks=sinks)
    host, device = make(draft, 4, context, sinks), make(draft, 4, context, sinks)
    device.use_graphs(sizes)
    for drafter in (host, device):
        show_all(drafter)
    params = row_params("cab", sampling)
    for places in ({"c": 4, "a": 30, "b": 1}, {"c": 13, "a": 2, "b": 34}):
        drafted = device.propose_running(running(places), params)
        assert drafted.tolist() == host.propose([known(rid, place) for rid, place in places.items()], params)
    assert device.follows("anyone"), "nothing belongs to a request"


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("context", [12, 64])
@pytest.mark.parametrize("text", ["2,3,2", "eagle2:4,2,10"])
def test_padded_static_buffers_grow_the_trees_of_the_plain_path(
    text: str, context: int, sampling: dict[str, Any]
) -> None:
    """The graph's twin for trees, within the context and past it, where the deeper nodes no longer see the oldest rows."""
    shape = parse_tree(text)
    assert shape is not None
    plain, padded = make(rows=8, context=context), make(rows=8, context=context)
    padded.use_graphs([2, 4, 6], [shape])
    for drafter in (plain, padded):
        for rid in "abc":
            show(drafter, TEXTS[rid], PAGES[rid], 0, 30)
    for ids in ("abc", "ba", "c", "cab"):
        batch = [known(rid, 8 + ord(rid) % 7, limit) for rid, limit in zip(ids, (4, 2, 0), strict=False)]
        params = row_params(ids, sampling)
        assert same_trees(padded.propose_tree(batch, params, shape), plain.propose_tree(batch, params, shape))


@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (5, 0), (3, 4), (40, 2), (1, 2)])
@pytest.mark.parametrize("count", [0, 1, 4, 7, 12])
def test_a_node_sees_the_first_rows_and_its_window(count: int, window: int, sinks: int) -> None:
    """By the rule itself: of row i a node ``depth`` below the root's row sees less than a window's distance, and the sinks."""
    most = sinks + window
    rows = list(range(100, 100 + count))
    given = rows if count <= most else rows[:sinks] + rows[count - window :]
    pages_BW = torch.full((1, most), -1, dtype=torch.int32)
    pages_BW[0, : len(given)] = torch.tensor(given, dtype=torch.int32)
    lens_B = torch.tensor([len(given)], dtype=torch.int32)
    unused = torch.zeros(0)
    seen = Eagle3Rows((unused, unused), pages_BW, lens_B, window, sinks, None)
    for depth in range(6):
        want = [row for i, row in enumerate(rows) if i < sinks or count + depth - i < window]
        pages, lens = seen.visible(depth)
        assert pages[0, : int(lens)].tolist() == want


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("sizes", [[], [2, 4]])
@pytest.mark.parametrize(("window", "context"), [(None, 64), (None, 12), (8, 64)])
def test_trees_of_the_device_are_the_hosts(
    window: int | None, context: int, sizes: list[int], sampling: dict[str, Any]
) -> None:
    draft = DRAFT if window is None else tiny_eagle3(TARGET, window=window, sinks=2)
    host, device, shape = make(draft, 4, context), make(draft, 4, context), parse_tree("eagle2:3,2,8")
    assert shape is not None
    device.use_graphs(sizes, [shape])
    for drafter in (host, device):
        show_all(drafter)
    params = row_params("cab", sampling)
    limits = [3, 1, 0]
    for places in ({"c": 4, "a": 30, "b": 1}, {"c": 13, "a": 2, "b": 34}):
        want = host.propose_tree(
            [known(r, p, n) for (r, p), n in zip(places.items(), limits, strict=True)], params, shape
        )
        got = device.propose_trees_running(running(places), torch.tensor(limits), params, shape)
        assert got.parent_BT.tolist() == want.parent_BT.tolist()
        assert torch.equal(got.token_BT[got.valid_BT], want.token_BT[want.valid_BT])
