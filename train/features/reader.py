"""A feature store as the training's corpus: documents with their stored positions and the target's tensors.

Legend: L tokens of a document, T packed tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Corpus, Document, Documents
from longdraft.train.features.format import ROWS, Index, Place, aux_layers, feature_shapes, shard_is_whole
from longdraft.train.target import Capture, load_config, weights_fingerprint

OPEN_SHARDS = 32


class FeatureCorpus:
    """The documents of a store by index, as they were cut when they were stored.

    Raises:
        UserError: a store that is not whole, is another target's, or lacks what the recipe reads.
    """

    def __init__(self, settings: TrainSettings, spec: TargetSpec) -> None:
        assert settings.data.features is not None
        self.folder = Path(settings.data.features)
        self.index, self.vocab_size = Index.read(self.folder), spec.vocab_size
        self._check(settings, spec)
        self.places = {(p.variant, p.document): p for p in self.index.places}
        self._shards: OrderedDict[int, Any] = OrderedDict()

    def _check(self, settings: TrainSettings, spec: TargetSpec) -> None:
        index, name = self.index, f"data.features={str(self.folder)!r}"
        for shard in range(index.shards):
            if not shard_is_whole(self.folder, index, shard):
                raise UserError(f"{name} lacks {index.shard_name(shard)}: run longdraft capture again, it continues")
            self._check_shapes(shard)
        weights = weights_fingerprint(settings.target.path)
        if index.identity["target.shapes"] != spec.hash or weights != index.identity["target.weights"]:
            raise UserError(f"{name} was captured from another target than target.path={settings.target.path!r}")
        names = settings.read_features
        if missing := feature_shapes(spec, names).keys() - index.tensors.keys():
            raise UserError(
                f"{name} holds {', '.join(index.tensors)}; this recipe reads {', '.join(sorted(missing))} too: capture with "
                f"features.store={names}"
            )
        kept, read = index.identity.get("features.kv_layers"), settings.draft.cross_layers or None
        if "kv" in names and kept != read:
            raise UserError(
                f"{name} holds keys and values of {_layers(kept)}, draft.cross_layers reads {_layers(read)}: capture with the "
                "draft's setting"
            )
        if "aux" in names and index.identity["features.aux_layers"] != aux_layers(settings, spec):
            raise UserError(
                f"{name} holds the outputs of layers {index.identity['features.aux_layers']}, the draft reads "
                f"{aux_layers(settings, spec)}: capture with features.aux_layers of that"
            )
        longest = max(p.length for p in index.places)
        if longest > settings.data.max_length:
            raise UserError(
                f"data.max_length={settings.data.max_length} is below {name}'s longest document of {longest}: raise it"
            )

    def _check_shapes(self, shard: int) -> None:
        """Headers only: every tensor of a shard has one row for each of its tokens."""
        path, index = self.folder / self.index.shard_name(shard), self.index
        rows = max((p.begin + p.length for p in index.places if p.shard == shard), default=0)
        expected = {name: (rows, kind) for name, kind in ROWS.items()}
        try:
            dtype = getattr(torch, index.dtype)
            expected |= {name: (rows, *shape, dtype) for name, shape in index.tensors.items()}
            with safe_open(path, framework="pt") as file:
                found = {n: file.get_slice(n) for n in expected.keys() & set(file.keys())}
                for name, (*shape, kind) in expected.items():
                    there = [*found[name].get_shape(), found[name][:0].dtype] if name in found else "missing"
                    if there != [*shape, kind]:
                        raise UserError(
                            f"{path}: {name} is {there}, the index makes it {[*shape, kind]}: capture it again"
                        )
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}): run longdraft capture again") from None

    @property
    def positions(self) -> int:
        """The largest stored position plus one. Positions ascend in a document, so its last row says its largest."""
        last = (Place(p.variant, p.document, p.shard, p.begin + p.length - 1, 1) for p in self.index.places if p.length)
        return 1 + max((int(self._slice(place, "position_ids")) for place in last), default=-1)

    def __len__(self) -> int:
        return self.index.documents

    def __getitem__(self, index: int) -> Document:
        """The first variant of a document; empty if it was too short to be stored."""
        place = self.places.get((0, index))
        return Document([], [], self._name(index)) if place is None else self._rows(place)[0]

    def fingerprints(self) -> list[dict[str, Any]]:
        """The store's name, digest and size, for the run's records."""
        size = self.index.tokens * self.index.row_bytes
        return [{"source": str(self.folder), "documents": len(self), "bytes": size, "sha256": self.index.digest}]

    def stored(self, epoch: int, index: int) -> tuple[Document, torch.Tensor, Capture] | None:
        """A document as an epoch shows it, its positions (int64 ``[L]``) and what the target gave for it."""
        place = self.places.get((epoch % self.index.variants, index))
        if place is None:
            return None
        document, position_L = self._rows(place)
        return document, position_L, Capture({name: self._slice(place, name) for name in self.index.tensors})

    def _rows(self, place: Place) -> tuple[Document, torch.Tensor]:
        ids, positions, mask = (self._slice(place, name) for name in ("input_ids", "position_ids", "loss_mask"))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise UserError(
                f"data.features={str(self.folder)!r}: document {place.document} has ids beyond the target's vocabulary of "
                f"{self.vocab_size}: capture again"
            )
        return Document(ids.tolist(), mask.bool().tolist(), self._name(place.document)), positions.long()

    def _name(self, index: int) -> str:
        return f"{self.folder.name}:{index}"

    def _slice(self, place: Place, name: str) -> torch.Tensor:
        try:
            rows: torch.Tensor = self._shard(place.shard).get_slice(name)[place.begin : place.begin + place.length]
        except (OSError, SafetensorError) as error:
            path = self.folder / self.index.shard_name(place.shard)
            raise UserError(f"{path} cannot be read ({error}): run longdraft capture again") from None
        return rows

    def _shard(self, shard: int) -> Any:
        """An open shard; the oldest of many is closed."""
        if shard in self._shards:
            self._shards.move_to_end(shard)
        else:
            self._shards[shard] = safe_open(self.folder / self.index.shard_name(shard), framework="pt")
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)
        return self._shards[shard]


def open_corpus(settings: TrainSettings, tokenizer: Any) -> Documents:
    """What ``data.source`` says: the documents of ``data.train``, or of a store.

    Raises:
        UserError: from either.
    """
    spec = TargetSpec.from_config(load_config(settings.target))
    if settings.data.source == "features":
        return FeatureCorpus(settings, spec)
    return Corpus(settings.data.train, settings.data, tokenizer, spec.vocab_size)


def join(captures: Sequence[Capture | None]) -> Capture | None:
    """Captures of documents as that of their packed sample; None if the target has to run."""
    found = [c for c in captures if c is not None]
    if not found:
        return None
    assert len(found) == len(captures), "all documents of a sample come from one source"
    return Capture({name: torch.cat([c.tensors[name] for c in found]) for name in found[0].tensors})


def _layers(kv_layers: list[int] | None) -> str:
    return "the last layer" if kv_layers is None else f"layers {kv_layers}"
