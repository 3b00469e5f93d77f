"""What stands between a layer's matrix products, a pass over the rows each: embedding and norm, sum and norm, gated SiLU; and choices.

A draft step on a card is a chain of small kernels that wait for one another, so what counts is how many there are. SGLang's library
has kernels of the last two, but not for float32, none for the first, and none that runs where there is no card.

Legend: T rows, N choices, V table rows or a vocabulary, E row size, F = half of a gated projection.
"""

import torch
from torch.nn import functional as F

from longdraft.kernels.twin import simple_backend


def torch_embed_norm(
    id_T: torch.Tensor, table_VE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of :func:`embed_norm`."""
    h_TE = F.embedding(id_T, table_VE).to(weight_E.dtype)
    return h_TE, F.rms_norm(h_TE, weight_E.shape, weight_E, eps)


def embed_norm(
    id_T: torch.Tensor, table_VE: torch.Tensor, weight_E: torch.Tensor, eps: float, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a table, new, and their RMS norm, both ``[T, E]`` in the weight's dtype.

    Args:
        id_T: int64 rows of the table.
        table_VE: any float dtype.
        weight_E: of the norm.
        eps: of the norm.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU (float64: the twin).
    """
    if simple_backend(weight_E, backend) == "torch":
        return torch_embed_norm(id_T, table_VE, weight_E, eps)
    from longdraft.kernels.triton_row_ops import triton_embed_norm  # no Triton, no harm

    return triton_embed_norm(id_T, table_VE, weight_E, eps)


def torch_add_norm(more_TE: torch.Tensor, h_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """The torch twin of :func:`add_norm`."""
    h_TE += more_TE
    return F.rms_norm(h_TE, weight_E.shape, weight_E, eps)


def add_norm(
    more_TE: torch.Tensor, h_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, backend: str | None = None
) -> torch.Tensor:
    """RMS norm ``[T, E]`` of a residual stream after an addition.

    Args:
        more_TE: what is added.
        h_TE: the stream, which is changed, of the same dtype.
        weight_E: of the norm.
        eps: of the norm.
        backend: as in :func:`embed_norm`.
    """
    if simple_backend(h_TE, backend) == "torch":
        return torch_add_norm(more_TE, h_TE, weight_E, eps)
    from longdraft.kernels.triton_row_ops import triton_add_norm

    return triton_add_norm(more_TE, h_TE, weight_E, eps)


def torch_gated_silu(both_T2F: torch.Tensor) -> torch.Tensor:
    """The torch twin of :func:`gated_silu`."""
    gate, up = both_T2F.chunk(2, -1)
    return F.silu(gate) * up


def gated_silu(both_T2F: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """``silu(gate) * up``, ``[T, F]``, of a packed projection ``[gate, up]``; ``backend`` as in :func:`embed_norm`."""
    if simple_backend(both_T2F, backend) == "torch":
        return torch_gated_silu(both_T2F)
    from longdraft.kernels.triton_row_ops import triton_gated_silu

    return triton_gated_silu(both_T2F)


def torch_best_id(logits_TN: torch.Tensor, id_N: torch.Tensor) -> torch.Tensor:
    """The torch twin of :func:`best_id`."""
    return id_N[logits_TN.argmax(-1)]


def best_id(logits_TN: torch.Tensor, id_N: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """The id of each row's largest number, int64 ``[T]``; of equal ones the first, of a row of nothing but NaN any.

    For some ten thousand choices: one program reads a row. ``backend`` as in :func:`embed_norm`.
    """
    if simple_backend(logits_TN, backend) == "torch":
        return torch_best_id(logits_TN, id_N)
    from longdraft.kernels.triton_row_ops import triton_best_id

    return triton_best_id(logits_TN, id_N)


def torch_best_place(logits_TV: torch.Tensor) -> torch.Tensor:
    """The torch twin of :func:`best_place`."""
    return logits_TV.nan_to_num(float("-inf"), float("inf"), float("-inf")).argmax(-1)


def best_place(logits_TV: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """Where each row's largest number stands, int64 ``[T]``: of equal ones the first, NaN never, 0 in a row of nothing else.

    One pass over the numbers, none is written; ``backend`` as in :func:`embed_norm`.
    """
    if simple_backend(logits_TV, backend) == "torch":
        return torch_best_place(logits_TV)
    from longdraft.kernels.triton_row_ops import triton_best_place

    return triton_best_place(logits_TV)
