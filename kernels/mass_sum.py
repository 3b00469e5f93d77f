"""From log-sum-exps of blocks to each block's attention mass, summed over the rows and heads of a request.

The scores of five rows and 32 heads over 2,048 blocks are 21 MB for 16 requests: torch goes over them a dozen times, the Triton
kernels twice, and they lie in an H200's second-level cache.

Legend: B requests, T query rows of all requests (R of each), H query heads, N blocks.
"""

import torch

from longdraft.kernels.block_lse import block_mass
from longdraft.kernels.twin import simple_backend


def torch_mass_sum(lse_THN: torch.Tensor, batch: int) -> torch.Tensor:
    """The torch twin of :func:`mass_sum`."""
    return block_mass(lse_THN).unflatten(0, (batch, -1)).sum((1, 2)).float()


def mass_sum(lse_THN: torch.Tensor, batch: int, backend: str | None = None) -> torch.Tensor:
    """Float32 ``score_BN``: each block's share of a row's attention, summed over the rows and heads of each request.

    Args:
        lse_THN: of :func:`longdraft.kernels.block_lse.block_lse`, as many rows of every request, at least one. A row that
            reads nothing counts nothing.
        batch: B.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU (float64: the twin).
    """
    if simple_backend(lse_THN, backend) == "torch":
        return torch_mass_sum(lse_THN, batch)
    from longdraft.kernels.triton_mass_sum import triton_mass_sum  # no Triton, no harm

    return triton_mass_sum(lse_THN, batch)
