"""The Triton kernel of sets of largest entries in Triton's interpreter, against its twin (run by test_kernels_top_set.py)."""

import math
import random

import pytest
import torch

from longdraft.kernels import triton_top_set
from longdraft.kernels.top_set import top_set

FEW = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-149, math.inf, -math.inf, math.nan, 3e38, -3.4028235e38])


def check(score_BN: torch.Tensor, counts: list[int], ends: list[int], room: int, forced: int = 0) -> torch.Tensor:
    args = score_BN, torch.tensor(counts), torch.tensor(ends), room, forced
    found = top_set(*args, backend="triton")
    assert found.dtype == torch.int32
    assert torch.equal(found, top_set(*args, backend="torch"))
    return found


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a hundred take several pieces, and candidates of those several again."""
    monkeypatch.setattr(triton_top_set, "PIECE", 32)
    monkeypatch.setattr(triton_top_set, "LAST", 64)


def random_case(seed: int, most_room: int, most: int) -> None:
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    entries, rows = rng.randint(1, most), 4
    score_BN = FEW[torch.randint(len(FEW), (rows, entries), generator=g)]
    score_BN[1] = torch.randn(entries, generator=g)
    score_BN[2] = torch.randn(entries, generator=g).bfloat16().float() * 1e-6
    room = rng.randint(1, most_room)
    counts = [rng.choice([0, room, rng.randint(0, room)]) for _ in range(rows)]
    ends = [rng.choice([0, entries, entries + 3, rng.randint(0, entries)]) for _ in range(rows)]
    check(score_BN, counts, ends, room, rng.choice([0, 0, 1, 5]))


@pytest.mark.parametrize("seed", range(10))
def test_ties_zeros_infinities_and_counts(seed: int) -> None:
    random_case(seed, 40, 90)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_many_pieces(seed: int, small_pieces: None) -> None:
    random_case(seed, 16, 400)


def test_pieces_of_the_real_size() -> None:
    score_BN = torch.randn(2, 9_000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    found = check(score_BN, [500, 300], [9_000, 8_500], 512, 4)
    assert found[0, :4].tolist() == [0, 1, 2, 3] and int(found[0, 499]) < 9_000 == int(found[0, 500])


def test_rows_may_lie_in_wider_ones_and_be_of_16_bits() -> None:
    wide = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    check(wide[:, 3:40], [5, 6, 0], [37, 20, 4], 8, 2)
    check(wide.T[3:6], [2] * 3, [3] * 3, 2)
