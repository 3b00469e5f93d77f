"""Structured output: the grammar's mask behind every draft of a chain.

Legend: N rows, V vocabulary.
"""

from typing import Any

import torch


def apply_grammar(logits_NV: torch.Tensor, grammar: Any, drafts: list[int]) -> None:
    """Mask the rows of one request in place; the grammar is left where it was.

    Row j is masked as if the drafts before it were accepted. Rows behind a draft that the grammar refuses stay as they
    are: the target's own choice cannot be that draft, so nothing behind it is ever emitted.

    Args:
        logits_NV: one row behind the newest token and one behind each draft.
        grammar: SGLang's grammar object, advanced over everything emitted.
        drafts: the drafted tokens, one fewer than rows.
    """
    if grammar.finished or grammar.is_terminated():
        return
    vocab = logits_NV.shape[1]
    mask = grammar.allocate_vocab_mask(vocab_size=vocab, batch_size=len(logits_NV), device=logits_NV.device)
    mask.fill_(-1)
    advanced = 0
    try:
        for row in range(len(logits_NV)):
            grammar.fill_vocab_mask(mask, row)
            if row == len(drafts) or not _allows(mask, row, drafts[row]):
                break
            grammar.accept_token(drafts[row])
            advanced += 1
            if grammar.is_terminated():
                break
    finally:
        if advanced:
            grammar.rollback(advanced)
    grammar.apply_vocab_mask(logits=logits_NV, vocab_mask=grammar.move_vocab_mask(mask, logits_NV.device))


def _allows(mask: torch.Tensor, row: int, token: int) -> bool:
    """Bit of a token in a row of xgrammar's int32 bitmask."""
    return bool((int(mask[row, token // 32]) >> (token % 32)) & 1)
