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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from longdraft.kernels.dense_attention import dense_attention

SCORES = 1 << 23  # scores a block in torch: 32 MiB in float32
OWN_ROWS = 4096  # rows a block of the chain's own part


@dataclass(frozen=True)
class ChainRows:
    """Which rows attend, prepared once for all steps.

    Attributes:
        row_N: their indices among the packed rows, int64, ascending.
        place_N: their places in their documents.
        spans: neighbouring rows of one document: ``(first, last, row, document)`` are a range of N, the packed row of the
            range's first, and where the document starts.
        documents: ranges of N by document: ``(first, last, document)``.
    """

    row_N: torch.Tensor
    place_N: torch.Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    documents: tuple[tuple[int, int, int], ...]

    @staticmethod
    def build(row_N: torch.Tensor, cu: Sequence[int]) -> "ChainRows":
        """Plan for some rows of packed documents.

        Raises:
            ValueError: rows that do not ascend, or lie outside the documents.
        """
        rows, starts = row_N.cpu(), torch.tensor(cu)
        if len(rows) and (bool((rows[1:] <= rows[:-1]).any()) or int(rows[0]) < cu[0] or int(rows[-1]) >= cu[-1]):
            raise ValueError(f"rows must ascend and lie in {cu[0]} .. {cu[-1] - 1}")
        document_N = torch.searchsorted(starts, rows, right=True) - 1
        start_N = starts[document_N]
        changes = document_N[1:] != document_N[:-1]
        documents = [(a, b, int(start_N[a])) for a, b in _ranges(changes, len(rows))]
        breaks = changes | (rows[1:] != rows[:-1] + 1)
        spans = [(a, b, int(rows[a]), int(start_N[a])) for a, b in _ranges(breaks, len(rows))]
        place_N = (rows - start_N).to(row_N.device)
        return ChainRows(row_N, place_N, tuple(spans), tuple(documents))


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

    @property
    def left(self) -> int | None:
        """Step-0 keys that a row sees before its own; None: all, negative: nor its own."""
        return None if self.window is None else self.window - 1 - self.step

    def prefix(self) -> Iterator[tuple[slice, slice, int | None]]:
        """``(rows, keys, left)``: causal attention aligned at the end, over ``left`` keys before the diagonal (None: all)."""
        left = self.left
        if left is not None and left <= 0:
            return
        for first, last, row, document in self.rows.spans:
            begin = document if left is None else max(document, row - left)
            yield slice(first, last), slice(begin, row + last - first), left

    def blocks(self, heads: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """The prefix in blocks of bounded size: ``(rows, keys, visible_CM)``."""
        device = self.rows.row_N.device
        for at, keys, left in self.prefix():
            top = keys.stop - (at.stop - at.start)  # packed row of the span's first
            rows = max(1, SCORES // (heads * (keys.stop - keys.start)))
            for n in range(at.start, at.stop, rows):
                end = min(n + rows, at.stop)
                here = torch.arange(top + n - at.start, top + end - at.start, device=device)
                begin = keys.start if left is None else max(keys.start, top + n - at.start - left)
                there = torch.arange(begin, top + end - at.start, device=device)
                distance = here[:, None] - there
                visible = distance >= 0 if left is None else (distance >= 0) & (distance <= left)
                yield slice(n, end), slice(begin, top + end - at.start), visible

    def sink_blocks(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Leading keys behind the window's back."""
        if self.window is None or not self.sinks:
            return
        for first, last, document in self.rows.documents:
            place = self.rows.place_N[first:last]
            count = min(self.sinks, int(place[-1]) + 1)
            sink = torch.arange(count, device=place.device)
            behind = place[:, None] + self.step - sink >= self.window
            yield slice(first, last), slice(document, document + count), behind & (sink <= place[:, None])

    def alone(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """``(rows, packed rows)`` in blocks, where of step 0 a row sees its own key only: no kernel for one key a row."""
        if self.left == 0:
            for n in _row_blocks(len(self.rows.row_N)):
                yield n, self.rows.row_N[n]

    def own(self, n: slice, count: int) -> torch.Tensor | None:
        """``[C, S]`` which keys of its own chain a row sees; None: all."""
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
    reach = _Reach(rows, len(own_k), window, sinks, scale)
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
            for n, m, left in reach.prefix():
                out, lse, *state = _flash_forward(q[n], k[m], v[m], left, reach.scale)
                ctx.states.append(state)
                _merge(out_NHD[n], total_NH[n], out, lse)
        else:
            for n, m, visible in reach.blocks(q.shape[1]):
                _merge(out_NHD[n], total_NH[n], *dense_attention(q[n], k[m], v[m], reach.scale, visible))
        for n, m, visible in reach.sink_blocks():
            _merge(out_NHD[n], total_NH[n], *dense_attention(q[n], k[m], v[m], reach.scale, visible))
        for n, row in reach.alone():
            own_k, own_v = (x[row].to(work)[:, :, None] for x in (k, v))
            _merge(out_NHD[n], total_NH[n], *_own_forward(q[n], own_k, own_v, reach.scale, None))
        for n in _row_blocks(len(q) if own else 0):
            own_k, own_v = _own(own, n, work)
            mask = reach.own(n, own_k.shape[2])
            _merge(out_NHD[n], total_NH[n], *_own_forward(q[n], own_k, own_v, reach.scale, mask))
        out = out_NHD.to(q.dtype)
        ctx.reach = reach
        ctx.save_for_backward(out, total_NH, q, k, v, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, total_NH, q, k, v, *own = ctx.saved_tensors
        reach: _Reach = ctx.reach
        dout, work = grads[0].contiguous(), total_NH.dtype
        delta_NH = (dout.to(work) * out.to(work)).sum(-1)
        dq = torch.zeros_like(q, dtype=work)
        dk, dv = torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)
        down = [torch.empty_like(x) for x in own]

        def add(n: slice, m: slice | torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
            for whole, at, part in zip((dq, dk, dv), (n, m, m), parts, strict=True):
                whole[at] += part

        if _has_flash(q):
            for (n, m, left), state in zip(reach.prefix(), ctx.states, strict=True):
                given = dout[n], q[n], k[m], v[m], out[n], total_NH[n]
                add(n, m, _flash_backward(*given, left, reach.scale, *state))
            dense = reach.sink_blocks()
        else:
            dense = (block for part in (reach.blocks(q.shape[1]), reach.sink_blocks()) for block in part)
        for n, m, visible in dense:
            given = dout[n], q[n], k[m], v[m], total_NH[n], delta_NH[n]
            add(n, m, _dense_backward(*given, reach.scale, visible))
        for n, row in reach.alone():
            own_k, own_v = (x[row].to(work)[:, :, None] for x in (k, v))
            dq_n, dk_n, dv_n = _own_backward(dout[n], q[n], own_k, own_v, total_NH[n], delta_NH[n], reach.scale, None)
            add(n, row, (dq_n, dk_n[:, :, 0], dv_n[:, :, 0]))
        for n in _row_blocks(len(q) if own else 0):
            own_k, own_v = _own(own, n, work)
            mask = reach.own(n, own_k.shape[2])
            dq_n, dk_n, dv_n = _own_backward(dout[n], q[n], own_k, own_v, total_NH[n], delta_NH[n], reach.scale, mask)
            dq[n] += dq_n
            for to, part in zip(down, (*dk_n.unbind(2), *dv_n.unbind(2)), strict=True):
                to[n] = part.to(to.dtype)
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *down


def _merge(out_CHD: torch.Tensor, total_CH: torch.Tensor, part_CHD: torch.Tensor, lse_CH: torch.Tensor) -> None:
    """Merge a part over other keys into a running result, in place; a row may have seen nothing so far."""
    new_CH = torch.logaddexp(total_CH, lse_CH)
    safe_CH = torch.where(torch.isneginf(new_CH), 0.0, new_CH)
    out_CHD *= torch.exp(total_CH - safe_CH)[..., None]
    out_CHD += part_CHD.to(out_CHD.dtype) * torch.exp(lse_CH - safe_CH)[..., None]
    total_CH.copy_(new_CH)


def _row_blocks(count: int) -> Iterator[slice]:
    for n in range(0, count, OWN_ROWS):
        yield slice(n, min(n + OWN_ROWS, count))


def _own(own: Sequence[torch.Tensor], n: slice, work: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Own keys and values of some rows, ``[C, K, S, D]`` each."""
    half = len(own) // 2
    keys, values = (torch.stack([x[n] for x in part], 2).to(work) for part in (own[:half], own[half:]))
    return keys, values


def _grouped(x_CHX: torch.Tensor, own_CKSD: torch.Tensor) -> torch.Tensor:
    return x_CHX.unflatten(1, (own_CKSD.shape[1], -1))


def _own_scores(
    q_CHD: torch.Tensor, own_CKSD: torch.Tensor, scale: float, visible_CS: torch.Tensor | None
) -> torch.Tensor:
    """``[C, K, G, S]`` scaled scores in working precision, -inf where a row does not see its own key."""
    score = torch.einsum("ckgd,cksd->ckgs", _grouped(q_CHD.to(own_CKSD.dtype), own_CKSD), own_CKSD) * scale
    return score if visible_CS is None else score.masked_fill(~visible_CS[:, None, None], float("-inf"))


def _own_forward(
    q_CHD: torch.Tensor, k_CKSD: torch.Tensor, v_CKSD: torch.Tensor, scale: float, visible_CS: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out_CHD, lse_CH)`` over keys that are each one row's own; every row sees one at least."""
    score = _own_scores(q_CHD, k_CKSD, scale, visible_CS)
    lse = torch.logsumexp(score, -1)
    out = torch.einsum("ckgs,cksd->ckgd", torch.exp(score - lse[..., None]), v_CKSD)
    return out.flatten(1, 2), lse.flatten(1)


def _own_backward(
    dout_CHD: torch.Tensor,
    q_CHD: torch.Tensor,
    k_CKSD: torch.Tensor,
    v_CKSD: torch.Tensor,
    total_CH: torch.Tensor,
    delta_CH: torch.Tensor,
    scale: float,
    visible_CS: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dq_CHD, dk_CKSD, dv_CKSD)`` of :func:`_own_forward`'s part in the merged softmax."""
    work = total_CH.dtype
    weight = torch.exp(_own_scores(q_CHD, k_CKSD, scale, visible_CS) - _grouped(total_CH[..., None], k_CKSD))
    dout = _grouped(dout_CHD.to(work), k_CKSD)
    dweight = torch.einsum("ckgd,cksd->ckgs", dout, v_CKSD)
    dscore = weight * (dweight - _grouped(delta_CH[..., None], k_CKSD)) * scale
    dq = torch.einsum("ckgs,cksd->ckgd", dscore, k_CKSD).flatten(1, 2)
    dk = torch.einsum("ckgs,ckgd->cksd", dscore, _grouped(q_CHD.to(work), k_CKSD))
    return dq, dk, torch.einsum("ckgs,ckgd->cksd", weight, dout)


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


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int | None, scale: float
) -> tuple[torch.Tensor, ...]:
    """``(out_CHD, lse_CH, seed, offset)`` of FlashAttention, whose causal mask is aligned at the last query and key."""
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, len(q), len(k), 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=None if left is None else 0,
    )  # fmt: skip
    return out[0], lse[0].t(), seed, offset


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total_CH: torch.Tensor,
    left: int | None,
    scale: float,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        x[0]
        for x in torch.ops.aten._flash_attention_backward(
            dout[None], q[None], k[None], v[None], out[None], total_CH.t().contiguous()[None], None, None, len(q), len(k),
            0.0, True, seed, offset, scale=scale, window_size_left=left, window_size_right=None if left is None else 0,
        )
    )  # fmt: skip
