"""The choice of a shape: expected tokens, costs between batch sizes, the best of them, and what acceptance is learned from."""

import json
from pathlib import Path
from typing import Any

import pytest

from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.serve.acceptance_rates import FIRST, MEMORY, WEIGHT, AcceptanceRates
from longdraft.serve.settings import ServeSettings
from longdraft.serve.shape_choice import ShapeChoice
from longdraft.serve.shape_costs import CostTable, best_shape, expected_tokens
from longdraft.serve.tree_shape import TreeShape, candidates

CHAINS = ["chain0", "chain1", "chain2", "chain3"]


def chains(rate: float, depth: int = 3) -> dict[str, list[float]]:
    return {f"chain{d}": [rate] * d for d in range(depth + 1)}


def table(*ms: float, batches: tuple[int, ...] = (1,)) -> CostTable:
    """A chain a row, of one cost at each batch size."""
    return CostTable(batches, {f"chain{d}": (cost,) * len(batches) for d, cost in enumerate(ms)})


def test_expected_tokens_are_the_sum_over_kept_prefixes() -> None:
    assert expected_tokens([]) == 1
    assert expected_tokens([0.5, 0.5]) == 1.75
    assert expected_tokens([1.0, 0.0, 1.0]) == 2


@pytest.mark.parametrize(
    ("rate", "step_ms", "best"),
    [
        (0.0, 0.5, 0),
        (0.05, 0.6, 0),
        (0.3, 4.0, 0),
        (0.3, 2.0, 1),
        (0.7, 2.5, 2),
        (0.7, 0.1, 3),
        (1.0, 9.9, 3),
        (0.9, 9.9, 0),
    ],
)
def test_it_drafts_as_deep_as_pays(rate: float, step_ms: float, best: int) -> None:
    """Plain decoding costs 10 ms, and every draft of a chain the same on top."""
    costs = table(*(10 + step_ms * d for d in range(4)))
    by_hand = max(range(4), key=lambda d: (expected_tokens([rate] * d) / costs.of(f"chain{d}", 1), -d))
    assert best_shape(costs, chains(rate), 1) == f"chain{by_hand}" == f"chain{best}"


def test_better_acceptance_never_drafts_shallower_and_dearer_steps_never_deeper() -> None:
    depths = [int(best_shape(table(10, 11, 12, 13), chains(rate / 20), 1)[-1]) for rate in range(21)]
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (0, 3)
    depths = [int(best_shape(table(*(10 + ms * d for d in range(4))), chains(0.7), 1)[-1]) for ms in range(12)]
    assert depths == sorted(depths, reverse=True)
    assert (depths[0], depths[-1]) == (3, 0)


def test_of_equal_shapes_the_shallowest_is_taken() -> None:
    assert best_shape(table(1, 2, 4, 8), {"chain0": [], "chain1": [1.0]}, 1) == "chain0"
    assert best_shape(table(5, 5, 5, 5), chains(0.0), 1) == "chain0"


def test_the_batch_decides_where_large_batches_make_drafts_dear() -> None:
    costs = CostTable((1, 64), {"chain0": (10.0, 20.0), "chain3": (12.0, 80.0)})
    acceptance = {"chain0": [], "chain3": [0.8, 0.8, 0.8]}
    assert [best_shape(costs, acceptance, batch) for batch in (1, 8, 64, 200)] == [
        "chain3",
        "chain3",
        "chain0",
        "chain0",
    ]


def test_costs_lie_on_straight_lines_between_batch_sizes() -> None:
    costs = CostTable((2, 4, 8), {"a": (1.0, 3.0, 11.0)})
    assert [costs.of("a", batch) for batch in (1, 2, 3, 4, 5, 8, 9)] == [1, 1, 2, 3, 5, 11, 11]


def test_a_dumped_table_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = CostTable((1, 16), {"chain0": (1.5, 2.25), "4,4": (3.0, 9.0)})
    path.write_text(costs.dump())
    assert CostTable.load(str(path), ["chain0", "4,4"]) == costs
    assert CostTable.load(str(path), ["4,4"]).ms == {"4,4": (3.0, 9.0)}


GOOD = {"batches": [1, 4], "ms": {"chain0": [1, 2], "chain1": [1.5, 3]}}


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table's path is short: messages shorten long ones."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        ("{", "is not JSON: write .*batches"),
        ([1], r"holds \[1\]: write"),
        ({**GOOD, "ms": [1]}, "holds .*: write"),
        ({**GOOD, "batches": [4, 1]}, r"batches is \[4, 1\]: list ascending"),
        ({**GOOD, "batches": [0, 1]}, r"batches is \[0, 1\]: list"),
        ({**GOOD, "batches": []}, r"batches is \[\]: list"),
        ({"ms": GOOD["ms"]}, "batches is None: list"),
        ({**GOOD, "ms": {"chain0": [1, 2]}}, r"no row 'chain1' in ms, only \['chain0'\]: measure"),
        ({**GOOD, "ms": {"chain0": [1, 2], "chain1": [1]}}, r"ms.chain1 is \[1\]: give 2 milliseconds above 0"),
        ({**GOOD, "ms": {"chain0": [1, 2], "chain1": [1, -2]}}, r"ms.chain1 is \[1, -2\]: give"),
        ({**GOOD, "ms": {"chain0": [1, 2], "chain1": [1, "x"]}}, r"ms.chain1 is \[1, 'x'\]: give"),
        ({**GOOD, "ms": {"chain0": [1, 2], "chain1": [1, float("nan")]}}, r"ms.chain1 is \[1, nan\]: give"),
        ({**GOOD, "ms": {"chain0": [1, 2], "chain1": [1, 10**400]}}, r"ms.chain1 is \[1, 10+\.\.\. .*: give"),
        ({**GOOD, "ms": {"chain0": [1, 2], "chain1": [1, float("inf")]}}, r"ms.chain1 is \[1, inf\]: give"),
        ({**GOOD, "batches": [1, 10**400]}, r"batches is \[1, 10+\.\.\. .*: list ascending"),
        ("[" * 100_000, "is not JSON: write"),
        ({**GOOD, "batches": list(range(9, 4000))}, r"ms.chain0 is \[1, 2\]: give 3991"),
    ],
)
@pytest.mark.usefixtures("in_a_folder")
def test_a_broken_table_is_refused_with_field_value_and_remedy(data: Any, pattern: str) -> None:
    path = Path("costs.json")
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(UserError, match=f"tree_costs='costs.json'.*{pattern}") as error:
        CostTable.load(str(path), ["chain0", "chain1"])
    assert len(str(error.value)) < 500


