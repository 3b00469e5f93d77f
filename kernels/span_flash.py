"""Causal attention of spans of packed rows over the keys of their documents, in few calls of FlashAttention's varlen kernel.

A span reads the keys from its document's start to its last row, so queries and keys end at the same row, which is how the kernel
aligns its causal mask. Many short documents are one call instead of one each: the calls of a kernel that lasts microseconds cost
more than the kernel. Keys are copied where they do not follow each other already; several spans of one document copy its start
each, so a call takes spans up to a bound of keys, and spans with a short gap become one sequence of queries with dead rows in
the gap, which receive zeros and give none.

The kernel's two entries are functions of this module, which tests replace by torch: the index arithmetic runs on a CPU too.

Legend: N query rows, T packed rows, Q queries and M keys of a call, S sequences of a call, H query heads, K key/value heads,
D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

GAP = 128  # rows between two spans that are cheaper as dead queries than as a second reading of the keys: a tile of the kernel
COPIES = 2  # keys of a call at most, in packed rows

Span = tuple[int, int, int, int]


class Sequences(NamedTuple):
    """What the kernel is told beside tensors: offsets of queries and keys (int32 ``[S + 1]``) and the longest of each."""

    cum_q: torch.Tensor
    cum_k: torch.Tensor
    longest_q: int
    longest_k: int

    def places(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each query's sequence, and its place there."""
        sequence_Q = torch.searchsorted(self.cum_q, torch.arange(queries, device=self.cum_q.device), right=True) - 1
        return sequence_Q, torch.arange(queries, device=self.cum_q.device) - self.cum_q[sequence_Q]


class KernelState(NamedTuple):
    """What the backward pass needs of the forward one: the log-sum-exp's layout, and two random numbers' places.

    The layout is ``[H, Q]`` in CUDA's build of torch 2.11 and ``[S, H, longest]`` in ROCm's (and older ones').
    """

    lse_shape: torch.Size
    random: list[torch.Tensor]


@dataclass(frozen=True)
class SpanCall:
    """One call of the kernel.

    Attributes:
        rows: the range of N that it answers.
        at_Q: where those rows stand among ``queries`` queries, int64; None where there are no dead ones.
        keys: packed rows, one sequence's after another: a range, or int64 ``[M]``.
        sequences: how queries and keys fall into sequences.
    """

    rows: slice
    at_Q: torch.Tensor | None
    queries: int
    keys: slice | torch.Tensor
    sequences: Sequences

    def laid(self, x_NX: torch.Tensor) -> torch.Tensor:
        """The call's rows among its queries, zeros for the dead ones."""
        part = x_NX[self.rows]
        if self.at_Q is None:
            return part
        return part.new_zeros(self.queries, *part.shape[1:]).index_copy_(0, self.at_Q, part)

    def picked(self, x_QX: torch.Tensor) -> torch.Tensor:
        """The call's rows from its queries."""
        return x_QX if self.at_Q is None else x_QX[self.at_Q]


class _Sequence(NamedTuple):
    spans: list[Span]
    row: int  # packed row of the first query
    end: int  # behind the last query, and behind the last key
    begin: int  # first key


def plan_calls(spans: Sequence[Span], left: int | None, packed: int, device: torch.device) -> tuple[SpanCall, ...]:
    """Put spans into calls.

    Args:
        spans: ``(first, last, row, document)``, ascending and neighbours in N: a range of N, the packed row of its first, and
            where the document starts.
        left: keys before a query's own that it sees; None: all of the document's.
        packed: T, which bounds the keys of a call.
        device: of the tensors.
    """
    calls, some, keys = list[SpanCall](), list[_Sequence](), 0
    for sequence in _sequences(spans, left):
        count = sequence.end - sequence.begin
        if some and keys + count > COPIES * packed:
            calls.append(_call(some, device))
            some, keys = [], 0
        some.append(sequence)
        keys += count
    return (*calls, _call(some, device)) if some else ()


def _sequences(spans: Sequence[Span], left: int | None) -> Iterator[_Sequence]:
    joined = list[Span]()
    for span in spans:
        if joined:
            first, last, row, document = joined[-1]
            if span[3] != document or span[2] - (row + last - first) > GAP:
                yield _sequence(joined, left)
                joined = []
        joined.append(span)
    if joined:
        yield _sequence(joined, left)


def _sequence(spans: list[Span], left: int | None) -> _Sequence:
    _, _, row, document = spans[0]
    first, last, final, _ = spans[-1]
    begin = document if left is None else max(document, row - left)
    return _Sequence(spans, row, final + last - first, begin)


