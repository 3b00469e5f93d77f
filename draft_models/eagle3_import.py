"""Published EAGLE-3 drafts to our format and back: EAGLE's, SpecForge's and SGLang's names of weights and config keys.

What is read is what SGLang would serve: the draft's embedding is dropped (SGLang puts the target's in its place), a missing
rotation is Llama's default, ``norm_output`` has SGLang's meaning, and missing aux layers are SGLang's own. Where SGLang would
skip something silently, the import refuses.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.checkpoint import CONFIG, CheckpointError, check_vocabulary, library_versions
from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings, RopeSettings
from longdraft.draft_models.published import published_weights, write_published
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import validate

LLAMA_THETA = 10000.0
RENAMES = (
    (re.compile(r"^(draft_model|model)\."), ""),
    (re.compile(r"^layers\.0\."), "midlayer."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
UNUSED = ("embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
ROPE_IGNORED = ("type", "finetuned")  # an older name, and a note of the trainer's
# What leaves the rotation as it is; SpecForge's YaRN wants the last two written down.
ROPE_NEUTRAL = {"attn_factor": 1, "extrapolation_factor": 1, "truncate": True, "mscale": 1, "mscale_all_dim": 0}
# Keys of the config that must be what they are here, or absent: no such draft is served.
FIXED: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,), "tie_word_embeddings": (False,), "attention_bias": (False,), "mlp_bias": (False,),
    "bias": (False,), "num_aux_hidden_states": (3,), "partial_rotary_factor": (1, 1.0),
}  # fmt: skip


def import_eagle3(source: str | Path, target: TargetSpec) -> Eagle3Draft:
    """Read a published draft for its target.

    Args:
        source: a folder with ``config.json`` and safetensors, one file or shards with their index.
        target: the target that the draft was trained for.

    Returns:
        The draft in the stored dtype, not yet bound to the target's embedding. Its vocabulary is in ascending order of the
        target's ids, rows of the head with it.

    Raises:
        CheckpointError: no safetensors, a config key that no served draft has, or a missing, unknown or mis-shaped weight.
    """
    source = Path(source)
    config = _read_config(source)
    found = {_rename(name): weight for name, weight in published_weights(source).items()}
    found = {name: weight for name, weight in found.items() if name not in UNUSED}
    try:
        settings = published_settings(config, found, target)
        draft = Eagle3Draft(Eagle3Config(target, settings))
    except UserError as error:
        raise CheckpointError(f"{source}/{CONFIG}: {error}") from None
    _complete_vocabulary(found, target, source)
    expected = draft.state_dict()
    for problem, names in (("misses", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            raise CheckpointError(
                f"{source} {problem} weights {', '.join(sorted(names))}: give a published EAGLE-3 draft of one layer"
            )
    for name, want in expected.items():
        if found[name].shape != want.shape:
            raise CheckpointError(
                f"{source}: {name} is {tuple(found[name].shape)}, {CONFIG} and the target make it {tuple(want.shape)}: use the "
                "target that the draft was trained for"
            )
    draft.load_state_dict(found)
    check_vocabulary(draft, source)
    frequencies = draft.rotary.inverse
    draft = draft.to(found["fc.weight"].dtype)
    draft.rotary.inverse = frequencies  # a cast to 16 bit would bend far positions
    return draft.eval()


def export_eagle3(draft: Eagle3Draft, folder: str | Path) -> None:
    """Write our draft as published ones are laid out: no block of ours in the config, no embedding.

    Our own folders load in SGLang as they are; this is for readers that want nothing else in a config.

    Args:
        draft: any dtype.
        folder: a new or empty folder; both files appear whole.

    Raises:
        CheckpointError: a window, which the published layout has no key for, or a folder with something in it.
    """
    s = draft.config.settings
    if s.window is not None:
        raise CheckpointError(
            f"window={s.window} has no key in the published layout: keep our folder, which SGLang serves as it is with "
            f"--speculative-draft-window-size {s.window - 1}"
        )
    weights = {name: w.detach().cpu().contiguous() for name, w in draft.state_dict().items()}
    config = draft.config.to_json("", TrainingFacts(), library_versions())
    del config["longdraft"]
    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    write_published(folder, weights, {**config, "dtype": dtype, "torch_dtype": dtype})


def _read_config(source: Path) -> dict[str, Any]:
    path = source / CONFIG
    if not path.is_file():
        raise CheckpointError(f"draft {str(source)!r} has no {CONFIG}: give the folder of a published EAGLE-3 draft")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): copy the draft again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}: give the folder of a published EAGLE-3 draft")
    return config


def _rename(name: str) -> str:
    for old, new in RENAMES:
        name = old.sub(new, name)
    return name


def published_settings(config: dict[str, Any], found: dict[str, torch.Tensor], target: TargetSpec) -> Eagle3Settings:
    """A published config as our settings; ``found`` are the draft's weights, of which shapes and names are read.

    Raises:
        UserError: what cannot be served as it stands.
    """
    fixed = {
        **FIXED,
        "hidden_size": (target.hidden_size,),
        "target_hidden_size": (target.hidden_size,),
        "vocab_size": (target.vocab_size,),
        "hidden_act": (target.hidden_act,),
    }
    for key, allowed in fixed.items():
        if config.get(key) not in (None, *allowed):
            raise UserError(
                f"{key}={config[key]}, a draft for this target has {allowed[0]}: use the draft's own target"
            )
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise UserError(
            "eagle_config.use_aux_hidden_state=False is not an EAGLE-3 draft: give one that reads three layers"
        )
    if "lm_head.weight" not in found:
        raise UserError(
            "the draft has no lm_head.weight and would take the target's: add the target's head to its weights"
        )
    normed = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    if not normed and any(name.startswith("fc_norm.") for name in found):
        raise UserError(
            "the draft holds norms of its features, fc_norm is not set: set fc_norm to true, SGLang would skip them"
        )
    heads = config.get("num_attention_heads")
    rope, reach = _rope(config)
    same = rope.parameters(target.rope["rope_theta"]) == target.rope
    rows = len(found["lm_head.weight"])
    return validate(
        Eagle3Settings,
        {
            "draft_vocab_size": None if rows == target.vocab_size else rows,
            "fc_norm": normed,
            "norm_output": bool(config.get("norm_output", False)),
            "aux_layers": eagle.get("eagle_aux_hidden_state_layer_ids"),
            "rope": None if same else rope.model_dump(),
            "max_position": reach,
            "intermediate_size": config.get("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim") or (target.hidden_size // heads if heads else None),
            "rms_norm_eps": config.get("rms_norm_eps"),
        },
    )


def _rope(config: dict[str, Any]) -> tuple[RopeSettings, int | None]:
    """The rotation by its new name or its old ones, and the positions that it is said to cover (None: what it covers)."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    positions = config.get("max_position_embeddings")
    known = {name: given.pop(name) for name in RopeSettings.model_fields if given.get(name) is not None}
    known.setdefault("rope_type", given.get("type", "default"))
    known.setdefault("rope_theta", config.get("rope_theta") or LLAMA_THETA)
    for name, value in given.items():
        if value is not None and name not in ROPE_IGNORED and (name not in ROPE_NEUTRAL or ROPE_NEUTRAL[name] != value):
            raise UserError(
                f"rope {name}={value} is not supported: use a draft with a default, linear, llama3 or yarn rotation"
            )
    if known["rope_type"] == "linear" and positions:
        known.setdefault("original_max_position_embeddings", positions)  # it counts the positions before stretching
    rope = validate(RopeSettings, known)
    return rope, None if rope.rope_type in ("linear", "yarn") else positions


