"""A request's tokens, the suffix automaton against brute force, and the lookup drafter."""

from array import array
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.lookup import LookupDrafter
from longdraft.serve.drafters.suffix_automaton import SuffixAutomaton
from longdraft.serve.tokens import Tokens

ids = st.lists(st.integers(0, 2), max_size=30)


def tokens_of(prompt: list[int], output: list[int]) -> Tokens:
    return Tokens(SimpleNamespace(origin_input_ids=array("q", prompt), output_ids=array("q", output)))


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    output=st.lists(st.integers(0, 9), max_size=8),
    data=st.data(),
)
def test_slices_are_those_of_the_joined_list(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    whole, tokens = prompt + output, tokens_of(prompt, output)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole) + 2))))
    piece = tokens.slice(start, end)
    assert piece == whole[start:end]
    assert isinstance(piece, list)
    assert (len(tokens), tokens.cached, tokens.newest) == (len(whole), len(whole) - 1, whole[-1])


def longest_repeated_suffix(text: list[int]) -> int:
    """Length of the longest suffix that occurs earlier too; the occurrences may overlap."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        if any(text[i : i + length] == text[n - length :] for i in range(n - length)):
            return length
    return 0


@settings(max_examples=200, deadline=None)
@given(text=ids)
def test_the_match_is_the_longest_suffix_seen_before(text: list[int]) -> None:
    """After every token: the right length, and an end at which that suffix really stands, before the last token."""
    index = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        index.append(token)
        seen = text[:count]
        length, end = index.match()
        assert length == longest_repeated_suffix(seen)
        if length:
            assert end < count - 1
            assert seen[end - length + 1 : end + 1] == seen[count - length :]


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 3), max_size=200))
def test_states_grow_linearly(text: list[int]) -> None:
    """At most 2n - 1 states and 3n - 4 transitions, the bounds of the construction."""
    index = SuffixAutomaton()
    for token in text:
        index.append(token)
    n = len(text)
    assert len(index.next) <= max(2, 2 * n)
    assert sum(len(edges) for edges in index.next) <= max(2, 3 * n)
    assert len(index.next) == len(index.link) == len(index.length) == len(index.end)
    assert len(index) == n


@settings(max_examples=150, deadline=None)
@given(text=ids, count=st.integers(1, 6), shortest=st.integers(1, 4))
def test_a_continuation_follows_the_match_and_repeats_what_runs_into_the_end(
    text: list[int], count: int, shortest: int
) -> None:
    index = SuffixAutomaton()
    for token in text:
        index.append(token)
    out = index.continuation(count, shortest)
    length, end = index.match()
    if length < shortest:
        assert out == []
        return
    assert len(out) == count
    longer = list(text)
    for _ in range(count):  # copying token by token, the copied ones included
        longer.append(longer[end + 1 + len(longer) - len(text)])
    assert out == longer[len(text) :]


def test_the_latest_occurrence_is_continued() -> None:
    """Text repeats what it said last: 1 2 was followed by 3, later by 4."""
    index = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2]:
        index.append(token)
    assert index.continuation(2, 1) == [4, 1]


def draft(drafter: LookupDrafter, rid: str, tokens: Tokens, limit: int = 3) -> list[int]:
    request = DraftRequest(rid, tokens, torch.zeros(tokens.cached, dtype=torch.int32), limit)
    return drafter.propose([request], lambda logits, at: at)[0]


def test_lookup_drafts_from_prompt_and_output_as_they_grow() -> None:
    drafter = LookupDrafter(2)
    tokens = tokens_of([1, 2, 3, 4, 9, 1], [2])
    assert draft(drafter, "a", tokens) == [3, 4, 9]
    tokens.output.append(3)
    assert draft(drafter, "a", tokens, 2) == [4, 9]
    tokens.output.append(7)
    assert draft(drafter, "a", tokens) == [], "nothing ended in 3 7 before"


def test_short_matches_are_not_continued() -> None:
    tokens = tokens_of([1, 2, 3], [2])
    assert draft(LookupDrafter(2), "a", tokens) == []
    assert draft(LookupDrafter(1), "a", tokens) == [3, 2, 3]


def test_requests_have_indexes_of_their_own_until_they_end() -> None:
    drafter = LookupDrafter(1)
    assert draft(drafter, "a", tokens_of([1, 2, 1], [])) == [2, 1, 2]
    assert draft(drafter, "b", tokens_of([1, 3, 1], [])) == [3, 1, 3]
    drafter.forget("a")
    drafter.forget("never seen")
    assert list(drafter.indexes) == ["b"]
    drafter.clear()
    assert not drafter.indexes


def test_an_id_that_comes_back_with_fewer_tokens_is_another_request() -> None:
    drafter = LookupDrafter(1)
    draft(drafter, "a", tokens_of([5, 6, 7, 8, 9], []))
    assert draft(drafter, "a", tokens_of([1, 2, 1], [])) == [2, 1, 2]


def test_a_batch_drafts_for_each_request_within_its_limit() -> None:
    drafter = LookupDrafter(1)
    batch = [
        DraftRequest(rid, tokens_of(text, []), torch.zeros(0), limit)
        for rid, text, limit in (("a", [1, 2, 1], 1), ("b", [4, 5], 5), ("c", [6, 6], 4))
    ]
    assert drafter.propose(batch, lambda logits, at: at) == [[2], [], [6, 6, 6, 6]]
