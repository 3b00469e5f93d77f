"""Which rows of packed documents begin a drafted chain, which steps of it are supervised, and by which row of the target.

Row t of training-time test reads the feature of token t and the embedding of token t + 1, and its step k is taught by the
target's row t + 1 + k (EAGLE-3, section 3.1). The loss mask is shifted with the inputs: a chain begins where token t + 1 belongs
to an answer, as in serving, where the first answer token comes from the prefill.

Legend: T packed tokens, N chains, K steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from longdraft.kernels.linear_cross_entropy import IGNORED


@dataclass(frozen=True)
class Chains:
    """``row_N`` ascending; ``valid_KN`` says which steps are supervised; ``teacher_KN`` is the target's row, where valid."""

    row_N: torch.Tensor
    valid_KN: torch.Tensor
    teacher_KN: torch.Tensor

    def supervised(self) -> list[torch.Tensor]:
        """Of every step the chains that it supervises: int64 indices of N, ascending."""
        counts: list[int] = self.valid_KN.sum(1).tolist()
        return list(self.valid_KN.nonzero()[:, 1].split(counts))


def document_ends(cu: Sequence[int], device: torch.device) -> torch.Tensor:
    """``[T]`` offset behind each token's document."""
    lengths = [b - a for a, b in pairwise(cu)]
    length_D, end_D = torch.tensor([lengths, cu[1:]], dtype=torch.int64).to(device, non_blocking=True)
    return torch.repeat_interleave(end_D, length_D, output_size=sum(lengths))


def supervised_chains(label_T: torch.Tensor, cu: Sequence[int], steps: int) -> Chains:
    """Chains that begin at a supervised row.

    Args:
        label_T: next token of the same document where it is supervised, else -100.
        cu: document offsets from 0 to T.
        steps: K.
    """
    row_N = (label_T != IGNORED).nonzero().flatten()
    return _chains(label_T != IGNORED, row_N, cu, steps)


def unshifted_chains(label_T: torch.Tensor, cu: Sequence[int], steps: int) -> Chains:
    """SpecForge 0.2.0's rows: every row is a chain, and its mask is that of token t + k instead of t + 1 + k.

    A document's first token counts as unsupervised; no loss mask that comes from a chat says otherwise.
    """
    own_T = torch.zeros_like(label_T, dtype=torch.bool)
    own_T[1:] = label_T[:-1] != IGNORED
    row_N = torch.arange(len(label_T), device=label_T.device)
    return _chains(own_T, row_N, cu, steps)


def _chains(wanted_T: torch.Tensor, row_N: torch.Tensor, cu: Sequence[int], steps: int) -> Chains:
    end_N = document_ends(cu, row_N.device)[row_N]
    step_K1 = torch.arange(steps, device=row_N.device)[:, None]
    teacher_KN = row_N + step_K1 + 1
    inside_KN = teacher_KN < end_N
    valid_KN = inside_KN & wanted_T[(teacher_KN - 1).clamp_max(max(len(wanted_T) - 1, 0))]
    return Chains(row_N, valid_KN, torch.where(inside_KN, teacher_KN, 0))
