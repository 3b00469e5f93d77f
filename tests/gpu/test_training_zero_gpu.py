"""ZeRO on GPUs through NCCL: one GPU is enough, two say more. The same program as on gloo."""

import sys
from pathlib import Path

import pytest
import torch
from test_training_zero import PROGRAM, STAGES, assert_close
from training_process import assert_same, finish, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    ranks = min(torch.cuda.device_count(), 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    for launcher, part in (([sys.executable], "one"), (torchrun, "two")):
        log = folder / f"{part}.log"
        finish(start([*launcher, PROGRAM, str(folder), part, "cuda"], log), log)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_what_the_torch_engine_trains(runs: Path, stage: str) -> None:
    assert_close(runs / "torch", runs / stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_stage_ends_with_the_same_bits(runs: Path, stage: str) -> None:
    assert_same(runs / stage, runs / f"{stage}-resumed")


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_sharded_target_teaches_what_the_whole_one_teaches(runs: Path, source: str) -> None:
    assert_close(runs / f"{source}-shard-false", runs / f"{source}-shard-true")
