"""A LongSpec draft's serving step on a card: its kernels, rings read in place, chains against the module, one graph a chain."""

from typing import Any

import pytest
import torch
from chain_case import SETTINGS, Chains, make
from prefix_case import make_prefix_case
from row_case import DTYPES, HEADS, ROWS, check_choices, check_rotation, check_rows, check_windows

from longdraft.draft_models.fused_step import FusedStep
from longdraft.kernels.prefix_attention import BACKENDS, prefix_attention, prefix_output
from longdraft.kernels.row_ops import add_norm, torch_add_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [*HEADS, (16, 32, 8, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_rotated_and_put_away_as_by_the_twin(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_rotation(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*ROWS, (16, 4096), (1, 14336)], ids=str)
def test_row_operations_are_the_twins(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_rows(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), [(1, 3), (3, 40), (2, 8192), (16, 32768), (1, 128256)])
def test_choices_are_the_twins(rows: int, count: int, dtype: torch.dtype) -> None:
    check_choices(rows, count, dtype, "cuda")


@pytest.mark.parametrize(("window", "size", "steps"), [(1, 1, 1), (6, 10, 5), (512, 517, 6)])
def test_windows_are_the_twins(window: int, size: int, steps: int) -> None:
    check_windows(window, size, steps, "cuda")


def test_the_stream_is_added_to_with_the_twins_rounding() -> None:
    """What a layer adds is rounded once, as a sum of two tensors is."""
    more, one, weight = torch.randn(3, 16, 4096, device="cuda").bfloat16()
    other = one.clone()
    add_norm(more, one, weight[0], 1e-5)
    torch_add_norm(more, other, weight[0], 1e-5)
    assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_an_output_without_its_log_sum_exp_is_the_same(backend: str) -> None:
    """One row a request, as a draft's are, and a request that reads nothing."""
    case = make_prefix_case(
        [4096, 0, 513, 1], [1, 1, 1, 1], heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda"
    )
    if reason := BACKENDS[backend].unfit(case.q, case.k, case.plan):
        pytest.skip(reason)
    args = case.q, case.k, case.v, case.plan, case.scale, backend
    assert torch.equal(prefix_output(*args), prefix_attention(*args)[0])


@torch.no_grad()
def test_rings_read_in_place_are_rings_read_through_a_mask() -> None:
    """Float32, by our Triton kernel: requests longer and shorter than the window, and an empty one."""
    chains = Chains(make("llama", {}, torch.float32, "cuda"))
    state, at_B = chains.state, chains.at_B
    for step in range(4):
        q = torch.randn(len(at_B), 4, 16, device="cuda")
        k, v = chains.draft.self_kv(at_B + 7, at_B + step)
        _, (window,) = state.windows(chains.row_B, at_B + step, 1)
        in_place = state.attend(chains.row_B, at_B + step, q, k, v, window)
        masked = state.attend(chains.row_B, at_B + step, q, k, v)
        torch.testing.assert_close(in_place, masked, rtol=1e-5, atol=1e-6)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """Distance relative to the norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
@torch.no_grad()
def test_a_chain_is_the_modules_chain(family: str, settings: dict[str, Any], dtype: torch.dtype, near: float) -> None:
    """Logits as long as both read the same tokens: in bfloat16 a near tie may fall to either side."""
    draft = make(family, settings, dtype, "cuda")
    want, got = Chains(draft), Chains(draft)
    fused = FusedStep.of(draft)
    assert fused is not None
    wanted, found = want.run(None), got.run(fused)
    same_B = torch.ones(len(found), dtype=torch.bool, device="cuda")
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        there = torch.isfinite(b)  # a ranked head leaves the others out
        assert torch.equal(there, torch.isfinite(a))
        for row in same_B.nonzero().flatten().tolist():
            assert far(a[row][there[row]], b[row][there[row]]) < near
        same_B &= found[:, step] == wanted[:, step]
    if dtype == torch.float32:
        assert bool(same_B.all())
        torch.testing.assert_close(got.state.k, want.state.k, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.state.v, want.state.v, rtol=1e-4, atol=1e-5)
    assert torch.equal(got.state.position, want.state.position)


@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
@torch.no_grad()
def test_in_bfloat16_a_step_is_as_near_to_the_truth_as_the_modules(family: str, settings: dict[str, Any]) -> None:
    """The first step's logits against the same weights and caches in float32."""
    draft, wide = (make(family, settings, torch.bfloat16, "cuda") for _ in range(2))
    wide = wide.float().bind(draft.embedding_VE.float(), draft.head_VE.float())
    module, step, truth = Chains(draft), Chains(draft), Chains(wide)
    truth.cache = step.cache.float()
    module.run(None)
    step.run(FusedStep(draft))
    truth.run(None)
    want = truth.logits[0]
    seen = torch.isfinite(want)
    allowed = 2 * far(module.logits[0][seen], want[seen]) + 1e-3
    assert far(step.logits[0][seen], want[seen]) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
@torch.no_grad()
def test_a_captured_chain_is_the_eager_one(family: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Replayed over other roots and positions than it was captured with."""
    draft = make(family, settings, dtype, "cuda")
    fused, captured, eager = FusedStep(draft), Chains(draft), Chains(draft)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.run(fused)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafted = captured.run(fused)
    for chains in (captured, eager):
        chains.root_B.copy_(torch.tensor([9, 100, 7]))
        chains.at_B.copy_(torch.tensor([30, 0, 2]))
        chains.lens_B.copy_(torch.tensor([5, 20, 1]))
    graph.replay()
    assert torch.equal(drafted, eager.run(fused))
    seen = torch.isfinite(eager.logits[-1])
    assert far(captured.logits[-1][seen], eager.logits[-1][seen]) < 1e-3
