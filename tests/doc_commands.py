"""Commands of the pages in docs/: finds them, and checks one without running what it starts.

A page's ``bash`` blocks hold its commands, a line each. A comment before a block says how tests treat it: ``<!-- run -->`` blocks run as
they stand, up to :data:`PLACES`; ``<!-- starts the server -->`` and ``<!-- asks the server -->`` run against a real one; of all
others the command line is checked: the command exists, takes every option, and its settings are valid.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from longdraft import cli
from longdraft.options import parse_options
from longdraft.serve.launch import ServeOptions, sglang_arguments

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- ([a-z ]+) -->\n)?```bash\n(.*?)```", re.DOTALL)
# What stands for a reader's own in checked commands -> what is checked in its place.
PLACES = {
    "TARGET": "tiny-random:llama:4",
    "RECIPE": "recipes/smoke/eagle3.yaml",
    "TEXT.jsonl": "recipes/smoke/data.jsonl",
}


@dataclass(frozen=True)
class Block:
    """Commands that stand together on a page; ``how`` is the comment before them, if there is one."""

    page: str
    how: str
    lines: tuple[str, ...]


def blocks() -> list[Block]:
    """Of all pages."""
    return [
        Block(path.name, how, tuple(text.strip().splitlines()))
        for path in sorted((ROOT / "docs").glob("*.md"))
        for how, text in BLOCK.findall(path.read_text())
    ]


def words_of(line: str) -> list[str]:
    """Words as a shell makes them, PLACES filled in; ``$(longdraft ...)`` is one word."""
    line = re.sub(r"\$\((.*?)\)", lambda found: shlex.quote(f"$({found[1]})"), line)
    words = shlex.split(line, comments=True)
    whole = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, PLACES)) + r")(?![\w-])")
    return [whole.sub(lambda found: PLACES[found[1]], word) for word in words]


def check(line: str) -> None:
    """Check a command; AssertionError or the command's own error says what is wrong with it."""
    program, *words = words_of(line)
    CHECKS[program](words)


def check_longdraft(words: list[str]) -> None:
    name, *rest = words
    if name == "serve":
        check_server(*parse_options(ServeOptions, rest, "longdraft serve"))
    elif name == "train" and "specforge" not in rest:
        assert said(["train", *rest, *([] if "--plan" in rest else ["--plan"])])
    else:
        group = rest[:1] if name in ("bench", "models", "drafts", "features") else []
        known = said([name, *group, "--help"]) + (options_of(group[0]) if name == "bench" else "")
        takes_settings = name in ("train", "capture")
        for word in rest:
            option = word.split("=")[0]
            assert not word.startswith("--") or takes_settings or re.search(rf"{re.escape(option)}\b", known), (
                f"{name}: no option {option}"
            )


def said(words: list[str]) -> str:
    """What a command prints; it must end well."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    assert status == 0, f"longdraft {shlex.join(words)}: {out.getvalue()[-1500:]}"
    return out.getvalue()


def options_of(benchmark: str) -> str:
    """Help of the module of a benchmark's name, where the command itself takes a file or else that module's options."""
    module = f"longdraft.bench.{benchmark}"
    main = getattr(import_module(module), "main", None) if find_spec(module) else None
    return printed(main) if main else ""


def printed(main: Callable[[list[str]], int]) -> str:
    """A module's help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["--help"])
    return out.getvalue()


def check_server(options: ServeOptions, rest: list[str]) -> None:
    check_sglang(["serve", *sglang_arguments(options, rest, on_cpu=False)])


def check_sglang(words: list[str]) -> None:
    """SGLang's own parser takes the words; the algorithm of ours is known to it with the plugin alone."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    assert words[0] == "serve"
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    at = words.index("LONGDRAFT")
    found = parser.parse_args([*words[1 : at - 1], *words[at + 1 :]])
    assert found.model_path


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words)
    assert found.training_script == "train/long_draft.py"
    check_longdraft(["train", *found.training_script_args])


def check_curl(words: list[str]) -> None:
    assert any(word.startswith("http://127.0.0.1:30000/") for word in words)
    for flag, body in zip(words, words[1:], strict=False):
        assert flag != "-d" or json.loads(body)


def check_make(words: list[str]) -> None:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]", words[-1])) <= set(extras)


def check_python(words: list[str]) -> None:
    """A module of ours with options that it has."""
    assert words[0] == "-m" and words[1].startswith("longdraft.")
    known = printed(import_module(words[1]).main)
    assert all(word in known for word in words[2:] if word.startswith("--"))


def check_promtool(words: list[str]) -> None:
    assert (ROOT / words[-1]).is_file()
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    assert program is None or subprocess.run([program, *words], cwd=ROOT, capture_output=True).returncode == 0


CHECKS = {
    "longdraft": check_longdraft,
    "sglang": check_sglang,
    "torchrun": check_torchrun,
    "curl": check_curl,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "promtool": check_promtool,
}
