"""Rules of the source tree that no linter knows."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

OUR_FOLDERS = ("kernels", "draft_models", "train", "serve", "bench", "ops")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|tmp/w)/\w+")


def test_kernels_in_the_repository_root_is_the_library(repository: Path) -> None:
    program = "import kernels; print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "site-packages" in done.stdout


@pytest.mark.parametrize("folder", [*OUR_FOLDERS, "recipes"])
def test_a_top_folder_is_no_package(repository: Path, folder: str) -> None:
    assert not (repository / folder / "__init__.py").exists()
    assert (repository / "src" / "longdraft" / folder).resolve() == repository / folder


@pytest.mark.parametrize("folder", ["train", "serve"])
def test_no_module_has_the_name_of_another_library(repository: Path, folder: str) -> None:
    # A script's own folder comes first on the path: torchrun train/long_draft.py would import ours for theirs.
    names = {path.stem for path in (repository / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    taken = names & (set(sys.stdlib_module_names) | set(packages_distributions()))
    assert taken - {"__pycache__"} == set()


def test_the_plugin_is_imported_without_a_gpu(repository: Path) -> None:
    program = "import sys, longdraft.serve.plugin as p; assert callable(p.register); print('sglang' in sys.modules)"
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(repository / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_only_the_seam_imports_specforge(repository: Path) -> None:
    program = (
        "import sys, longdraft.train.loop, longdraft.train.long_draft, longdraft.train.features.capture, "
        "longdraft.train.generate, longdraft.draft_models.convert; print('specforge' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
    outside = [
        path.relative_to(repository)
        for path in our_sources(repository)
        if re.search(r"^\s*(import|from) specforge", path.read_text(), re.M)
        and path.parent.name != "specforge_seam"
        and path.parts[len(repository.parts)] != "bench"
    ]
    assert outside == []


def our_sources(repository: Path) -> list[Path]:
    folders = [repository / name for name in OUR_FOLDERS] + [repository / "src" / "longdraft"]
    return [path for folder in folders for path in folder.glob("**/*.py")]


def test_nothing_unpickles_and_nothing_trusts_remote_code(repository: Path) -> None:
    found = []
    for path in our_sources(repository):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found += [
                    f"{path.name}: {name}" for name in names if name.split(".")[0] in ("pickle", "dill", "cloudpickle")
                ]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                literal = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
                if literal.get("trust_remote_code") is True or (
                    called == "torch.load" and literal.get("weights_only") is not True
                ):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []


def test_trust_in_remote_code_is_off_unless_asked_for() -> None:
    from longdraft.train.config import TargetSettings

    assert TargetSettings(path="x").trust_remote_code is False


def test_no_file_names_a_folder_of_some_machine(repository: Path, files: list[Path]) -> None:
    found = []
    for name in files:
        if name == Path(__file__).relative_to(repository) or (repository / name).is_dir():
            continue
        try:
            text = (repository / name).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def test_every_make_target_in_the_readme_exists(repository: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


def test_every_file_named_in_the_readme_exists(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    named = re.findall(r"`((?:recipes|docs|train|serve|bench|kernels|draft_models|tests)/[\w./-]*)`", text)
    named += re.findall(r"\]\(((?!http)[\w./-]+)\)", text)
    assert [name for name in named if not (repository / name).exists()] == []


def test_runnable_modules_say_how_to_run_them(repository: Path) -> None:
    silent = []
    for path in our_sources(repository):
        tree = ast.parse(path.read_text())
        runnable = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if runnable and not re.search(r"longdraft |torchrun |python |make ", first):
            silent.append(f"{path.relative_to(repository)}: {first!r}")
    assert silent == []
