"""The feature store on disk: ``index.json`` and shards of safetensors, each tensor the rows of all documents of its shard.

A shard holds ``input_ids`` and ``position_ids`` (int32), ``loss_mask`` (uint8) and the features, all with one row a token; a
document is a range of rows, so that reading one touches its own bytes only. The index says which document lies where and
everything that decides what the features are. Legend: N rows of a shard, K key/value heads, D head size, E hidden size,
A three times E.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.draft_models.eagle3_config import default_aux_layers
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.train.config import TrainSettings

FORMAT, SCHEMA, INDEX = "longdraft-features", 1, "index.json"
ROWS = {"input_ids": torch.int32, "position_ids": torch.int32, "loss_mask": torch.uint8}
HIDDEN_NORM = "final norm applied: these rows feed the head"


@dataclass(frozen=True)
class Place:
    """Where a stored document lies: rows ``begin .. begin + length`` of a shard."""

    variant: int
    document: int
    shard: int
    begin: int
    length: int


@dataclass
class Index:
    """What a store is of.

    ``identity`` holds dotted settings and fingerprints that decide its content, ``tensors`` the features' shapes a token.
    ``documents`` counts those of the corpus, also the ones that are too short to be stored.
    """

    identity: dict[str, Any]
    tensors: dict[str, list[int]]
    dtype: str
    documents: int
    variants: int
    shards: int
    places: list[Place]
    about: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of the identity and the layout; every shard carries it."""
        text = json.dumps([self.identity, self.tensors, self.dtype, [dataclasses.astuple(p) for p in self.places]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        size = sum(dtype.itemsize for dtype in ROWS.values())
        item: int = getattr(torch, self.dtype).itemsize
        for shape in self.tensors.values():
            size += item * int(torch.Size(shape).numel())
        return size

    @property
    def tokens(self) -> int:
        return sum(p.length for p in self.places)

    def shard_name(self, shard: int) -> str:
        return f"features-{shard:05d}-of-{self.shards:05d}.safetensors"

    def write(self, folder: Path) -> None:
        """Write the index, in one move."""
        fields = [field.name for field in dataclasses.fields(Place)]
        columns = {name: [getattr(p, name) for p in self.places] for name in fields}
        record = {"format": FORMAT, "schema": SCHEMA, **self.about, **vars(self), "places": columns}
        del record["about"]
        write_whole(folder / INDEX, (json.dumps(record, ensure_ascii=False) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> "Index":
        """The index of a store.

        Raises:
            UserError: none there, a damaged one, or one of another schema.
        """
        path = folder / INDEX
        try:
            record = json.loads(path.read_text())
            if (record.pop("format"), record.pop("schema")) != (FORMAT, SCHEMA):
                raise UserError(f"{path} is not of schema {SCHEMA}: capture again with this version")
            columns = record.pop("places")
            record["places"] = [
                Place(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
            ]
            own = {field.name for field in dataclasses.fields(Index)} - {"about"}
            about = {key: value for key, value in record.items() if key not in own}
            read = TypeAdapter(Index).validate_python({**{key: record[key] for key in own}, "about": about})
            if min(read.documents, read.variants, read.shards, len(read.places)) < 1:
                raise ValueError("it has no documents")
            return read
        except OSError as error:
            raise UserError(
                f"data.features={str(folder)!r} has no {INDEX} ({error.strerror}): give a folder that longdraft capture wrote"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is damaged ({' '.join(str(error).split())[:200]}): capture again") from None


def feature_shapes(spec: TargetSpec, names: list[str], kv_layers: int = 1) -> dict[str, list[int]]:
    """Shapes a token of what ``kv``, ``hidden`` and ``aux`` stand for: ``k`` and ``v`` (keys rotated), ``hidden``, ``aux``."""
    shapes: dict[str, list[int]] = {}
    if "kv" in names:
        shapes |= {name: [kv_layers * spec.num_kv_heads, spec.head_dim] for name in ("k", "v")}
    if "hidden" in names:
        shapes["hidden"] = [spec.hidden_size]
    if "aux" in names:
        shapes["aux"] = [3 * spec.hidden_size]
    return shapes


def aux_layers(settings: TrainSettings, spec: TargetSpec) -> list[int]:
    """The layers whose outputs ``aux`` holds.

    Raises:
        UserError: the target is too small, or has no such layer.
    """
    own = settings.eagle3.aux_layers if settings.draft.arch == "eagle3" else None
    layers = list(settings.features.aux_layers or own or default_aux_layers(spec.num_layers))
    if not 0 <= layers[0] < layers[1] < layers[2] < spec.num_layers - 1:
        raise UserError(
            f"features.aux_layers={layers}: give three ascending layers from 0 to {spec.num_layers - 2}, the last but one"
        )
    return layers


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with work.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def write_shard(folder: Path, index: Index, shard: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write a shard that appears whole or not at all.

    Raises:
        UserError: it cannot be written, a full disk included; the shards before it hold.
    """
    path = folder / index.shard_name(shard)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, work, {FORMAT: index.digest})  # one entry: their order is random
        work.chmod(0o644)  # safetensors lets nobody else read it; a store is shared
        with work.open("rb") as file:
            os.fsync(file.fileno())
        work.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be written ({error}): make room and run the same command, it continues with this shard"
        ) from None
    finally:
        work.unlink(missing_ok=True)


def shard_is_whole(folder: Path, index: Index, shard: int) -> bool:
    """Whether a shard of this very index lies there."""
    try:
        with safe_open(folder / index.shard_name(shard), framework="pt") as file:
            return bool((file.metadata() or {}).get(FORMAT) == index.digest)
    except (OSError, SafetensorError):
        return False
