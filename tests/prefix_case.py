"""Random page lists over a poisoned cache, for the prefix part alone, and what float64 says of them.

Legend: T query rows (R of one request), N keys, S cache slots, H query heads, K key/value heads, D head size.
"""

import random
from dataclasses import dataclass

import torch

from longdraft.kernels.plan import AttentionPlan

TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (4e-3, 3e-3)}


@dataclass
class PrefixCase:
    """Queries, a cache and a plan over it; ``slots[b]`` are request b's. All else in the cache is NaN or infinite."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: AttentionPlan
    slots: list[list[int]]
    scale: float
    kv_scales: tuple[float, float]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output and natural log-sum-exp, moved to the CPU."""
        outs, lses = [], []
        for b, slots in enumerate(self.slots):
            q_RHD = self.q[self.plan.rows_of(b)].double()
            group = q_RHD.shape[1] // self.k.shape[1]
            k_NHD, v_NHD = (x[slots].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            score_RHN = torch.einsum("rhd,nhd->rhn", q_RHD, k_NHD) * self.scale * self.kv_scales[0]
            outs.append(torch.einsum("rhn,nhd->rhd", score_RHN.softmax(-1), v_NHD) * self.kv_scales[1])
            lses.append(score_RHN.logsumexp(-1))
        return torch.cat(outs).cpu(), torch.cat(lses).cpu()

    def check(self, out_THD: torch.Tensor, lse_TH: torch.Tensor, looser: float = 1.0) -> None:
        """Both results against :meth:`expected`, in what the queries' dtype can hold."""
        want_out, want_lse = self.expected()
        assert out_THD.dtype == self.q.dtype and lse_TH.dtype == torch.float32
        rtol, atol = (looser * x for x in TOLERANCE[self.q.dtype])
        biggest = max(self.kv_scales[1], 1.0)
        torch.testing.assert_close(out_THD.cpu().double(), want_out, rtol=rtol, atol=atol * biggest)
        torch.testing.assert_close(lse_TH.cpu().double(), want_lse, rtol=rtol / 10, atol=atol / 2)


def make_prefix_case(
    lens: list[int],
    rows: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    page_size: int = 1,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    slots: int = 0,
    device: str = "cpu",
) -> PrefixCase:
    """A batch whose pages lie all over the cache, at least ``slots`` large; columns behind a list name a poisoned page."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lens]
    order = list(range(sum(counts) + max(3, slots // page_size)))
    rng.shuffle(order)
    poison = torch.tensor([float("nan"), float("inf"), float("-inf"), float("nan")], dtype=dtype)
    if cache is not None:
        poison[1:3] = float("nan")  # e4m3 has no infinity
    total = len(order) * page_size
    k, v = (poison[torch.randint(4, (total, kv_heads, size), generator=generator)] for _ in "kv")
    pages = torch.full((len(lens), max(counts, default=0) + 2), order[-1], dtype=torch.int32)
    mine, used = list[list[int]](), 0
    for b, (n, count) in enumerate(zip(lens, counts, strict=True)):
        listed = order[used : used + count]
        used += count
        pages[b, :count] = torch.tensor(listed, dtype=torch.int32)
        mine.append([p * page_size + i for p in listed for i in range(page_size)][:n])
        for x in (k, v):
            x[mine[b]] = torch.randn(n, kv_heads, size, generator=generator).to(dtype)
    q = torch.randn(sum(rows), heads, size, generator=generator).to(dtype)
    q, k, v = q.to(device), k.to(cache or dtype).to(device), v.to(cache or dtype).to(device)
    plan = AttentionPlan.build(pages.to(device), lens, rows, page_size)
    return PrefixCase(q, k, v, plan, mine, size**-0.5, kv_scales)
