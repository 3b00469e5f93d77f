"""The page lists of a verification, and the bits of its trees, in buffers whose addresses never change, for CUDA graphs.

Legend: B requests, L lists, W page-list width; in bits T new tokens of all requests, W words.
"""

import torch

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree_bits import pack_bits, words


class StaticPlan:
    """Plans of chains or trees of one width for up to ``most`` requests; filled on the device before every replay."""

    def __init__(
        self, most: int, width: int, columns: int, device: torch.device, trees: bool = False, lists: int = 1
    ) -> None:
        """Allocate.

        Args:
            most: requests.
            width: new tokens of each request.
            columns: of SGLang's page table. The lists are longer by a chain: near the end of a table's row the chain's padding
                has no slots there, and stands on slot 0, which nobody owns.
            device: of the table.
            trees: whether what is verified has bits; chains may be verified with them too.
            lists: of each request: one, or one for every layer.
        """
        self.width = width
        self.pages_LBW = torch.zeros(lists, most, columns + width, dtype=torch.int32, device=device)
        self.lens_LB = torch.zeros(lists, most, dtype=torch.int32, device=device)
        self.pages_BW, self.lens_B = self.pages_LBW[0], self.lens_LB[0]
        self.cu_B1 = torch.arange(most + 1, dtype=torch.int32, device=device) * width
        self.bits_TW: torch.Tensor | None = None
        if trees:
            self.bits_TW = torch.zeros(most * width, words(width), dtype=torch.int64, device=device)
            self.chain_TW = pack_bits(torch.ones(width, width, dtype=torch.bool, device=device).tril())

    def fill(
        self,
        table: torch.Tensor,
        row_B: torch.Tensor,
        lens_B: torch.Tensor,
        longest: int,
        bits_TW: torch.Tensor | None = None,
    ) -> None:
        """Read the page table for a batch and its padding.

        Args:
            table: SGLang's page table; row 0 is the padding's.
            row_B: each request's row.
            lens_B: cached tokens of each.
            longest: none of them is larger; columns behind it and its chain keep what they held.
            bits_TW: of the batch's trees; None for chains.
        """
        size, used = len(row_B), min(longest + self.width, table.shape[1], self.pages_BW.shape[1])
        self.pages_BW[:size, :used] = table[row_B, :used].to(torch.int32)
        self.lens_B[:size] = lens_B
        if self.bits_TW is None:
            assert bits_TW is None, "graphs of chains cannot verify trees"
            return
        given_TW = self.chain_TW.repeat(size, 1) if bits_TW is None else bits_TW
        self.bits_TW[: len(given_TW)] = given_TW
        self.bits_TW[len(given_TW) : size * self.width] = 0  # the padding reads nothing

    def fill_view(self, pages_BW: torch.Tensor, lens_B: torch.Tensor, size: int) -> None:
        """Page lists of chains that read a part of their cache; behind them is padding, which reads slot 0.

        Args:
            pages_BW: int32 slots, those of the new tokens behind what is read; ``[L, B, W]`` for a list of each layer.
            lens_B: int32 slots that each reads, ``[L, B]``.
            size: batch size with padding.
        """
        assert self.bits_TW is None, "trees read the whole cache"
        batch, used = pages_BW.shape[-2], min(pages_BW.shape[-1], self.pages_LBW.shape[-1])
        self.pages_LBW[:, :batch, :used] = pages_BW[..., :used]
        self.pages_LBW[:, batch:size, :used] = 0
        self.lens_LB[:, :batch] = lens_B
        self.lens_LB[:, batch:size] = 1

    def plan(self, size: int) -> AttentionPlan | list[AttentionPlan]:
        """The plan of a batch of ``size``, over views of the buffers; of several lists, one of each."""
        cu = list(range(0, (size + 1) * self.width, self.width))
        plans = [
            AttentionPlan.on_device(pages_BW[:size], lens_B[:size], self.cu_B1[: size + 1], cu)
            for pages_BW, lens_B in zip(self.pages_LBW, self.lens_LB, strict=True)
        ]
        return plans[0] if len(plans) == 1 else plans

    def bits(self, size: int) -> torch.Tensor | None:
        """The bits of a batch of ``size``, a view; None for chains."""
        return None if self.bits_TW is None else self.bits_TW[: size * self.width]
