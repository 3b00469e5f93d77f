"""Draft checkpoints: ``config.json`` and ``model.safetensors``, read strictly and written atomically."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.draft_models.config import FORMAT_VERSION, TrainingFacts, vars_of
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.kinds import KINDS, AnyConfig, AnyDraft
from longdraft.draft_models.rope import Rotary
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import validate

CONFIG, WEIGHTS = "config.json", "model.safetensors"
T = TypeVar("T")


class CheckpointError(UserError):
    """A draft folder that cannot be used, with the field or key and the remedy."""


def library_versions() -> dict[str, str]:
    """Versions that a checkpoint records."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("longdraft", "torch", "transformers", "sglang"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def save_draft(
    draft: AnyDraft,
    folder: str | Path,
    target_name: str,
    facts: TrainingFacts | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a draft that training and serving load, atomically: a reader sees the old folder or the new one.

    Args:
        draft: the module; only its own weights are written.
        folder: where to; an existing draft there is replaced.
        target_name: the target's name or path, for people.
        facts: how it was trained.
        state: weights to write in place of the module's (gathered from shards).
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    both = {
        **draft.state_dict(),
        **(state or {}),
    }  # gathered weights leave out what is not trained, as a ranked head's ids
    weights = {k: v.detach().to("cpu").contiguous() for k, v in both.items()}
    config = draft.config.to_json(target_name, facts or TrainingFacts(), library_versions())
    config["dtype"] = str(weights_dtype(weights)).removeprefix("torch.")
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(weights, work / WEIGHTS, metadata={"format": "pt"})
        (work / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        os.chmod(work, 0o755)
        if folder.exists():
            old = work.with_name(work.name + "-old")
            folder.rename(old)
            try:
                work.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def weights_dtype(weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type of a draft's weights; the ids of a vocabulary are none."""
    return next(weight.dtype for weight in weights.values() if weight.is_floating_point())


def read_config(folder: str | Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``.

    Raises:
        CheckpointError: no such file, no JSON, or no draft of a known kind and format.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"draft folder {str(folder)!r} has no {CONFIG}: give a folder that longdraft train wrote")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): export the draft again") from None
    ours = config.get("longdraft") if isinstance(config, dict) else None
    if not isinstance(ours, dict) or ours.get("draft") not in KINDS:
        architecture = config.get("architectures") if isinstance(config, dict) else config
        known = " or ".join(kind.config.title for kind in KINDS.values())
        raise CheckpointError(
            f"{path}: architectures={architecture} is not a {known} draft: give a folder that longdraft train wrote"
        )
    if ours.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version={ours.get('format_version')}, this longdraft reads {FORMAT_VERSION}: export the draft again"
        )
    return config


def load_draft(
    folder: str | Path, target: TargetSpec, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> AnyDraft:
    """Build the draft of a folder for a target; ``bind`` the target's embedding and head next.

    Raises:
        CheckpointError: a target that does not match, or a missing, unused or mis-shaped weight.
    """
    draft = check_draft(folder, read_config(folder), target)
    draft.to_empty(device="cpu")
    weights = read_weights(Path(folder) / WEIGHTS)
    draft.load_state_dict(weights)
    if isinstance(draft, Eagle3Draft):
        check_vocabulary(draft, folder)
    draft.to(dtype=dtype or weights_dtype(weights), device=device)
    draft.rotary = Rotary(draft.config.rotary_spec).to(device)  # after the casts: its frequencies stay float32
    return draft.eval()


def check_draft(folder: str | Path, config: dict[str, Any], target: TargetSpec) -> AnyDraft:
    """Check a folder against a target by its headers alone; returns the draft without storage (on the meta device).

    Raises:
        CheckpointError: as :func:`load_draft`.
    """
    check_target(config, target, folder)
    own = draft_config(config, target, folder)
    training_facts(config, folder)
    with torch.device("meta"):
        draft = KINDS[own.kind].build(own)
    found, expected = read_shapes(Path(folder) / WEIGHTS), draft.state_dict()
    for problem, names in (("misses", expected.keys() - found.keys()), ("has unused", found.keys() - expected.keys())):
        if names:
            raise CheckpointError(
                f"{folder}/{WEIGHTS} {problem} weights {', '.join(sorted(names))}: export the draft again"
            )
    for name, want in expected.items():
        if found[name] != tuple(want.shape):
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {name} is {found[name]}, {CONFIG} makes it {tuple(want.shape)}: export the draft again"
            )
    return draft


