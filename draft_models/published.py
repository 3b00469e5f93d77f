"""Folders of published drafts: their safetensors in, and ours in their layout out."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longdraft.draft_models.checkpoint import CONFIG, WEIGHTS, CheckpointError, read_weights

INDEX = "model.safetensors.index.json"


def published_weights(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or of a folder's one or several.

    Raises:
        CheckpointError: no safetensors (pickled weights are never read), or damaged ones.
    """
    if source.is_file():
        if source.suffix != ".safetensors":
            raise CheckpointError(f"{source} is no safetensors file: convert the draft to safetensors first")
        return read_weights(source)
    if (source / INDEX).is_file():
        try:
            shards = sorted(set(json.loads((source / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{source / INDEX} is damaged: copy the draft again") from None
        if unsafe := [name for name in shards if Path(name).name != name]:
            raise CheckpointError(f"{source / INDEX} names {unsafe[0]!r} outside its folder: copy the draft again")
        return {name: w for shard in shards for name, w in read_weights(source / shard).items()}
    if not (source / WEIGHTS).is_file():
        pickled = next((p.name for p in sorted(source.glob("*.bin"))), None) if source.is_dir() else None
        found = f"only {pickled}, which is not read (it can run code)" if pickled else "none"
        raise CheckpointError(f"draft {str(source)!r} needs {WEIGHTS}, it has {found}: convert it to safetensors first")
    return read_weights(source / WEIGHTS)


def write_published(folder: str | Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write weights and config as a folder that appears whole.

    Raises:
        CheckpointError: a folder with something in it.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"output {str(folder)!r} is not empty: give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        ready = Path(work) / "ready"
        ready.mkdir()
        save_file(weights, ready / WEIGHTS, metadata={"format": "pt"})
        (ready / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        os.replace(ready, folder)
