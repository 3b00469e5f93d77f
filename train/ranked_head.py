"""Which tokens a ranked head holds: the most frequent ones of the training text (FR-Spec's idea)."""

from collections.abc import Sequence

import torch

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.train.documents import Corpus

DOCUMENTS = 2000  # documents that are counted; ranks settle long before


def most_frequent(corpus: Corpus, always: Sequence[int], draft: LongSpecDraft) -> torch.Tensor:
    """Ids for :meth:`LongSpecDraft.rank_head`, the same on every rank: no randomness, ties by id.

    Args:
        corpus: counted from the front.
        always: ids that are in whatever their count, such as the ends of turns.
        draft: its settings say how many.
    """
    assert draft.head_ids is not None
    size = draft.config.target.vocab_size
    count_V = torch.zeros(size, dtype=torch.int64)
    for index in range(min(len(corpus), DOCUMENTS)):
        count_V += torch.bincount(torch.tensor(corpus[index].ids, dtype=torch.int64), minlength=size)[:size]
    within = [token for token in always if token < size]
    count_V[within] = torch.iinfo(torch.int64).max
    return count_V.argsort(descending=True, stable=True)[: len(draft.head_ids)]