def draft_config(config: dict[str, Any], target: TargetSpec, folder: str | Path) -> AnyConfig:
    """A draft's config from its file's content, for the target that it was trained for.

    Raises:
        CheckpointError: settings that are none, or a key beside them that says something else.
    """
    kind = KINDS[config["longdraft"]["draft"]]
    try:
        own = kind.configure(target, validate(kind.settings, config["longdraft"].get("settings")))
    except UserError as error:
        raise CheckpointError(f"{folder}/{CONFIG}: longdraft.settings: {error}: export the draft again") from None
    written = json.loads(json.dumps(own.to_json("", TrainingFacts(), {})))
    for field in own.own_fields:  # what SGLang reads and what we read must be the same draft
        if config.get(field) != (want := written.get(field)):
            raise CheckpointError(
                f"{folder}/{CONFIG}: {field}={config.get(field)}, longdraft.settings makes it {want}: export the draft again"
            )
    return own


def check_vocabulary(draft: Eagle3Draft, folder: str | Path) -> None:
    """Raise :class:`CheckpointError` where ``d2t`` and ``t2d`` are not one ascending choice of the target's tokens."""
    ids = draft.target_ids
    fits = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < len(draft.t2d)
    if not fits or not torch.equal(draft.t2d.nonzero().flatten(), ids):
        raise CheckpointError(
            f"{folder}/{WEIGHTS}: d2t and t2d do not name the same ascending tokens: export the draft again"
        )


def training_facts(config: dict[str, Any], folder: str | Path) -> TrainingFacts:
    """How a folder's draft was trained; raises :class:`CheckpointError` where its config does not say."""
    try:
        return validate(TrainingFacts, config["longdraft"].get("training"))
    except UserError as error:
        raise CheckpointError(f"{folder}/{CONFIG}: longdraft.training: {error}: export the draft again") from None


def check_target(config: dict[str, Any], target: TargetSpec, folder: str | Path) -> None:
    """Raise :class:`CheckpointError` naming the first field in which a draft's target differs from this one."""
    outer = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
    }
    for field in KINDS[config["longdraft"]["draft"]].config.target_fields:
        if config.get(field) != (want := outer[field]):
            raise CheckpointError(
                f"{folder}/{CONFIG}: {field}={config.get(field)}, the target has {want}: use the draft that was trained for this target"
            )
    stored = config["longdraft"].get("target")
    if (
        not isinstance(stored, dict)
        or not isinstance(stored.get("spec"), dict)
        or not {"hash", "name"} <= stored.keys()
    ):
        raise CheckpointError(f"{folder}/{CONFIG}: longdraft.target is incomplete: export the draft again")
    if stored["hash"] == target.hash:
        return
    now = json.loads(json.dumps(vars_of(target)))
    for field, want in now.items():
        if stored["spec"].get(field) != want:
            raise CheckpointError(
                f"{folder}/{CONFIG}: longdraft.target.spec.{field}={stored['spec'].get(field)}, the target has {want}: "
                f"use the draft that was trained for this target (this one is for {stored['name']!r})"
            )
    raise CheckpointError(
        f"{folder}/{CONFIG}: longdraft.target.hash={stored['hash']}, the target's is {target.hash}: use the draft that was trained for this target"
    )


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file.

    Raises:
        CheckpointError: no such file, or a damaged one.
    """
    return _read(path, lambda file, name: file.get_tensor(name))


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a safetensors file's tensors, from its header; errors as :func:`read_weights`."""
    return _read(path, lambda file, name: tuple(file.get_slice(name).get_shape()))


def _read(path: Path, get: Callable[[Any, str], T]) -> dict[str, T]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: export the draft again")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: get(file, name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy or export the draft again") from None
