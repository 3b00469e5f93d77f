"""Kernels on a GPU against float64 references. Needs torch, SGLang's packages and ``src`` on the path, nothing else.

Legend: B requests, T new tokens, S cache slots, H query heads, K key/value heads, D head size.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from attention_case import ancestor_mask, bits_of

from longdraft.kernels.fa3 import fa3_available, fa3_chain_attention, fa3_prefix_attention
from longdraft.kernels.gumbel import MASK, gumbel_argmax, murmur_hash, torch_gumbel_argmax
from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.linear_cross_entropy import linear_cross_entropy
from longdraft.kernels.packed_attention import flash_varlen, lagged_attention, packed_causal_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import checked_backend, torch_prefix_attention
from longdraft.kernels.view_attention import View, view_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
fa3 = pytest.mark.skipif(not fa3_available(), reason="needs a Hopper card and SGLang's FlashAttention-3")

TOLERANCE = {torch.bfloat16: (2e-2, 1.5e-2), torch.float16: (3e-3, 2e-3), torch.float32: (1e-4, 1e-5)}
DTYPES = [torch.bfloat16, torch.float16]
HEADS = [(32, 8, 128), (28, 4, 128), (8, 1, 64), (16, 16, 128), (24, 8, 96), (16, 2, 256)]
# Prefix lengths and new tokens of a batch: empty prefixes, block edges, one request, many.
BATCHES = [
    ([0], [1]),
    ([1], [5]),
    ([0, 7, 0], [3, 1, 6]),
    ([127, 128, 129], [1, 2, 5]),
    ([4097, 1, 0, 2500], [5, 5, 1, 6]),
    ([300] * 33, [5] * 33),
]


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    plan: AttentionPlan
    slots: list[torch.Tensor]
    masks: list[torch.Tensor]
    scale: float

    def expected(self, tree: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 attention and log-sum-exp; ``tree`` is ``none`` (prefix alone), ``chain`` or ``masks``."""
        outs, lses = [], []
        for b, length in enumerate(self.plan.lens):
            rows = self.plan.rows_of(b)
            n = rows.stop - rows.start
            prefix = self.slots[b][:length]
            visible = torch.ones(n, length, dtype=torch.bool, device="cuda")
            keys, values = self.k_cache[prefix], self.v_cache[prefix]
            if tree != "none":
                mask = torch.ones(n, n, dtype=torch.bool, device="cuda").tril() if tree == "chain" else self.masks[b]
                keys, values = torch.cat([keys, self.k[rows]]), torch.cat([values, self.v[rows]])
                visible = torch.cat([visible, mask], 1)
            out, lse = reference(self.q[rows], keys, values, self.scale, visible)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