@pytest.mark.usefixtures("in_a_folder")
def test_a_missing_table_is_refused() -> None:
    with pytest.raises(UserError, match=r"tree_costs='none.json' cannot be read \(No such file"):
        CostTable.load("none.json", [])


@pytest.mark.parametrize("tree", ["chain", "4,4"])
def test_costs_without_a_choice_are_refused(tree: str) -> None:
    with pytest.raises(UserError, match="nothing to choose: leave it out, or set tree to auto"):
        validate(ServeSettings, {"tree": tree, "tree_costs": "x.json"})
    assert validate(ServeSettings, {"tree": "auto:4,4", "tree_costs": "x.json"}).tree_costs == "x.json"


def test_candidates_are_chains_and_the_tree_the_shallowest_first() -> None:
    assert [s.name for s in candidates("auto", 3)] == CHAINS
    assert [(s.name, s.places, s.depth, s.chain) for s in candidates("auto:3,2", 2)] == [
        ("chain0", 1, 0, True),
        ("chain1", 2, 1, True),
        ("chain2", 3, 2, True),
        ("3,2", 6, 2, False),
    ]
    assert [s.name for s in candidates("eagle2:3,2,8", 3)] == ["eagle2:3,2,8"]
    assert candidates("chain", 4) == []


def shapes(text: str = "auto:3,2,2", steps: int = 3) -> dict[str, TreeShape]:
    return {shape.name: shape for shape in candidates(text, steps)}


def test_before_anything_is_seen_rates_are_the_prior() -> None:
    known = shapes()
    rates = AcceptanceRates(list(known.values()))
    assert rates.of(known["chain3"]) == [FIRST] * 3
    assert rates.of(known["3,2,2"]) == pytest.approx([(1 + FIRST) / 2] * 3)
    assert rates.of(known["chain0"]) == []


def test_rates_are_smoothed_shares_of_drafts_whose_ancestors_were_kept() -> None:
    known = shapes()
    rates = AcceptanceRates(list(known.values()))
    rates.learn(known["chain3"], [3, 3, 1, 0], [3, 1, 0, 0])
    assert rates.tried["chain"] == [3, 2, 1]
    assert rates.kept["chain"] == [2, 1, 1]
    first = (2 + WEIGHT * FIRST) / (3 + WEIGHT)
    assert rates.of(known["chain1"]) == pytest.approx([first])
    assert rates.of(known["chain2"])[1] == pytest.approx((1 + WEIGHT * first) / (2 + WEIGHT))
    assert rates.tried["3,2,2"] == [0, 0, 0], "a tree's counts are its own"


def test_much_evidence_outweighs_the_prior_and_fades_once_it_stops() -> None:
    known = shapes()
    rates = AcceptanceRates(list(known.values()))
    for _ in range(400):
        rates.fade()
        rates.learn(known["3,2,2"], [3] * 16, [2] * 16)
    assert rates.of(known["3,2,2"]) == pytest.approx([1, 1, 0], abs=0.02)
    assert rates.tried["3,2,2"][0] == pytest.approx(16 * (1 - MEMORY**400) / (1 - MEMORY))
    for _ in range(2500):
        rates.fade()
    assert rates.of(known["3,2,2"]) == pytest.approx([(1 + FIRST) / 2] * 3, abs=0.01)


def test_a_choice_follows_what_is_kept() -> None:
    """Good drafts deepen it, bad ones end in plain decoding, and after a while it tries again."""
    choice = ShapeChoice(candidates("auto", 4))
    assert choice.pick(1).name == "chain4", "without costs the last"
    choice.costs = CostTable((1,), {f"chain{d}": (10.0 + 2 * d,) for d in range(5)})

    def rounds(count: int, kept: int) -> list[str]:
        names = []
        for _ in range(count):
            shape = choice.pick(1)
            names.append(shape.name)
            choice.learn(shape, [shape.depth], [min(kept, shape.depth)])
        return names

    assert rounds(200, 9)[-1] == "chain4"
    assert rounds(200, 1)[-1] == "chain1"
    bad = rounds(3000, 0)
    assert bad.count("chain0") > 2000
    assert "chain0" in bad and bad[bad.index("chain0") :] != ["chain0"] * len(bad[bad.index("chain0") :]), "tried again"


def test_one_shape_leaves_nothing_to_choose() -> None:
    choice = ShapeChoice(candidates("3,2", 2))
    assert not choice.open
    shape = choice.pick(5)
    choice.learn(shape, [2], [1])
    assert shape.name == "3,2"
    assert choice.rates.tried == {"3,2": [0, 0]}
