"""Which of two implementations a kernel's function takes: our Triton kernel, or its torch twin.

Legend: T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

import torch

from longdraft.errors import UserError
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_fit import unfit_triton

BACKENDS = ("triton", "torch")


def simple_backend(on: torch.Tensor, name: str | None) -> str:
    """The named one, or for None Triton on a GPU; for float64 the twin."""
    return name or ("triton" if on.is_cuda and on.dtype != torch.float64 else "torch")


def score_backend(name: str | None, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, what: str) -> str:
    """The named one for scores of cached keys or, for None, that for these queries and this cache (on a CPU the twin).

    Args:
        name: ``"triton"``, ``"torch"`` or None.
        q_THD, k_SKD, plan: as the kernels take them.
        what: is scored, in the plural, for the message.

    Raises:
        UserError: a name that is unknown, or one that cannot serve this.
    """
    reason = unfit_triton(q_THD, k_SKD, plan)
    if name is None:
        return "triton" if q_THD.is_cuda and reason is None else "torch"  # Triton's interpreter is for tests
    if name not in BACKENDS:
        raise UserError(f"backend={name!r} is unknown: write one of {', '.join(BACKENDS)}")
    if name == "triton" and reason:
        raise UserError(f"backend='triton' cannot score these {what}, {reason}: take 'torch', or none")
    return name