def _complete_vocabulary(found: dict[str, torch.Tensor], target: TargetSpec, source: Path) -> None:
    """Fill in ``d2t`` where the draft has every token, ``t2d`` from ``d2t``, and put both in ascending order."""
    rows = len(found["lm_head.weight"])
    if "d2t" not in found:
        if rows != target.vocab_size:
            raise CheckpointError(
                f"{source} misses weights d2t, its head has {rows} of the target's {target.vocab_size} tokens: give the whole draft"
            )
        found["d2t"] = torch.zeros(rows, dtype=torch.int64)
    if found["d2t"].shape != (rows,):
        raise CheckpointError(
            f"{source}: d2t is {tuple(found['d2t'].shape)}, lm_head.weight has {rows} rows: copy the draft again"
        )
    ids = found["d2t"].long() + torch.arange(rows)
    if bool((ids < 0).any()) or bool((ids >= target.vocab_size).any()):
        raise CheckpointError(
            f"{source}: d2t names tokens beyond the target's {target.vocab_size}: use the target that the draft was trained for"
        )
    ids, order = ids.sort()
    found["d2t"], found["lm_head.weight"] = ids - torch.arange(rows), found["lm_head.weight"][order]
    mask = torch.zeros(target.vocab_size, dtype=torch.bool)
    mask[ids] = True
    found["t2d"] = mask if "t2d" not in found else found["t2d"].bool()
