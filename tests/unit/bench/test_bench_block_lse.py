"""The benchmark of block scores: its cases, floors and checks, without a card."""

import pytest
import torch

from longdraft.bench import block_lse as bench
from longdraft.bench.prefix_attention import DTYPES, Shape, make_layers


def test_the_floors_are_those_of_the_shapes() -> None:
    shapes = [Shape.parse(x) for x in bench.SHAPES]
    assert [s.bytes_read(torch.bfloat16) // 2 for s in shapes] == [1_073_741_824, 256_000_000]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_scorers_are_four_different_ones_and_read_every_layer(dtype: str) -> None:
    shape = Shape(2, 100, 3)
    layers = make_layers(shape, DTYPES[dtype], 1, "cpu", least=2 * shape.bytes_read(DTYPES[dtype]))
    scorers = bench.scorers(layers)
    found = {n: score(layers.q_THD, layers.caches[0][0], layers.plan) for n, score in scorers.items()}
    assert {n: x.shape[-1] for n, x in found.items()} == {"lse": 7, "lse_block1": 100, "bound": 7, "corners": 7}
    largest = found["lse_block1"][..., :96].unflatten(-1, (6, 16)).amax(-1)
    assert (found["bound"][..., :6] >= largest - 1e-3).all() and (found["lse"][..., :6] >= largest - 1e-3).all()
    assert bench.furthest(found["bound"], found["corners"]) > 0.1
    seen = list[torch.Tensor]()

    def score(q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: object) -> torch.Tensor:
        seen.append(k_SKD)
        return q_THD

    bench.score_all(layers, score)
    assert [id(x) for x in seen] == [id(k) for k, _ in layers.caches]


def test_an_error_and_a_missing_block_are_seen() -> None:
    want = torch.tensor([1.0, 2.0, -torch.inf])
    assert bench.furthest(want, want) == 0.0
    assert bench.furthest(torch.tensor([1.0, 2.5, -torch.inf]), want) == 0.5
    assert bench.furthest(torch.tensor([1.0, -torch.inf, -torch.inf]), want) == float("inf")


def test_a_choice_reads_two_layers_and_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUDGET", bench.Budget(256, 16, 32))
    layers = make_layers(Shape(2, 1000, 2), torch.bfloat16, 16, "cpu", least=1)
    assert len(layers.caches) == 1, "a context that fills a pass has one layer, which is then read twice"
    score_BN, chosen = bench.choose(layers)
    torch.testing.assert_close(score_BN.sum(1), torch.full((2,), 2.0 * 2 * 32))
    assert (chosen.count_B + 1000 - chosen.start_B <= 256).all() and (chosen.count_B > 0).all()


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["block_lse"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main() == 2
    assert "measured on a GPU" in capsys.readouterr().err
