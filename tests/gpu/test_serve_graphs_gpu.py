"""Draft loops and tree loops in CUDA graphs on a card draft what they draft eagerly; a verification's graph reads what was filled in."""

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import SAMPLING, row_params, same_trees
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree_bits import ancestor_bits, unpack_bits
from longdraft.serve.drafters.base import Computed, DraftRequest
from longdraft.serve.drafters.cross_attention import Cache
from longdraft.serve.drafters.eagle3 import Eagle3Drafter
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.graph_runner import CudaGraphRunner, EagerRunner
from longdraft.serve.slot_mover import SlotMover
from longdraft.serve.static_plan import StaticPlan
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape, parse_tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS, LENGTH, ROWS = 4, 200, 9
SIZES = [1, 2, 4, 8]


def longspec() -> Any:
    """The draft loop over a random cache, in float32 by our Triton kernel."""
    torch.manual_seed(0)
    target = tiny_target("llama")
    draft = tiny_draft(target, window=16).cuda()
    draft.bind(target.embedding_VE.cuda(), target.head_VE.cuda())
    drafter = LongSpecDrafter(draft, ROWS, STEPS, 64, 4, "triton")
    k, v = (torch.randn(ROWS * LENGTH, 2, 16, device="cuda") for _ in range(2))
    drafter.bind_cache(Cache(k, v))
    return drafter


def eagle3() -> Any:
    torch.manual_seed(0)
    target = tiny_target("llama", num_hidden_layers=5)
    draft = tiny_eagle3(target, draft_vocab_size=100).cuda()
    draft.bind(target.embedding_VE.cuda(), target.head_VE.cuda())
    drafter = Eagle3Drafter(draft, ROWS, STEPS, 64, 4, "triton")
    drafter.allocate(ROWS * LENGTH, "cuda")
    at = torch.arange(ROWS * LENGTH, device="cuda")
    features = torch.randn(len(at), 3 * draft.config.target.hidden_size, device="cuda")
    drafter.observe(Computed(at % 256, at % LENGTH, at, (at - 1).clamp(min=0), features))
    return drafter


def batch(count: int, at: int) -> list[DraftRequest]:
    """Requests of several lengths, each over its own slots."""
    found = []
    for b in range(count):
        ids = torch.randint(0, 256, (at + 7 * b + 1,), generator=torch.Generator().manual_seed(b)).tolist()
        req = SimpleNamespace(origin_input_ids=array("q", ids[:1]), output_ids=array("q", ids[1:]))
        pages = torch.arange(b * LENGTH, b * LENGTH + len(ids) - 1, device="cuda", dtype=torch.int32)
        found.append(DraftRequest(str(b), Tokens(req), pages, STEPS))
    return found


