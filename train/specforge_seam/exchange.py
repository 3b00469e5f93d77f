"""``longdraft features import|export``: SpecForge's feature files as a feature store, and a store as its feature files.

Legend: N rows of a shard, S tokens of a sample.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.features.format import (
    HIDDEN_NORM,
    INDEX,
    ROWS,
    Index,
    Place,
    aux_layers,
    shard_is_whole,
    write_shard,
)
from longdraft.train.features.plan import GIB, check_size, size_text
from longdraft.train.provenance import origin
from longdraft.train.recipe_files import find_config
from longdraft.train.specforge_seam.feature_files import (
    LEADING,
    FeatureSample,
    feature_files,
    read_feature_file,
    write_feature_file,
)
from longdraft.train.target import load_config, weights_fingerprint


def import_features(
    settings: TrainSettings, source: str | Path, folder: Path, command: list[str], agreed: bool = False
) -> Index:
    """Make a store of SpecForge's files, which ``data.source=features`` trains from.

    Args:
        settings: the recipe; its target is the one that was captured, ``features.aux_layers`` the layers.
        source: a folder of feature files, or one file.
        folder: the store; must not be one yet.
        command: for the record.
        agreed: whatever the size is.

    Raises:
        UserError: no or damaged files, files that do not agree or are not of this target, a store that is too large.
    """
    if (folder / INDEX).exists():
        raise UserError(f"--out {str(folder)!r} is a store already: give another folder")
    files = feature_files(source)
    spec = TargetSpec.from_config(load_config(settings.target))
    shapes, dtype, lengths = _survey(files, spec)
    layers = aux_layers(settings, spec) if "aux" in shapes else None
    if layers is not None:
        print(f"aux: the outputs of layers {layers} (features.aux_layers)", flush=True)
    named = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    index = Index(
        identity={
            "target.path": Path(settings.target.path).name,
            "target.shapes": spec.hash,
            "target.weights": weights_fingerprint(settings.target.path),
            "features.aux_layers": layers,
            "imported.sha256": hashlib.sha256(named.encode()).hexdigest(),
        },
        tensors=shapes,
        dtype=str(dtype).removeprefix("torch."),
        documents=len(files),
        variants=1,
        shards=0,
        places=[],
        about={**origin(command), "target": spec.model_type, "hidden_norm": HIDDEN_NORM, "rope": spec.rope},
    )
    limit = max(int(settings.features.shard_gib * GIB) // index.row_bytes, 1)
    shard = filled = 0
    for document, length in enumerate(lengths):
        if filled and filled + length > limit:
            shard, filled = shard + 1, 0
        index.places.append(Place(0, document, shard, filled, length))
        filled += length
    index.shards = shard + 1
    print(size_text(index), flush=True)
    check_size(index, folder, settings.features.max_gib, agreed, index.tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {str(folder)!r} cannot be written ({error.strerror}): choose another folder") from None
    for number in range(index.shards):
        write_shard(folder, index, number, _shard(index, number, files))
    index.write(folder)  # last: a store without its index is none
    return index


def _survey(files: list[Path], spec: TargetSpec) -> tuple[dict[str, list[int]], torch.dtype, list[int]]:
    """Shapes a token, the one dtype and every length; a plain file's tensors are not read for that."""
    expected = {"hidden": [spec.hidden_size], "aux": [3 * spec.hidden_size]}
    expected |= {name: [spec.num_kv_heads, spec.head_dim] for name in ("k", "v")}
    shapes: dict[str, list[int]] = {}
    dtypes, lengths = set(), []
    for path in files:
        sample = read_feature_file(path)
        found = {name: list(t.shape[1:]) for name, t in sample.tensors.items() if name in LEADING}
        for name, shape in found.items():
            if shape != expected[name]:
                raise UserError(
                    f"{path}: {LEADING[name]} has {shape} a token, the target makes it {expected[name]}: give the target "
                    "that was captured"
                )
        _check_rows(sample, path, spec)
        if shapes and found.keys() != shapes.keys():
            raise UserError(f"{path} holds {sorted(found)}, {files[0]} {sorted(shapes)}: import them apart")
        shapes = found
        dtypes |= {t.dtype for name, t in sample.tensors.items() if name in LEADING}
        lengths.append(len(sample.id_S))
    if len(dtypes) != 1:
        raise UserError(f"features of several dtypes ({', '.join(sorted(map(str, dtypes)))}): import them apart")
    return shapes, dtypes.pop(), lengths


