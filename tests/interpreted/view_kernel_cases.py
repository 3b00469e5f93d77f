"""The Triton kernels of views in Triton's interpreter against their twins (run by test_kernels_view_pages.py)."""

import pytest
import torch
from view_kernel_case import any_chains, any_ring, any_scores, any_views

from longdraft.kernels import triton_mass_sum
from longdraft.kernels.chain_inputs import chain_inputs, remember
from longdraft.kernels.mass_sum import mass_sum
from longdraft.kernels.view_pages import view_pages


@pytest.mark.parametrize("seed", range(24))
def test_page_lists_equal_the_twins(seed: int) -> None:
    given = any_views(seed)
    for found, wanted in zip(view_pages(*given, backend="triton"), view_pages(*given, backend="torch"), strict=True):
        assert found.dtype == wanted.dtype == torch.int32 and torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(12))
def test_masses_equal_the_twins(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mass_sum, "WIDE", 64)  # several turns at small sizes
    monkeypatch.setattr(triton_mass_sum, "NARROW", 16)
    lse_THN, batch = any_scores(seed)
    found, wanted = mass_sum(lse_THN, batch, "triton"), mass_sum(lse_THN.double(), batch, "torch")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_chains_inputs_equal_the_twins(seed: int) -> None:
    given = any_chains(seed)
    for found, wanted in zip(chain_inputs(*given, backend="triton"), chain_inputs(*given), strict=True):
        assert found.dtype == torch.int64 and torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(24))
def test_rings_equal_the_twins(seed: int) -> None:
    ring, *given = any_ring(seed)
    found = ring.clone()
    remember(found, *given, backend="triton")
    remember(ring, *given)
    assert torch.equal(found, ring)
