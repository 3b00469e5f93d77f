"""Chain attention and the training-time test on a GPU: FlashAttention's path against torch in float64, memory by length, and
launches by documents.

Legend: N query rows, T packed rows, S own keys, H query heads, K key/value heads, D head size.
"""

import time
from itertools import accumulate, pairwise

import pytest
import torch

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.draft_models.target import TargetSpec
from longdraft.kernels import span_flash
from longdraft.kernels.chain_attention import ChainRows, chain_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CU = [0, 1, 130, 257, 1300]
ENDS = {end - 1 for end in CU[1:]}
ROWS = {
    "all": list(range(1300)),
    "all but last ones": [row for row in range(1300) if row not in ENDS],
    "spans": [0, *range(100, 130), 131, *range(900, 1300)],
    "scattered": list(range(3, 1300, 7)),
}


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (64, 0), (64, 4), (2, 3), (1, 0)])
@pytest.mark.parametrize("step", [0, 1, 6])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 1, 96)])
@pytest.mark.parametrize("which", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_gives_the_values_and_gradients_of_float64(
    dtype: torch.dtype, which: str, heads: tuple[int, int, int], step: int, window: int | None, sinks: int
) -> None:
    torch.manual_seed(step)
    (query, kv, size), rows = heads, torch.tensor(ROWS[which], device="cuda")
    shapes = [(len(rows), query, size), (1300, kv, size), (1300, kv, size), *[(len(rows), kv, size)] * (2 * step)]
    narrow = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    plan = ChainRows.build(rows, CU)
    weight = torch.randn(len(rows), query, size, device="cuda", dtype=torch.float64)
    results = []
    for given in (narrow, wide):
        own = given[3:]
        out = chain_attention(*given[:3], own[:step], own[step:], plan, size**-0.5, window, sinks)
        results.append([out, *torch.autograd.grad((out.double() * weight).sum(), given)])
    # A row that sees one key has no gradient in its scores: what float32 leaves there is held against the output's gradient.
    least = 1e-3 * weight.norm()
    for have, want in zip(*results, strict=True):
        error = (have.double() - want).norm() / want.norm().clamp_min(least)
        assert error < (1.5e-2 if dtype == torch.bfloat16 else 2.5e-3), f"relative error {error:.2e}"


@pytest.mark.parametrize(("gap", "copies"), [(128, 2), (0, 2), (1, 0)], ids=["joined", "spans", "a call each"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("which", ["all but last ones", "spans", "scattered"])
def test_however_spans_fall_into_calls_nothing_changes(
    which: str, window: int | None, gap: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_flash, "GAP", gap)
    monkeypatch.setattr(span_flash, "COPIES", copies)
    test_flash_gives_the_values_and_gradients_of_float64(torch.bfloat16, which, (9, 3, 64), 2, window, 0)


@pytest.mark.parametrize("documents", [1, 37])
def test_the_varlen_log_sum_exp_has_a_layout_that_is_understood(documents: int) -> None:
    """What this card's kernel returns, said in the test's output, against a log-sum-exp in float64."""
    torch.manual_seed(0)
    cu = [0, *accumulate(3 + 5 * i for i in range(documents))]
    q, k, v = (torch.randn(cu[-1], heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (9, 3, 3))
    (call,) = ChainRows.build(torch.arange(cu[-1], device="cuda"), cu).calls(None)
    _, lse_NH, state = span_flash.spans_forward(q, k, v, call, None, 0.125)
    print(f"layout of the log-sum-exp for {documents} documents: {tuple(state.lse_shape)}")
    for a, b in pairwise(cu):
        score = torch.einsum("lhd,jhd->lhj", q[a:b].double(), k[a:b].double().repeat_interleave(3, 1)) * 0.125
        hidden = torch.ones(b - a, b - a, device="cuda", dtype=torch.bool).triu(1)
        want = torch.logsumexp(score.masked_fill(hidden[:, None], float("-inf")), -1)
        torch.testing.assert_close(lse_NH[a:b].double(), want, rtol=1e-3, atol=1e-3)


def smollm2_135m() -> TargetSpec:
    rope = {"rope_type": "default", "rope_theta": 1e5}
    return TargetSpec("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, 1e-5, "silu", True, False, rope)


def test_launches_do_not_grow_with_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps over 64K rows of a 135M's shape, as 8 documents and as 340: as many launches; a call a span is the loop of before."""
    draft = Eagle3Draft(Eagle3Config(smollm2_135m(), Eagle3Settings(draft_vocab_size=8192))).to("cuda", torch.bfloat16)
    draft.bind(torch.zeros(49152, 576, device="cuda", dtype=torch.bfloat16))
    aux = torch.randn(65536, 3 * 576, device="cuda", dtype=torch.bfloat16)
    ids, position = torch.randint(1000, (65536,), device="cuda"), torch.arange(65536, device="cuda") % 8192

    def step(cu: list[int]) -> None:
        ends = {end - 1 for end in cu[1:]}
        rows = torch.tensor([row for row in range(65536) if row not in ends], device="cuda")
        torch.cuda.synchronize()
        started.append(time.perf_counter())
        total = torch.zeros((), device="cuda")
        for out in forward_ttt(draft, aux, ids, position, cu, rows, 5):
            total = total + out.normed_NE.float().mean()
        total.backward()
        torch.cuda.synchronize()

    def measured(documents: int) -> tuple[int, float]:
        cu = [65536 * i // documents for i in range(documents + 1)]
        step(cu)
        step(cu)
        seconds = time.perf_counter() - started[-1]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step(cu)
        return sum(event.count for event in seen.key_averages()), seconds

    started = list[float]()
    few, many = measured(8), measured(340)
    monkeypatch.setattr(span_flash, "COPIES", 0)
    loop = measured(340)
    for name, (launches, seconds) in {"8 documents": few, "340": many, "340 in a loop": loop}.items():
        print(f"{name}: {launches:,} launches, {seconds * 1e3:.0f} ms")
    assert many[0] < 1.1 * few[0]
    assert loop[0] > 4 * many[0]


def llama_8b() -> TargetSpec:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    return TargetSpec("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 1e-5, "silu", False, False, rope)


def test_peak_memory_is_linear_in_length() -> None:
    """Seven steps of an 8B-shaped draft, a tenth of the rows supervised; and all rows at 16K."""
    draft = Eagle3Draft(Eagle3Config(llama_8b(), Eagle3Settings(draft_vocab_size=32000))).to("cuda", torch.bfloat16)
    draft.bind(torch.zeros(128256, 4096, device="cuda", dtype=torch.bfloat16))

    def peak(length: int, rows: torch.Tensor) -> int:
        aux = torch.randn(length, 3 * 4096, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(1000, (length,), device="cuda")
        draft.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total = torch.zeros((), device="cuda")
        for out in forward_ttt(draft, aux, ids, torch.arange(length, device="cuda"), [0, length], rows, 7):
            total = total + out.normed_NE.float().mean()
        total.backward()
        return torch.cuda.max_memory_allocated() - before

    lengths = (8192, 16384, 32768)
    peak(1024, torch.arange(1024, device="cuda"))  # gradients and workspaces
    sparse = [peak(n, torch.arange(n - n // 10, n, device="cuda")) for n in lengths]
    dense = [peak(n, torch.arange(n, device="cuda")) for n in lengths]
    print({n: (s >> 20, d >> 20) for n, s, d in zip(lengths, sparse, dense, strict=True)}, "MiB sparse, dense")
    for small, large in (*pairwise(sparse), *pairwise(dense)):
        assert large < 2.2 * small
