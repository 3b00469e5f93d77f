"""Selectors of KV views: scores against float64, by hand and from the papers' formulas.

Legend: B requests, T query rows, H query heads, N blocks.
"""

import pytest
import torch
from block_case import expected_bound, expected_lse
from prefix_case import PrefixCase, make_prefix_case

from longdraft.errors import UserError
from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.choose import choose_columns
from longdraft.serve.views.selectors import SELECTORS, by_request, make_selector

N = 6


def two_layers(lens: list[int], rows: list[int]) -> tuple[PrefixCase, PrefixCase]:
    """Two caches under one plan, whatever is not listed poisoned."""
    first, second = (make_prefix_case(lens, rows, seed=seed) for seed in (0, 1))
    g = torch.Generator().manual_seed(5)
    second.plan, second.slots = first.plan, first.slots
    second.k = first.k.clone()
    for slots in first.slots:
        second.k[slots] = torch.randn(len(slots), 2, 16, generator=g)
    return first, second


def scores(name: str, layers: tuple[PrefixCase, ...], reduction: str = "mean") -> list[torch.Tensor]:
    """The score of all layers, then each layer's."""
    args = [x.q for x in layers], [x.k for x in layers], layers[0].plan, layers[0].scale, N
    selector = make_selector(name, reduction)
    found = [selector.score(*args), *selector.score_layers(*args)]
    assert all(x.dtype == torch.float32 and x.shape == (len(layers[0].plan), N) for x in found)
    return found


def expected_mass(case: PrefixCase) -> list[torch.Tensor]:
    """``[R, H, N]`` of each request."""
    lse = expected_lse(case, 16, N)
    return [lse[case.plan.rows_of(b)].softmax(-1).nan_to_num(0.0) for b in range(len(case.plan))]


@pytest.mark.parametrize("rows", [[2, 2, 2], [3, 0, 1]], ids=["even", "ragged"])
def test_mass_is_summed_over_rows_heads_and_layers(rows: list[int]) -> None:
    layers = two_layers([70, 33, 0], rows)
    total, *each = scores("mass", layers)
    for found, case in zip(each, layers, strict=True):
        want = torch.stack([mass.sum((0, 1)) for mass in expected_mass(case)])
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, each[0] + each[1])
    torch.testing.assert_close(total[0].sum(), torch.tensor(2.0 * 4 * rows[0]))
    assert not total[2].any(), "a request that reads nothing"


def test_the_worst_is_the_best_of_the_negative() -> None:
    layers = two_layers([70, 33], [2, 2])
    for worst, mass in zip(scores("worst", layers), scores("mass", layers), strict=True):
        assert torch.equal(worst, -mass)


def test_snapkv_pools_each_heads_votes_over_neighbours() -> None:
    (case, _) = two_layers([90, 33], [2, 2])
    _, found = scores("snapkv", (case,))
    for b, mass_RHN in enumerate(expected_mass(case)):
        votes = mass_RHN.sum(0)
        for n in range(N):
            want = votes[:, max(n - 1, 0) : n + 2].amax(-1).sum()
            torch.testing.assert_close(found[b, n].double(), want, rtol=1e-5, atol=1e-6)
    selector = make_selector("snapkv")
    assert selector.once and selector.rows == 8 and not make_selector("mass").once


@pytest.mark.parametrize(
    ("name", "reduction"),
    [("quest", "mean"), ("quest", "max"), ("specpv", "mean"), ("specpv", "max"), ("specpv", "last")],
)
@pytest.mark.parametrize("rows", [[3, 3, 3], [3, 1, 2]], ids=["even", "ragged"])
def test_bounds_are_reduced_over_rows_and_averaged_over_heads(name: str, reduction: str, rows: list[int]) -> None:
    layers = two_layers([70, 33, 0], rows)
    total, *each = scores(name, layers, reduction)
    over = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "last": lambda x: x[-1]}[reduction]
    for found, case in zip(each, layers, strict=True):
        bound = expected_bound(case, 16, N, name) * case.scale
        want = torch.stack([over(bound[case.plan.rows_of(b)]).mean(0) for b in range(3)])
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, each[0] + each[1])


