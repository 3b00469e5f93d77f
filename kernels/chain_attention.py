"""Attention of draft chains in training: each row sees the causal prefix of its document and its own chain of drafts.

The attention of EAGLE-3's training-time test. At step k a row t reads keys 0 .. t of step 0, which all rows share, and keys
that steps 1 .. k made from row t alone. No [T, T] and no [T, steps * T] tensor: the prefix is one causal attention, the chain a
few elementwise products, and both merge by log-sum-exp. Queries may be a few rows of the documents (query-sparse).

The backward pass needs no gradient of any log-sum-exp. With the *total* one, ``exp(score - total)`` is the weight that a key has
in the merged softmax, and with the *merged* output ``rowsum(dout * out)`` is the softmax's correction for every key alike; so a
flash backward that is given those two in place of its own part's returns this part's exact share of the gradients.

Legend: N query rows, C rows of a block, M keys of a block, T packed rows, S own keys of a row, H query heads, K key/value heads
(H = K * G), D head size. Document i is rows ``cu[i] .. cu[i + 1]``. Places count from the document's first row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.row_keys import row_blocks, row_keys_backward, row_keys_forward
from longdraft.kernels.span_flash import SpanCall, plan_calls, spans_backward, spans_forward

SCORES = 1 << 23  # scores a block in torch: 32 MiB in float32


@dataclass(frozen=True)
class ChainRows:
    """Which rows attend, prepared once for all steps.

    Attributes:
        row_N: their indices among the packed rows, int64, ascending.
        place_N: their places in their documents.
        last_N: the last packed row of each one's document.
        spans: neighbouring rows of one document: ``(first, last, row, document)`` are a range of N, the packed row of the
            range's first, and where the document starts.
        documents: ranges of N by document: ``(first, last, document, deepest)``, the last the largest place of the range.
        packed: T.
    """

    row_N: torch.Tensor
    place_N: torch.Tensor
    last_N: torch.Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    documents: tuple[tuple[int, int, int, int], ...]
    packed: int
    _calls: dict[int | None, tuple[SpanCall, ...]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def build(row_N: torch.Tensor, cu: Sequence[int]) -> "ChainRows":
        """Plan for some rows of packed documents.

        Raises:
            ValueError: rows that do not ascend, or lie outside the documents.
        """
        rows, offsets = row_N.cpu(), torch.tensor(cu)
        if len(rows) and (bool((rows[1:] <= rows[:-1]).any()) or int(rows[0]) < cu[0] or int(rows[-1]) >= cu[-1]):
            raise ValueError(f"rows must ascend and lie in {cu[0]} .. {cu[-1] - 1}")
        document_N = torch.searchsorted(offsets, rows, right=True) - 1
        start_N, last_N = offsets[document_N], offsets[document_N + 1] - 1
        place_N, changes = rows - start_N, document_N[1:] != document_N[:-1]
        documents = [(a, b, int(start_N[a]), int(place_N[b - 1])) for a, b in _ranges(changes, len(rows))]
        breaks = changes | (rows[1:] != rows[:-1] + 1)
        spans = [(a, b, int(rows[a]), int(start_N[a])) for a, b in _ranges(breaks, len(rows))]
        place_N, last_N = (x.to(row_N.device) for x in (place_N, last_N))
        return ChainRows(row_N, place_N, last_N, tuple(spans), tuple(documents), cu[-1])

    @property
    def deepest(self) -> int:
        """The largest place; -1 without rows."""
        return max((deepest for *_, deepest in self.documents), default=-1)

    def calls(self, left: int | None) -> tuple[SpanCall, ...]:
        """The flash kernel's calls for ``left`` keys before the diagonal (None: all), planned once."""
        if left not in self._calls:
            self._calls[left] = plan_calls(self.spans, left, self.packed, self.row_N.device)
        return self._calls[left]


def _ranges(breaks: torch.Tensor, count: int) -> Iterator[tuple[int, int]]:
    if count:
        yield from pairwise([0, *(breaks.nonzero().flatten() + 1).tolist(), count])


