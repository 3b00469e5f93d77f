"""Page lists and masses of views on a card against their twins. Needs torch and Triton."""

import pytest
import torch
from view_kernel_case import any_chains, any_ring, any_scores, any_views

from longdraft.kernels.chain_inputs import chain_inputs, remember
from longdraft.kernels.mass_sum import mass_sum
from longdraft.kernels.row_ops import best_place
from longdraft.kernels.view_pages import view_pages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("seed", range(40))
def test_page_lists_equal_the_twins(seed: int) -> None:
    given = any_views(seed, "cuda")
    for found, wanted in zip(view_pages(*given), view_pages(*given, backend="torch"), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_masses_equal_the_twins(seed: int) -> None:
    lse_THN, batch = any_scores(seed, "cuda")
    wanted = mass_sum(lse_THN.double(), batch, "torch")
    torch.testing.assert_close(mass_sum(lse_THN, batch), wanted, rtol=1e-5, atol=1e-6)


def test_a_long_context_and_a_graph() -> None:
    lse_THN = 8 * torch.randn(80, 32, 2048, device="cuda")
    wanted = mass_sum(lse_THN.double(), 16, "torch")
    mass_sum(lse_THN, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mass_sum(lse_THN, 16)
    graph.replay()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_chains_inputs_and_rings_equal_the_twins(seed: int) -> None:
    given = any_chains(seed, "cuda")
    for found, wanted in zip(chain_inputs(*given), chain_inputs(*given, backend="torch"), strict=True):
        assert torch.equal(found, wanted)
    ring, *more = any_ring(seed, "cuda")
    found = ring.clone()
    remember(found, *more)
    remember(ring, *more, backend="torch")
    assert torch.equal(found, ring)


@pytest.mark.parametrize("size", [1, 7, 8192, 128_256])
def test_the_best_place_is_the_first_of_the_largest_numbers(size: int) -> None:
    logits = torch.randn(9, size, device="cuda").round(decimals=1)
    logits[0], logits[1, -1] = float("nan"), float("nan")
    assert torch.equal(best_place(logits), best_place(logits, "torch"))
