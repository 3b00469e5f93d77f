"""SpecForge's offline feature files, read and written: one ``torch.save`` dictionary a sample, ``.ckpt`` or ``.ckpt.gz``.

Its EAGLE-3 layout is ``input_ids`` and ``loss_mask`` ``[S]``, ``hidden_state`` ``[1, S, E]`` (the rows that feed the head) and
``aux_hidden_state`` ``[1, S, 3 E]``, nothing shifted. LongSpec's features lie beside them under names of our own, which its
readers skip unless they are asked for: ``position_ids`` ``[S]``, ``target_key`` and ``target_value`` ``[1, S, K, D]``.

Legend: S tokens, E hidden size, K key/value heads, D head size.
"""

import gzip
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longdraft.errors import UserError

SUFFIXES = (".ckpt", ".ckpt.gz")
LEADING = {"hidden": "hidden_state", "aux": "aux_hidden_state", "k": "target_key", "v": "target_value"}
FLAT = {"position": "position_ids"}
EAGLE3 = ("aux", "hidden")
LONGSPEC = ("position", "k", "v")


@dataclass(frozen=True)
class FeatureSample:
    """One document with what a draft reads of the target.

    ``id_S`` is int64, ``supervised_S`` bool, True where the draft is trained to predict the token. ``tensors`` are one row a
    token: ``hidden`` ``[S, E]``, ``aux`` ``[S, 3 E]``, ``k`` and ``v`` ``[S, K, D]``, ``position`` ``[S]``.
    """

    id_S: torch.Tensor
    supervised_S: torch.Tensor
    tensors: dict[str, torch.Tensor]


def feature_files(path: str | Path) -> list[Path]:
    """A folder's feature files in SpecForge's order (by whole path), or the one file.

    Raises:
        UserError: none there.
    """
    path = Path(path)
    found = [path] if path.is_file() else sorted((p for p in path.rglob("*") if p.name.endswith(SUFFIXES)), key=str)
    if not found:
        raise UserError(
            f"features {str(path)!r}: no {' or '.join(SUFFIXES)} file there, give SpecForge's output folder"
        )
    return found


def read_feature_file(path: str | Path) -> FeatureSample:
    """One sample. Nothing in it is executed (``weights_only``), and a plain file's tensors are mapped, not copied.

    Raises:
        UserError: a damaged file, or one that holds no sample of this layout; names file, key and remedy.
    """
    raw = _load(Path(path))
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}: SpecForge's feature files hold a dictionary of tensors")
    if missing := [name for name in ("input_ids", "loss_mask") if not isinstance(raw.get(name), torch.Tensor)]:
        raise UserError(f"{path} has no tensor {missing[0]!r}: it is no feature file of SpecForge's")
    if odd := [
        n for n, t in raw.items() if isinstance(t, torch.Tensor) and (t.layout != torch.strided or t.dim() == 0)
    ]:
        raise UserError(f"{path}: {odd[0]} is no dense tensor of rows: capture the sample again")
    id_S, mask_S = raw["input_ids"].reshape(-1).to(torch.int64), raw["loss_mask"].reshape(-1) != 0
    tensors: dict[str, torch.Tensor] = {}
    for ours, theirs in {**LEADING, **FLAT}.items():
        value = raw.get(theirs)
        if isinstance(value, torch.Tensor):
            tensors[ours] = value[0] if ours in LEADING and value.dim() > 1 and len(value) == 1 else value
    if not tensors:
        raise UserError(
            f"{path} has none of {', '.join([*LEADING.values()])}: it is no feature file that trains a draft here"
        )
    for name, value in {"loss_mask": mask_S, **{LEADING.get(n, n): t for n, t in tensors.items()}}.items():
        if len(value) != len(id_S):
            raise UserError(
                f"{path}: {name} has {len(value)} rows, input_ids has {len(id_S)}: capture the sample again"
            )
    if raw["input_ids"].is_floating_point() or raw["input_ids"].is_complex():
        raise UserError(f"{path}: input_ids are {raw['input_ids'].dtype}, not integers: capture the sample again")
    return FeatureSample(id_S, mask_S, tensors)


def write_feature_file(sample: FeatureSample, path: str | Path) -> None:
    """Write a sample as SpecForge's readers take it; the file appears whole, gzipped if its name says so.

    Raises:
        UserError: another suffix.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"feature file {str(path)!r}: name it with {' or '.join(SUFFIXES)}, its readers go by that")
    raw = {"input_ids": sample.id_S.to(torch.int64), "loss_mask": sample.supervised_S.to(torch.int64)}
    for ours, value in sample.tensors.items():
        raw[LEADING.get(ours) or FLAT[ours]] = value[None] if ours in LEADING else value
    # Clones: torch.save writes the whole storage that a view lies in.
    raw = {name: value.detach().cpu().clone().contiguous() for name, value in raw.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.name.endswith(".gz"):
            buffer = io.BytesIO()
            torch.save(raw, buffer)
            with gzip.open(work, "wb") as file:
                file.write(buffer.getbuffer())
        else:
            torch.save(raw, work)
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


def write_vocabulary_file(d2t_N: torch.Tensor, t2d_V: torch.Tensor, path: str | Path) -> None:
    """A draft's vocabulary as SpecForge's ``model.vocab_mapping_path`` takes it (``torch.save`` of both maps)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save({"d2t": d2t_N.cpu().to(torch.int64), "t2d": t2d_V.cpu().to(torch.bool)}, work)
    os.replace(work, path)


def _load(path: Path) -> Any:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the file system's, gzip's, zip's, and torch's own for anything but tensors
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path} cannot be read as tensors ({reason}): copy or capture the sample again") from None
