"""What a record says about where it was made: commit, device, versions."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("longdraft", "sglang", "specforge", "torch", "transformers", "triton")


def git_commit() -> str | None:
    """Commit of the checkout that this code lies in, ``-dirty`` behind it if tracked files differ; None outside of one."""

    def git(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name() -> str:
    """The GPU's name, or the number of CPU cores and the machine's architecture."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that matter."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