def _call(some: list[_Sequence], device: torch.device) -> SpanCall:
    queries, keys = [s.end - s.row for s in some], [s.end - s.begin for s in some]
    cum_q, cum_k = (torch.tensor([0, *x]).cumsum(0) for x in (queries, keys))
    spans = [span for s in some for span in s.spans]
    rows, at_Q = slice(spans[0][0], spans[-1][1]), None
    if (total := int(cum_q[-1])) != rows.stop - rows.start:
        # A span's first row stands behind the sequences before its own, and behind its own sequence's earlier rows.
        starts = [q + span[2] - s.row for q, s in zip(cum_q.tolist(), some, strict=False) for span in s.spans]
        at_Q = _runs(starts, [last - first for first, last, *_ in spans]).to(device)
    begins = [s.begin for s in some]
    follows = all(s.end == begin for s, begin in zip(some, begins[1:], strict=False))
    where = slice(begins[0], some[-1].end) if follows else _runs(begins, keys).to(device)
    cum = [x.to(device, torch.int32) for x in (cum_q, cum_k)]
    return SpanCall(rows, at_Q, total, where, Sequences(cum[0], cum[1], max(queries), max(keys)))


def _runs(starts: list[int], lengths: list[int]) -> torch.Tensor:
    """Runs of ascending numbers behind each other, int64."""
    length = torch.tensor(lengths)
    before = length.cumsum(0) - length
    return torch.arange(int(length.sum())) + torch.repeat_interleave(torch.tensor(starts) - before, length)


def spans_forward(
    q_NHD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, call: SpanCall, left: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, KernelState]:
    """``(out_NHD, lse_NH, state)`` of the call's rows; the state is the backward pass's."""
    q, k, v = call.laid(q_NHD), k_TKD[call.keys], v_TKD[call.keys]
    out, lse, *random = flash_varlen_forward(q, k, v, call.sequences, left, scale)
    state = KernelState(lse.shape, random)
    if lse.dim() == 3:
        at_Q = call.sequences.places(len(q))
        return call.picked(out), call.picked(lse[at_Q[0], :, at_Q[1]]), state
    return call.picked(out), call.picked(lse.t()), state


def spans_backward(
    dout_NHD: torch.Tensor,
    q_NHD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    out_NHD: torch.Tensor,
    total_NH: torch.Tensor,
    call: SpanCall,
    left: int | None,
    scale: float,
    state: KernelState,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Add the call's share of the gradients to those of all queries, keys and values.

    Args:
        out_NHD, total_NH: merged over all parts of the softmax, not this part's alone.
        grads: ``(dq_NHD, dk_TKD, dv_TKD)`` in working precision, changed in place.
    """
    dout, q, out, total = (call.laid(x) for x in (dout_NHD, q_NHD, out_NHD, total_NH))
    if len(state.lse_shape) == 3:
        lse = total.new_zeros(state.lse_shape)
        at_Q = call.sequences.places(len(q))
        lse[at_Q[0], :, at_Q[1]] = total
    else:
        lse = total.t().contiguous()
    k, v = k_TKD[call.keys], v_TKD[call.keys]
    parts = flash_varlen_backward(dout, q, k, v, out, lse, call.sequences, left, scale, state.random)
    dq, dk, dv = (part.to(whole.dtype) for part, whole in zip(parts, grads, strict=True))
    grads[0][call.rows] += call.picked(dq)
    for whole, part in ((grads[1], dk), (grads[2], dv)):
        if isinstance(call.keys, slice):
            whole[call.keys] += part
        else:
            whole.index_add_(0, call.keys, part)  # spans of one document share keys


def flash_varlen_forward(
    q_QHD: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor, sequences: Sequences, left: int | None, scale: float
) -> tuple[torch.Tensor, ...]:
    """``(out_QHD, lse, seed, offset)`` of FlashAttention, causal and aligned at each sequence's last query and key."""
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q_QHD, k_MKD, v_MKD, *sequences, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=None if left is None else 0,
    )  # fmt: skip
    return out, lse, seed, offset


def flash_varlen_backward(
    dout_QHD: torch.Tensor,
    q_QHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    out_QHD: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    left: int | None,
    scale: float,
    random: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """``(dq_QHD, dk_MKD, dv_MKD)`` of FlashAttention; the log-sum-exp has its forward pass's layout."""
    grads: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_backward(
        dout_QHD, q_QHD, k_MKD, v_MKD, out_QHD, lse, *sequences, 0.0, True, *random,
        scale=scale, window_size_left=left, window_size_right=None if left is None else 0,
    )  # fmt: skip
    return grads
