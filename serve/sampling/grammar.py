"""Structured output: the grammar's mask behind every draft of a chain or a tree.

Legend: N rows, V vocabulary.
"""

from typing import Any

import torch


def apply_grammar(logits_NV: torch.Tensor, grammar: Any, drafts: list[int], parents: list[int] | None = None) -> None:
    """Mask the rows of one request in place; the grammar is left where it was.

    A row is masked as if the drafts on its path were accepted. Rows behind a draft that the grammar refuses stay as they
    are: the target's own choice cannot be that draft, so nothing behind it is ever emitted.

    Args:
        logits_NV: one row behind the newest token and one behind each draft.
        grammar: SGLang's grammar object, advanced over everything emitted.
        drafts: the drafted tokens, one fewer than rows; draft i is the token of row i + 1.
        parents: the row that each draft stands behind, less than 0 for one that is none of the tree's; None: a chain.
    """
    if grammar.finished or grammar.is_terminated():
        return
    vocab = logits_NV.shape[1]
    mask = grammar.allocate_vocab_mask(vocab_size=vocab, batch_size=len(logits_NV), device=logits_NV.device)
    mask.fill_(-1)
    children: dict[int, list[int]] = {}
    for draft, parent in enumerate(range(len(drafts)) if parents is None else parents):
        children.setdefault(parent, []).append(draft)

    def walk(row: int) -> None:
        grammar.fill_vocab_mask(mask, row)
        for draft in children.get(row, ()):
            if not _allows(mask, row, drafts[draft]):
                continue
            grammar.accept_token(drafts[draft])
            try:
                if not grammar.is_terminated():
                    walk(draft + 1)
            finally:
                grammar.rollback(1)

    walk(0)
    grammar.apply_vocab_mask(logits=logits_NV, vocab_mask=grammar.move_vocab_mask(mask, logits_NV.device))


def _allows(mask: torch.Tensor, row: int, token: int) -> bool:
    """Bit of a token in a row of xgrammar's int32 bitmask."""
    return bool((int(mask[row, token // 32]) >> (token % 32)) & 1)
