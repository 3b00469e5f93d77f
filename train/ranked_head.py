"""Which tokens a ranked head holds: the most frequent ones of the training text (FR-Spec's idea)."""

from collections.abc import Sequence

import torch

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.train.documents import Documents
from longdraft.train.vocabulary import count_tokens

DOCUMENTS = 2000  # documents that are counted; ranks settle long before


def most_frequent(corpus: Documents, always: Sequence[int], draft: LongSpecDraft) -> torch.Tensor:
    """Ids for :meth:`LongSpecDraft.rank_head`, the same on every rank: no randomness.

    Args:
        corpus: counted from the front, prompts too.
        always: ids that are in whatever their count, such as the ends of turns.
        draft: its settings say how many.
    """
    assert draft.head_ids is not None
    documents = (corpus[index] for index in range(min(len(corpus), DOCUMENTS)))
    return count_tokens(documents, draft.config.target.vocab_size, all_rows=True).top(len(draft.head_ids), always)
