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

from longdraft.draft_models.config import FORMAT_VERSION, LongSpecConfig, LongSpecSettings, TrainingFacts
from longdraft.draft_models.longspec import LongSpecDraft
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
    draft: LongSpecDraft,
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
    config["dtype"] = str(weights["self_attn.q_proj.weight"].dtype).removeprefix("torch.")
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


def read_config(folder: str | Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``.

    Raises:
        CheckpointError: no such file, no JSON, or no LongSpec draft of a known format.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"draft folder {str(folder)!r} has no {CONFIG}: give a folder that longdraft train wrote")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): export the draft again") from None
    ours = config.get("longdraft") if isinstance(config, dict) else None
    if not isinstance(ours, dict) or ours.get("draft") != "longspec":
        kind = config.get("architectures") if isinstance(config, dict) else config
        raise CheckpointError(
            f"{path}: architectures={kind} is not a LongSpec draft: give a folder that longdraft train wrote"
        )
    if ours.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version={ours.get('format_version')}, this longdraft reads {FORMAT_VERSION}: export the draft again"
        )
    return config


def load_draft(
    folder: str | Path, target: TargetSpec, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LongSpecDraft:
    """Build the draft of a folder for a target; :meth:`LongSpecDraft.bind` the target's embedding and head next.

    Raises:
        CheckpointError: a target that does not match, or a missing, unused or mis-shaped weight.
    """
    draft = check_draft(folder, read_config(folder), target)
    draft.to_empty(device="cpu")
    weights = read_weights(Path(folder) / WEIGHTS)
    draft.load_state_dict(weights)
    draft.to(dtype=dtype or weights["self_attn.q_proj.weight"].dtype, device=device)
    draft.rotary = Rotary(target).to(device)  # after the casts: its frequencies stay float32
    return draft.eval()


def check_draft(folder: str | Path, config: dict[str, Any], target: TargetSpec) -> LongSpecDraft:
    """Check a folder against a target by its headers alone; returns the draft without storage (on the meta device).

    Raises:
        CheckpointError: as :func:`load_draft`.
    """
    check_target(config, target, folder)
    try:
        settings = validate(LongSpecSettings, config["longdraft"].get("settings"))
    except UserError as error:
        raise CheckpointError(f"{folder}/{CONFIG}: longdraft.settings: {error}: export the draft again") from None
    training_facts(config, folder)
    with torch.device("meta"):
        draft = LongSpecDraft(LongSpecConfig(target, settings))
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


def training_facts(config: dict[str, Any], folder: str | Path) -> TrainingFacts:
    """How a folder's draft was trained; raises :class:`CheckpointError` where its config does not say."""
    try:
        return validate(TrainingFacts, config["longdraft"].get("training"))
    except UserError as error:
        raise CheckpointError(f"{folder}/{CONFIG}: longdraft.training: {error}: export the draft again") from None


def check_target(config: dict[str, Any], target: TargetSpec, folder: str | Path) -> None:
    """Raise :class:`CheckpointError` naming the first field in which a draft's target differs from this one."""
    from longdraft.draft_models.config import vars_of

    outer = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
    }
    for field, want in outer.items():
        if config.get(field) != want:
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