@pytest.mark.parametrize("build", [longspec, eagle3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_graphs_draft_what_the_eager_loop_drafts(build: Any, sampling: dict[str, Any]) -> None:
    """Batches below, at and above the captured sizes, contexts within and past what a draft reads, many times over."""
    eager, graph = build(), build()
    graph.use_graphs(SIZES)
    assert isinstance(graph.runner, CudaGraphRunner)
    for count, at in ((3, 20), (8, 90), (1, 100), (5, 30), (9, 50), (2, 63), (8, 90)):
        params = row_params("abcdefghi"[:count], sampling, torch.device("cuda"))
        assert graph.propose(batch(count, at), params) == eager.propose(batch(count, at), params)


def shape_of(text: str) -> TreeShape:
    shape = parse_tree(text)
    assert shape is not None
    return shape


TREES = [shape_of(text) for text in ("1,1,1,1", "4,8,8,4", "eagle2:4,4,20")]


@pytest.mark.parametrize("build", [longspec, eagle3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_graphs_grow_what_the_eager_loop_grows(build: Any, sampling: dict[str, Any]) -> None:
    """Three shapes in turn over one set of inputs; batches below, at and above the captured sizes; requests that do not draft."""
    eager, graph = build(), build()
    graph.use_graphs(SIZES, TREES)
    assert isinstance(graph.trees.runner, CudaGraphRunner)
    # Padded alike: a product of another size rounds differently, and a tree ranks many sums that nearly tie.
    eager.trees.runner = EagerRunner(eager.trees._grow, SIZES)
    for count, at in ((3, 20), (8, 90), (1, 100), (5, 30), (9, 50), (2, 63), (8, 90)):
        params = row_params("abcdefghi"[:count], sampling, torch.device("cuda"))
        requests = batch(count, at)
        if count == 5:
            requests[1] = replace(requests[1], limit=0)
            requests[4] = replace(requests[4], limit=2)
        for shape in TREES:
            got, want = (d.propose_tree(requests, params, shape) for d in (graph, eager))
            assert same_trees(got, want), f"batch {count} at {at}, {shape.places} places {shape.depth} deep"
            assert int(got.valid_BT[0].sum()) == shape.places, "the trees are empty, nothing was compared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_graph_moves_slots_as_the_plain_moves_do(dtype: torch.dtype) -> None:
    """Chains of moves whose targets are the next ones' sources, in three layers, for batches below and at the captured sizes."""
    layers = [torch.randn(2, 200, 2, 16, device="cuda").to(dtype) for _ in range(3)]
    pool = SimpleNamespace(layer_num=3, get_key_buffer=lambda i: layers[i][0], get_value_buffer=lambda i: layers[i][1])
    mover = SlotMover(pool, SIZES, 5)
    assert isinstance(mover.runner, CudaGraphRunner)
    for requests in (3, 8, 1):
        source = torch.randperm(199, device="cuda")[: 4 * requests] + 1
        to = source.roll(1)
        want = [layer.view(torch.uint8).clone() for layer in layers]
        for layer in want:
            layer[:, to] = layer[:, source]
        mover.move(requests, to, source)
        for got, layer in zip(layers, want, strict=True):
            assert torch.equal(got.view(torch.uint8), layer), f"{requests} requests"


def test_new_tensors_of_the_target_make_new_graphs() -> None:
    drafter, other = longspec(), longspec()
    drafter.use_graphs(SIZES)
    params = row_params("ab", SAMPLING[0], torch.device("cuda"))
    before = drafter.propose(batch(2, 50), params)
    size = other.draft.config.target
    embedding, head = torch.randn(2, size.vocab_size, size.hidden_size, device="cuda")
    for each in (drafter, other):
        each.clear()
        each.bind_target(SimpleNamespace(embedding_VE=embedding, head_VE=head))
    assert drafter.propose(batch(2, 50), params) == other.propose(batch(2, 50), params) != before


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_a_captured_verification_attention_follows_the_static_plan(backend: str) -> None:
    """Replays over pages and lengths that were filled in after the capture, and no column behind them."""
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 needs a Hopper card")
    size, width, columns, heads, scale = 4, 6, 96, 2, 64**-0.5
    table = torch.randperm(size * columns, device="cuda").view(size, columns).int()
    k, v = (torch.randn(size * columns, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    static = StaticPlan(size, width, columns, torch.device("cuda"))
    q = torch.randn(size * width, 2 * heads, 64, device="cuda", dtype=torch.bfloat16)
    new = [torch.zeros(size * width, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    rows, plan = torch.arange(size, device="cuda"), static.plan(size)
    static.fill(table, rows, torch.ones_like(rows), 1)

    def attend(plan: AttentionPlan) -> torch.Tensor:
        return hybrid_tree_attention(q, *new, k, v, plan, scale, backend=backend)

    attend(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(plan)
    for lens in ([1, 40, 90, 7], [0, 0, 3, 64]):
        static.fill(table, rows, torch.tensor(lens, device="cuda"), max(lens))
        slots = [int(table[b, n + j]) for b, n in enumerate(lens) for j in range(width)]
        new[0].copy_(k[slots])
        new[1].copy_(v[slots])
        graph.replay()
        want = attend(AttentionPlan.build(table, lens, [width] * size))
        torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["fa3", "triton"])
@pytest.mark.parametrize("width", [7, 69])
def test_a_captured_verification_of_trees_follows_the_static_bits(backend: str, width: int) -> None:
    """One graph for trees of any edges, for chains, and for a batch of which the last request is padding."""
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 needs a Hopper card")
    size, columns, heads, scale = 3, 160, 2, 64**-0.5
    device = torch.device("cuda")
    table = torch.randperm(size * columns, device=device).view(size, columns).int()
    k, v = (torch.randn(size * columns, heads, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    static = StaticPlan(size, width, columns, device, trees=True)
    q = torch.randn(size * width, 2 * heads, 64, device=device, dtype=torch.bfloat16)
    new = [torch.randn(size * width, heads, 64, device=device, dtype=torch.bfloat16) for _ in range(2)]
    rows, plan, bits = torch.arange(size, device=device), static.plan(size), static.bits(size)
    static.fill(table, rows, torch.ones_like(rows), 1)

    def attend(plan: AttentionPlan, bits_TW: torch.Tensor | None) -> torch.Tensor:
        return hybrid_tree_attention(q, *new, k, v, plan, scale, bits_TW, backend)

    attend(plan, bits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(plan, bits)
    for seed, lens in enumerate(([1, 40, 90], [0, 64, 3])):
        host = torch.Generator().manual_seed(seed)
        up = [
            [int(torch.randint(-1 if t == 0 else 0, max(t, 1), (1,), generator=host)) for t in range(width)]
            for _ in range(size)
        ]
        parents = torch.tensor(up, device=device)
        parents[:, 0] = -1
        given = ancestor_bits(parents).flatten(0, 1)
        for bits_TW, real in ((given, size), (given[: 2 * width], 2), (None, size)):
            static.fill(table, rows, torch.tensor(lens, device=device), max(lens), bits_TW)
            graph.replay()
            if bits_TW is not None:
                bits_TW = torch.nn.functional.pad(bits_TW, (0, 0, 0, size * width - len(bits_TW)))
            want = attend(AttentionPlan.build(table, lens, [width] * size), bits if bits_TW is None else bits_TW)
            torch.testing.assert_close(
                out.float(), want.float(), rtol=2e-2, atol=2e-2, msg=lambda m, r=real: f"{r} of {size} requests: {m}"
            )
            assert torch.isfinite(out).all()
    causal = unpack_bits(static.chain_TW, width)
    assert torch.equal(causal, torch.ones_like(causal).tril())
