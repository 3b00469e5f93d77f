"""What a capture will store and how large it is, known before the target runs.

Legend: L tokens of a document.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.train.config import TrainSettings, as_list
from longdraft.train.documents import Corpus
from longdraft.train.features.format import HIDDEN_NORM, Index, Place, aux_layers, feature_shapes
from longdraft.train.samples import SampleStream
from longdraft.train.target import weights_fingerprint

GIB = 1 << 30


def make_index(
    settings: TrainSettings, spec: TargetSpec, corpus: Corpus, stream: SampleStream, dtype: str, origin: dict[str, Any]
) -> Index:
    """Render every document once and lay out the shards.

    Args:
        settings: the recipe.
        spec: the target's shapes.
        corpus: the documents.
        stream: over them.
        dtype: of the features.
        origin: command, commit, versions.

    Raises:
        UserError: no document is long enough.
    """
    own, names = settings.features, settings.stored_features
    about = {
        **origin,
        "target": spec.model_type,
        "kind": names,
        "hidden_norm": HIDDEN_NORM,
        "keys": "rotated, at position_ids",
        "rope": spec.rope,
    }
    index = Index(
        identity=identity(settings, spec, corpus),
        tensors=feature_shapes(spec, names, len(settings.draft.cross_layers) or 1),
        dtype=dtype,
        documents=len(corpus),
        variants=own.variants,
        shards=0,
        places=[],
        about=about,
    )
    limit = max(int(own.shard_gib * GIB) // index.row_bytes, 1)
    shard = filled = 0
    for variant, document, length in _lengths(stream, own.variants):
        if filled and filled + length > limit:
            shard, filled = shard + 1, 0
        index.places.append(Place(variant, document, shard, filled, length))
        filled += length
    if not index.places:
        raise UserError(
            f"data.train has no document of data.min_length={settings.data.min_length} tokens or more with anything to "
            "predict: lower it, or check the conversations' roles"
        )
    index.shards = shard + 1
    return index


def _lengths(stream: SampleStream, variants: int) -> Iterator[tuple[int, int, int]]:
    for variant in range(variants):
        for document in range(len(stream.corpus)):
            drawn = stream.drawn(variant, document)
            if drawn is not None:
                yield variant, document, len(drawn.document.ids)


def identity(settings: TrainSettings, spec: TargetSpec, corpus: Corpus) -> dict[str, Any]:
    """Dotted settings and fingerprints that decide the content of a store."""
    data, target, layers = settings.data.model_dump(mode="json"), settings.target, settings.draft.cross_layers
    for key in ("train", "eval", "source", "features", "packing", "shuffle"):  # these decide samples, not documents
        del data[key]
    return {
        "target.path": Path(target.path).name,
        "target.revision": target.revision,
        "target.shapes": spec.hash,
        "target.weights": weights_fingerprint(target.path),
        "target.attn": target.attn,
        "data.train": [Path(name).name for name in as_list(settings.data.train)],
        "data.train.sha256": [source.fingerprint for source in corpus.sources],
        **{f"data.{key}": value for key, value in data.items()},
        **{f"positions.{key}": value for key, value in settings.positions.model_dump(mode="json").items()},
        "objective.rows": settings.objective.rows,
        "run.seed": settings.run.seed,
        "features.variants": settings.features.variants,
        # Only where it is set: stores from before the setting go on.
        **({"features.kv_layers": layers} if "kv" in settings.stored_features and layers else {}),
        "features.aux_layers": aux_layers(settings, spec) if "aux" in settings.stored_features else None,
    }


def gib(size: float) -> str:
    """A size in bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def size_text(index: Index) -> str:
    """One line for people."""
    tensors = ", ".join(f"{name} {shape}" for name, shape in index.tensors.items())
    return (
        f"{len(index.places):,} documents ({index.variants} of each), {index.tokens:,} tokens of {index.row_bytes:,} bytes "
        f"({tensors}, {index.dtype}): {gib(index.tokens * index.row_bytes)} in {index.shards} shards"
    )


def check_size(index: Index, folder: Path, max_gib: float, agreed: bool, left: int) -> None:
    """Refuse a store that is larger than agreed, or than the disk.

    Args:
        index: the plan.
        folder: where to.
        max_gib: the limit of ``features.max_gib``.
        agreed: the user has seen the size.
        left: tokens that are not stored yet.

    Raises:
        UserError: with the size and what to change.
    """
    size = index.tokens * index.row_bytes
    if size > max_gib * GIB and not agreed:
        raise UserError(
            f"features.max_gib={max_gib:g} is below the {gib(size)} of this capture: raise it, say --yes, or store less "
            "(data.max_length, fewer documents, features.store)"
        )
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free, need = shutil.disk_usage(nearest).free, left * index.row_bytes
    if need > free:
        raise UserError(
            f"--out {str(folder)!r}: {gib(need)} are to be written and {gib(free)} are free: choose another "
            "disk, or store less"
        )
