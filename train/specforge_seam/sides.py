"""What differs between our drafts under SpecForge's trainer: first weights, features, its run config, and the way back.

Legend: L tokens of a document.
"""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from longdraft.draft_models.checkpoint import CONFIG, save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings, TrainingFacts
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.kinds import AnyDraft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Corpus
from longdraft.train.eagle3_weights import build_eagle3
from longdraft.train.engine import Group
from longdraft.train.first_weights import build_draft, fit, rank_head
from longdraft.train.samples import Drawn
from longdraft.train.specforge_seam.draft_json import specforge_json
from longdraft.train.specforge_seam.feature_files import write_vocabulary_file
from longdraft.train.target import LAST, FrozenTarget, load_config, resolve_dtype

VOCABULARY, INDEX = "vocabulary.pt", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
Unlike = dict[str, tuple[bool, str]]  # named setting -> whether it is wrong, what to set


class Side(ABC):
    """One kind of draft under SpecForge's trainer."""

    strategy: str

    @abstractmethod
    def unlike(self, settings: TrainSettings) -> Unlike:
        """Settings that SpecForge would ignore."""

    @abstractmethod
    def write_first(
        self,
        settings: TrainSettings,
        target: FrozenTarget,
        corpus: Corpus,
        tokenizer: Any,
        limit: int,
        group: Group,
        folder: Path,
    ) -> None:
        """Write the first weights with a JSON that its config loader takes and that has our own block."""  # fmt: skip

    @abstractmethod
    def tensors(self, target: FrozenTarget, drawn: Drawn, initial: Path) -> dict[str, torch.Tensor]:
        """A document's features, by the names of a feature sample."""

    @abstractmethod
    def sections(self, settings: TrainSettings, initial: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """This side's keys of its ``model`` and ``training`` sections."""

    @abstractmethod
    def rebuild(self, block: dict[str, Any], spec: TargetSpec) -> AnyDraft:
        """Our draft, without weights, of a JSON's ``longdraft`` block."""

    @abstractmethod
    def facts(self, settings: TrainSettings) -> dict[str, int]:
        """What a checkpoint says of the training beside its lengths."""

    def export(
        self, settings: TrainSettings, initial: Path, state: dict[str, torch.Tensor], facts: TrainingFacts, folder: Path
    ) -> None:
        """Write trained weights in our format."""
        block = json.loads((initial / CONFIG).read_text())["longdraft"]
        draft = self.rebuild(block, TargetSpec(**block["target"]["spec"]))
        draft.load_state_dict(state)
        save_draft(draft, folder, settings.target.path, facts.model_copy(update=self.facts(settings)), state)


class LongSpecSide(Side):
    strategy = "longspec"

    def unlike(self, settings: TrainSettings) -> Unlike:
        s = settings
        return {
            f"objective.name={s.objective.name}": (s.objective.name != "ce", "ce"),
            f"views.share={s.views.share}": (s.views.share > 0, "0"),
        }

    def write_first(
        self, settings: TrainSettings, target: FrozenTarget, corpus: Corpus, tokenizer: Any, limit: int, group: Group,
        folder: Path,
    ) -> None:  # fmt: skip
        draft = build_draft(settings, target)
        rank_head(draft, settings, corpus, tokenizer)
        fit(draft, target, settings, corpus, limit, group)
        save_draft(draft, folder, target.name)
        # SpecForge's run config takes nothing of ours: the objective's settings travel in the draft's JSON.
        training = {
            "lag_min": settings.lag.min,
            "lag_max": settings.lag.max,
            "seed": settings.run.seed,
            "chunk": settings.objective.chunk,
        }
        _change_json(folder / CONFIG, {"longspec_training": training})

    def tensors(self, target: FrozenTarget, drawn: Drawn, initial: Path) -> dict[str, torch.Tensor]:
        ids, position_L = torch.tensor(drawn.document.ids, device=target.device), drawn.position_L.to(target.device)
        layers = json.loads((initial / CONFIG).read_text())["longdraft"]["settings"]["cross_layers"]
        seen = target.capture(ids, position_L, [0, len(ids)], kv_layers=layers or LAST)
        return {"position": position_L, "k": seen.k_TKD, "v": seen.v_TKD}

    def sections(self, settings: TrainSettings, initial: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"attention_backend": "sdpa"}  # a name only: our draft has its own attention

    def rebuild(self, block: dict[str, Any], spec: TargetSpec) -> AnyDraft:
        return LongSpecDraft(LongSpecConfig(spec, validate(LongSpecSettings, block["settings"])))

    def facts(self, settings: TrainSettings) -> dict[str, int]:
        return {"anchors": settings.positions.anchors, "max_lag": settings.lag.max}


class Eagle3Side(Side):
    """SpecForge's own algorithm and draft class: names of weights, vocabulary and features are the same as ours."""

    strategy = "eagle3"

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def unlike(self, settings: TrainSettings) -> Unlike:
        p, t = settings.positions, settings.ttt
        return {
            f"ttt.decay={t.decay}": (t.decay != 0.8, "0.8"),
            f"ttt.out_of_vocab={t.out_of_vocab}": (t.out_of_vocab != "drop", "drop"),
            f"ttt.compat={t.compat}": (t.compat != "specforge-0.2.0", "specforge-0.2.0, which is what it computes"),
            f"positions.offset_share={p.offset_share}": (p.offset_share > 0, "0"),
            f"eagle3.window={settings.eagle3.window}": (settings.eagle3.window is not None, "none"),
            "eagle3.norm_output=True": (settings.eagle3.norm_output, "false"),
        }

    def write_first(
        self, settings: TrainSettings, target: FrozenTarget, corpus: Corpus, tokenizer: Any, limit: int, group: Group,
        folder: Path,
    ) -> None:  # fmt: skip
        draft, said = build_eagle3(settings, target, corpus, tokenizer)
        print(said, end="\n" if said else "", flush=True)
        changed = specforge_json(draft.config)
        save_draft(draft, folder, target.name)
        _change_json(folder / CONFIG, changed)
        write_vocabulary_file(draft.d2t, draft.t2d, folder / VOCABULARY)

    def tensors(self, target: FrozenTarget, drawn: Drawn, initial: Path) -> dict[str, torch.Tensor]:
        layers = json.loads((initial / CONFIG).read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ids, position_L = torch.tensor(drawn.document.ids, device=target.device), drawn.position_L.to(target.device)
        seen = target.capture(ids, position_L, [0, len(ids)], hidden=True, aux=layers, kv_layers=())
        # Its head is always bfloat16, and multiplies only what is; its draft projects what has its own dtype.
        dtype = resolve_dtype(self.dtype, target.device)
        hidden_LE = seen.tensors["hidden"].to(torch.bfloat16)
        return {"position": position_L, "aux": seen.aux_TA.to(dtype), "hidden": hidden_LE}

    def sections(self, settings: TrainSettings, initial: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        tied = TargetSpec.from_config(load_config(settings.target)).tie_embeddings
        # Always given: without it SpecForge counts a vocabulary anew and lays it over the draft's.
        model = {"vocab_mapping_path": str(initial / VOCABULARY)} | ({"lm_head_key": EMBEDDING} if tied else {})
        backend = "flex_attention" if torch.cuda.is_available() else "sdpa"
        return model, {"attention_backend": backend, "ttt_length": settings.ttt.steps}

    def rebuild(self, block: dict[str, Any], spec: TargetSpec) -> AnyDraft:
        return Eagle3Draft(Eagle3Config(spec, validate(Eagle3Settings, block["settings"])))

    def facts(self, settings: TrainSettings) -> dict[str, int]:
        return {"anchors": 0, "max_lag": settings.ttt.steps}


def side_of(settings: TrainSettings) -> Side:
    """The side of a recipe's draft."""
    return Eagle3Side(settings.engine.dtype) if settings.draft.arch == "eagle3" else LongSpecSide()


def indexed_target(source: Path, folder: Path) -> Path:
    """A model folder whose weights have an index, which SpecForge's head loader insists on.

    Returns:
        ``source`` itself if it has one, else ``folder`` with links to its files and an index; made once.

    Raises:
        UserError: no safetensors there.
    """
    if list(source.glob("*.index.json")):
        return source
    if (folder / INDEX).exists():
        return folder
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UserError(f"target.path={str(source)!r} has no safetensors: SpecForge reads the target's head from them")
    weight_map: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as weights:
            weight_map |= dict.fromkeys(weights.keys(), path.name)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")
    return folder


def _change_json(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1) + "\n")
