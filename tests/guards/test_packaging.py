"""What is shipped: the wheel, the sdist, and both commands from a new environment in another folder."""

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from built import Distributions

from longdraft.models import SHIPPED


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_one_top_level_name(distributions: Distributions) -> None:
    tops = {name.split("/")[0] for name in names_in(distributions.wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"longdraft"}


def test_the_wheel_holds_every_module_and_recipe(distributions: Distributions, files: list[Path]) -> None:
    folders = ("kernels", "draft_models", "train", "serve", "bench", "ops", "recipes")
    wanted = {
        f"longdraft/{name}"
        for name in files
        if name.parts[0] in folders
        and name.suffix in (".py", ".yaml", ".json", ".jsonl", ".safetensors")
        and name.parts[:2] != ("bench", "results")
    }
    assert wanted - set(names_in(distributions.wheel)) == set()
    assert "longdraft/py.typed" in names_in(distributions.wheel)


def test_the_wheel_holds_no_tests(distributions: Distributions) -> None:
    assert not [name for name in names_in(distributions.wheel) if "tests/" in name]


def test_the_sdist_holds_what_a_wheel_is_built_from(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/longdraft/cli.py"} <= names
    assert "src/longdraft/kernels/merge.py" in names


@pytest.mark.parametrize("kind", SHIPPED["smollm2-135m"])
def test_both_archives_hold_the_shipped_drafts(distributions: Distributions, kind: str) -> None:
    wanted = {f"recipes/smollm2-135m/{kind}/{name}" for name in ("config.json", "model.safetensors")}
    with tarfile.open(distributions.sdist) as archive:
        names = {name.split("/", 1)[-1].removeprefix("src/longdraft/") for name in archive.getnames()}
    assert wanted <= names
    assert {f"longdraft/{name}" for name in wanted} <= set(names_in(distributions.wheel))


def test_the_wheel_stays_small(distributions: Distributions) -> None:
    """The shipped drafts and a MiB of code: nothing else that is large slips in."""
    assert distributions.wheel.stat().st_size <= 30 << 20


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    program = [str(environment / command[0]), *command[1:]]
    return subprocess.run(program, cwd=folder, env=clean, capture_output=True, text=True)


def test_an_installed_wheel_serves_from_another_folder(new_environment: Path, tmp_path: Path) -> None:
    done = run(new_environment, tmp_path, "longdraft", "serve", "--help")
    assert done.returncode == 0, done.stderr
    assert "--draft" in done.stdout


def test_an_installed_wheel_trains_from_another_folder(new_environment: Path, tmp_path: Path) -> None:
    done = run(new_environment, tmp_path, "longdraft", "train", "--config", "recipes/smoke/longspec.yaml", "--plan")
    assert done.returncode == 0, done.stderr
    assert "longspec" in done.stdout


def test_an_installed_wheel_finds_its_drafts(new_environment: Path, tmp_path: Path) -> None:
    done = run(new_environment, tmp_path, "longdraft", "models", "draft", "smollm2-135m", "longspec")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert new_environment.parent in folder.parents
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_the_installed_plugin_is_found_by_sglang_without_a_gpu(new_environment: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import entry_points\n"
        "import longdraft, sys\n"
        "found = {e.name: e for e in entry_points(group='sglang.srt.plugins')}\n"
        "found['longdraft'].load()\n"
        "print(longdraft.__file__)\n"
    )
    done = run(new_environment, tmp_path, "python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert str(new_environment.parent) in done.stdout
