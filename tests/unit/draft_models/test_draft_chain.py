"""Chains of drafts against the training forward, and how much of a chain is kept (D2, V5)."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.acceptance import AcceptStats, accepted_drafts
from longdraft.draft_models.chain import argmax_choice, propose_chain
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.dense_attention import dense_attention
from longdraft.train.target import Capture

TARGET = tiny_target("qwen3")
DRAFT = tiny_draft(TARGET, window=8)
IDS = torch.randint(0, 256, (26,), generator=torch.Generator().manual_seed(2))
SEEN: Capture = TARGET.capture(IDS, torch.arange(26), [0, 26])


def propose(roots: list[int], steps: int) -> torch.Tensor:
    """One batch whose requests are prefixes of the same text, each with its own root."""
    state = WindowState(DRAFT, len(roots), steps)
    for row, root in enumerate(roots):
        state.rebuild(row, IDS[:root].tolist(), root)

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        parts = zip(q.split(1), roots, strict=True)
        return torch.cat(
            [dense_attention(x, SEEN.k_TKD[:root], SEEN.v_TKD[:root], x.shape[-1] ** -0.5)[0] for x, root in parts]
        )

    at = torch.tensor(roots)
    return propose_chain(state, torch.arange(len(roots)), IDS[at], at, steps, cross_attend)


def test_a_free_running_chain_is_the_training_forward_over_its_own_drafts() -> None:
    """D2 without forcing: depth d of the chain is row root + d under lag d + 1, its own drafts as input."""
    for root in (1, 4, 17):
        drafted = propose([root], 4)[0]
        text = torch.cat([IDS[: root + 1], drafted])
        padding = torch.zeros(
            len(text) - root, *SEEN.k_TKD.shape[1:]
        )  # drafts have no target keys; the lag hides these
        keys, values = torch.cat([SEEN.k_TKD[:root], padding]), torch.cat([SEEN.v_TKD[:root], padding])
        for depth in range(4):
            with torch.no_grad():
                hidden = DRAFT.forward_packed(text, torch.arange(len(text)), keys, values, [0, len(text)], depth + 1)
            assert int(DRAFT.logits(hidden)[root + depth].argmax()) == int(drafted[depth])


def test_a_batch_drafts_what_its_requests_draft_alone() -> None:
    """V7 for drafting: rows of different length, one whose target cache is empty."""
    roots = [9, 0, 21]
    together = propose(roots, 5)
    assert together.shape == (3, 5)
    for row, root in enumerate(roots):
        assert torch.equal(together[row], propose([root], 5)[0])


def test_choices_get_the_position_of_the_token_that_was_read() -> None:
    heard: list[tuple[list[int], int]] = []
    state = WindowState(DRAFT, 2, 3)

    def choose(logits: torch.Tensor, at: torch.Tensor, step: int) -> torch.Tensor:
        heard.append((at.tolist(), step))
        return argmax_choice(logits, at, step)

    at = torch.tensor([5, 11])
    propose_chain(state, torch.arange(2), IDS[:2], at, 3, torch.zeros_like, choose)
    assert heard == [([5, 11], 0), ([6, 12], 1), ([7, 13], 2)]


def test_another_head_replaces_the_targets() -> None:
    state = WindowState(DRAFT, 1, 3)
    one = torch.eye(40)[7].expand(1, 40)
    drafted = propose_chain(
        state, torch.tensor([0]), IDS[:1], torch.tensor([4]), 3, torch.zeros_like, logits=lambda hidden: one
    )
    assert drafted.tolist() == [[7, 7, 7]]


def naive_kept(draft: list[int], choice: list[int]) -> int:
    """Decode one token at a time and count how many drafts the target would have written itself."""
    kept = 0
    for drafted, chosen in itertools.zip_longest(draft, choice[: len(draft)]):
        if drafted != chosen:
            break
        kept += 1
    return kept


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), min_size=6, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    junk=st.integers(0, 2),
)
def test_acceptance_equals_a_loop_whatever_the_padding_holds(
    batch: list[tuple[list[int], list[int]]], junk: int
) -> None:
    """Padding that happens to equal the target's choice must not count."""
    width = max(len(draft) for draft, _ in batch)
    draft_BK = (
        torch.tensor([draft + [junk] * (width - len(draft)) for draft, _ in batch]).long().view(len(batch), width)
    )
    choice_BK1 = torch.tensor([choice[: width + 1] for _, choice in batch])
    kept = accepted_drafts(draft_BK, choice_BK1, torch.tensor([len(draft) for draft, _ in batch]))
    assert kept.tolist() == [naive_kept(draft, choice) for draft, choice in batch]


def test_both_taus_and_their_difference() -> None:
    """V5: sum of accepted plus verifications is what was emitted."""
    stats = AcceptStats()
    assert (stats.tau, stats.tau_without_bonus) == (0.0, 0.0)
    for drafted, accepted in ((4, 4), (4, 0), (2, 1)):
        stats.add(drafted, accepted)
    assert (stats.verifications, stats.drafted, stats.accepted) == (3, 10, 5)
    assert stats.tau_without_bonus == pytest.approx(5 / 3)
    assert stats.tau == pytest.approx(8 / 3)


def test_merged_stats_are_those_of_all_verifications() -> None:
    rounds = [(4, 2), (3, 3), (4, 0), (1, 1)]
    whole, left, right = AcceptStats(), AcceptStats(), AcceptStats()
    for index, one in enumerate(rounds):
        whole.add(*one)
        (left if index < 1 else right).add(*one)
    left.merge(right)
    assert left == whole
