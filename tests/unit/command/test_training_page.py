"""docs/training.md: its walk-through runs as it stands, and whatever else it names exists."""

import re
import shlex
from pathlib import Path

import pytest

from longdraft import cli
from longdraft.options import leaf_fields
from longdraft.train.config import TrainSettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/training.md").read_text()
TESTED = re.findall(r"<!-- tested -->\n```\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("block", range(len(TESTED)))
def test_the_walk_through_runs(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for line in TESTED[block].splitlines():
        program, *words = shlex.split(line)
        assert program == "longdraft" and cli.main(words) == 0, line


def test_every_command_of_the_page_exists() -> None:
    assert len(TESTED) == 2
    for line in COMMANDS:
        program, *words = shlex.split(line)
        assert program in ("longdraft", "torchrun"), line
        if program == "longdraft":
            assert words[0] in cli.COMMANDS, line


def test_every_recipe_and_setting_of_the_page_exists() -> None:
    for path in re.findall(r"recipes/[\w./-]+", PAGE):
        assert (ROOT / path).exists() or path.startswith("recipes/longspec/TARGET"), path
    known = {name for name, _ in leaf_fields(TrainSettings)}
    sections = set(TrainSettings.model_fields)
    named = re.findall(r"(?<![\w/.-])([a-z0-9]+)\.([a-z_0-9]+)(?=[=`:])", PAGE)
    assert len(named) > 15
    for section, field in named:
        assert section not in sections or field in ("json", "yaml") or f"{section}.{field}" in known, (
            f"{section}.{field}"
        )


def test_the_page_is_linked() -> None:
    assert "docs/training.md" in (ROOT / "README.md").read_text()
