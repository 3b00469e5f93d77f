"""What a verification of chains is given, and the tokens that a server remembers of each request: a kernel each.

Each is some ten torch operations on a few numbers; on a card such an operation takes as long as one on a million.

Legend: B requests, K drafted tokens, T = K + 1 new tokens of a request, R rows of the page table, C its columns; N tokens of a run,
I remembered tokens.
"""

from typing import NamedTuple

import torch

from longdraft.kernels.twin import simple_backend


class ChainInputs(NamedTuple):
    """Ids, positions and cache slots of the new tokens, int64 ``[B, T]`` each."""

    id_BT: torch.Tensor
    position_BT: torch.Tensor
    slot_BT: torch.Tensor


def torch_chain_inputs(
    newest_B: torch.Tensor,
    draft_BK: torch.Tensor,
    limit_B: torch.Tensor,
    length_B: torch.Tensor,
    row_B: torch.Tensor,
    table_RC: torch.Tensor,
) -> ChainInputs:
    """The torch twin of :func:`chain_inputs`."""
    offset_T = torch.arange(draft_BK.shape[1] + 1, device=draft_BK.device)
    at_BT = torch.minimum(offset_T, limit_B[:, None])
    id_BT = torch.cat([newest_B[:, None], draft_BK], 1).gather(1, at_BT)
    position_BT = length_B[:, None] + at_BT
    slot_BT = table_RC[row_B[:, None], position_BT].long() * (offset_T <= limit_B[:, None])
    return ChainInputs(id_BT, position_BT, slot_BT)


def chain_inputs(
    newest_B: torch.Tensor,
    draft_BK: torch.Tensor,
    limit_B: torch.Tensor,
    length_B: torch.Tensor,
    row_B: torch.Tensor,
    table_RC: torch.Tensor,
    backend: str | None = None,
) -> ChainInputs:
    """Chains padded to T: behind a chain's end its last token stands again at its place and writes to slot 0.

    Args:
        newest_B: int64 first token of each chain.
        draft_BK: int64 tokens behind it.
        limit_B: int64 number of these that count, 0 to K.
        length_B: int64 cached tokens, so the position of the first.
        row_B: int64 rows of the page table.
        table_RC: int32 page table; every position that counts has a column.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU.
    """
    if simple_backend(draft_BK, backend) == "torch":
        return torch_chain_inputs(newest_B, draft_BK, limit_B, length_B, row_B, table_RC)
    from longdraft.kernels.triton_chain_inputs import triton_chain_inputs  # no Triton, no harm

    return triton_chain_inputs(newest_B, draft_BK, limit_B, length_B, row_B, table_RC)


def torch_remember(id_RI: torch.Tensor, row_B: torch.Tensor, position_B: torch.Tensor, id_BN: torch.Tensor) -> None:
    """The torch twin of :func:`remember`."""
    at_BN = (position_B[:, None] + torch.arange(id_BN.shape[1], device=row_B.device)) % id_RI.shape[1]
    id_RI[row_B[:, None], at_BN] = id_BN


def remember(
    id_RI: torch.Tensor,
    row_B: torch.Tensor,
    position_B: torch.Tensor,
    id_BN: torch.Tensor,
    backend: str | None = None,
) -> None:
    """Tokens of each request from a position on, into a ring of the latest ones; position p stands at ``p % I``.

    Args:
        id_RI: int64 rings, changed.
        row_B: int64 rows, no two alike.
        position_B: int64.
        id_BN: int64 tokens, no more than I.
        backend: as in :func:`chain_inputs`.
    """
    if simple_backend(id_RI, backend) == "torch":
        torch_remember(id_RI, row_B, position_B, id_BN)
        return
    from longdraft.kernels.triton_chain_inputs import triton_remember

    triton_remember(id_RI, row_B, position_B, id_BN)