@dataclass(frozen=True)
class _Reach:
    """What a step sees: ``window`` keys by place, the row's own place moved on by the step, and leading ``sinks``."""

    rows: ChainRows
    step: int
    window: int | None
    sinks: int
    scale: float

    @staticmethod
    def build(rows: ChainRows, step: int, window: int | None, sinks: int, scale: float) -> "_Reach":
        """A window that hides nothing from any row is none: short documents share one plan for all steps."""
        hides = window is not None and rows.deepest + step >= window
        return _Reach(rows, step, window if hides else None, sinks, scale)

    @property
    def left(self) -> int | None:
        """Step-0 keys that a row sees before its own; None: all, negative: nor its own."""
        return None if self.window is None else self.window - 1 - self.step

    @property
    def has_prefix(self) -> bool:
        """Whether a row sees step-0 keys before its own, by the window."""
        return self.left is None or self.left > 0

    def calls(self) -> tuple[SpanCall, ...]:
        """The prefix for the flash kernel."""
        return self.rows.calls(self.left) if self.has_prefix else ()

    def blocks(self, heads: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """The prefix in blocks of bounded size, each row in one of them: ``(rows, keys, visible_CM)``."""
        device, left = self.rows.row_N.device, self.left
        for first, last, row, document in self.rows.spans if self.has_prefix else ():
            widest = row + last - first - (document if left is None else max(document, row - left))
            rows = max(1, SCORES // (heads * widest))
            for n in range(first, last, rows):
                end = min(n + rows, last)
                here = torch.arange(row + n - first, row + end - first, device=device)
                begin = document if left is None else max(document, row + n - first - left)
                there = torch.arange(begin, row + end - first, device=device)
                distance = here[:, None] - there
                visible = distance >= 0 if left is None else (distance >= 0) & (distance <= left)
                yield slice(n, end), slice(begin, row + end - first), visible

    def sink_blocks(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Leading keys behind the window's back, of documents that are longer than the window."""
        if self.window is None or not self.sinks:
            return
        for first, last, document, deepest in self.rows.documents:
            if deepest + self.step < self.window:
                continue
            place = self.rows.place_N[first:last]
            count = min(self.sinks, deepest + 1)
            sink = torch.arange(count, device=place.device)
            behind = place[:, None] + self.step - sink >= self.window
            yield slice(first, last), slice(document, document + count), behind & (sink <= place[:, None])

    @property
    def alone(self) -> bool:
        """Whether a row sees its own key of step 0 only: one key a row, no work for an attention kernel."""
        return self.left == 0

    def own(self, n: slice, count: int) -> torch.Tensor | None:
        """``[C, S]`` which keys of its own chain a row sees, behind its own key of step 0 if that is alone; None: all."""
        if self.window is None or count <= self.window:
            return None
        s = torch.arange(1, count + 1, device=self.rows.row_N.device)
        return (self.step - s < self.window) | (self.rows.place_N[n, None] + s < self.sinks)


def chain_attention(
    q_NHD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    own_k: Sequence[torch.Tensor],
    own_v: Sequence[torch.Tensor],
    rows: ChainRows,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
) -> torch.Tensor:
    """One step's attention, differentiable in queries, shared keys and values, and every own key and value.

    Args:
        q_NHD: queries of the rows at step k.
        k_TKD, v_TKD: step-0 keys and values of all packed rows; row t sees those of its document up to its own.
        own_k, own_v: k tensors ``[N, K, D]`` each, what steps 1 .. k made from each row; the last is this step's.
        rows: which rows attend.
        scale: factor of the scores.
        window: keys visible by distance, self included: a query stands at place t + k, a step-0 key at its row's place, an
            own key of step s at t + s. None for all.
        sinks: leading places that a window never hides.

    Returns:
        ``[N, H, D]`` in the queries' dtype. On a GPU in 16 bit by FlashAttention, elsewhere in bounded blocks of torch.
    """
    assert len(own_k) == len(own_v) and len(q_NHD) == len(rows.row_N)
    reach = _Reach.build(rows, len(own_k), window, sinks, scale)
    out_NHD: torch.Tensor = _ChainAttention.apply(reach, q_NHD, k_TKD, v_TKD, *own_k, *own_v)
    return out_NHD


def _has_flash(q_NHD: torch.Tensor) -> bool:
    size = q_NHD.shape[-1]
    return q_NHD.is_cuda and q_NHD.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reach: _Reach, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *own: torch.Tensor
    ) -> torch.Tensor:
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        total_NH = q.new_full(q.shape[:2], float("-inf"), dtype=work)
        out_NHD = torch.zeros_like(q, dtype=work)
        ctx.states = []
        if _has_flash(q):
            for call in reach.calls():
                out_NHD[call.rows], total_NH[call.rows], state = spans_forward(q, k, v, call, reach.left, reach.scale)
                ctx.states.append(state)
        else:
            for n, m, visible in reach.blocks(q.shape[1]):
                out_NHD[n], total_NH[n] = dense_attention(q[n], k[m], v[m], reach.scale, visible)
        for n, m, visible in reach.sink_blocks():
            _merge(out_NHD[n], total_NH[n], *dense_attention(q[n], k[m], v[m], reach.scale, visible))
        for n in row_blocks(len(q), len(own) // 2 + reach.alone, k, work):
            own_k, own_v, seen = _near(reach, n, k, v, own, work)
            _merge(out_NHD[n], total_NH[n], *row_keys_forward(q[n], own_k, own_v, reach.scale, seen))
        out = out_NHD.to(q.dtype)
        ctx.reach = reach
        ctx.save_for_backward(out, total_NH, q, k, v, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, total_NH, q, k, v, *own = ctx.saved_tensors
        reach: _Reach = ctx.reach
        dout, work, scale = grads[0].contiguous(), total_NH.dtype, reach.scale
        delta_NH = (dout.to(work) * out.to(work)).sum(-1)
        dq = torch.zeros_like(q, dtype=work)
        dk, dv = torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)
        down = [torch.empty_like(x) for x in own]

        def add(n: slice, m: slice | torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
            for whole, at, part in zip((dq, dk, dv), (n, m, m), parts, strict=True):
                whole[at] += part

        if _has_flash(q):
            for call, state in zip(reach.calls(), ctx.states, strict=True):
                spans_backward(dout, q, k, v, out, total_NH, call, reach.left, scale, state, (dq, dk, dv))
            dense = reach.sink_blocks()
        else:
            dense = (block for part in (reach.blocks(q.shape[1]), reach.sink_blocks()) for block in part)
        for n, m, visible in dense:
            given = dout[n], q[n], k[m], v[m], total_NH[n], delta_NH[n]
            add(n, m, _dense_backward(*given, scale, visible))
        for n in row_blocks(len(q), len(own) // 2 + reach.alone, k, work):
            own_k, own_v, seen = _near(reach, n, k, v, own, work)
            row = dout[n], q[n], own_k, own_v, total_NH[n], delta_NH[n]
            dq_n, dk_n, dv_n = row_keys_backward(*row, scale, seen)
            if reach.alone:
                add(n, reach.rows.row_N[n], (dq_n, dk_n[:, :, 0], dv_n[:, :, 0]))
                dk_n, dv_n = dk_n[:, :, 1:], dv_n[:, :, 1:]
            else:
                dq[n] += dq_n
            for to, part in zip(down, (*dk_n.unbind(2), *dv_n.unbind(2)), strict=True):
                to[n] = part.to(to.dtype)
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *down


def _near(
    reach: _Reach, n: slice, k: torch.Tensor, v: torch.Tensor, own: Sequence[torch.Tensor], work: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values that are each one row's own, ``[C, K, S, D]``, and which of them are seen, ``[C, S]`` (None: all)."""
    half, visible = len(own) // 2, reach.own(n, len(own) // 2)
    parts = [[x[n] for x in part] for part in (own[:half], own[half:])]
    if reach.alone:
        row = reach.rows.row_N[n]
        parts = [[x[row], *part] for x, part in zip((k, v), parts, strict=True)]
        visible = visible if visible is None else torch.nn.functional.pad(visible, (1, 0), value=True)
    keys, values = (torch.stack(part, 2).to(work) for part in parts)
    return keys, values, visible


def _merge(out_CHD: torch.Tensor, total_CH: torch.Tensor, part_CHD: torch.Tensor, lse_CH: torch.Tensor) -> None:
    """Merge a part over other keys into a running result, in place; a row may have seen nothing so far."""
    new_CH = torch.logaddexp(total_CH, lse_CH)
    safe_CH = torch.where(torch.isneginf(new_CH), 0.0, new_CH)
    out_CHD *= torch.exp(total_CH - safe_CH)[..., None]
    out_CHD += part_CHD.to(out_CHD.dtype) * torch.exp(lse_CH - safe_CH)[..., None]
    total_CH.copy_(new_CH)


def _dense_backward(
    dout_CHD: torch.Tensor,
    q_CHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    total_CH: torch.Tensor,
    delta_CH: torch.Tensor,
    scale: float,
    visible_CM: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one block's queries, keys and values in working precision."""
    work, kv_heads = total_CH.dtype, k_MKD.shape[1]
    q, dout = (x.to(work).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (q_CHD, dout_CHD))  # [K, G, C, D]
    k, v = (x.to(work).transpose(0, 1)[:, None] for x in (k_MKD, v_MKD))  # [K, 1, M, D]
    total, delta = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0)[..., None] for x in (total_CH, delta_CH))
    score = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible_CM, float("-inf"))
    weight = torch.exp(score - total)
    dscore = weight * (dout @ v.transpose(-1, -2) - delta) * scale
    dq = (dscore @ k).permute(2, 0, 1, 3).flatten(1, 2)
    dk, dv = ((x.transpose(-1, -2) @ y).sum(1).transpose(0, 1) for x, y in ((dscore, q), (weight, dout)))
    return dq, dk, dv
