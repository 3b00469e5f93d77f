"""The wheel and the sdist of this tree, built once, and a new environment with the wheel in it."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from built import Distributions

ROOT = Path(__file__).resolve().parents[2]


def tracked_files() -> list[Path]:
    """Files of the repository that git tracks or would track, relative to its root."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    return tracked_files()


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Built from a copy, so that the checkout stays clean, and without a network."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@pytest.fixture(scope="session")
def new_environment(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an environment that holds the wheel; the dependencies come from this environment, by path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    done = subprocess.run([*pip, "--no-deps", "--no-index", str(distributions.wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A path line adds this environment's libraries and leaves out its own .pth files, the editable install's among them.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"
