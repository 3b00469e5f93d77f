"""Plans of varlen calls: how spans fall into sequences and calls, and that their number follows tokens, not documents."""

import pytest
import torch
from flash_twin import FlashTwin

from longdraft.kernels import row_keys, span_flash
from longdraft.kernels.chain_attention import ChainRows, chain_attention
from longdraft.kernels.row_keys import row_blocks
from longdraft.kernels.span_flash import SpanCall, plan_calls

CPU = torch.device("cpu")


def plan(rows: list[int], cu: list[int], left: int | None = None) -> tuple[SpanCall, ...]:
    return plan_calls(ChainRows.build(torch.tensor(rows), cu).spans, left, cu[-1], CPU)


def shape(call: SpanCall) -> tuple[list[int], list[int]]:
    return call.sequences.cum_q.tolist(), call.sequences.cum_k.tolist()


def test_whole_documents_are_one_call_that_copies_nothing() -> None:
    (call,) = plan(list(range(24)), [0, 9, 11, 24])
    assert call.rows == slice(0, 24) and call.at_Q is None and call.keys == slice(0, 24)
    assert shape(call) == ([0, 9, 11, 24], [0, 9, 11, 24])
    assert call.sequences[2:] == (13, 13)


def test_documents_without_their_last_rows_copy_the_keys_that_are_read() -> None:
    (call,) = plan([0, 1, 2, 4, 5], [0, 4, 7])
    assert isinstance(call.keys, torch.Tensor) and call.keys.tolist() == [0, 1, 2, 4, 5]
    assert call.at_Q is None and shape(call) == ([0, 3, 5], [0, 3, 5])


def test_a_short_gap_holds_dead_queries_and_a_long_one_reads_the_document_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_flash, "GAP", 3)
    monkeypatch.setattr(span_flash, "COPIES", 3)
    (call,) = plan([5, 6, 10, 15], [2, 20])
    assert shape(call) == ([0, 6, 7], [0, 9, 23])
    assert call.queries == 7 and call.at_Q is not None and call.at_Q.tolist() == [0, 1, 5, 6]
    assert isinstance(call.keys, torch.Tensor) and call.keys.tolist() == [*range(2, 11), *range(2, 16)]
    rows = torch.tensor([[1.0], [2], [3], [4]])
    assert call.laid(rows).flatten().tolist() == [1, 2, 0, 0, 0, 3, 4]
    assert torch.equal(call.picked(call.laid(rows)), rows)


def test_a_window_leaves_out_keys_before_it() -> None:
    (call,) = plan([9, 10, 31], [0, 20, 40], left=4)
    assert isinstance(call.keys, torch.Tensor) and call.keys.tolist() == [*range(5, 11), *range(27, 32)]


def test_copied_keys_are_bounded_by_the_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread spans of one document, each with nearly all of it as its keys."""
    monkeypatch.setattr(span_flash, "GAP", 1)
    rows = list(range(500, 1000, 10))
    calls = plan(rows, [0, 1000])
    assert [row for call in calls for row in rows[call.rows]] == rows
    assert all(call.sequences.cum_k[-1] <= span_flash.COPIES * 1000 for call in calls)
    assert len(calls) <= sum(row + 1 for row in rows) // 1000


def test_many_documents_are_one_call_a_step_and_the_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many launches for three hundred short documents as for one long document."""
    twin = FlashTwin(padded=False).install(monkeypatch)
    cu = [6 * i for i in range(301)]
    rows = torch.tensor([row for row in range(1800) if row % 6 != 5])
    chain = ChainRows.build(rows, cu)
    q, k, v = torch.randn(1500, 2, 4), torch.randn(1800, 1, 4), torch.randn(1800, 1, 4)
    own = torch.randn(1500, 1, 4)
    for step in range(3):
        for window in (None, 512):
            chain_attention(q, k, v, [own] * step, [own] * step, chain, 1.0, window, 4)
    assert twin.calls == [(1500, 1500, 300)] * 6
    assert list(chain._calls) == [None]


def test_rows_with_own_keys_come_in_blocks_of_bounded_bytes() -> None:
    like = torch.empty(1, 8, 128)
    blocks = list(row_blocks(32768, 7, like, torch.float32))
    assert [n.start for n in blocks[1:]] == [n.stop for n in blocks[:-1]] and blocks[-1].stop == 32768
    assert all((n.stop - n.start) * 7 * 8 * 128 * 4 <= row_keys.BLOCK for n in blocks)
    smol = torch.empty(1, 3, 64)
    assert len(list(row_blocks(65536, 4, smol, torch.float32))) <= 2
    assert not list(row_blocks(100, 0, like, torch.float32))
