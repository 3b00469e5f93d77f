"""Verification as CUDA graphs run it, on the CPU: static page lists, chains padded to one width, batches padded to one size."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import plain_request, row_params
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree import NO_NODE, Tree
from longdraft.kernels.tree_bits import unpack_bits
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.drafters.lookup import LookupDrafter
from longdraft.serve.observer import Observer
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.static_plan import StaticPlan
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_verify import verify_tree
from longdraft.serve.verify import verify

HEADS, SIZE, VOCAB, COLUMNS, STRIDE, MOST = 2, 8, 50, 24, 5, 4
DRAW = torch.Generator().manual_seed(0)
EMBEDDING, HEAD = torch.randn(VOCAB, 3, HEADS, SIZE, generator=DRAW), torch.randn(HEADS * SIZE, VOCAB, generator=DRAW)
TABLE = torch.zeros(MOST + 1, COLUMNS, dtype=torch.int32)
TABLE[1:] = 1 + torch.randperm(MOST * COLUMNS, generator=DRAW).view(MOST, COLUMNS).int()
LAYER: Any = SimpleNamespace(
    tp_q_head_num=HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS, head_dim=SIZE, v_head_dim=SIZE, layer_id=0, scaling=SIZE**-0.5,
    k_scale=None, v_scale=None,
)  # fmt: skip


class Pool:
    """A one-layer cache in which every unwritten slot is poison."""

    def __init__(self) -> None:
        self.k, self.v = (torch.full((MOST * COLUMNS + 1, HEADS, SIZE), float("nan")) for _ in range(2))

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, at: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        self.k[at.loc], self.v[at.loc] = k, v


class OneLayerTarget:
    """Attention over token and position, and a head."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.pool = Pool()
        self.backend = LongDraftAttention(SimpleNamespace(), self.pool, "torch", TABLE)  # type: ignore[arg-type]
        self.seen: list[ForwardBatch] = []
        for row, text in enumerate(texts, start=1):
            for at, token in enumerate(text[:-1]):
                _, k, v = self.qkv(torch.tensor([token]), torch.tensor([at]))
                self.pool.k[TABLE[row, at].long()], self.pool.v[TABLE[row, at].long()] = k[0], v[0]

    def qkv(self, id_T: torch.Tensor, position_T: torch.Tensor) -> Any:
        return (EMBEDDING[id_T] * (1 + 0.1 * position_T[:, None, None, None])).unbind(1)

    def forward_batch_generation(self, batch: None, forward_batch: ForwardBatch, is_verify: bool) -> Any:
        self.seen.append(forward_batch)
        self.backend.init_forward_metadata(forward_batch)
        q, k, v = self.qkv(forward_batch.input_ids, forward_batch.positions)
        out = self.backend.forward_extend(q, k, v, LAYER, forward_batch)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=out @ HEAD, hidden_states=None))


def run(texts: list[list[int]], drafts: list[list[int]], width: int | None) -> tuple[Any, OneLayerTarget]:
    target = OneLayerTarget(texts)
    target.backend.init_cuda_graph_state(MOST, MOST * STRIDE)
    batch = batch_of(texts)
    members = list(range(len(texts)))
    return verify(target, batch, members, drafts, Observer(LookupDrafter(2)), width), target


def batch_of(texts: list[list[int]]) -> Any:
    reqs = []
    for i, text in enumerate(texts):
        req = plain_request(rid=str(i), temperature=0.0)
        req.origin_input_ids, req.output_ids = array("q", text), array("q")
        reqs.append(req)
    rows = torch.arange(1, len(texts) + 1)
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.tensor([Tokens(r).cached for r in reqs]),
        req_pool_indices=rows,
        req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
        spec_algorithm=None,
        sampling_info=None,
    )


TEXTS = [torch.randint(0, VOCAB, (n,), generator=DRAW).tolist() for n in (7, 1, COLUMNS - 1, 12)]


@pytest.mark.parametrize("drafts", [[[3, 4, 5, 6], [7], [8], []], [[], [], [], []], [[1], [2, 3, 4, 5], [], [9, 9]]])
def test_padded_chains_are_chosen_as_the_chains_alone(drafts: list[list[int]]) -> None:
    """V1 for graphs: ragged drafts, a first token, a request at the very end of its row of the page table."""
    alone, plain = run(TEXTS, drafts, None)
    padded, target = run(TEXTS, drafts, STRIDE)
    assert padded.choices() == alone.choices()
    assert padded.cu == alone.cu
    torch.testing.assert_close(padded.logits_TV, alone.logits_TV)
    assert torch.isfinite(padded.logits_TV).all(), "poison was read"
    torch.testing.assert_close(target.pool.k[1:], plain.pool.k[1:], equal_nan=True, msg="padding wrote to owned slots")
    assert len(target.seen[0].input_ids) == len(TEXTS) * STRIDE
    for text, at in zip(TEXTS, target.seen[0].positions.view(-1, STRIDE), strict=True):
        assert at.max() < COLUMNS, f"padding of {len(text)} tokens leaves the context"


def test_a_static_plan_names_what_a_plan_of_the_batch_names() -> None:
    """Filled for one batch after another, as between replays; the padding reads row 0."""
    static = StaticPlan(MOST, STRIDE, COLUMNS, torch.device("cpu"))
    for rows, lens in (([1, 2, 3], [9, 0, 20]), ([3, 1], [4, 24]), ([2, 0], [11, 1])):
        static.fill(TABLE, torch.tensor(rows), torch.tensor(lens), max(lens))
        got = static.plan(len(rows))
        want = AttentionPlan.build(TABLE[rows], lens, [STRIDE] * len(rows))
        assert got.lens == want.lens
        assert got.cu_rows == want.cu_rows == got.cu_rows_B1.tolist()
        for b, count in enumerate(lens):
            seen = min(count + STRIDE, COLUMNS)
            assert got.slots(b, seen).tolist() == TABLE[rows[b], :seen].tolist()
        assert got.pages_BW.data_ptr() == static.pages_BW.data_ptr()
        assert got.pages_BW.shape[1] == COLUMNS + STRIDE


