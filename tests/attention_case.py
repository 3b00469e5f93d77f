"""Random batches of page lists and trees, and the float64 dense attention that every kernel is held to.

Legend: B requests, T query rows, N keys, S cache slots, H query heads, K key/value heads, D head size.
"""

import random
from dataclasses import dataclass

import torch

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree_bits import words


def dense_reference(
    q_THD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, scale: float, visible_TN: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook masked attention in float64, row by row over the visible keys only."""
    rows, heads, _ = q_THD.shape
    group = heads // k_NKD.shape[1]
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64)
    for t in range(rows):
        keep = slice(None) if visible_TN is None else visible_TN[t]
        keys, values = k_NKD[keep].double(), v_NKD[keep].double()
        if not len(keys):
            continue
        for h in range(heads):
            scores = keys[:, h // group] @ q_THD[t, h].double() * scale
            lse[t, h] = torch.logsumexp(scores, 0)
            out[t, h] = torch.softmax(scores, 0) @ values[:, h // group]
    return out, lse


def ancestor_mask(parents: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Visibility inside a tree, ``[n, n]`` bool: a node sees itself and its ancestors; parents come before children."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask.to(device)


def bits_of(masks: list[torch.Tensor]) -> torch.Tensor:
    """Masks of a batch, one bool matrix a request, as the int64 words that kernels take, bit by bit."""
    bits = torch.zeros(sum(map(len, masks)), words(max((m.shape[1] for m in masks), default=0)), dtype=torch.int64)
    first = 0
    for mask in masks:
        for row, key in mask.nonzero().tolist():
            bits[first + row, key // 64] |= torch.tensor(1) << key % 64
        first += len(mask)
    return bits.to(masks[0].device)


@dataclass
class Case:
    """New tokens, a cache whose unlisted slots hold NaN, and a plan over it; ``slots[b]`` are request b's prefix slots."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    plan: AttentionPlan
    masks: list[torch.Tensor]
    slots: list[list[int]]
    scale: float

    @property
    def bits(self) -> torch.Tensor:
        return bits_of(self.masks)

    def expected(self, causal: bool = False) -> torch.Tensor:
        """Hybrid attention of every request by the reference, float64."""
        outs = []
        for b, slots in enumerate(self.slots):
            rows = self.plan.rows_of(b)
            n = rows.stop - rows.start
            tree = torch.ones(n, n, dtype=torch.bool).tril() if causal else self.masks[b]
            keys, values = (
                torch.cat([cache[slots], new[rows]]) for cache, new in ((self.k_cache, self.k), (self.v_cache, self.v))
            )
            visible = torch.cat([torch.ones(n, len(slots), dtype=torch.bool), tree], 1)
            outs.append(dense_reference(self.q[rows], keys, values, self.scale, visible)[0])
        return torch.cat(outs)


def random_parents(n: int, rng: random.Random) -> list[int]:
    """A random tree in parent order; a chain, a star and everything between."""
    return [-1] + [rng.randrange(node) for node in range(1, n)]


def make_case(
    lens: list[int],
    rows: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scattered: bool = True,
) -> Case:
    """A batch; ``scattered`` draws the page lists from all over the cache, else each is one consecutive run."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    count = sum(n + m for n, m in zip(lens, rows, strict=True))
    cache = count + 7
    order = list(range(cache))
    if scattered:
        rng.shuffle(order)
    width = max((n + m for n, m in zip(lens, rows, strict=True)), default=0)
    pages, slots, used = torch.full((len(lens), width), cache - 1, dtype=torch.int32), [], 0
    k_cache, v_cache = (torch.full((cache, kv_heads, size), float("nan"), dtype=dtype) for _ in range(2))
    k, v = normal(sum(rows), kv_heads, size), normal(sum(rows), kv_heads, size)
    start = 0
    for b, (n, m) in enumerate(zip(lens, rows, strict=True)):
        mine = order[used : used + n + m]
        used += n + m
        pages[b, : n + m] = torch.tensor(mine, dtype=torch.int32)
        k_cache[mine[:n]], v_cache[mine[:n]] = normal(n, kv_heads, size), normal(n, kv_heads, size)
        k_cache[mine[n:]], v_cache[mine[n:]] = k[start : start + m], v[start : start + m]
        start += m
        slots.append(mine[:n])
    masks = [ancestor_mask(random_parents(n, rng)) if n else torch.zeros(0, 0, dtype=torch.bool) for n in rows]
    plan = AttentionPlan.build(pages, lens, rows)
    return Case(normal(sum(rows), heads, size), k, v, k_cache, v_cache, plan, masks, slots, size**-0.5)
