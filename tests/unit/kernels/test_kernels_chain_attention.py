"""Chain attention against a dense masked softmax in float64, values and gradients.

Legend: N query rows, T packed rows, S own keys, H query heads, K key/value heads, D head size.
"""

import copy
from itertools import pairwise

import pytest
import torch
from flash_twin import FlashTwin

from longdraft.kernels import chain_attention as module
from longdraft.kernels import row_keys, span_flash
from longdraft.kernels.chain_attention import ChainRows, chain_attention

HEADS, KV, SIZE = 6, 2, 5
CU = [0, 1, 12, 12, 29, 40]
ROWS = {
    "all": list(range(40)),
    "tails": [0, 8, 9, 10, 11, 25, 26, 27, 28],
    "scattered": [3, 5, 6, 13, 20, 22, 23, 24, 39],
    "one": [17],
}


def inputs(rows: list[int], step: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(7 * len(rows) + step)
    shapes = [(len(rows), HEADS, SIZE), (40, KV, SIZE), (40, KV, SIZE), *[(len(rows), KV, SIZE)] * (2 * step)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def dense(given: list[torch.Tensor], rows: list[int], step: int, window: int | None, sinks: int) -> torch.Tensor:
    """Every key that could be seen in one softmax, by the rule in words."""
    q, k, v, *own = given
    outs = []
    for n, row in enumerate(rows):
        start = max(a for a, b in pairwise(CU) if a <= row < b)
        keys = [(row_j - start, k[row_j], v[row_j]) for row_j in range(start, row + 1)]
        keys += [(row - start + s, own[s - 1][n], own[step + s - 1][n]) for s in range(1, step + 1)]
        query_place = row - start + step
        kept = [(x, y) for place, x, y in keys if window is None or query_place - place < window or place < sinks]
        key, value = (torch.stack(part).repeat_interleave(HEADS // KV, 1) for part in zip(*kept, strict=True))
        weight = torch.softmax(torch.einsum("hd,mhd->hm", q[n], key) * SIZE**-0.5, -1)
        outs.append(torch.einsum("hm,mhd->hd", weight, value))
    return torch.stack(outs)


@pytest.mark.parametrize("block", [1 << 23, 70], ids=["one block", "small blocks"])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (4, 3), (1, 0), (2, 1), (100, 2)])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("which", ROWS)
def test_values_and_gradients_are_those_of_one_dense_softmax(
    which: str, step: int, window: int | None, sinks: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCORES", block)
    monkeypatch.setattr(row_keys, "BLOCK", 7 * max(step, 1) * KV * SIZE * 8)
    check(which, step, window, sinks)


@pytest.mark.parametrize(
    ("gap", "copies", "padded"), [(128, 2, True), (0, 2, False), (1, 0, True)], ids=["joined", "spans", "a call each"]
)
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (4, 3), (1, 0), (2, 1), (100, 2)])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("which", ROWS)
def test_the_varlen_kernels_path_is_that_softmax_too(
    which: str,
    step: int,
    window: int | None,
    sinks: int,
    gap: int,
    copies: int,
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spans of a document that share keys, dead queries in the gaps, several calls: values and gradients stay."""
    monkeypatch.setattr(span_flash, "GAP", gap)
    monkeypatch.setattr(span_flash, "COPIES", copies)
    twin = FlashTwin(padded).install(monkeypatch)
    check(which, step, window, sinks)
    assert bool(twin.calls) == (window is None or step < window - 1)


def check(which: str, step: int, window: int | None, sinks: int) -> None:
    rows = ROWS[which]
    given = inputs(rows, step)
    expected = dense(given, rows, step, window, sinks)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), given, allow_unused=True)
    plan = ChainRows.build(torch.tensor(rows), CU)
    own = given[3:]
    out = chain_attention(*given[:3], own[:step], own[step:], plan, SIZE**-0.5, window, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad((out * weight).sum(), given)
    for want, have in zip(wanted, found, strict=True):
        torch.testing.assert_close(have, torch.zeros_like(have) if want is None else want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_stay_near_float64(dtype: torch.dtype) -> None:
    rows = ROWS["all"]
    given = inputs(rows, 2, dtype)
    wide = [x.detach().double().requires_grad_() for x in given]
    plan = ChainRows.build(torch.tensor(rows), CU)
    results = []
    for tensors in (given, wide):
        own = tensors[3:]
        out = chain_attention(*tensors[:3], own[:2], own[2:], plan, SIZE**-0.5, 6, 1)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for narrow, exact in zip(*results, strict=True):
        assert narrow.dtype == dtype
        torch.testing.assert_close(narrow.double(), exact, rtol=tolerance, atol=tolerance)


def test_no_block_is_larger_than_the_budget() -> None:
    """A long document is cut into rows whose scores fit; all of them together are every pair that is seen."""
    plan = ChainRows.build(torch.arange(100, 3000), [0, 3000])
    for window in (None, 64):
        pairs = 0
        for n, m, visible in module._Reach.build(plan, 2, window, 0, 1.0).blocks(8):
            assert visible.shape == (n.stop - n.start, m.stop - m.start)
            assert visible.numel() * 8 <= module.SCORES
            pairs += int(visible.sum())
        assert pairs == sum(min(t + 1, 3000 if window is None else window - 2) for t in range(100, 3000))


@pytest.mark.parametrize(("step", "window"), [(0, 1), (2, 3)])
def test_a_window_that_holds_the_row_alone_asks_no_attention_kernel(step: int, window: int) -> None:
    """One key a row: no span is left to a kernel on any device."""
    reach = module._Reach.build(ChainRows.build(torch.tensor(ROWS["scattered"]), CU), step, window, 0, 1.0)
    assert reach.alone and not reach.calls() and not list(reach.blocks(1))
    for other in (window - 1, window + 1, None):
        assert not module._Reach.build(reach.rows, step, other, 0, 1.0).alone


def test_a_window_beyond_every_row_is_planned_as_none() -> None:
    plan = ChainRows.build(torch.tensor(ROWS["all"]), CU)
    assert plan.deepest == 16
    for window, left in ((19, None), (18, 15)):
        assert module._Reach.build(plan, 2, window, 3, 1.0).left == left


def test_a_row_alone_reads_its_own_value_and_gives_scores_no_gradient() -> None:
    rows = ROWS["tails"]
    given = inputs(rows, 0, torch.bfloat16)
    out = chain_attention(*given, [], [], ChainRows.build(torch.tensor(rows), CU), 1.0, 1)
    assert torch.equal(out, given[2][rows].repeat_interleave(HEADS // KV, 1))
    dq, dk, dv = torch.autograd.grad(out.float().sum(), given)
    assert float(dq.abs().max()) < 1e-5
    assert float(dk.abs().max()) < 1e-5
    assert torch.equal(dv[rows], torch.full_like(dv[rows], HEADS // KV))
    assert int(dv.count_nonzero()) == len(rows) * KV * SIZE


def test_the_plan_joins_neighbours_within_a_document() -> None:
    plan = ChainRows.build(torch.tensor([8, 9, 11, 12, 13, 39]), CU)
    assert plan.spans == ((0, 2, 8, 1), (2, 3, 11, 1), (3, 5, 12, 12), (5, 6, 39, 29))
    assert plan.documents == ((0, 3, 1, 10), (3, 5, 12, 1), (5, 6, 29, 10))
    assert plan.place_N.tolist() == [7, 8, 10, 0, 1, 10]
    assert plan.last_N.tolist() == [11, 11, 11, 28, 28, 39]


@pytest.mark.parametrize("rows", [[3, 3], [4, 3], [40], [-1, 2]])
def test_rows_that_cannot_be(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="rows must ascend and lie in 0"):
        ChainRows.build(torch.tensor(rows), CU)


def test_a_row_outside_its_document_changes_nothing() -> None:
    """Perturbing another document, a later row or another row's chain leaves a row's output bit for bit."""
    rows = ROWS["tails"]
    given = inputs(rows, 2)
    plan = ChainRows.build(torch.tensor(rows), CU)

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        own = tensors[3:]
        return chain_attention(*tensors[:3], own[:2], own[2:], plan, 1.0)

    changed = copy.deepcopy(given)
    with torch.no_grad():
        changed[1][12:] += 1.0  # later documents' keys
        changed[2][10] += 1.0  # a later row's value
        for own in changed[3:]:
            own[2:] += 1.0  # other rows' chains
    before, after = run(given), run(changed)
    assert torch.equal(before[:2], after[:2])
    assert not torch.allclose(before[3], after[3])
