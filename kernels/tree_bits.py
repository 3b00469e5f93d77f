"""A tree's visibility as bits: which of its request's new tokens a row reads, packed into int64 words.

Bit ``j % 64`` of word ``j // 64`` of a row says whether the row reads the request's new token j. A row without bits reads
nothing: so are rows marked that only fill a fixed stride. All of it runs on the device and never waits for it.

Legend: B requests, T new tokens of a request, R rows, N keys, W words, ``W = ceil(T / 64)``.
"""

import torch

WORD = 64


def words(keys: int) -> int:
    """How many words hold a bit for each of ``keys`` keys, at least one."""
    return max(1, -(-keys // WORD))


def _own_bits(count: int, device: torch.device) -> torch.Tensor:
    """``[count, W]``: the bit of every node alone."""
    node = torch.arange(count, device=device)
    bit_T1 = (torch.ones_like(node) << (node % WORD))[:, None]
    return torch.where(node[:, None] // WORD == torch.arange(words(count), device=device), bit_T1, 0)


def ancestor_bits(parents_BT: torch.Tensor, depth: int | None = None) -> torch.Tensor:
    """Bits of trees whose nodes read themselves and their ancestors.

    Args:
        parents_BT: int32 or int64, the parent of each node among its request's; -1 for a root, less for a row that is none
            of the tree's. Parents may stand before or behind their children.
        depth: edges between a root and its deepest node at most, where the caller knows it; None for any tree.

    Returns:
        int64 ``[B, T, W]``. Nodes that are each other's ancestors read each other; nothing loops.
    """
    count = parents_BT.shape[1]
    # The last node stands for "no parent": it is its own parent and has no bits.
    parents_BT = parents_BT.long()
    up_BT = torch.nn.functional.pad(torch.where(parents_BT < 0, count, parents_BT), (0, 1), value=count)
    own_TW = torch.nn.functional.pad(_own_bits(count, parents_BT.device), (0, 0, 0, 1))
    alive_BT1 = torch.nn.functional.pad(parents_BT >= -1, (0, 1))[..., None]
    bits_BTW = torch.where(alive_BT1, own_TW, 0)
    # After round i a node has the bits of its next 2^i - 1 ancestors and points at the one behind them.
    for _ in range((count - 1 if depth is None else depth).bit_length()):
        bits_BTW = bits_BTW | bits_BTW.gather(1, up_BT[..., None].expand_as(bits_BTW))
        up_BT = up_BT.gather(1, up_BT)
    return bits_BTW[:, :count]


def unpack_bits(bits_RW: torch.Tensor, keys: int) -> torch.Tensor:
    """The bool mask ``[R, keys]`` of packed bits; leading dimensions may be any."""
    bit_RWX = (bits_RW[..., None] >> torch.arange(WORD, device=bits_RW.device)) & 1
    return bit_RWX.flatten(-2)[..., :keys].bool()


def pack_bits(mask_RN: torch.Tensor) -> torch.Tensor:
    """Bits of a bool mask ``[R, N]``, int64 ``[R, W]``; leading dimensions may be any."""
    keys = mask_RN.shape[-1]
    padded = torch.nn.functional.pad(mask_RN, (0, words(keys) * WORD - keys)).unflatten(-1, (-1, WORD))
    one_X = torch.ones(WORD, dtype=torch.int64, device=mask_RN.device)
    return (padded.long() * (one_X << torch.arange(WORD, device=mask_RN.device))).sum(-1)
