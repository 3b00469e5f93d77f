"""The demo's training: a short run that continues from the shipped LongSpec draft, and what it does to the loss.

Legend: T packed tokens.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.demo_text import HELD_OUT_MODULES, HELD_OUT_TOPICS, module_text, topic_text, write_training_text
from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import ObjectiveSettings, TargetSettings, TrainSettings
from longdraft.train.objective import longspec_loss
from longdraft.train.recipe_files import find_config
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget, load_target, load_tokenizer

RECIPE, CHATS = "recipes/demo_smollm2.yaml", "recipes/demo/chats.jsonl"
HELD_OUT_TOKENS = 1024  # of each document that the loss is measured on


def train(folder: Path, model: Path, draft: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run ``longdraft train`` with the demo's recipe from a draft on, its progress on this terminal.

    Args:
        folder: the demo's; the run, its checkpoint and its training text lie in it.
        model: the target.
        draft: to continue from; stays as it is.
        overrides: ``a.b=value`` settings of the training.

    Returns:
        Facts of the new checkpoint: ``steps``, ``tokens``, ``loss_before`` and ``loss_after`` on held-out text, ``seconds``.

    Raises:
        UserError: a training that failed.
    """
    text, runs, began = folder / "train.jsonl", folder / "runs", time.monotonic()
    shutil.rmtree(runs, ignore_errors=True)
    write_training_text(text)
    sources = json.dumps([str(find_config(CHATS)), str(text)])
    changes = [f"target.path={model}", f"data.train={sources}", f"run.output_dir={runs}", f"draft.init_from={draft}"]
    changes += [f"target.dtype={fastest_dtype()}", *overrides]
    command = [sys.executable, "-m", "longdraft.cli", "train", "--config", RECIPE, *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)}
    if status := subprocess.run(command, env=environment).returncode:
        raise UserError(f"the demo's training ended with exit status {status}: see the lines above")
    made = sorted(runs.glob("*/checkpoints/step-*/draft"))
    if not made:
        raise UserError(f"the demo's training left no checkpoint in {runs}: see the lines above")
    facts = json.loads((made[-1] / "config.json").read_text())["longdraft"]["training"]
    objective = load_settings(TrainSettings, find_config(RECIPE), changes).objective
    before, after = held_out_losses(model, [draft, made[-1]], objective)
    return {
        "steps": facts["steps"],
        "tokens": facts["tokens"],
        "objective": objective.name,
        "loss_before": round(before, 4),
        "loss_after": round(after, 4),
        "checkpoint": str(made[-1]),
        "seconds": round(time.monotonic() - began),
    }


def fastest_dtype() -> str:
    """The training target's: bfloat16 halves its time where the processor multiplies it, and is slow elsewhere."""
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def held_out_losses(model: Path, drafts: Sequence[Path], objective: ObjectiveSettings) -> list[float]:
    """Loss a token of each draft on the same text that neither it nor the demo's run was trained on, lag 1."""
    target = load_target(TargetSettings(path=str(model)), torch.device("cpu"))
    tokenizer = load_tokenizer(TargetSettings(path=str(model)))
    texts = [*map(module_text, HELD_OUT_MODULES), *map(topic_text, HELD_OUT_TOPICS)]
    batch = packed([tokenizer(text, verbose=False).input_ids[:HELD_OUT_TOKENS] for text in texts])
    return [mean_loss(folder, target, batch, objective) for folder in drafts]


def packed(documents: Sequence[Sequence[int]]) -> Packed:
    """Whole documents as one micro-batch at plain positions, all rows supervised."""
    ids: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    cu = [0]
    for document in documents:
        ids += document
        positions += range(len(document))
        labels += [*document[1:], -100]
        cu.append(len(ids))
    names = [f"held out {i}" for i in range(len(documents))]
    return Packed(torch.tensor(ids), torch.tensor(positions), torch.tensor(labels), cu, names)


@torch.no_grad()
def mean_loss(folder: Path, target: FrozenTarget, batch: Packed, objective: ObjectiveSettings) -> float:
    """A LongSpec draft's loss a supervised row, float32.

    Raises:
        UserError: a draft of another kind, or for another target.
    """
    draft = load_draft(folder, target.spec, dtype=torch.float32)
    if not isinstance(draft, LongSpecDraft):
        raise UserError(f"draft {str(folder)!r} is no LongSpec draft: the demo trains a LongSpec draft on")
    draft.bind(target.embedding_VE, target.head_VE)
    return float(longspec_loss(draft, target, batch, 1, objective).loss) / batch.supervised
