"""How often each token comes in some text, as a file: what a draft head over the most frequent tokens is chosen by.

A LongSpec draft borrows the target's head, and reads all of it in every step. Most of what is said is said with a part of it
(FR-Spec's idea), and which part can be counted without any training.

Legend: V the target's vocabulary, N rows of the draft's head.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.errors import UserError

REMEDY = "make it with longdraft counts, with this target"


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a target's tokens.

    Attributes:
        count_V: int64, how often each token comes.
        rank_V: int64 ids, the most wanted first. Not only by count: ends of turns may come first whatever their count.
    """

    count_V: torch.Tensor
    rank_V: torch.Tensor

    def save(self, path: Path, facts: dict[str, str]) -> None:
        """Write a safetensors file, atomically; ``facts`` are for people."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, work = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(handle)
        try:
            save_file({"count": self.count_V, "rank": self.rank_V}, work, metadata={"format": "pt", **facts})
            os.chmod(work, 0o644)
            os.replace(work, path)
        finally:
            Path(work).unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path, vocab_size: int) -> "TokenCounts":
        """Read a file of :meth:`save`.

        Raises:
            UserError: no such file, a damaged one, or one of another vocabulary.
        """
        if not Path(path).is_file():
            raise UserError(f"token counts {str(path)!r}: no such file: {REMEDY}")
        try:
            with safe_open(path, framework="pt") as file:
                count_V, rank_V = file.get_tensor("count"), file.get_tensor("rank")
        except (SafetensorError, OSError) as error:
            raise UserError(f"token counts {str(path)!r} cannot be read ({error}): {REMEDY}") from None
        if count_V.shape != (vocab_size,):
            raise UserError(
                f"token counts {str(path)!r} are of {count_V.numel()} tokens, the target has {vocab_size}: {REMEDY}"
            )
        if rank_V.dtype != torch.int64 or not torch.equal(rank_V.sort().values, torch.arange(vocab_size)):
            raise UserError(f"token counts {str(path)!r} do not rank every token once: {REMEDY}")
        return TokenCounts(count_V, rank_V)

    def top(self, count: int) -> torch.Tensor:
        """The ``count`` most wanted ids, ascending, ``[N]``.

        Raises:
            UserError: more than the vocabulary holds.
        """
        if count > len(self.rank_V):
            raise UserError(f"a draft head of {count} tokens, the target has {len(self.rank_V)}: give fewer")
        return self.rank_V[:count].sort().values

    def coverage(self, id_N: torch.Tensor) -> float:
        """Share of the counted text that these ids are; 0 where nothing was counted."""
        return float(self.count_V[id_N].sum()) / max(float(self.count_V.sum()), 1.0)
