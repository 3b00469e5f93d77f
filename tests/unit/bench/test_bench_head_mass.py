"""The benchmark of Dustin's scores: its cases, floors and checks, without a card."""

import pytest
import torch

from longdraft.bench import head_mass as bench
from longdraft.bench.prefix_attention import DTYPES, Shape, make_layers


def test_the_floors_are_those_of_the_shapes() -> None:
    shapes = [Shape.parse(x) for x in bench.SHAPES]
    spread, near = ([bench.key_bytes(s, torch.bfloat16, heads) for s in shapes] for heads in ("spread", "near"))
    assert spread == [536_870_912, 128_000_000] and near == [134_217_728, 32_000_000]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_scores_are_of_all_rows_or_the_last_and_of_each_layer(dtype: str) -> None:
    shape = Shape(2, 100, 3)
    layers = make_layers(shape, DTYPES[dtype], 1, "cpu", least=2 * shape.bytes_read(DTYPES[dtype]))
    assert len(layers.caches) == 2
    history_BN = [bench.score(layers, at, "near", bench.last_rows(layers)) for at in range(3)]
    torch.testing.assert_close(history_BN[0].sum(1), torch.full((2,), 4.0))
    torch.testing.assert_close(bench.score(layers, 0, "near", None).sum(1), torch.full((2,), 12.0))
    assert torch.equal(history_BN[0], history_BN[2]) and bench.furthest(history_BN[0], history_BN[1]) > 0.1


def test_an_error_is_seen() -> None:
    want = torch.tensor([1.0, 2.0])
    assert bench.furthest(want, want) == 0.0 and bench.furthest(torch.tensor([1.0, 2.5]), want) == 0.25


def test_a_choice_is_of_both_scores_and_of_the_whole_budget() -> None:
    layers = make_layers(Shape(2, 1000, 2), torch.bfloat16, 16, "cpu", least=1)
    draft_BN, target_BN, chosen = bench.choose(layers, "spread", bench.last_rows(layers))
    torch.testing.assert_close(draft_BN.sum(1), torch.full((2,), 8.0))
    torch.testing.assert_close(target_BN.sum(1), torch.full((2,), 4.0))
    assert chosen.start_B.tolist() == [984, 984] and chosen.count_B.tolist() == [496, 496]
    ahead_B = chosen.column_BV[0].long()[
        draft_BN[0, chosen.column_BV[0].long()] >= draft_BN[0, 4:984].topk(192).values[-1]
    ]
    assert len(ahead_B) >= 192


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["head_mass"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main() == 2
    assert "measured on a GPU" in capsys.readouterr().err
