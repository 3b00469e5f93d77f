"""Chain attention and the training-time test on a GPU: FlashAttention's path against torch in float64, and memory by length.

Legend: N query rows, T packed rows, S own keys, H query heads, K key/value heads, D head size.
"""

from itertools import pairwise

import pytest
import torch

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.draft_models.target import TargetSpec
from longdraft.kernels.chain_attention import ChainRows, chain_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CU = [0, 1, 130, 257, 1300]
ROWS = {
    "all": list(range(1300)),
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
