"""The Triton kernels of Equation 6 in Triton's interpreter, against their twin (run by test_kernels_token_set.py)."""

import math
import random

import pytest
import torch

from longdraft.kernels import token_set as module
from longdraft.kernels import triton_token_set
from longdraft.kernels.token_set import token_set

FEW = torch.tensor([0.0, -0.0, 1.0, 2.0**-149, 3.0, math.inf, -math.inf, math.nan, -2.0])


def check(draft_BN: torch.Tensor, target_BN: torch.Tensor, lengths: list[int], *parts: int) -> list[torch.Tensor]:
    args = draft_BN, target_BN, torch.tensor(lengths), *parts
    found, want = token_set(*args, backend="triton"), token_set(*args, backend="torch")
    for got, wanted in zip(found, want, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    return list(found)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a hundred take several pieces."""
    monkeypatch.setattr(module, "PIECE", 32)
    for each in (module, triton_token_set):
        monkeypatch.setattr(each, "LAST", 128)


def random_case(seed: int, most: int) -> None:
    """Scores of few values or of many, rows without a score of either source or of both, any split of any budget."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    columns = rng.randint(1, most)
    pair = []
    for _ in range(2):
        score_BN = torch.rand(4, columns, generator=g)
        score_BN[0] = FEW[torch.randint(len(FEW), (columns,), generator=g)]
        score_BN[rng.randrange(4)] = 0.0
        score_BN[rng.randrange(4), ::2] = 0.5
        pair.append(score_BN)
    sinks, window, room = rng.randint(0, 4), rng.randint(0, 5), rng.randint(1, 20)
    tokens = sinks + window + room
    lengths = [rng.choice([0, tokens, tokens + 1, rng.randint(0, columns + 6)]) for _ in range(4)]
    check(*pair, lengths, tokens, sinks, window, rng.choice([0, room, rng.randint(0, room)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(10))
def test_u1_u2_rows_of_one_piece(seed: int) -> None:
    random_case(seed, 90)


@pytest.mark.parametrize("seed", range(8))
def test_u1_u2_rows_of_many_pieces(seed: int, small_pieces: None) -> None:
    random_case(seed, 180)


def test_the_papers_budget() -> None:
    g = torch.Generator().manual_seed(0)
    pair = torch.rand(2, 1, 9000, generator=g).bfloat16().float()
    column_BV, count_B, start_B = check(pair[0], pair[1], [8800], 512, 4, 16, 192)
    assert count_B.tolist() == [496] and start_B.tolist() == [8784] and column_BV[0, :4].tolist() == [0, 1, 2, 3]


def test_rows_may_lie_in_wider_ones_and_be_of_16_bits() -> None:
    wide = torch.rand(3, 60, generator=torch.Generator().manual_seed(0)).bfloat16()
    check(wide[:, 3:50], wide[:, 13:60].float(), [47, 40, 3], 12, 2, 3, 4)
    same = wide[:, 3:50]
    check(same, same, [47, 40, 3], 12, 2, 3, 4)
