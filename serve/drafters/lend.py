"""Lends a draft what it uses of the target's weights."""

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.kinds import AnyDraft
from longdraft.draft_models.shares import Share
from longdraft.serve.target_weights import TargetWeights


def lend(draft: AnyDraft, weights: TargetWeights, share: Share | None) -> None:
    """Bind a draft to its target, now or anew.

    Args:
        draft: of the server.
        weights: of the target.
        share: this rank's, where several serve together.
    """
    if isinstance(draft, Eagle3Draft):
        draft.bind(weights.embedding_VE)
    elif share is None:
        draft.bind(weights.embedding_VE, weights.head_VE)
    else:
        rows = weights.head_rows(draft.target_ids, draft.config.target.vocab_size, share)
        draft.bind_rows(weights.embedding_VE, *rows)