def test_metadata_of_a_replay_fills_the_captured_plan_in_place() -> None:
    target = OneLayerTarget(TEXTS)
    target.backend.init_cuda_graph_state(MOST, MOST * STRIDE)
    captured: Any = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=2, req_pool_indices=torch.zeros(2, dtype=torch.int64),
        seq_lens=torch.ones(2, dtype=torch.int64), seq_lens_cpu=torch.ones(2, dtype=torch.int64),
        spec_info=VerifyInput(None, CaptureHiddenMode.FULL),
    )  # fmt: skip
    target.backend.init_forward_metadata_out_graph(captured, in_capture=True)
    replayed = SimpleNamespace(**{**vars(captured), "spec_info": VerifyInput(None)})
    replayed.req_pool_indices, replayed.seq_lens = torch.tensor([3, 0]), torch.tensor([17, 1])
    replayed.seq_lens_cpu = replayed.seq_lens
    target.backend.init_forward_metadata_out_graph(replayed)
    assert captured.spec_info.plan.lens == [17, 1]
    assert captured.spec_info.plan.slots(0, 22).tolist() == TABLE[3, :22].tolist()


PLAIN = row_params("abcd", {"temperature": 0.0})


def trees(seed: int) -> Tree:
    """Random trees of the stride's places, of which some hold no node; the third request, at its row's end, has its root alone."""
    draw = torch.Generator().manual_seed(seed)
    parents, depths = torch.full((MOST, STRIDE), NO_NODE), torch.zeros(MOST, STRIDE, dtype=torch.int64)
    parents[:, 0] = -1
    for b in range(MOST):
        for t in range(1, STRIDE):
            parent = int(torch.randint(-1, t, (1,), generator=draw))
            if b != 2 and parent >= 0 and parents[b, parent] > NO_NODE:
                parents[b, t], depths[b, t] = parent, depths[b, parent] + 1
    tokens = torch.randint(0, VOCAB, (MOST, STRIDE), generator=draw)
    tokens[:, 0] = torch.tensor([text[-1] for text in TEXTS])
    return Tree.build(tokens, parents, depths, STRIDE - 1)


@pytest.mark.parametrize("seed", range(3))
def test_trees_over_static_bits_are_chosen_as_trees_alone(seed: int) -> None:
    """V1 for graphs of trees, one batch after another over the same buffers."""
    target, tree = OneLayerTarget(TEXTS), trees(seed)
    target.backend.tree_widths = frozenset({STRIDE})
    target.backend.init_cuda_graph_state(MOST, MOST * STRIDE)
    verify_tree(target, batch_of(TEXTS), trees(seed + 10), PLAIN, Observer(LookupDrafter(2)), captured=True)
    seen = verify_tree(target, batch_of(TEXTS), tree, PLAIN, Observer(LookupDrafter(2)), captured=True)
    plain = OneLayerTarget(TEXTS)
    alone = verify_tree(plain, batch_of(TEXTS), tree, PLAIN, Observer(LookupDrafter(2)))
    real_N = tree.valid_BT.flatten()
    assert seen.choice_BT[tree.valid_BT].tolist() == alone.choice_BT[tree.valid_BT].tolist()
    torch.testing.assert_close(seen.logits_NV[real_N], alone.logits_NV[real_N])
    assert torch.isfinite(seen.logits_NV[real_N]).all(), "poison was read"


def test_static_bits_are_the_batchs_and_the_padding_reads_nothing() -> None:
    static = StaticPlan(MOST, STRIDE, COLUMNS, torch.device("cpu"), trees=True)
    rows, lens, bits_TW = torch.tensor([2, 0, 0]), torch.tensor([9, 1, 1]), trees(0).bits_BTW.flatten(0, 1)
    static.fill(TABLE, rows, lens, 9, bits_TW[: 3 * STRIDE])
    assert torch.equal(static.bits(3), bits_TW[: 3 * STRIDE])  # type: ignore[arg-type]
    static.fill(TABLE, rows, lens, 9, bits_TW[:STRIDE])
    assert torch.equal(static.bits(3), torch.cat([bits_TW[:STRIDE], torch.zeros_like(bits_TW[: 2 * STRIDE])]))  # type: ignore[arg-type]


def test_chains_in_graphs_of_trees_are_causal() -> None:
    drafts = [[3, 4, 5, 6], [7], [], [1, 2]]
    alone, _ = run(TEXTS, drafts, None)
    target = OneLayerTarget(TEXTS)
    target.backend.tree_widths = frozenset({STRIDE})
    target.backend.init_cuda_graph_state(MOST, MOST * STRIDE)
    seen = verify(target, batch_of(TEXTS), list(range(MOST)), drafts, Observer(LookupDrafter(2)), STRIDE)
    assert seen.choices() == alone.choices()
    static = target.backend.static
    assert static is not None and static.bits_TW is not None
    causal = torch.ones(STRIDE, STRIDE).tril().bool()
    assert all(torch.equal(x, causal) for x in unpack_bits(static.bits_TW, STRIDE).view(MOST, STRIDE, STRIDE))


def test_graphs_of_chains_refuse_trees() -> None:
    static = StaticPlan(MOST, STRIDE, COLUMNS, torch.device("cpu"))
    with pytest.raises(AssertionError, match="cannot verify trees"):
        static.fill(TABLE, torch.tensor([1]), torch.tensor([3]), 3, torch.zeros(STRIDE, 1, dtype=torch.int64))
