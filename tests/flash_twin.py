"""FlashAttention's varlen entries in torch, for tests of what is built around them on a CPU: ``FlashTwin(padded).install(...)``.

Legend: Q queries and M keys of a call, S sequences, L queries and J keys of one sequence, H query heads, K key/value heads,
D head size.
"""

from collections.abc import Iterator

import pytest
import torch

from longdraft.kernels import chain_attention, span_flash
from longdraft.kernels.span_flash import Sequences


class FlashTwin:
    """One softmax a query, sequence by sequence, with the log-sum-exp in one of the kernel's two layouts.

    Attributes:
        padded: ``[S, H, longest]`` instead of ``[H, Q]``.
        calls: what each forward call was given: queries, keys, sequences.
    """

    def __init__(self, padded: bool) -> None:
        self.padded, self.calls = padded, list[tuple[int, int, int]]()

    def install(self, patch: pytest.MonkeyPatch) -> "FlashTwin":
        patch.setattr(span_flash, "flash_varlen_forward", self.forward)
        patch.setattr(span_flash, "flash_varlen_backward", self.backward)
        patch.setattr(chain_attention, "_has_flash", lambda _: True)
        return self

    def _each(self, sequences: Sequences, left: int | None) -> Iterator[tuple[int, slice, slice, torch.Tensor]]:
        for cum in (sequences.cum_q, sequences.cum_k):
            assert cum.dtype == torch.int32 and cum.is_contiguous()
        assert left != 0, "a window of one key reads past its bounds on a GPU"
        cum_q, cum_k = sequences.cum_q.tolist(), sequences.cum_k.tolist()
        for s in range(len(cum_q) - 1):
            q, k = slice(cum_q[s], cum_q[s + 1]), slice(cum_k[s], cum_k[s + 1])
            queries, keys = q.stop - q.start, k.stop - k.start
            assert 0 < queries <= sequences.longest_q and queries <= keys <= sequences.longest_k
            distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
            yield s, q, k, (distance >= 0) & (distance <= (keys if left is None else left))

    def _score(self, q_LHD: torch.Tensor, k_JKD: torch.Tensor, seen_LJ: torch.Tensor, scale: float) -> torch.Tensor:
        k_JHD = k_JKD.repeat_interleave(q_LHD.shape[1] // k_JKD.shape[1], 1)
        return (torch.einsum("lhd,jhd->hlj", q_LHD, k_JHD) * scale).masked_fill(~seen_LJ, float("-inf"))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, left: int | None, scale: float
    ) -> tuple[torch.Tensor, ...]:
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        self.calls.append((len(q), len(k), len(sequences.cum_q) - 1))
        out = torch.full_like(q, float("nan"))
        shape = (len(sequences.cum_q) - 1, heads, sequences.longest_q) if self.padded else (heads, len(q))
        lse = q.new_full(shape, float("nan"))
        for s, at, there, seen in self._each(sequences, left):
            score = self._score(q[at], k[there], seen, scale)
            out[at] = torch.einsum("hlj,jhd->lhd", torch.softmax(score, -1), v[there].repeat_interleave(group, 1))
            part = torch.logsumexp(score, -1)
            if self.padded:
                lse[s, :, : part.shape[1]] = part
            else:
                lse[:, at] = part
        return out, lse, torch.zeros(2), torch.zeros(0)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sequences: Sequences,
        left: int | None,
        scale: float,
        random: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        assert len(random) == 2 and lse.is_contiguous()
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        assert lse.shape == ((len(sequences.cum_q) - 1, heads, sequences.longest_q) if self.padded else (heads, len(q)))
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
        for s, at, there, seen in self._each(sequences, left):
            total = lse[s, :, : at.stop - at.start] if self.padded else lse[:, at]
            weight = torch.exp(self._score(q[at], k[there], seen, scale) - total[..., None])
            wide_k, wide_v = (x[there].repeat_interleave(group, 1) for x in (k, v))
            correction = (dout[at] * out[at]).sum(-1).t()[..., None]
            dscore = weight * (torch.einsum("lhd,jhd->hlj", dout[at], wide_v) - correction) * scale
            dq[at] = torch.einsum("hlj,jhd->lhd", dscore, wide_k)
            for to, x, y in ((dk, dscore, q), (dv, weight, dout)):
                to[there] = torch.einsum("hlj,lhd->jhd", x, y[at]).unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv
