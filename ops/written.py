"""The command line of a module that makes one file of the repository."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def write_made(argv: Sequence[str] | None, module: str, doc: str | None, default: Path, text: Callable[[], str]) -> int:
    """Write the file that is named on the command line, or the usual one.

    Args:
        argv: the command line's.
        module: that is run.
        doc: its docstring, whose third line says what the file is.
        default: the usual file.
        text: makes what stands in it.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n")[2])
    parser.add_argument("file", nargs="?", type=Path, default=default)
    path: Path = parser.parse_args(argv).file
    path.write_text(text())
    return 0
