"""The frozen target: one forward pass a sample that keeps what the draft reads, such as the last layer's cache, and nothing else.

Legend: B rows of a pass, documents padded to length L or a single one of L packed tokens, T packed tokens, E hidden size, A three times E, K key/value heads,
D head size.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache
from transformers.cache_utils import CacheLayerMixin

from longdraft.draft_models.aux_features import aux_features
from longdraft.draft_models.layer_queries import layer_queries
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.train.config import TargetSettings
from longdraft.train.fused_layers import fuse, wants_fusion
from longdraft.train.packed_target import can_pack, packed_attention, spans
from longdraft.train.recipe_files import shipped
from longdraft.train.tiny_random import PREFIX, byte_tokenizer, tiny_config, tiny_random_model

SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a weight file: reading all of a large target's would take minutes
PACKED = "auto"  # of target.attn: ours for packed documents, and SDPA wherever else the model runs
LAST = (-1,)  # the last layer alone, which LongSpec's drafts read
PADDING_WASTE = 1.25  # documents share a padded batch while it stays within this factor of its real tokens
Parts = Iterator[tuple[int, int, dict[str, torch.Tensor]]]  # begin and end among the packed tokens, and their features


class _PassLayer(CacheLayerMixin):
    """Hands back what it is given; keeps it only where asked. Looks empty, so every mask is plain causal."""

    is_sliding = False

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keep:
            self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return -1


def _side_by_side(layers: list[torch.Tensor | None]) -> torch.Tensor:
    found = [x for x in layers if x is not None]
    assert len(found) == len(layers), "the target did not write its cache"
    return (found[0] if len(found) == 1 else torch.cat(found, 1)).transpose(1, 2)


class KeptLayers(Cache):
    """A cache that holds some layers' keys (rotated, as serving caches them) and values instead of all layers'.

    Passing any cache also keeps transformers from reading a jump of the positions as the start of a new document, which
    would silently cut the anchors off under Anchor-Offset Indices.
    """

    def __init__(self, num_layers: int, kept: Sequence[int]) -> None:
        super().__init__(layers=[_PassLayer(keep=i in kept) for i in range(num_layers)])
        self.kept = kept

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, L, K, D]`` of the pass, the layers' key heads side by side."""
        found = [self.layers[i] for i in self.kept]
        return _side_by_side([layer.keys for layer in found]), _side_by_side([layer.values for layer in found])


@dataclass(frozen=True)
class Wanted:
    """Layers of a pass whose outputs, whose keys and values, and whose queries are kept."""

    aux: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = LAST
    q_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Capture:
    """What the draft reads, one row a token in the target's dtype, by name.

    ``k`` and ``v`` are the cache of one layer, or of several side by side, keys rotated; ``hidden`` feeds the head; ``aux`` is the outputs of three layers
    side by side, low layer first; ``q`` is queries of layers, not rotated. What was not asked for is not there.
    """

    tensors: dict[str, torch.Tensor]

    @property
    def k_TKD(self) -> torch.Tensor:
        return self.tensors["k"]

    @property
    def v_TKD(self) -> torch.Tensor:
        return self.tensors["v"]

    @property
    def q_THD(self) -> torch.Tensor:
        return self.tensors["q"]

    @property
    def hidden_TE(self) -> torch.Tensor | None:
        return self.tensors.get("hidden")

    @property
    def aux_TA(self) -> torch.Tensor:
        return self.tensors["aux"]

    def to(self, device: torch.device) -> "Capture":
        return Capture({name: x.to(device, non_blocking=True) for name, x in self.tensors.items()})


