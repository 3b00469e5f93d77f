"""The latest tokens of every request, by row of SGLang's page table, on the device.

Legend: R rows, I remembered tokens of each, B requests, N tokens of a run.
"""

import torch


class LatestTokens:
    """A ring of ids a row, each with its position, so that what was never written is not taken for a token."""

    def __init__(self, rows: int, remembered: int, device: torch.device | str) -> None:
        self.id_RI = torch.zeros(rows, remembered, dtype=torch.int64, device=device)
        self.position_RI = torch.full_like(self.id_RI, -1)

    def write(self, row_B: torch.Tensor, position_B: torch.Tensor, id_BN: torch.Tensor) -> None:
        """Tokens of each request from a position on."""
        at_BN = position_B[:, None] + torch.arange(id_BN.shape[1], device=row_B.device)
        place = row_B[:, None], at_BN % self.id_RI.shape[1]
        self.id_RI[place], self.position_RI[place] = id_BN, at_BN

    def read(self, row_B: torch.Tensor, position_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[B]`` the token that was written last at each request's position, and bool ``[B]`` whether there is one."""
        place = row_B, position_B % self.id_RI.shape[1]
        return self.id_RI[place], self.position_RI[place] == position_B
