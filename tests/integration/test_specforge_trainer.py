"""SpecForge's own trainer trains our draft on a CPU (data parallel, its FSDP wants a GPU), stops, goes on, and hands it back."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_target

from longdraft import cli
from longdraft.draft_models.checkpoint import load_draft, read_config
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.schema import load_settings
from longdraft.train.config import TargetSettings, TrainSettings
from longdraft.train.documents import Corpus
from longdraft.train.methods.eagle3 import Eagle3Method
from longdraft.train.samples import pack
from longdraft.train.target import load_target
from longdraft.train.tiny_random import byte_tokenizer

RECIPE = """
run: {{name: sf, seed: 2, output_dir: {folder}}}
target: {{path: "tiny-random:llama", dtype: float32}}
draft: {{window: 16, head_tokens: 60}}
data: {{train: {data}, max_length: 64}}
positions: {{anchors: 2, max_position: 512}}
objective: {{rows: all}}
lag: {{max: 3}}
engine: {{dtype: float32}}
optim: {{lr: 3.0e-3}}
schedule: {{max_steps: 4, micro_batch: 2, accumulate: 1, save_every: 2, keep: 3, log_every: 1}}
"""
EAGLE3 = """
run: {{name: sf, seed: 2, output_dir: {folder}}}
target: {{path: "tiny-random:llama:5", dtype: float32}}
draft: {{arch: eagle3}}
eagle3: {{draft_vocab_size: 250}}
ttt: {{steps: 2, compat: specforge-0.2.0}}
data: {{train: {data}, max_length: 64}}
positions: {{offset_share: 0.0}}
objective: {{rows: all}}
engine: {{dtype: float32}}
optim: {{lr: 3.0e-3}}
schedule: {{max_steps: 2, micro_batch: 8, save_every: 2, log_every: 1}}
"""
PROGRAM = """
import sys
from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.specforge_seam.trainer import train_with_specforge
train_with_specforge(load_settings(TrainSettings, sys.argv[1], sys.argv[2:]), "NO_SHARD")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    lines = [f'{{"text": "Clause {i}: the tenant pays the rent on day {i} of the month."}}' for i in range(9)]
    data.write_text("\n".join(lines) + "\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=tmp_path / "runs", data=data))
    return path


def run(recipe: Path, *overrides: str, ranks: int = 1, **environment: str) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    program = recipe.parent / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, *launch, str(program), str(recipe), *overrides]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_trains_our_draft_and_a_stopped_run_goes_on_to_the_same_weights(recipe: Path) -> None:
    out = run(recipe)
    root = recipe.parent / "runs" / "sf" / "specforge"
    assert "step 4:" in out
    assert "'lag'" in out
    assert len(list((root / "features").glob("*.ckpt"))) == 8, "as many as the steps read"
    trained, first = (load_file(root / name / "model.safetensors") for name in ("draft", "initial"))
    assert trained.keys() == first.keys()
    assert all(not torch.equal(trained[n], first[n]) for n in trained if n != "head_ids")
    assert torch.equal(trained["head_ids"], first["head_ids"])
    facts = read_config(root / "draft")["longdraft"]["training"]
    assert (facts["steps"], facts["max_lag"], facts["anchors"]) == (4, 3, 2)
    load_draft(root / "draft", tiny_target("llama").spec)

    checkpoints = root / "checkpoints"
    shutil.rmtree(checkpoints / "sf-step4")
    (checkpoints / "sf-latest").unlink()
    (checkpoints / "sf-latest").symlink_to("sf-step2")
    out = run(recipe)
    assert "step 3:" in out
    assert "step 2:" not in out
    again = load_file(root / "draft" / "model.safetensors")
    assert all(torch.equal(again[n], w) for n, w in trained.items())


def test_two_ranks_train_one_draft(recipe: Path) -> None:
    out = run(recipe, "schedule.max_steps=2", "schedule.micro_batch=1", ranks=2)
    assert out.count("saved ") == 1
    assert out.count("step 2:") == 2, "both ranks say their step"
    root = recipe.parent / "runs" / "sf" / "specforge"
    assert read_config(root / "draft")["longdraft"]["training"]["steps"] == 2


def test_it_trains_our_eagle3_draft_too_on_the_loss_that_ours_computes(recipe: Path) -> None:
    recipe.write_text(EAGLE3.format(folder=recipe.parent / "runs", data=recipe.parent / "data.jsonl"))
    data = recipe.parent / "data.jsonl"
    data.write_text("\n".join(data.read_text().splitlines()[:8]) + "\n")  # of equal length; a step reads them all
    out = run(recipe, TORCHDYNAMO_DISABLE="1", TRITON_INTERPRET="1")
    root = recipe.parent / "runs" / "sf" / "specforge"
    trained, first = (load_file(root / name / "model.safetensors") for name in ("draft", "initial"))
    assert trained.keys() == first.keys()
    for name, weight in trained.items():
        assert torch.equal(weight, first[name]) == (name in ("d2t", "t2d")), name
    target = load_target(TargetSettings(path="tiny-random:llama:5", dtype="float32"), torch.device("cpu"))
    loaded = load_draft(root / "draft", target.spec)
    assert loaded.config.kind == "eagle3"
    assert read_config(root / "draft")["longdraft"]["training"]["steps"] == 2

    settings = load_settings(TrainSettings, recipe)
    start = Eagle3Draft(loaded.config)
    start.load_state_dict(first)
    method = Eagle3Method(settings, target, start.bind(target.embedding_VE))
    corpus = Corpus(settings.data.train, settings.data, byte_tokenizer())
    losses = []
    for i in range(8):
        batch = pack([corpus[i]], [torch.arange(len(corpus[i].ids))], all_rows=True)
        losses.append(float(method(batch, 1).loss.detach()) / method.denominator(batch))
    said = float(re.findall(r"step 1: .*?'loss': ([0-9.]+)", out)[0])
    assert said == pytest.approx(sum(losses) / 8, rel=1e-2), "its head is bfloat16, so choices at a tie differ"


def test_without_a_gpu_the_command_says_so_and_exits_2(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["train", "--config", str(recipe), "--trainer", "specforge"]) == 2
    error = capsys.readouterr().err.strip()
    assert "needs a GPU" in error
    assert len(error.splitlines()) == 1
