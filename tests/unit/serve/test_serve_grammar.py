"""Grammar masks behind every draft, and a grammar left exactly where it was (V8)."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.serve.sampling.grammar import apply_grammar

VOCAB = 70  # three words of a 32-bit mask


class ListGrammar:
    """Allows the next token of any of some texts; terminated at a text's end. Keeps a log of what was done to it."""

    def __init__(self, texts: list[list[int]], written: list[int], *, fail_at: int | None = None) -> None:
        self.texts, self.written, self.fail_at = texts, list(written), fail_at
        self.finished = False
        self.deepest = len(written)

    def allowed(self) -> set[int]:
        n = len(self.written)
        return {t[n] for t in self.texts if t[:n] == self.written and len(t) > n}

    def is_terminated(self) -> bool:
        return self.written in self.texts

    def accept_token(self, token: int) -> None:
        if token not in self.allowed():
            raise ValueError(f"Tokens not accepted: {token}")
        self.written.append(token)
        self.deepest = max(self.deepest, len(self.written))

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.written)
        del self.written[-count:]

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.zeros(batch_size, (vocab_size + 31) // 32, dtype=torch.int32)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        if self.fail_at == row:
            raise RuntimeError("matcher broke")
        words = [0] * mask.shape[1]
        for token in self.allowed():
            words[token // 32] |= 1 << token % 32
        mask[row] = torch.tensor([w - (1 << 32) if w >= 1 << 31 else w for w in words], dtype=torch.int32)

    @staticmethod
    def move_vocab_mask(mask: torch.Tensor, device: Any) -> torch.Tensor:
        return mask.to(device)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        for row in range(len(logits)):
            for token in range(logits.shape[1]):
                if not int(vocab_mask[row, token // 32]) >> token % 32 & 1:
                    logits[row, token] = float("-inf")


def open_tokens(logits: torch.Tensor) -> list[set[int]]:
    return [set((row > float("-inf")).nonzero().flatten().tolist()) for row in logits]


def masked(grammar: ListGrammar, drafts: list[int]) -> list[set[int]]:
    logits = torch.zeros(len(drafts) + 1, VOCAB)
    apply_grammar(logits, grammar, drafts)
    return open_tokens(logits)


EVERYTHING = set(range(VOCAB))
# 31 and 63 are sign bits of their words.
TEXTS = [[1, 31, 63, 4], [1, 31, 64], [1, 2, 33], [69]]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rows_are_masked_as_if_the_drafts_before_them_were_written(data: st.DataObject) -> None:
    """Drafts that follow a text for a while, then stray or end."""
    text = data.draw(st.sampled_from(TEXTS))
    written = text[: data.draw(st.integers(0, len(text) - 1))]
    follow = text[len(written) : len(written) + data.draw(st.integers(0, 4))]
    drafts = (follow + data.draw(st.lists(st.sampled_from([1, 2, 4, 31, 63, 69]), max_size=3)))[:5]
    grammar = ListGrammar(TEXTS, written)
    got = masked(grammar, drafts)
    assert grammar.written == written, "the grammar stands where it stood"
    prefix, got_allowed = list(written), True
    for row in range(len(drafts) + 1):
        step = ListGrammar(TEXTS, prefix)
        if step.is_terminated() or not got_allowed:
            assert got[row:] == [EVERYTHING] * (len(got) - row), "nothing behind an end or a refused draft is emitted"
            break
        assert got[row] == step.allowed()
        got_allowed = row < len(drafts) and drafts[row] in step.allowed()
        prefix += drafts[row : row + 1]


def test_a_refused_draft_stops_the_walk_before_it_reaches_the_matcher() -> None:
    """xgrammar's wrapper raises on a refused token; the mask says so first."""
    grammar = ListGrammar(TEXTS, [1])
    assert masked(grammar, [31, 2, 33]) == [{31, 2}, {63, 64}, EVERYTHING, EVERYTHING]
    assert grammar.deepest == 2


def test_a_grammar_that_ends_inside_the_chain_is_walked_no_further() -> None:
    grammar = ListGrammar(TEXTS, [1, 31])
    assert masked(grammar, [64, 5]) == [{63, 64}, EVERYTHING, EVERYTHING]
    assert grammar.written == [1, 31]


@pytest.mark.parametrize("how", ["finished", "terminated"])
def test_an_ended_grammar_masks_nothing(how: str) -> None:
    grammar = ListGrammar(TEXTS, [69] if how == "terminated" else [1])
    grammar.finished = how == "finished"
    assert masked(grammar, [1, 2]) == [EVERYTHING] * 3


def test_a_matcher_that_breaks_half_way_is_rolled_back() -> None:
    """The step is repeated without drafts, from the grammar's true state."""
    grammar = ListGrammar(TEXTS, [1], fail_at=2)
    with pytest.raises(RuntimeError, match="matcher broke"):
        masked(grammar, [31, 63, 4])
    assert grammar.written == [1]
    grammar.fail_at = None
    assert masked(grammar, []) == [{31, 2}]


def test_a_trees_rows_are_masked_by_their_own_paths() -> None:
    """Siblings, one that the grammar refuses, one that ends the text, a place that is none of the tree's."""
    grammar = ListGrammar(TEXTS, [1])
    drafts, parents = [31, 2, 5, 63, 33, 64, 7], [0, 0, 0, 1, 2, 1, -2]
    logits = torch.zeros(8, VOCAB)
    apply_grammar(logits, grammar, drafts, parents)
    assert open_tokens(logits) == [{31, 2}, {63, 64}, {33}, EVERYTHING, {4}, EVERYTHING, EVERYTHING, EVERYTHING]
    assert grammar.written == [1]


def test_a_grammar_that_breaks_deep_in_a_tree_is_left_where_it_stood() -> None:
    grammar = ListGrammar(TEXTS, [1], fail_at=4)
    with pytest.raises(RuntimeError, match="matcher broke"):
        apply_grammar(torch.zeros(5, VOCAB), grammar, [31, 2, 64, 63], [0, 0, 1, 1])
    assert grammar.written == [1]
