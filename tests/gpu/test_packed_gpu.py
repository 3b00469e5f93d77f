"""Packed attention and the packed target on a GPU: gradients against float64, and what a LongSpec step gains at SmolLM2's shape."""

import itertools
import time
from pathlib import Path

import pytest
import torch
from half_precision import SMOLLM2, documents
from tiny import tiny_model

from longdraft.kernels import packed_attention
from longdraft.kernels.packed_attention import lagged_attention, packed_causal_attention
from longdraft.kernels.varlen_flash import takes_flash
from longdraft.train.config import DataSettings, TargetSettings, TrainSettings
from longdraft.train.engine import Group, TorchEngine
from longdraft.train.engine_settings import EngineSettings
from longdraft.train.first_weights import build_draft
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget, load_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01}
HEADS = [(9, 3, 64), (8, 8, 64), (32, 8, 128), (4, 1, 256)]
CUTS = [
    [0, 1, 3, 66, 131, 131, 258, 1281, 1282],  # odd lengths, single tokens, an empty one, block edges
    [0, 997],
    list(range(331)),  # single tokens alone
    [0, 0, 2, 4, 7],
]


def case_of(cu: list[int], heads: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(len(cu))
    return [
        torch.randn(cu[-1], n, heads[2], device="cuda", generator=g).to(dtype).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]


def exact(case: list[torch.Tensor], dout: torch.Tensor, cu: list[int], lag: int, reach: int) -> list[torch.Tensor]:
    """Output and gradients in float64 where a row sees keys ``lag .. reach - 1`` before it; rows that see none give zero."""
    q, k, v = (x.detach().double().requires_grad_() for x in case)
    outs = []
    for a, b in itertools.pairwise(cu):
        t = torch.arange(b - a, device="cuda")
        distance = t[:, None] - t
        visible = (distance >= lag) & (distance < reach)
        wide_k, wide_v = (x[a:b].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[a:b], wide_k) * q.shape[-1] ** -0.5
        share = torch.softmax(score.masked_fill(~visible, -1e30), -1) * visible
        outs.append(torch.einsum("hqk,khd->qhd", share, wide_v))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("cu", CUTS, ids=len)
@pytest.mark.parametrize("which", ["all", "window 1", "window 2", "window 64", "window 512", "lag 1", "lag 3"])
def test_packed_attention_is_the_exact_one(
    which: str, cu: list[int], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    kind, number = [*which.split(), "0"][:2]
    case = case_of(cu, heads, dtype)
    assert takes_flash(case[0])
    if kind == "lag":
        got, want_of = lagged_attention(*case, cu, int(number)), (int(number), 1 << 30)
    else:
        window = int(number) or None
        got, want_of = packed_causal_attention(*case, cu, window), (0, window or 1 << 30)
    dout = torch.randn_like(got)
    want = exact(case, dout, cu, *want_of)
    if got.requires_grad:  # documents that are no longer than the lag attend to nothing
        got.backward(dout)
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in case]
    for name, ours, theirs in zip("oqkv", [got.detach(), *grads], want, strict=True):
        assert bool(torch.isfinite(ours).all()), name
        error = float((ours.double() - theirs).norm())
        assert error <= TOLERANCE[dtype] * float(theirs.norm()) + 1e-3, (name, error, float(theirs.norm()))


def test_a_target_in_16_bit_gives_packed_what_it_gives_padded(tmp_path: Path) -> None:
    """No further from float32 than padded batches are."""
    folder = tiny_model("llama", tmp_path / "t", **SMOLLM2 | {"num_hidden_layers": 6, "initializer_range": 0.02})
    batch = documents([700, 3, 301, 1, 64, 129, 2048], 49152).to(torch.device("cuda"))
    seen = []
    for dtype, attn in (("float32", "sdpa"), ("bfloat16", "auto"), ("bfloat16", "sdpa")):
        target = load_target(TargetSettings(path=str(folder), dtype=dtype, attn=attn), torch.device("cuda"))
        assert target.packed == (attn == "auto")
        seen.append(target.capture(batch.id_T, batch.position_T, batch.cu, hidden=True, aux=(0, 2, 4)).tensors)
    for name, want in seen[0].items():
        packed, padded = (float((x[name].double() - want).norm() / want.norm()) for x in seen[1:])
        print(f"{name}: relative error packed {packed:.2e}, padded {padded:.2e}")
        assert packed < 1.25 * padded + 1e-3


def step_lengths(count: int) -> list[int]:
    """64K tokens in some documents of many lengths."""
    share = torch.rand(count, generator=torch.Generator().manual_seed(0)) + 0.2
    lengths = (share / share.sum() * 65536).long().clamp_min(2).tolist()
    lengths[-1] += 65536 - sum(lengths)
    return lengths


def tokens_a_second(target: FrozenTarget, batch: Packed) -> float:
    """Of whole training steps as the loop makes them, the median of the last six."""
    settings = TrainSettings(
        target=TargetSettings(path="none"), data=DataSettings(train="none"), engine=EngineSettings(dtype="bfloat16")
    )
    method = LongSpecMethod(settings, target, build_draft(settings, target))
    engine = TorchEngine(method, settings.optim, Group(EngineSettings(device="cuda")))
    seconds = []
    for step in range(1, 10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = engine.loss(batch.to(target.device), step)
        engine.backward(out.loss / batch.supervised)
        norm = engine.step(1e-4)
        assert norm < float("inf")
        seconds.append(time.perf_counter() - begin)
    return len(batch.id_T) / sorted(seconds[3:])[3]


@pytest.mark.parametrize("count", [340, 8])
def test_a_longspec_step_at_smollm2s_shape(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64K tokens in many and in few documents, by the loop over documents with padded batches and packed; prints tokens/s."""
    folder = tiny_model("llama", tmp_path / "t", **SMOLLM2 | {"num_hidden_layers": 30, "initializer_range": 0.02})
    target = load_target(TargetSettings(path=str(folder)), torch.device("cuda"))
    assert target.packed
    batch = documents(step_lengths(count), 49152)
    torch.cuda.reset_peak_memory_stats()
    packed = tokens_a_second(target, batch)
    peak = torch.cuda.max_memory_allocated() / 2**30
    padded = FrozenTarget(target.model, target.name, packed=False)
    target_alone = tokens_a_second(padded, batch)
    monkeypatch.setattr(packed_attention, "takes_flash", lambda q_THD: False)
    monkeypatch.setattr(packed_attention, "flash_varlen", lambda: None)
    loop = tokens_a_second(padded, batch)
    print(
        f"LongSpec step, 65,536 tokens in {count} documents: loop and padded batches {loop:,.0f} tokens/s, packed attention "
        f"with padded batches {target_alone:,.0f}, all packed {packed:,.0f} (peak {peak:.1f} GiB)"
    )
    assert packed > loop * (1.3 if count > 100 else 0.95)
