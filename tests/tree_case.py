"""Random new tokens under random masks, for the tree part alone, and what float64 says of them.

Legend: T query rows, N keys, W words, H query heads, K key/value heads, D head size.
"""

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from attention_case import ancestor_mask, bits_of, dense_reference, random_parents

from longdraft.kernels.plan import AttentionPlan

TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (4e-3, 3e-3)}


@dataclass
class TreeCase:
    """Queries, keys and values of a batch; ``masks[b]`` is what request b's rows read of its keys ``cu_keys[b]`` and on."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: AttentionPlan
    cu_keys: list[int]
    masks: list[torch.Tensor]
    scale: float

    @property
    def bits(self) -> torch.Tensor:
        return bits_of(self.masks)

    @property
    def cu_keys_B1(self) -> torch.Tensor:
        return torch.tensor(self.cu_keys, dtype=torch.int32, device=self.q.device)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output and natural log-sum-exp, on the CPU; rows never touch what they may not read."""
        parts = []
        for b, (first, last) in enumerate(pairwise(self.cu_keys)):
            q, k, v = self.q[self.plan.rows_of(b)].cpu(), self.k[first:last].cpu(), self.v[first:last].cpu()
            parts.append(dense_reference(q, k, v, self.scale, self.masks[b].cpu()))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    """Output and log-sum-exp against float64, in what the queries' dtype can hold; NaN must stand where NaN is wanted."""
    rtol, atol = TOLERANCE[dtype]
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(got[1].cpu().double(), want[1], rtol=rtol / 10, atol=atol / 2, equal_nan=True)


def make_tree_case(
    rows: list[int],
    *,
    keys: list[int] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    masks: str = "trees",
    device: str = "cpu",
) -> TreeCase:
    """A batch under ``trees`` (random ones), ``chains`` or ``any`` masks: each bit by chance, some rows without any."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = keys or rows
    made = []
    for n, m in zip(rows, counts, strict=True):
        if masks == "any":
            mask = torch.rand(n, m, generator=generator) < 0.4
            mask[torch.rand(n, generator=generator) < 0.2] = False
        else:
            parents = random_parents(n, rng) if masks == "trees" else [i - 1 for i in range(n)]
            mask = ancestor_mask(parents[:n])
        made.append(mask.to(device))
    shapes = (sum(rows), heads), (sum(counts), kv_heads), (sum(counts), kv_heads)
    q, k, v = (torch.randn(*shape, size, generator=generator).to(device, dtype) for shape in shapes)
    plan = AttentionPlan.build(torch.zeros(len(rows), 1, dtype=torch.int32, device=device), [0] * len(rows), rows)
    return TreeCase(q, k, v, plan, list(accumulate(counts, initial=0)), made, size**-0.5)


def other_part(case: TreeCase, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A part over other keys; every third row of it is empty and holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(case.q.shape, generator=generator).to(case.q.device, case.q.dtype)
    lse = 2 * torch.randn(case.q.shape[:2], generator=generator).to(case.q.device)
    out[::3], lse[::3] = float("nan"), float("-inf")
    return out, lse


def merged_reference(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts merged in float64 on the CPU: the definition, row by row and head by head, over the parts that are not empty."""
    outs, lses = ([x.cpu().double() for x in column] for column in zip(*parts, strict=True))
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], float("-inf"))
    for t, h in torch.cartesian_prod(torch.arange(lse.shape[0]), torch.arange(lse.shape[1])).tolist():
        full = [i for i in range(len(parts)) if lses[i][t, h] != float("-inf")]
        if full:
            weights = torch.stack([lses[i][t, h] for i in full])
            lse[t, h] = torch.logsumexp(weights, 0)
            out[t, h] = (torch.softmax(weights, 0)[:, None] * torch.stack([outs[i][t, h] for i in full])).sum(0)
    return out, lse
