"""LongSpec as an algorithm in SpecForge's registry: its contracts, and the providers that build data and models for them.

Features are SpecForge's offline files with our names in them (``longspec_kv_v1``, see :mod:`.feature_files`); its own capture has
no keys and values, so ``longdraft train --trainer specforge`` writes them.

Legend: S tokens, K key/value heads, D head size.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.checkpoint import WEIGHTS, read_weights
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.specforge_seam.longspec_draft import (
    FEATURES,
    TRAINING,
    LongSpecDraftModel,
    LongSpecStrategy,
    LongSpecTraining,
    LongSpecTrainingModel,
)

ALGORITHM, ARCHITECTURE, NORMALIZER = "longspec", "LongSpecDraftModel", "longspec_offline_v1"
Tensors = dict[str, torch.Tensor]


def normalize_sample(raw: Tensors, max_len: int) -> Tensors:
    """A feature file's tensors as one row of a batch, cut on the right.

    Raises:
        ValueError: tensors of different lengths.
    """
    flat = {name: raw[name].reshape(-1)[:max_len][None] for name in ("input_ids", "loss_mask", "position_ids")}
    wide = {name: raw[name][:, :max_len] for name in ("target_key", "target_value")}
    lengths = {name: value.shape[1] for name, value in {**flat, **wide}.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"longspec features have different lengths: {lengths}")
    return {**flat, **wide}


def build_reader(path: str, *, run_id: str, ttt_length: int, max_len: int) -> Any:
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    return OfflineManifestReader(
        path,
        run_id=run_id,
        strategy=ALGORITHM,
        feature_keys=FEATURES,
        target_repr=None,
        ttt_length=ttt_length,
        max_len=max_len,
    )


def build_normalizer(max_len: int, **topology: Any) -> Callable[[Tensors], Tensors]:
    return partial(normalize_sample, max_len=max_len)


def build_collator() -> Callable[[list[Tensors]], Tensors]:
    """Pads on the right with zeros: no causal row reads them, and the mask leaves them out of the loss."""
    from specforge.algorithms.common.collation import pad_and_concatenate_features

    return partial(pad_and_concatenate_features, sequence_axes=dict.fromkeys(FEATURES, 1), required_keys=FEATURES)


def build_draft(config: Any, draft_json: Any) -> LongSpecDraftModel:
    """The draft of a JSON, with the weights of ``model.draft_checkpoint_path`` if that is set."""
    from specforge.modeling.auto import AutoDraftModel
    from specforge.utils import get_local_device

    draft: LongSpecDraftModel = AutoDraftModel.from_config(draft_json)
    if config.model.draft_checkpoint_path:
        draft.load_state_dict(read_weights(Path(config.model.draft_checkpoint_path) / WEIGHTS))
    return draft.cast(get_local_device(), getattr(torch, config.model.torch_dtype))


def build_training_model(
    config: Any, draft: LongSpecDraftModel, draft_json: Any, target_config: Any, tokenizer: Any
) -> Any:
    from specforge.algorithms.model_providers import AlgorithmModelParts
    from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead

    weight = draft.self_attn.q_proj.weight
    target = TargetEmbeddingsAndHead.from_pretrained(
        config.model.target_model_path,
        embed_key=config.model.embedding_key,
        lm_head_key=config.model.lm_head_key,
        cache_dir=config.model.cache_dir,
        device=weight.device,
        dtype=weight.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    draft.train().bind(target.embed_tokens.weight, target.lm_head.weight)
    training = validate(LongSpecTraining, getattr(draft_json, TRAINING, None) or {})
    return AlgorithmModelParts(model=LongSpecTrainingModel(draft, training))


def build_step(model: Any, *, target_head: Any = None, **options: Any) -> LongSpecStrategy:
    inner = model
    while not isinstance(inner, LongSpecTrainingModel):  # an engine's wrapper: FSDP and DDP both keep it as .module
        inner = inner.module
    return LongSpecStrategy(model, inner.training_settings)


def resume_contract(config: Any, draft: LongSpecDraftModel, model: LongSpecTrainingModel) -> dict[str, Any]:
    """What a resumed run must not change."""
    named = {**draft.config.settings.model_dump(), **model.training_settings.model_dump()}
    return {f"longspec_{name}": value for name, value in named.items()}


def no_capture(*arguments: Any) -> list[int]:
    """SpecForge's own capture has no slot for keys and values."""
    raise UserError(
        "LongSpec's features are the target's last keys and values: capture with longdraft train --trainer specforge"
    )


def registration() -> Any:
    """The algorithm's contracts with its providers, as SpecForge checks them against each other."""
    from specforge.algorithms.common import defaults
    from specforge.algorithms.common import providers as p
    from specforge.algorithms.contracts import (
        AlgorithmCapabilities,
        AlgorithmSpec,
        DraftRequirement,
        FeatureContract,
        FeatureMode,
        OfflineStorageContract,
    )

    tensors = set(FEATURES)
    spec = AlgorithmSpec(
        name=ALGORITHM,
        draft=DraftRequirement(compatible_architectures={ARCHITECTURE}, default_architecture=ARCHITECTURE),
        feature_contracts=(
            FeatureContract(
                mode=FeatureMode.OFFLINE,
                modality="text",
                required_tensors=tensors,
                storage=OfflineStorageContract(
                    format="longspec_kv_v1", required_tensors=tensors, normalizer=NORMALIZER
                ),
            ),
        ),
        capabilities=AlgorithmCapabilities(attention_backends={"sdpa"}),
    )
    providers = p.AlgorithmProviders(
        algorithm_name=ALGORITHM,
        step=p.StepProvider(
            build=build_step,
            options=defaults.empty_options,
            resume_contract=resume_contract,
            allowed_missing_checkpoint_keys=defaults.no_missing_checkpoint_keys,
            uses_external_target_head=False,
        ),
        model=p.ModelProvider(
            draft_config=p.DraftConfigProvider(architecture=ARCHITECTURE),
            build_draft=build_draft,
            build_training_model=build_training_model,
            resolve_capture_layers=no_capture,
            minimum_loss_tokens=defaults.one_loss_token,
            needs_input_tools=defaults.online_needs_input_tools,
            default_dataloader_num_workers=2,
        ),
        offline=(
            p.OfflineDataProvider(
                modality="text",
                normalizer_id=NORMALIZER,
                build_reader=build_reader,
                build_normalizer=build_normalizer,
                build_collator=build_collator,
            ),
        ),
    )
    return p.make_registration(spec, providers)


def registry() -> Any:
    """SpecForge's own algorithms and ours."""
    from specforge.algorithms.builtin import builtin_algorithm_registry

    return builtin_algorithm_registry().with_registration(registration())