def test_float8_scales_belong_to_layers() -> None:
    """A layer's keys count as what they stand for: twice the scale is twice the keys."""
    case = make_prefix_case([70], [2], dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
    larger = case.k.clone()
    larger[case.slots[0]] = (case.k[case.slots[0]].float() * 2).to(case.k.dtype)
    for name in ("mass", "quest"):
        score = make_selector(name).score_layers
        plain, scaled = score([case.q] * 2, [case.k] * 2, case.plan, case.scale, N, [1.0, 2.0])
        (want,) = score([case.q], [larger], case.plan, case.scale, N)
        torch.testing.assert_close(scaled, want, rtol=1e-5, atol=1e-5)
        assert not torch.equal(plain, scaled)


def test_streaming_takes_sinks_and_what_is_newest() -> None:
    selector = make_selector("streaming")
    plan = AttentionPlan.build(torch.zeros(2, 400, dtype=torch.int32), [400, 300], [0, 0])
    assert selector.layers(32) == () and selector.rows == 0
    score_BN = selector.score([], [], plan, 1.0, 40)
    chosen = choose_columns(score_BN, torch.tensor([400, 300]), Budget(200, 16, 32))
    for b, length in enumerate((400, 300)):
        assert chosen.count_B[b] + length - chosen.start_B[b] > 184, "nothing wasted"
        held = chosen.column_BV[b, : chosen.count_B[b]].tolist()
        assert held == [*range(16), *range(int(chosen.start_B[b]) - len(held) + 16, int(chosen.start_B[b]))]


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_a_plan_that_only_the_device_knows_gives_the_same(name: str) -> None:
    case = make_prefix_case([70, 33], [2, 2])
    plan = AttentionPlan.on_device(case.plan.pages_BW, case.plan.lens_B, case.plan.cu_rows_B1, case.plan.cu_rows)
    selector = make_selector(name)
    found, want = (selector.score([case.q], [case.k], p, case.scale, N) for p in (plan, case.plan))
    assert torch.equal(found, want)


def test_the_layers_that_are_asked_for_exist() -> None:
    layers = make_selector("mass").layers
    assert [layers(n) for n in (32, 5, 4, 3, 2, 1)] == [(16, 30), (2, 3), (2,), (1,), (0, 1), (0,)]


def test_requests_without_rows_score_zero() -> None:
    value = torch.arange(6.0).view(3, 2)
    plan = AttentionPlan.build(torch.zeros(3, 1, dtype=torch.int32), [0, 0, 0], [1, 0, 2])
    assert by_request(value, plan, lambda x: x.sum(0)).tolist() == [[0, 1], [0, 0], [6, 8]]
    none = AttentionPlan.build(torch.zeros(2, 1, dtype=torch.int32), [0, 0], [0, 0])
    assert by_request(value[:0], none, lambda x: x.amax(0)).tolist() == [[0, 0], [0, 0]]


def test_bad_names_and_reductions_are_refused_with_what_there_is() -> None:
    with pytest.raises(
        UserError, match=r"selector='quets' is unknown \(did you mean 'quest'\?\): write one of mass, quest"
    ):
        make_selector("quets")
    with pytest.raises(UserError, match="reduction='last' does not fit selector='quest': write one of mean, max"):
        make_selector("quest", "last")
    with pytest.raises(UserError, match="reduction='max' does not fit selector='mass': it has no choice of one"):
        make_selector("mass", "max")
    with pytest.raises(UserError, match=r"mass=0.9: scores of 'quest' are no shares of attention: take 'mass'"):
        make_selector("quest").check(Budget(500, mass=0.9))
    make_selector("mass").check(Budget(500, mass=0.9))
    make_selector("quest").check(Budget(500))
