"""Rows and masks of training-time test against a loop that says what they mean."""

import pytest
import torch

from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.chains import document_ends, supervised_chains, unshifted_chains


def packed(seed: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Labels, the loss mask by token and offsets of random documents whose first token is not supervised."""
    g = torch.Generator().manual_seed(seed)
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    mask = torch.rand(cu[-1], generator=g) < 0.6
    mask[cu[:-1]] = False
    label = torch.full((cu[-1],), IGNORED)
    for a, b in zip(cu, cu[1:], strict=False):
        for t in range(a, b - 1):
            if mask[t + 1]:
                label[t] = 100 + t
    return label, mask, cu


@pytest.mark.parametrize("lengths", [[7], [1, 2, 9], [5, 1, 1, 12]])
@pytest.mark.parametrize("steps", [1, 4])
def test_chains_begin_at_answers_and_stay_in_their_document(lengths: list[int], steps: int) -> None:
    label, mask, cu = packed(len(lengths), lengths)
    chains = supervised_chains(label, cu, steps)
    begins = [t for a, b in zip(cu, cu[1:], strict=False) for t in range(a, b - 1) if mask[t + 1]]
    assert chains.row_N.tolist() == begins
    for n, t in enumerate(begins):
        end = next(b for b in cu[1:] if t < b)
        for k in range(steps):
            want = t + 1 + k < end and bool(mask[t + 1 + k])
            assert bool(chains.valid_KN[k, n]) == want
            if want:
                assert int(chains.teacher_KN[k, n]) == t + 1 + k


@pytest.mark.parametrize("lengths", [[7], [1, 2, 9]])
def test_unshifted_rows_are_one_token_late(lengths: list[int]) -> None:
    label, mask, cu = packed(3, lengths)
    chains = unshifted_chains(label, cu, 3)
    assert chains.row_N.tolist() == list(range(cu[-1]))
    for t in range(cu[-1]):
        end = next(b for b in cu[1:] if t < b)
        for k in range(3):
            assert bool(chains.valid_KN[k, t]) == (t + 1 + k < end and bool(mask[t + k]))


def test_ends_of_documents() -> None:
    assert document_ends([0, 2, 2, 5], torch.device("cpu")).tolist() == [2, 2, 5, 5, 5]


def test_nothing_supervised_gives_no_chain() -> None:
    chains = supervised_chains(torch.full((4,), IGNORED), [0, 4], 2)
    assert chains.row_N.shape == (0,) and chains.valid_KN.shape == (2, 0)
