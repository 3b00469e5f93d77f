"""A run of a few seconds, and what it leaves: for the tests of whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from longdraft.train.long_draft import main

TEXTS = [
    "short one",
    "a somewhat longer text " * 3,
    "the longest of these few lines, by a good margin " * 5,
    "x" * 40,
    "y z " * 30,
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A run of a few seconds; its data lies beside it."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = {
        "run": {"name": "r", "output_dir": str(tmp_path / "runs"), "seed": 3},
        "target": {"path": "tiny-random:llama"},
        "draft": {"window": 16},
        "data": {"train": "data.jsonl", "eval": "data.jsonl", "max_length": 200},
        "positions": {"max_position": 1000},
        "lag": {"max": 3},
        "optim": {"lr": 0.003, "schedule": "constant", "warmup_ratio": 0.0},
        "schedule": {"max_steps": 6, "micro_batch": 2, "save_every": 3, "log_every": 1},
        "evaluation": {"prompts": 0},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(recipe: Path, name: str, *overrides: str) -> Path:
    assert main(["--config", str(recipe), f"run.name={name}", *overrides]) == 0
    return recipe.parent / "runs" / name


def final_state(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "state.safetensors")


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
