"""Penalties behind every draft equal SGLang's own, counted token by token."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grown_tree import tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fakes import PieceTokenizer, plain_request
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from longdraft.serve.sampling.penalties import apply_penalties, penalise_tree, penalised

VOCAB = 8


class _Batch:
    def __init__(self, req: Any) -> None:
        self.reqs, self.device = [req], "cpu"


def of_sglang(logits: torch.Tensor, req: Any, written: list[int]) -> torch.Tensor:
    """One row as SGLang penalises it after ``written``: additive penalties first, then the scaling one."""
    batch = _Batch(req)
    kinds = {
        BatchedFrequencyPenalizer,
        BatchedPresencePenalizer,
        BatchedMinNewTokensPenalizer,
        BatchedRepetitionPenalizer,
    }
    book = BatchedPenalizerOrchestrator(VOCAB, batch, kinds)
    for token in written:
        book.cumulate_output_tokens(torch.tensor([token]))
    row = logits[None].clone()
    book.accumulate_additive_penalties(row)
    scale = book.accumulate_scaling_penalties()
    if scale is not None:  # what its compiled apply_scaling_penalties does
        row = torch.where(row < 0, row * scale, row / scale)
    return row[0]


token = st.integers(0, VOCAB - 1)
penalty = st.sampled_from([0.0, 0.5, 1.5, -1.0])


@settings(max_examples=120, deadline=None)
@given(
    output=st.lists(token, max_size=6),
    drafts=st.lists(token, max_size=4),
    frequency=penalty,
    presence=penalty,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    shortest=st.integers(0, 9),
    stop_ids=st.lists(token, max_size=2),
    more=st.one_of(st.none(), st.sets(token, max_size=2)),
    seed=st.integers(0, 99),
)
def test_every_row_is_penalised_as_if_its_drafts_were_written(
    output: list[int],
    drafts: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    shortest: int,
    stop_ids: list[int],
    more: set[int] | None,
    seed: int,
) -> None:
    req = plain_request(
        output,
        tokenizer=PieceTokenizer("abcdefgh", eos=7, more_stops=more),
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=shortest,
        stop_token_ids=stop_ids,
    )
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    want = torch.stack([of_sglang(row, req, output + drafts[:j]) for j, row in enumerate(logits)])
    apply_penalties(logits, req, drafts)
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [{"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"repetition_penalty": 1.1}, {"min_new_tokens": 1}],
)
def test_any_one_parameter_makes_a_request_penalised(params: dict[str, Any]) -> None:
    assert penalised(plain_request(**params))


def test_a_request_without_penalties_costs_nothing() -> None:
    assert not penalised(plain_request(temperature=0.7, top_k=5))


def test_stop_tokens_outside_the_vocabulary_hold_nothing_back_and_break_nothing() -> None:
    """A client may name any id; an index error here would end the server in the prefill."""
    tokenizer = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)
    req = plain_request(tokenizer=tokenizer, min_new_tokens=2, stop_token_ids=[3, VOCAB, 1 << 40, -1])
    logits = torch.zeros(3, VOCAB)
    apply_penalties(logits, req, [0, 0])
    want = torch.zeros(3, VOCAB)
    want[:2, 3] = -math.inf
    assert torch.equal(logits, want)


def test_a_trees_rows_are_penalised_by_their_own_paths() -> None:
    """Row by row, a tree is the chain along each node's path; what is none of the tree's harms nobody."""
    drafts, parents = [1, 2, 1, 3, 1, 6], [0, 0, 1, 2, 3, -2]
    paths = [[], [1], [2], [1, 1], [2, 3], [1, 1, 1]]
    req = plain_request([4, 1], frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.3, min_new_tokens=4)
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3))
    want = torch.stack([of_sglang(logits[row], req, [4, 1, *path]) for row, path in enumerate(paths)])
    tree = tree_of([[1, *drafts]], [[-1, *parents]])
    penalise_tree(logits, req, tree.token_BT[0], tree.bits_BTW[0], tree.depth_BT[0])
    torch.testing.assert_close(logits[:6], want, rtol=1e-5, atol=1e-5)