def reference(
    q_THD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, scale: float, visible_TN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q_THD.shape[1] // k_NKD.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_NKD, v_NKD))
    score_HTN = torch.einsum("thd,nhd->htn", q_THD.double(), k) * scale
    score_HTN = score_HTN.masked_fill(~visible_TN, float("-inf"))
    lse_HT = torch.logsumexp(score_HTN, -1)
    weight_HTN = torch.exp(score_HTN - torch.where(lse_HT.isneginf(), 0.0, lse_HT)[..., None])
    return torch.einsum("htn,nhd->thd", weight_HTN, v), lse_HT.t()


def make(
    lens: list[int], rows: list[int], shape: tuple[int, int, int], dtype: torch.dtype, *, sharp: float = 1.0
) -> Case:
    """Page lists of random slots, wider than needed; every slot outside them, and every spare column's, holds NaN."""
    heads, kv_heads, size = shape
    g = torch.Generator("cuda").manual_seed(sum(lens) + size)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", generator=g).to(dtype)

    count = sum(lens) + sum(rows)
    order = torch.randperm(count + 50, device="cuda", generator=g)
    k_cache, v_cache = (
        torch.full((count + 50, kv_heads, size), float("nan"), dtype=dtype, device="cuda") for _ in "kv"
    )
    k, v = normal(sum(rows), kv_heads, size), normal(sum(rows), kv_heads, size)
    width = max(n + m for n, m in zip(lens, rows, strict=True)) + 3
    pages = torch.full((len(lens), width), int(order[-1]), dtype=torch.int32, device="cuda")
    slots, used, start = [], 0, 0
    for b, (n, m) in enumerate(zip(lens, rows, strict=True)):
        mine = order[used : used + n + m]
        used += n + m
        k_cache[mine[:n]], v_cache[mine[:n]] = normal(n, kv_heads, size), normal(n, kv_heads, size)
        k_cache[mine[n:]], v_cache[mine[n:]] = k[start : start + m], v[start : start + m]
        start += m
        pages[b, : n + m] = mine.int()
        slots.append(mine)
    masks = []
    for m in rows:  # node i hangs on node i // 2: branches at every level
        masks.append(ancestor_mask([-1, *(i // 2 for i in range(m - 1))][:m], "cuda"))
    q = normal(sum(rows), heads, size) * sharp
    return Case(q, k, v, k_cache, v_cache, AttentionPlan.build(pages, lens, rows), slots, masks, size**-0.5)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@fa3
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=[f"b{len(lens)}max{max(lens)}" for lens, _ in BATCHES])
def test_fa3_prefix_equals_the_reference_and_the_twin(
    batch: tuple[list[int], list[int]], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A1, A3, A7, A8: random slot order, empty prefixes, grouped heads; natural log-sum-exp."""
    case = make(*batch, shape, dtype)
    want_out, want_lse = case.expected("none")
    arguments = (case.q, case.k_cache, case.v_cache, case.plan, case.scale)
    for run in (fa3_prefix_attention, torch_prefix_attention):
        out, lse = run(*arguments)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        close(out, want_out, dtype)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)


@fa3
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=[f"b{len(lens)}max{max(lens)}" for lens, _ in BATCHES])
def test_fa3_chain_equals_the_reference_and_the_hybrid(
    batch: tuple[list[int], list[int]], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A6: one causal call over the prefix and the new tokens' own slots; the three-part path gives the same."""
    case = make(*batch, shape, dtype)
    want, _ = case.expected("chain")
    close(fa3_chain_attention(case.q, case.k_cache, case.v_cache, case.plan, case.scale), want, dtype)
    causal = [torch.ones_like(mask).tril() for mask in case.masks]
    for backend, bits in (("fa3", None), ("fa3", bits_of(causal)), ("torch", None)):
        out = hybrid_tree_attention(
            case.q, case.k, case.v, case.k_cache, case.v_cache, case.plan, case.scale, bits, backend
        )
        close(out, want, dtype)


@fa3
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", [([0, 7], [3, 6]), ([513, 0, 2000], [31, 8, 128])], ids=["small", "large"])
def test_hybrid_trees_on_fa3_equal_the_reference(
    batch: tuple[list[int], list[int]], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = make(*batch, shape, dtype)
    want, _ = case.expected("masks")
    for backend in ("fa3", "torch"):
        out = hybrid_tree_attention(
            case.q, case.k, case.v, case.k_cache, case.v_cache, case.plan, case.scale, bits_of(case.masks), backend
        )
        close(out, want, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_the_twin_keeps_sharp_scores_exact(dtype: torch.dtype) -> None:
    """Where there is no FA3 the twin serves: bfloat16 scores would be off by tenths here."""
    case = make([1500, 0], [5, 3], (8, 2, 128), dtype, sharp=8.0)
    want, _ = case.expected("masks")
    out = hybrid_tree_attention(
        case.q, case.k, case.v, case.k_cache, case.v_cache, case.plan, case.scale, bits_of(case.masks), "torch"
    )
    close(out, want, dtype)


@fa3
def test_a_hopper_card_takes_fa3_for_half_precision_alone() -> None:
    cases = [make([5], [1], (8, 2, 128), d) for d in (*DTYPES, torch.float32)]
    assert [checked_backend(None, c.q, c.k_cache, c.plan) for c in cases] == ["fa3", "fa3", "triton"]


@pytest.mark.skipif(flash_varlen() is None, reason="needs flash_attn with a backward pass")
@pytest.mark.parametrize("window", [None, 1, 100, 512])
def test_packed_flash_attention_equals_the_reference(window: int | None) -> None:
    """D1 on the training kernel: windows count self, lags never cross documents, short documents are empty."""
    cu, g = [0, 3, 700, 1500], torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1500, n, 64, device="cuda", generator=g).bfloat16() for n in (8, 2, 2))
    windowed, lagged = packed_causal_attention(q, k, v, cu, window), lagged_attention(q, k, v, cu, 5)
    for a, b in itertools.pairwise(cu):
        t = torch.arange(b - a, device="cuda")
        distance = t[:, None] - t
        for got, visible in (
            (windowed, (distance >= 0) & (distance < (window or 1 << 30))),
            (lagged, distance >= 5),
        ):
            want, _ = reference(q[a:b], k[a:b], v[a:b], 0.125, visible)
            close(got[a:b], want, torch.bfloat16)


def rows_of_noise(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(1)
    logprob = torch.randn(rows, vocab, device="cuda", generator=g).mul_(3).log_softmax(-1)
    logprob[:, ::7] = float("-inf")
    seed = torch.randint(-(1 << 62), 1 << 62, (rows,), device="cuda", generator=g)
    return logprob, seed, torch.randint(0, 1 << 20, (rows,), device="cuda", generator=g)


def test_the_hash_is_the_seeded_samplers() -> None:
    hashing = pytest.importorskip("sglang.srt.layers.utils.hash")
    _, seed, position = rows_of_noise(257, 1003)
    theirs = hashing.murmur_hash32(seed.to(torch.uint64), position, torch.arange(1003, device="cuda"))
    assert torch.equal(theirs.to(torch.int64), murmur_hash(seed, position, torch.arange(1003, device="cuda")))


@pytest.mark.parametrize(("rows", "vocab"), [(1, 151_936), (2048, 32_000), (333, 128_256), (4000, 17)])
def test_choices_are_the_seeded_samplers(rows: int, vocab: int) -> None:
    """Bit for bit, so that plain seeded decoding and ours draw the same; but for its one infinite hash in 2^32."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    logprob, seed, position = rows_of_noise(rows, vocab)
    theirs = sampler.multinomial_with_seed(logprob, seed, position).view(-1)
    sane = torch.cat(
        [
            (murmur_hash(s, p, torch.arange(vocab, device="cuda")) != MASK).all(1)
            for s, p in zip(seed.split(64), position.split(64), strict=True)
        ]
    )
    assert int(sane.sum()) >= rows - 2
    pieces = zip(logprob.split(256), seed.split(256), position.split(256), strict=True)
    ours = torch.cat([torch_gumbel_argmax(*piece) for piece in pieces])
    assert torch.equal(ours[sane], theirs[sane])
    assert torch.equal(gumbel_argmax(logprob, seed, position), ours)
    assert torch.equal(torch_gumbel_argmax(logprob[:64].cpu(), seed[:64].cpu(), position[:64].cpu()), ours[:64].cpu())


def test_the_infinite_hash_never_wins() -> None:
    """Seed 7, position 34,292 and token 18,839 hash to the largest value, which is a uniform of exactly 1."""
    seed, position, token, vocab = torch.tensor([7]).cuda(), torch.tensor([34_292]).cuda(), 18_839, 1 << 17
    assert int(murmur_hash(seed, position, torch.arange(vocab, device="cuda"))[0, token]) == MASK
    logprob = torch.full((1, vocab), -50.0, device="cuda")
    logprob[0, 5] = 0.0
    for value in (-50.0, float("-inf")):
        logprob[0, token] = value
        assert gumbel_argmax(logprob, seed, position).tolist() == [5]


def test_the_chunked_loss_equals_the_plain_one() -> None:
    """D10 in bfloat16."""
    g = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(700, 256, device="cuda", generator=g).bfloat16().requires_grad_()
    weight = torch.randn(5000, 256, device="cuda", generator=g).mul_(0.1).bfloat16()
    label = torch.randint(0, 5000, (700,), device="cuda", generator=g)
    label[::5] = -100
    loss, correct = linear_cross_entropy(hidden, weight, label, 128)
    loss.backward()
    plain = hidden.detach().double().requires_grad_()
    logits = plain @ weight.double().t()
    want = torch.nn.functional.cross_entropy(logits, label, reduction="sum")
    want.backward()
    assert hidden.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=2e-2, atol=1e-2)
    assert abs(int(correct) - int((logits.argmax(-1) == label).sum())) <= 2


@pytest.mark.parametrize("window", [128, 992], ids=["blocks", "recent"])
def test_a_view_in_bfloat16_is_near_the_exact_one_forward_and_backward(window: int) -> None:
    """The chunked path at served shapes, against float64 on the CPU."""
    g = torch.Generator().manual_seed(0)
    exact = [torch.randn(2500, n, 64, dtype=torch.float64, generator=g).requires_grad_() for n in (8, 2, 2)]
    half = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact]
    views, cu = [View(1024, 32, window, 16, seed=1), None], [0, 2100, 2500]
    want, got = (view_attention(*case, cu, 2, views) for case in (exact, half))
    assert float((got.cpu() - want).norm() / want.norm()) < 0.01
    grad = torch.randn(want.shape, dtype=torch.float64, generator=g)
    want.backward(grad)
    got.backward(grad.to("cuda", torch.bfloat16))
    for a, b in zip(exact, half, strict=True):
        assert a.grad is not None and b.grad is not None
        assert float((b.grad.cpu() - a.grad).norm() / a.grad.norm()) < 0.02


def test_the_memory_of_a_view_is_linear_in_the_length() -> None:
    """Forward and backward at 8K and 32K tokens with the widest budget that is served."""
    peaks = []
    for length in (8192, 32768):
        q, k, v = (torch.randn(length, n, 128, device="cuda", dtype=torch.bfloat16) for n in (32, 8, 8))
        q.requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        view_attention(q, k, v, [0, length], 1, [View(4096, 32, 128, 16)]).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 5 * peaks[0]