class FrozenTarget:
    """A transformers causal language model in evaluation mode without gradients.

    ``packed``: documents go through it side by side without padding (:mod:`longdraft.train.packed_target`) where its code is
    transformers' own; otherwise, in padded batches, under the attention that it was loaded with.
    """

    def __init__(self, model: Any, name: str, max_batch_tokens: int = 65536, packed: bool = True) -> None:
        self.model = model.eval().requires_grad_(False)
        self.packed = packed and can_pack(self.model)
        self.name = name
        self.spec = TargetSpec.from_config(model.config)
        self.max_batch_tokens = max_batch_tokens

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def embedding_VE(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_VE(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def capture(
        self,
        id_T: torch.Tensor,
        position_T: torch.Tensor,
        cu: Sequence[int],
        hidden: bool = False,
        aux: Sequence[int] = (),
        kv_layers: Sequence[int] = LAST,
        q_layers: Sequence[int] = (),
    ) -> Capture:
        """Run packed documents, each on its own, at the given positions.

        Args:
            id_T, position_T: int64 on the target's device.
            cu: document offsets from 0 to T; documents never see each other.
            hidden: also return the rows that feed the head.
            aux: layers whose outputs to return too, ascending, as :mod:`longdraft.draft_models.eagle3_config` counts them.
            kv_layers: layers whose keys and values to return, a negative number counting from the last; none of them if empty.
            q_layers: layers whose queries to return, before their rotation.
        """
        names = [*(("k", "v") if kv_layers else ()), *(("hidden",) if hidden else ()), *(("aux",) if aux else ())]
        names += ["q"] if q_layers else []
        run = self._packed if self.packed else self._padded
        parts = run(id_T, position_T, cu, Wanted(tuple(aux), tuple(kv_layers), tuple(q_layers)))
        out: dict[str, torch.Tensor] = {}
        for begin, end, seen in parts:
            if end - begin == len(id_T):
                return Capture({name: seen[name].contiguous() for name in names})
            for name in names:
                if name not in out:
                    out[name] = seen[name].new_empty(len(id_T), *seen[name].shape[1:])
                out[name][begin:end] = seen[name]
        return Capture(out or self._nothing(id_T, names, len(aux), len(kv_layers), len(q_layers)))

    def _packed(self, id_T: torch.Tensor, position_T: torch.Tensor, cu: Sequence[int], wanted: Wanted) -> Parts:
        """Documents side by side, as many at once as ``max_batch_tokens`` holds."""
        for span in spans(cu, self.max_batch_tokens):
            a, b = span[0], span[-1]
            with packed_attention(self.model):
                seen = self.run(
                    id_T[None, a:b], position_T[None, a:b], wanted, document_offsets=[end - a for end in span]
                )
            yield a, b, {name: rows[0] for name, rows in seen.items()}

    def _padded(self, id_T: torch.Tensor, position_T: torch.Tensor, cu: Sequence[int], wanted: Wanted) -> Parts:
        """Padding lies to the right, where causal attention never looks: no mask."""
        for batch in padded_batches(cu, self.max_batch_tokens):
            longest = max(b - a for a, b in batch)
            id_BL, position_BL = (id_T.new_zeros(len(batch), longest) for _ in range(2))
            for row, (a, b) in enumerate(batch):
                id_BL[row, : b - a], position_BL[row, : b - a] = id_T[a:b], position_T[a:b]
            seen = self.run(id_BL, position_BL, wanted)
            for row, (a, b) in enumerate(batch):
                yield a, b, {name: rows[row, : b - a] for name, rows in seen.items()}

    def passes(self, cu: Sequence[int]) -> int:
        """Forward passes that :meth:`capture` makes of these documents."""
        return len((spans if self.packed else padded_batches)(cu, self.max_batch_tokens))

    def run(
        self, id_BL: torch.Tensor, position_BL: torch.Tensor, wanted: Wanted, **given: Any
    ) -> dict[str, torch.Tensor]:
        """All features ``[B, L, ...]`` of one pass."""
        layers = self.spec.num_layers
        cache = KeptLayers(layers, [layer % layers for layer in wanted.kv_layers])
        with aux_features(self.model, wanted.aux) as features, layer_queries(self.model, wanted.q_layers) as queries:
            out = self.model.base_model(
                input_ids=id_BL, position_ids=position_BL, past_key_values=cache, use_cache=True, **given
            )
        seen = {"hidden": out.last_hidden_state}
        if wanted.kv_layers:
            seen["k"], seen["v"] = cache.rows()
        if wanted.q_layers:
            seen["q"] = torch.cat([queries[layer] for layer in wanted.q_layers], -1).unflatten(
                -1, (-1, self.spec.head_dim)
            )
        return seen | ({"aux": features.take()} if wanted.aux else {})

    def _nothing(
        self, id_T: torch.Tensor, names: Sequence[str], aux: int, kv_layers: int, q_layers: int
    ) -> dict[str, torch.Tensor]:
        """Features of no tokens."""
        spec = self.spec
        kv = (kv_layers * spec.num_kv_heads, spec.head_dim)
        shapes = {"k": kv, "v": kv, "hidden": (spec.hidden_size,), "aux": (aux * spec.hidden_size,)}
        shapes["q"] = (q_layers * spec.num_heads, spec.head_dim)
        return {name: torch.empty(0, *shapes[name], dtype=self.model.dtype, device=id_T.device) for name in names}


def padded_batches(cu: Sequence[int], max_tokens: int) -> list[list[tuple[int, int]]]:
    """Documents ``(begin, end)`` grouped by length into right-padded batches of little padding, longest first."""
    documents = sorted(((a, b) for a, b in pairwise(cu) if b > a), key=lambda d: (d[0] - d[1], d[0]))
    batches: list[list[tuple[int, int]]] = []
    real = 0
    for a, b in documents:
        if batches:
            padded = (len(batches[-1]) + 1) * (batches[-1][0][1] - batches[-1][0][0])
            if padded <= max_tokens and padded <= PADDING_WASTE * (real + b - a):
                batches[-1].append((a, b))
                real += b - a
                continue
        batches.append([(a, b)])
        real = b - a
    return batches


def load_config(settings: TargetSettings) -> Any:
    """The target's transformers config, without weights.

    Raises:
        UserError: no such model, or an unknown tiny one.
    """
    if settings.path.startswith(PREFIX):
        return tiny_config(settings.path.removeprefix(PREFIX))
    try:
        return AutoConfig.from_pretrained(
            settings.path, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _unreadable(settings, error) from None


def plan_config(settings: TargetSettings) -> Any:
    """The target's config where only shapes matter: a model that is not here yet is planned by the shapes that we ship.

    Raises:
        UserError: as :func:`load_config`, of a model whose shapes we do not ship.
    """
    shapes = shipped(f"recipes/shapes/{settings.path.rsplit('/', 1)[-1].lower()}")
    if not Path(settings.path).exists() and (shapes / "config.json").is_file():
        return AutoConfig.from_pretrained(shapes)
    return load_config(settings)


def load_target(settings: TargetSettings, device: torch.device) -> FrozenTarget:
    """Load the target in its training dtype, with fused layers where ``target.liger`` has them.

    Raises:
        UserError: a target that is not there, that a LongSpec draft cannot read, or whose layers cannot be fused as asked.
    """
    TargetSpec.from_config(load_config(settings))
    model = load_model(settings, resolve_dtype(settings.dtype, device))
    if wants_fusion(settings.liger, model, device):
        fuse(model)
    return FrozenTarget(model.to(device), settings.path, settings.max_batch_tokens, settings.attn == PACKED)


def load_model(settings: TargetSettings, dtype: torch.dtype) -> Any:
    """The transformers model in a dtype, on the device that transformers chooses; raises as :func:`load_target`."""
    attn = "sdpa" if settings.attn == PACKED else settings.attn
    if settings.path.startswith(PREFIX):
        model: Any = tiny_random_model(settings.path.removeprefix(PREFIX))
        for weight in model.parameters():  # not model.to(dtype): the rotary frequencies stay float32
            weight.data = weight.data.to(dtype)
        try:
            model.set_attn_implementation(attn)
        except (ValueError, ImportError) as error:
            raise _unreadable(settings, error) from None
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                settings.path,
                revision=settings.revision,
                dtype=dtype,
                attn_implementation=attn,
                trust_remote_code=settings.trust_remote_code,
            )
        except (OSError, ValueError, ImportError) as error:
            raise _unreadable(settings, error) from None
    return model


def load_tokenizer(settings: TargetSettings) -> Any:
    """The target's tokenizer.

    Raises:
        UserError: none there, or one without character offsets.
    """
    if settings.path.startswith(PREFIX):
        return byte_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.path, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _unreadable(settings, error) from None
    if not tokenizer.is_fast:
        raise UserError(
            f"target.path={settings.path!r} has a slow tokenizer: loss masks need one with character offsets (tokenizer.json)"
        )
    return tokenizer


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype setting; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _unreadable(settings: TargetSettings, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    if "attn_implementation" in reason or "FlashAttention" in reason:
        return UserError(f"target.attn={settings.attn!r} is not to be had here ({reason}): use sdpa or eager")
    return UserError(
        f"target.path={settings.path!r} cannot be loaded ({reason}): give a model folder or a Hugging Face name"
    )


def weights_fingerprint(folder: str) -> str | None:
    """SHA-256 over names, sizes and spread samples of a model folder's weight files and its config; None without a folder."""
    files = sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("config.json")])
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
