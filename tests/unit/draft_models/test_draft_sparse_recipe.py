"""The file that a calibration writes and serving reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.errors import UserError

GOOD: dict[str, Any] = {
    "target": {"layer": 17, "heads": [4, 1]},
    "draft": [{"layer": 2, "heads": [0]}, {"layer": 0, "heads": [3, 2]}],
    "lookahead": 208,
    "budget": 512,
    "provenance": {"target": "a model", "seed": 1},
}


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    recipe = SparseRecipe(**GOOD)
    recipe.save(path := tmp_path / "new" / "recipe.json")
    assert SparseRecipe.load(path) == recipe
    assert recipe.target.heads == [1, 4]
    assert [each.layer for each in recipe.draft] == [2, 0]
    assert [p.name for p in path.parent.iterdir()] == ["recipe.json"]


def test_a_file_written_by_hand_may_leave_out_what_has_defaults(tmp_path: Path) -> None:
    (path := tmp_path / "r.json").write_text('{"target": {"layer": 3, "heads": [0]}, "lookahead": 0}')
    recipe = SparseRecipe.load(path)
    assert recipe.budget == 512 and recipe.draft == [] and recipe.target == LayerHeads(layer=3, heads=[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lookahead": 493}, "lookahead=493 with budget=512, of which 20"),
        ({"draft": [], "lookahead": 4}, "lookahead=4 without draft layers"),
        ({"target": {"layer": 1, "heads": []}}, "target.heads=[]: list different heads"),
        ({"target": {"layer": 1, "heads": [2, 2]}}, "target.heads=[2, 2]: list different heads"),
        ({"target": {"layer": -1, "heads": [2]}}, "target.layer=-1"),
        ({"draft": [{"layer": 1, "heads": [0]}] * 2}, "name every layer once"),
        ({"budgett": 3}, "unknown key 'budgett' (did you mean 'budget'?)"),
        ({"budget": 20, "lookahead": 0}, "budget=20"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (path := tmp_path / "r.json").write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(UserError) as error:
        SparseRecipe.load(path)
    assert said in str(error.value) and "r.json" in str(error.value)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_file_that_is_none_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"sparse recipe .*r\.json.*longdraft calibrate"):
        SparseRecipe.load(path)