def _check_rows(sample: FeatureSample, path: Path, spec: TargetSpec) -> None:
    """Ids and positions that the store's 32 bits, the target's vocabulary and its rotation hold."""
    if not len(sample.id_S):
        raise UserError(f"{path} has no tokens: remove it")
    limits = {"input_ids": (sample.id_S, spec.vocab_size)}
    if (position := sample.tensors.get("position")) is not None:
        if position.dim() != 1 or position.is_floating_point() or bool((position[1:] <= position[:-1]).any()):
            raise UserError(f"{path}: position_ids are not ascending integers: capture the sample again")
        limits["position_ids"] = position, spec.max_position
    for name, (value, limit) in limits.items():
        if not 0 <= int(value.min()) <= int(value.max()) < limit:
            raise UserError(
                f"{path}: {name} reach from {int(value.min())} to {int(value.max())}, the target's from 0 to {limit - 1}: give "
                "the target that was captured"
            )


def _shard(index: Index, number: int, files: list[Path]) -> dict[str, torch.Tensor]:
    places = [p for p in index.places if p.shard == number]
    rows, dtype = sum(p.length for p in places), getattr(torch, index.dtype)
    out = {name: torch.empty(rows, dtype=kind) for name, kind in ROWS.items()}
    out |= {name: torch.empty(rows, *shape, dtype=dtype) for name, shape in index.tensors.items()}
    for place in places:
        sample, span = read_feature_file(files[place.document]), slice(place.begin, place.begin + place.length)
        out["input_ids"][span], out["loss_mask"][span] = sample.id_S, sample.supervised_S
        out["position_ids"][span] = sample.tensors.get("position", torch.arange(place.length))
        for name in index.tensors:
            out[name][span] = sample.tensors[name]
    return out


def export_features(store: Path, folder: Path, packed: bool = False) -> int:
    """Write every document of a store as a file that SpecForge reads; files that are there stay.

    Args:
        store: what ``longdraft capture`` or an import wrote.
        folder: for the files.
        packed: gzip them.

    Returns:
        How many documents there are.

    Raises:
        UserError: no store, one that is not whole, or a folder that cannot be written.
    """
    index = Index.read(store)
    if lacking := [n for n in range(index.shards) if not shard_is_whole(store, index, n)]:
        raise UserError(f"{store / index.shard_name(lacking[0])} is missing or damaged: run longdraft capture again")
    try:
        for number in range(index.shards):
            with safe_open(store / index.shard_name(number), framework="pt") as shard:
                for place in (p for p in index.places if p.shard == number):
                    name = f"data_{place.variant}_{place.document:08d}.ckpt" + (".gz" if packed else "")
                    if not (folder / name).exists():
                        write_feature_file(_sample(shard, index, place), folder / name)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's own, of a full disk
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--out {str(folder)!r}: not all is written ({reason}): make room or choose another") from None
    except SafetensorError as error:
        raise UserError(f"{store} cannot be read ({error}): run longdraft capture again") from None
    return len(index.places)


def _sample(shard: Any, index: Index, place: Place) -> FeatureSample:
    def rows(name: str) -> torch.Tensor:
        found: torch.Tensor = shard.get_slice(name)[place.begin : place.begin + place.length]
        return found

    tensors = {name: rows(name) for name in index.tensors} | {"position": rows("position_ids").long()}
    return FeatureSample(rows("input_ids").long(), rows("loss_mask") != 0, tensors)


def import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft features import", description="A folder of SpecForge's .ckpt or .ckpt.gz files as a store."
    )
    parser.add_argument("source", help="SpecForge's folder, or one file")
    parser.add_argument("--config", help="YAML recipe: its target is the one that was captured")
    parser.add_argument("--out", required=True, help="folder of the store")
    parser.add_argument("--yes", action="store_true", help="store more than features.max_gib")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace the recipe's")
    return parser


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft features export", description="A store as .ckpt files, which SpecForge's trainer reads."
    )
    parser.add_argument("source", help="folder that longdraft capture wrote")
    parser.add_argument("--out", required=True, help="folder for the files")
    parser.add_argument("--gz", action="store_true", help="gzip them")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; raises :class:`UserError`."""
    words = list(sys.argv[1:] if argv is None else argv)
    top = argparse.ArgumentParser(prog="longdraft features", description="SpecForge's feature files and our store.")
    top.add_argument(
        "command",
        choices=["import", "export"],
        help="import makes a store of SpecForge's .ckpt files, for data.source=features; export writes a store's documents as "
        ".ckpt files; --help behind it lists its options",
    )
    command, rest = top.parse_args(words[:1]).command, words[1:]
    if command == "export":
        args = export_parser().parse_args(rest)
        count = export_features(Path(args.source), Path(args.out), args.gz)
        print(f"{args.out}: {count:,} documents")
        return 0
    args = import_parser().parse_intermixed_args(rest)
    recipe = find_config(args.config) if args.config else None
    settings = load_settings(TrainSettings, recipe, args.overrides)
    index = import_features(settings, args.source, Path(args.out), ["longdraft", "features", *words], args.yes)
    print(f"{args.out}: {len(index.places):,} documents, trains with data.source=features data.features={args.out}")
    return 0
