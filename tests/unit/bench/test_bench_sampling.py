"""V3, V4: chi-square of 100,000 draws of chains and trees, controls that fail it, and what the test itself stands on."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft.bench import sampling_exactness as bench
from longdraft.bench.sampling_exactness import (
    PARAMS,
    SHAPES,
    World,
    couplings,
    decode,
    decode_plainly,
    exact_texts,
    p_value,
)

DRAWS = 100_000
WORLD = World.build(0.6)


@cache
def plain(name: str) -> torch.Tensor:
    return decode_plainly(WORLD, PARAMS[name], DRAWS)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_drafted_sampling_follows_the_exact_distribution(shape: str, name: str) -> None:
    drawn = decode(WORLD, shape, PARAMS[name], DRAWS)
    assert p_value(drawn.token_NL, exact_texts(WORLD, PARAMS[name])) > 0.01
    assert torch.equal(drawn.token_NL, plain(name)), "with seeds, the tokens of plain decoding"
    assert drawn.gained / drawn.rounds > 2.5, "it was drafted"


def test_a_chains_first_draft_is_kept_as_often_as_shared_noise_keeps_it() -> None:
    p, q = (bench.processed(table[0], {}) for table in (WORLD.target_VV, WORLD.draft_VV))
    rate = decode(WORLD, "chain", {}, DRAWS).first_kept / DRAWS
    found = couplings(p, q)
    assert abs(rate - found["shared_noise"]) < 2.5 * DRAWS**-0.5
    assert found["noise_of_its_own"] < found["shared_noise"] < found["optimal_coupling"]


@pytest.mark.parametrize("broken", [bench.without_position, bench.uniform_noise])
@pytest.mark.parametrize("shape", ["chain", "beam"])
def test_broken_noise_fails_the_same_test(shape: str, broken: bench.Choose) -> None:
    drawn = decode(WORLD, shape, {}, 20_000, broken)
    assert p_value(drawn.token_NL, exact_texts(WORLD, {})) < 1e-9


def test_couplings_in_closed_form() -> None:
    """Of two tokens, shared noise is the optimal coupling; equal distributions agree always, disjoint ones never."""
    two = couplings([0.3, 0.7], [0.6, 0.4])
    assert two["shared_noise"] == pytest.approx(0.7) == two["optimal_coupling"]
    assert two["noise_of_its_own"] == pytest.approx(0.46)
    assert couplings([0.2, 0.3, 0.5], [0.2, 0.3, 0.5])["shared_noise"] == pytest.approx(1)
    assert couplings([1.0, 0.0], [0.0, 1.0])["shared_noise"] == 0


def test_p_values_of_known_statistics() -> None:
    """Chi-square 4 with one degree of freedom is 0.0455; draws of a right sampler spread over (0, 1)."""
    wanted = {(0,): 0.5, (1,): 0.5}
    tokens = torch.tensor([0] * 60 + [1] * 40)[:, None]
    assert p_value(tokens, wanted) == pytest.approx(0.0455, abs=1e-4)
    assert p_value(torch.tensor([[0], [1]] * 50), {(0,): 1.0, (1,): 0.0}) == 0
    exact = exact_texts(WORLD, {})
    chances = torch.tensor(list(exact.values()))
    texts = torch.tensor(list(exact))
    g = torch.Generator().manual_seed(0)
    values = [p_value(texts[chances.multinomial(50_000, True, generator=g)], exact) for _ in range(40)]
    assert min(values) > 1e-4
    assert 10 < sum(value > 0.5 for value in values) < 30


def test_the_exact_distribution_is_one() -> None:
    for params in PARAMS.values():
        exact = exact_texts(WORLD, params)
        assert list(exact) == list(itertools.product(range(bench.VOCAB), repeat=bench.LENGTH))
        assert sum(exact.values()) == pytest.approx(1)
    assert 0 in exact_texts(WORLD, PARAMS["filtered"]).values()


def test_the_record_says_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"figures": {"x_p": 0.5}, "checks": {"x_p_above_0.01": False}}
    monkeypatch.setattr(bench, "measure", lambda draws, error: (found["figures"], found["checks"]))
    assert bench.main(["--draws", "10", "--out", str(tmp_path / "record.json")]) == 1
    assert '"x_p_above_0.01": false' in (tmp_path / "record.json").read_text()
