"""The pages in docs/: every command runs, or where it would take a GPU or hours, its command line is valid; whatever else they name exists."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from doc_commands import BLOCK, PLACES, Block, blocks, check, words_of

from longdraft import cli
from longdraft.bench.readme_tables import fill
from longdraft.ops.pages import PAGE_TABLES
from longdraft.options import leaf_fields
from longdraft.serve.settings import RequestSettings, ServeSettings
from longdraft.train.config import TrainSettings

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
RUN = [block for block in blocks() if block.how == "run"]
CHECKED = sorted({line for block in blocks() if block.how != "run" for line in block.lines})


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.page}: {block.lines[0][:40]}")
def test_a_walk_through_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for line in block.lines:
        program, *words = words_of(line)
        assert program == "longdraft" and cli.main(words) == 0, line


@pytest.mark.parametrize("line", CHECKED)
def test_a_command_line_is_valid(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "docs", "ops"):
        (tmp_path / name).symlink_to(ROOT / name)
    check(line)


@pytest.mark.parametrize(
    "line",
    [
        "longdraft serve --model-path TARGET --step 4 --no-such-flag",
        "longdraft serve --model-path TARGET --mode partial",
        "longdraft bench score_drafts --targets TARGET",
        "longdraft bench no_such_benchmark --target TARGET",
        "longdraft train --config recipes/smoke/eagle3.yaml schedule.steps=3",
        "torchrun --nproc-per-nodes 8 train/long_draft.py --config RECIPE",
        "make everything",
        "pip install -e '.[all]'",
        "promtool check rules ops/alarms.yaml",
        "curl -s http://127.0.0.1:30000/generate -d '{\"text\": 1'",
    ],
)
def test_a_wrong_command_line_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check(line)


def test_every_block_of_commands_is_found() -> None:
    """None hides in a block of another kind, and every comment before one is known."""
    for path in PAGES:
        text = path.read_text()
        fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
        assert set(fences) <= {"", "bash", "yaml", "promql"} and fences.count("") == len(fences) / 2, path
        assert fences.count("bash") == len(BLOCK.findall(text))
    assert {block.how for block in blocks()} == {"", "run", "starts the server", "asks the server"}
    assert len(RUN) >= 4 and len(CHECKED) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_table_is_typed(page: Path) -> None:
    text = page.read_text()
    assert fill(text, PAGE_TABLES) == text, f"run python -m longdraft.ops.pages docs/{page.name}"


def test_recipes_and_settings_of_the_pages_exist() -> None:
    text = "\n".join(path.read_text() for path in PAGES)
    for path in re.findall(r"(?<![\w/])(?:recipes|ops)/[\w./-]+\w", text):
        assert (ROOT / path).exists() or path.startswith("recipes/longspec/TARGET"), path
    known, parts = {name for name, _ in leaf_fields(TrainSettings)}, set(TrainSettings.model_fields)
    named = re.findall(r"(?<![\w/.-])([a-z0-9]+)\.([a-z_0-9]+)(?=[=`:])", text)
    assert len(named) > 15
    for section, field in named:
        assert section not in parts or field in ("json", "yaml") or f"{section}.{field}" in known, f"{section}.{field}"


def test_flags_named_in_the_text_are_options() -> None:
    """Of ours or of SGLang's server."""
    from sglang.srt.server_args import ServerArgs

    ours = {f"--{name.replace('_', '-')}" for name in ServeSettings.model_fields} | {
        "--draft",
        "--steps",
        "--help",
        "--plan",
    }
    theirs = {f"--{name.replace('_', '-')}" for name in ServerArgs.__dataclass_fields__}
    for path in PAGES:
        if path.name == "training.md":  # its flags are torchrun's and the trainer's
            continue
        named = set(re.findall(r"`(--[a-z-]+)", path.read_text()))
        assert named <= ours | theirs, f"{path.name}: {named - ours - theirs}"


def test_request_settings_of_the_serving_page_are_those_of_the_code() -> None:
    table = (ROOT / "docs/serve.md").read_text().split("| Key | Values |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(RequestSettings.model_fields)


def test_every_page_is_in_the_site_and_the_readme_names_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {next(iter(entry.values())) if isinstance(entry, dict) else entry for entry in nav}
    assert listed == {path.name for path in PAGES}
    readme = (ROOT / "README.md").read_text()
    assert "docs/training.md" in readme and "make docs" in readme


def test_places_stand_for_what_pages_say() -> None:
    words = {word for block in blocks() for line in block.lines for word in re.findall(r"[\w.]+", line)}
    assert set(PLACES) <= words
    assert words_of("longdraft serve --draft $(longdraft models draft a b)")[-1] == "$(longdraft models draft a b)"
    assert words_of("x TARGETS TARGET a.b=TEXT.jsonl")[1:] == [
        "TARGETS",
        PLACES["TARGET"],
        f"a.b={PLACES['TEXT.jsonl']}",
    ]
    assert shlex.join(words_of("make x # words")) == "make x"
