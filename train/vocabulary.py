"""A draft's own vocabulary: the target's most frequent tokens in the text that the draft is trained to predict.

Legend: L tokens of a document, V the target's vocabulary, N the draft's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from longdraft.errors import UserError
from longdraft.train.documents import Document


class TokenCount:
    """How often each token comes, and in which document first.

    Ties are broken as SpecForge breaks them: the token of the earlier document, then the smaller id.
    """

    def __init__(self, vocab_size: int) -> None:
        self.count_V = torch.zeros(vocab_size, dtype=torch.int64)
        self.first_V = torch.full((vocab_size,), torch.iinfo(torch.int64).max)
        self.documents = 0

    def add(self, id_L: torch.Tensor, supervised_L: torch.Tensor | None = None) -> None:
        """Count a document.

        Args:
            id_L: int64 ids; those beyond the vocabulary are left out.
            supervised_L: bool, which of them count; None counts all.
        """
        if supervised_L is not None:
            id_L = id_L[supervised_L]
        size = len(self.count_V)
        found_V = torch.bincount(id_L, minlength=size)[:size]
        self.first_V[(found_V > 0) & (self.count_V == 0)] = self.documents
        self.count_V += found_V
        self.documents += 1

    def top(self, count: int, always: Sequence[int] = ()) -> torch.Tensor:
        """The ``count`` most frequent ids, ascending, ``[N]``; tokens that never came fill up from id 0.

        Args:
            count: how many.
            always: ids that are in whatever their count, such as the ends of turns.

        Raises:
            UserError: more than the vocabulary holds.
        """
        size = len(self.count_V)
        if count > size:
            raise UserError(f"a draft vocabulary of {count} tokens, the target's has {size}: give that or less")
        return self.ranked(always)[:count].sort().values

    def ranked(self, always: Sequence[int] = ()) -> torch.Tensor:
        """All ids, the most frequent first and those of ``always`` before them, ``[V]``."""
        count_V = self.count_V.clone()
        count_V[[token for token in always if token < len(count_V)]] = torch.iinfo(torch.int64).max
        by_first = self.first_V.argsort(stable=True)
        return by_first[count_V[by_first].argsort(descending=True, stable=True)]

    def coverage(self, id_N: torch.Tensor) -> float:
        """Share of the counted tokens that are among these ids; 0 where nothing was counted."""
        return float(self.count_V[id_N].sum()) / max(float(self.count_V.sum()), 1.0)


def count_tokens(documents: Iterable[Document], vocab_size: int, all_rows: bool = False) -> TokenCount:
    """Count the tokens that a draft is trained to predict.

    Args:
        documents: in their order, which breaks ties.
        vocab_size: of the target.
        all_rows: count prompts too.
    """
    counted = TokenCount(vocab_size)
    for document in documents:
        ids = torch.tensor(document.ids, dtype=torch.int64)  # said, since an empty document has no type of its own
        counted.add(ids, None if all_rows else torch.tensor(document.supervised, dtype=torch.bool))
    return counted


@dataclass(frozen=True)
class VocabularyMap:
    """``d2t_N`` (int64) is target id minus draft id, ``t2d_V`` (bool) says which target ids the draft has."""

    d2t_N: torch.Tensor
    t2d_V: torch.Tensor

    @property
    def id_N(self) -> torch.Tensor:
        """Target id of each draft id, ascending."""
        return self.d2t_N + torch.arange(len(self.d2t_N))

    @staticmethod
    def of(id_N: torch.Tensor, vocab_size: int) -> "VocabularyMap":
        """The map of ascending, different ids."""
        t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
        t2d_V[id_N] = True
        return VocabularyMap(id_N - torch.arange(len(id_N)), t2d_V)
