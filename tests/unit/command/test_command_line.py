"""The ``longdraft`` command: what it answers, and how fast."""

import re
import subprocess
import sys
import time

import pytest

from longdraft import __version__, cli
from longdraft.options import leaf_fields, option_parser
from longdraft.schema import Settings
from longdraft.serve.launch import ServeOptions
from longdraft.train.calibration.settings import CalibrateSettings
from longdraft.train.config import TrainSettings
from longdraft.train.generation.settings import GenerateSettings


def test_help_needs_no_heavy_library() -> None:
    program = (
        "import sys\nfrom longdraft import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'sglang', 'pydantic', 'yaml') if m in sys.modules])"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert time.monotonic() - began < 5  # 0.1 s on an idle machine


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"longdraft {__version__}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--config", "recipes/smoke/longspec.yaml", "optm.lr=1"], "did you mean 'optim'"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--config", "recipes/smoke/longspec.yaml", "--optim.lr", "-1", "--plan"], "optim.lr=-1"),
        (["serve", "--mode", "fast", "--model-path", "x"], "mode='fast'"),
        (["models", "fetch", "smolm2"], "did you mean 'smollm2'"),
        (["models", "draft", "smollm2-135m", "eagle"], "did you mean 'smollm2-135m eagle3'"),
        (["demo", "--pears", "3"], "--pears"),
    ],
)
def test_a_users_error_exits_2_with_one_line_that_names_it(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_an_unknown_command_exits_2() -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["sevre"])
    assert end.value.code == 2


def test_train_takes_options_of_the_recipes_schema(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--config", "recipes/smoke/longspec.yaml", "--plan", "--data.max-length", "48"]
    assert cli.main(words) == 0
    assert "packed to 48 tokens" in capsys.readouterr().out


def test_train_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    assert "--optim.lr" in capsys.readouterr().out


@pytest.mark.parametrize("schema", [TrainSettings, GenerateSettings, CalibrateSettings, ServeOptions])
def test_every_option_says_what_it_is(schema: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    assert not [name for name, field in leaf_fields(schema) if not field.description]
    option_parser(schema, "x").print_help()
    words = set(re.findall(r"[A-Z]{3,}[a-z]*", capsys.readouterr().out))
    assert not words & {"TUPLE", "DICT", "ROPESETTINGS"}, "a Python type is no help"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help_that_starts_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main([command, "--help"])
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr().out
    assert status == 0 and said.startswith(f"usage: longdraft {command}")


@pytest.mark.parametrize("name", sorted(cli.runnable_benchmarks()))
def test_every_benchmark_takes_its_options_from_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", name, "--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_benchmarks_are_told_by_what_they_do() -> None:
    found = cli.runnable_benchmarks()
    assert not [text for text in found.values() if "python -m" in text]
    assert found["gpu_training"].startswith("EAGLE-3 training on one GPU")


def test_benchmarks_are_found_without_importing_them() -> None:
    found = cli.runnable_benchmarks()
    assert "demo" in found
    assert "server" not in found
    assert all(found.values())
