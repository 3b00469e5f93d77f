"""Two ranks on two cards over NCCL, with CUDA graphs and the overlap schedule: the tokens of two plain ranks, up to near ties in 16 bit.

What the ranks would verify and return is compared in every round, so that a rank that goes another way ends the server.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_pair import COMMON, NEW, SHAPE, differences, gaps, kept, prompts, up
from tiny import tiny_model
from tiny_draft import train_tiny_draft, train_tiny_eagle3
from tiny_lm import shaken_lm

from longdraft.bench.server import Server

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LAUNCH = str(Path(__file__).parents[1] / "integration" / "ranks_launch.py")
TWO = ["--tp-size", "2", "--attention-backend", "fa3"]
VIEWS = {"mode": "exact", "allow_lossy": True, "view_tokens": 128, "sparse_tokens": 128, "confirm_floor": 0.2}
GAP = 0.25  # of logits, in bfloat16
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "longspec-exact": ("longspec", VIEWS),
    "eagle3-exact": ("eagle3", VIEWS),
    "lm-exact": ("lm", VIEWS),
    "longspec-tree": ("longspec", {"tree": "2,3,3,3"}),
    "eagle3-full": ("eagle3", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    target = tiny_model("llama", folder / "target", **SHAPE)
    return {
        "target": target,
        "longspec": train_tiny_draft(target, folder / "longspec"),
        "eagle3": train_tiny_eagle3(target, folder / "eagle3"),
        "lm": shaken_lm(target, folder / "lm"),
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folders["target"]), *COMMON, *TWO]
    log = tmp_path_factory.mktemp("plain") / "log"
    with Server("plain", command, log, {"SGLANG_PLUGINS": "none"}) as server:
        yield server


@pytest.mark.parametrize("shared", [False, True], ids=["by-bytes", "everything"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_two_cards_give_the_tokens_of_two_plain_ones(
    folders: dict[str, Path], plain: Server, system: str, shared: bool, tmp_path: Path
) -> None:
    """With a draft that is shared as its bytes say (tiny: hardly), and one of which the ranks share everything."""
    kind, settings = SYSTEMS[system]
    start = [LAUNCH, "none"] if shared else ["-m", "sglang.launch_server"]
    command = [sys.executable, *start, "--model-path", str(folders["target"]), *COMMON, *TWO]
    command += ["--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", "4"]
    command += ["--speculative-draft-model-path", str(folders[kind])]
    given = {"SGLANG_PLUGINS": "longdraft", "LONGDRAFT_SETTINGS": json.dumps({"check_ranks": True, **settings})}
    asked = prompts()
    with up([Server(system, command, tmp_path / "log", given)]) as [drafted]:
        parted = differences(plain, drafted, asked)
        said = f"{system}, see {drafted.log}:\n" + "\n".join(parted)
        assert all(gap <= GAP for gap in gaps(parted)) and len(parted) <= len(asked) // 2, said
        assert kept(drafted, asked[:6]) > 0, f"{system} keeps no draft in {NEW} tokens"
    log = (tmp_path / "log").read_text(errors="replace")
    assert "failed" not in log and "leak" not in log and "RanksDiffer" not in log
