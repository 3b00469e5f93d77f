"""Sampling parameters of verification rows, and the choice of a token from processed logits.

Legend: N rows, V vocabulary; B requests, M nodes of one depth of a tree, D the draft's vocabulary.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longdraft.kernels.gumbel import gumbel_argmax, gumbel_noise
from longdraft.kernels.transfer import to_device

CUT = 2.0  # nats
AT_ONCE = (
    256  # rows that are sampled together: some 60 bytes for each token of the vocabulary and row, 2 GB of 128K tokens
)


def seed_of(req: Any) -> int:
    """The request's sampling seed as a signed 64-bit integer; without one, a hash of its random id (equal on all ranks)."""
    seed = req.sampling_params.sampling_seed
    if seed is None:
        return int.from_bytes(hashlib.blake2b(req.rid.encode(), digest_size=8).digest(), "little", signed=True)
    return (int(seed) + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class RowParams:
    """One entry a row: temperature, top-k, top-p, min-p, seed; ``greedy`` when no row samples."""

    temperature_N1: torch.Tensor
    top_k_N1: torch.Tensor
    top_p_N1: torch.Tensor
    min_p_N1: torch.Tensor
    seed_N: torch.Tensor
    greedy_N: torch.Tensor
    greedy: bool
    filtered: bool

    @staticmethod
    def build(reqs: list[Any], widths: list[int], device: torch.device) -> "RowParams":
        """Parameters of ``widths[i]`` consecutive rows of each request."""
        params = [r.sampling_params for r, width in zip(reqs, widths, strict=True) for _ in range(width)]
        seeds = [s for r, width in zip(reqs, widths, strict=True) for s in [seed_of(r)] * width]

        def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return to_device(values, dtype, device)[:, None]

        return RowParams(
            column([p.temperature for p in params], torch.float32),
            column([p.top_k for p in params], torch.int64),
            # Rounded sums of probabilities pass 1, so 1 must cut nothing: a row's choice cannot hang on its batch's filters.
            column([p.top_p if p.top_p < 1.0 else math.inf for p in params], torch.float32),
            column([p.min_p for p in params], torch.float32),
            to_device(seeds, torch.int64, device),
            to_device([p.top_k <= 1 for p in params], torch.bool, device),
            all(p.top_k <= 1 for p in params),
            any(p.top_k > 1 and (p.top_k < (1 << 30) or p.top_p != 1.0 or p.min_p > 0) for p in params),
        )

    def repeat(self, count: int) -> "RowParams":
        """``count`` rows in place of each one, as the places of a tree; made on the device."""
        if count == 1:
            return self
        more = partial(torch.repeat_interleave, repeats=count, dim=0)
        return RowParams(
            more(self.temperature_N1),
            more(self.top_k_N1),
            more(self.top_p_N1),
            more(self.min_p_N1),
            more(self.seed_N),
            more(self.greedy_N),
            self.greedy,
            self.filtered,
        )

    def scores(
        self, logits_BMD: torch.Tensor, position_B: torch.Tensor, id_D: torch.Tensor | None = None
    ) -> torch.Tensor:
        """How likely the target's choice behind each node is to be each token, as far as a draft knows: float32 logarithms.

        The score of :mod:`longdraft.draft_models.draft_tree`: ``log q`` for greedy rows, ``log_softmax(log q + G)`` for the
        others, q being the draft's distribution at the request's temperature, and G the noise that the target will choose
        with. Nodes of one depth share a position, and so their noise.

        What top-k, top-p and min-p leave out of the draft's distribution is not taken out, but :data:`CUT` less likely: the
        target cuts its own distribution, which a draft only knows about (bench/tree_scores.py compares).

        Args:
            logits_BMD: the draft's, for the nodes of one depth; one row of these parameters a request.
            position_B: the nodes' position.
            id_D: int64 target ids of the draft's vocabulary; None where it is the target's.
        """
        plain_BMD = torch.log_softmax(logits_BMD.float(), -1)
        if self.greedy:
            return plain_BMD
        batch, nodes, size = logits_BMD.shape
        rows = self.repeat(nodes)
        log_ND = torch.log_softmax(logits_BMD.float().flatten(0, 1) / rows.temperature_N1, -1)
        if self.filtered:
            log_ND = torch.where(rows._filter(log_ND.exp()) > 0, log_ND, log_ND - CUT)
        if id_D is None:
            id_D = torch.arange(size, device=logits_BMD.device)
        noise_BD = gumbel_noise(self.seed_N, position_B, id_D).float()
        noisy_BMD = log_ND.view(batch, nodes, size) + noise_BD[:, None]
        return torch.where(self.greedy_N[:, None, None], plain_BMD, torch.log_softmax(noisy_BMD, -1))

    def first(self, count: int, filtered: bool) -> "RowParams":
        """Views of the first rows, for code that has to run the same steps whatever the rows hold (a CUDA graph)."""
        return RowParams(
            self.temperature_N1[:count],
            self.top_k_N1[:count],
            self.top_p_N1[:count],
            self.min_p_N1[:count],
            self.seed_N[:count],
            self.greedy_N[:count],
            False,
            filtered,
        )

    def __call__(self, logits_NV: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        """:meth:`choose`."""
        return self.choose(logits_NV, position_N)

    def choose(self, logits_NV: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        """The target's (or the draft's) choice of each row, int64 ``[N]``.

        Greedy rows take the argmax; the others ``argmax(log p + G(seed, position))`` over what temperature, top-k, top-p
        and min-p leave. ``position_N`` is the position of the row's input token. Many rows are sampled in parts, so that a wide
        verification needs no more memory than a narrow one beside its logits.
        """
        parts = 1 if self.greedy else -(-len(logits_NV) // AT_ONCE)
        if parts <= 1:
            return self._choose(logits_NV, position_N)
        rows = zip(self._split(parts), logits_NV.tensor_split(parts), position_N.tensor_split(parts), strict=True)
        return torch.cat([own._choose(*given) for own, *given in rows])

    def _split(self, parts: int) -> list["RowParams"]:
        columns = self.temperature_N1, self.top_k_N1, self.top_p_N1, self.min_p_N1, self.seed_N, self.greedy_N
        t, k, p, m, s, g = (column.tensor_split(parts) for column in columns)
        return [RowParams(t[i], k[i], p[i], m[i], s[i], g[i], self.greedy, self.filtered) for i in range(parts)]

    def _choose(self, logits_NV: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        best_N = logits_NV.argmax(-1)
        if self.greedy:
            return best_N
        prob_NV = torch.softmax(logits_NV / self.temperature_N1, -1)
        if self.filtered:
            prob_NV = self._filter(prob_NV)
        sampled_N = gumbel_argmax(prob_NV.to(torch.float64).log_(), self.seed_N, position_N)
        return torch.where(self.greedy_N, best_N, sampled_N)

    def _filter(self, prob_NV: torch.Tensor) -> torch.Tensor:
        """Zero what top-k, top-p and min-p leave out. Each looks at the full distribution, as SGLang's sampler does.

        Tokens of equal probability rank by their id, whatever the batch's shape makes of an unstable sort.
        """
        sorted_NV, index_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
        before_NV = sorted_NV.cumsum(-1) - sorted_NV
        rank_V = torch.arange(prob_NV.shape[1], device=prob_NV.device)
        out_NV = (
            (rank_V >= self.top_k_N1) | (before_NV > self.top_p_N1) | (sorted_NV < sorted_NV[:, :1] * self.min_p_N1)
        )
        return torch.zeros_like(prob_NV).scatter_(1, index_NV, sorted_NV.masked_fill(out_NV, 0.0))
