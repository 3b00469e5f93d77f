"""Ridge regression from sums, for first weights that are fitted instead of trained.

Legend: N rows, F inputs, E outputs.
"""

import torch

RIDGE = 1e-2  # share of a feature's mean square that is added to the diagonal


class Regression:
    """Ridge regression from sums; each input has its own scale."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.gram_FF = torch.zeros(inputs, inputs, device=device)
        self.moment_FE = torch.zeros(inputs, outputs, device=device)

    def add(self, x_NF: torch.Tensor, want_NE: torch.Tensor) -> None:
        x_NF = x_NF.float()
        self.gram_FF += x_NF.t() @ x_NF
        self.moment_FE += x_NF.t() @ want_NE.float()

    def scale(self) -> torch.Tensor:
        """``[F]`` norm of each input over all rows; 1 for one that is always zero."""
        size_F = self.gram_FF.diagonal().sqrt()
        return torch.where(size_F > 0, size_F, 1.0)

    def solve(self) -> torch.Tensor:
        """``[E, F]``, as a linear layer's weight."""
        size_F = self.scale()
        scaled_FF = self.gram_FF / size_F / size_F[:, None]
        scaled_FF.diagonal().add_(RIDGE)
        return (torch.linalg.solve(scaled_FF, self.moment_FE / size_F[:, None]) / size_F[:, None]).t()
