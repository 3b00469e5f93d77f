"""LongSpec in SpecForge: its registries accept it, its data path carries our features, and its step is our own loss.

Legend: S tokens, K key/value heads, D head size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from specforge.application.composition import resolve_run
from specforge.config import Config
from specforge.modeling.draft.registry import DRAFT_REGISTRY
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.training.model_loading import load_draft_config_source
from specforge.training.strategies.base import StepContext
from tiny import tiny_draft, tiny_model, tiny_target

from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.train.config import ObjectiveSettings
from longdraft.train.documents import Document
from longdraft.train.objective import longspec_loss
from longdraft.train.positions import anchor_offset_positions, lag_of_step
from longdraft.train.samples import pack
from longdraft.train.specforge_seam import registration as ours
from longdraft.train.specforge_seam.feature_files import FeatureSample, write_feature_file
from longdraft.train.specforge_seam.longspec_draft import LongSpecDraftModel

TARGET = tiny_target("llama")
LENGTHS = (23, 17)


def documents() -> list[Document]:
    g = torch.Generator().manual_seed(3)
    return [
        Document(torch.randint(0, 256, (n,), generator=g).tolist(), [i > n // 3 for i in range(n)], str(n))
        for n in LENGTHS
    ]


def positions(index: int) -> torch.Tensor:
    return anchor_offset_positions(LENGTHS[index], 4, 900, index)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    for i, document in enumerate(documents()):
        ids = torch.tensor(document.ids)
        seen = TARGET.capture(ids, positions(i), [0, len(ids)])
        tensors = {"position": positions(i), "k": seen.k_TKD, "v": seen.v_TKD}
        write_feature_file(FeatureSample(ids, torch.tensor(document.supervised), tensors), folder / f"{i}.ckpt")
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> tuple[LongSpecDraft, Path]:
    folder = tmp_path_factory.mktemp("draft") / "initial"
    draft = tiny_draft(TARGET, window=9, head_tokens=200, final_norm=True)
    save_draft(draft, folder, "tiny")
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"longspec_training": {"lag_max": 3, "seed": 5, "chunk": 7}})
    )
    return draft, folder


def config(features: Path, draft: Path, target: str = "nowhere", **training: Any) -> Config:
    return Config.model_validate(
        {
            "run_id": "r",
            "output_dir": str(features.parent / "out"),
            "model": {
                "target_model_path": target,
                "draft_model_config": str(draft),
                "draft_checkpoint_path": str(draft),
                "torch_dtype": "float32",
            },
            "data": {"hidden_states_path": str(features), "max_length": 64},
            "training": {"strategy": "longspec", "attention_backend": "sdpa", **training},
        }
    )


def batch_of(features: Path) -> TrainBatch:
    refs = ours.build_reader(str(features), run_id="r", ttt_length=1, max_len=64).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=refs,
        batch_size=2,
        collate_fn=ours.build_collator(),
        per_sample_transform=ours.build_normalizer(64),
        strategy="longspec",
    )
    (batch,) = list(loader)
    return batch


def test_specforge_resolves_a_run_of_our_algorithm(features: Path, draft: tuple[LongSpecDraft, Path]) -> None:
    resolved = resolve_run(config(features, draft[1]), registry=ours.registry())
    assert resolved.algorithm.name == "longspec"
    assert {"eagle3", "longspec"} <= set(ours.registry().names)
    with pytest.raises(ValueError, match="attention_backend"):
        resolve_run(config(features, draft[1], attention_backend="fa"), registry=ours.registry())


def test_our_draft_is_in_its_draft_registry_and_built_from_our_json(draft: tuple[LongSpecDraft, Path]) -> None:
    assert DRAFT_REGISTRY["LongSpecDraftModel"] is LongSpecDraftModel
    source = load_draft_config_source(str(draft[1]))
    built = ours.build_draft(config(draft[1], draft[1]), source)
    assert built.config.settings == draft[0].config.settings
    assert built.config.target == TARGET.spec
    for name, weight in draft[0].state_dict().items():
        assert torch.equal(built.state_dict()[name], weight), name


def test_a_ranked_head_follows_weights_that_are_loaded_behind_the_binding(draft: tuple[LongSpecDraft, Path]) -> None:
    built = LongSpecDraftModel(load_draft_config_source(str(draft[1]))).bind(TARGET.embedding_VE, TARGET.head_VE)
    other = draft[0].state_dict() | {"head_ids": torch.arange(200) + 50}
    built.load_state_dict(other)  # as a resumed run does
    assert torch.equal(built.drafting_head_NE, TARGET.head_VE[50:250])


def test_its_data_path_carries_our_features(features: Path) -> None:
    batch = batch_of(features)
    assert batch.tensors["target_key"].shape == (2, 23, TARGET.spec.num_kv_heads, TARGET.spec.head_dim)
    for row, document in enumerate(documents()):
        n = LENGTHS[row]
        seen = TARGET.capture(torch.tensor(document.ids), positions(row), [0, n])
        assert torch.equal(batch.tensors["target_key"][row, :n], seen.k_TKD)
        assert torch.equal(batch.tensors["position_ids"][row, :n], positions(row))
        assert not bool(batch.tensors["loss_mask"][row, n:].any())


def test_features_of_different_lengths_are_refused(features: Path) -> None:
    raw = {n: t[:1] for n, t in batch_of(features).tensors.items()}
    assert ours.normalize_sample(raw, 5)["target_value"].shape[1] == 5
    with pytest.raises(ValueError, match="different lengths"):
        ours.normalize_sample(raw | {"target_key": raw["target_key"][:, 1:]}, 64)


def test_its_step_is_our_own_loss_with_the_steps_lag(
    features: Path, draft: tuple[LongSpecDraft, Path], tmp_path: Path
) -> None:
    own, folder = draft
    target = str(tiny_model("llama", tmp_path / "target"))
    cfg = config(features, folder, target)
    source = load_draft_config_source(str(folder))
    parts = ours.build_training_model(cfg, ours.build_draft(cfg, source), source, None, None)
    strategy = ours.build_step(parts.model)
    packed = pack(documents(), [positions(i) for i in range(2)], all_rows=False)
    for step in (0, 1, 2):
        out = strategy.forward_loss(batch_of(features), StepContext(global_step=step))
        lag = lag_of_step(step + 1, 1, 3, 5)
        want = longspec_loss(own, TARGET, packed, lag, ObjectiveSettings())
        assert out.metrics["lag"] == lag
        torch.testing.assert_close(out.loss_terms[0], want.loss, rtol=1e-5, atol=1e-5)
        assert float(out.loss_terms[1]) == packed.supervised
        own.zero_grad()
        parts.model.zero_grad()
        out.loss_terms[0].backward()
        want.loss.backward()
        for name, p in own.named_parameters():
            theirs = dict(parts.model.draft_model.named_parameters())[name].grad
            torch.testing.assert_close(theirs, p.grad, rtol=1e-4, atol=1e-5)


def test_a_batch_without_our_features_and_its_own_capture_are_refused(features: Path) -> None:
    strategy = ours.LongSpecStrategy(torch.nn.Linear(1, 1), ours.LongSpecTraining())
    with pytest.raises(ValueError, match="target_key"):
        strategy.forward_loss(TrainBatch(["0"], "longspec", {"input_ids": torch.zeros(1, 2)}))
    with pytest.raises(ValueError, match="longdraft train --trainer specforge"):
        ours.no_capture()


def test_only_the_drafts_weights_are_kept() -> None:
    strategy = ours.LongSpecStrategy(torch.nn.Linear(1, 1), ours.LongSpecTraining())
    kept = strategy.checkpoint_state_filter({"draft_model.head_ids": 1, "module.draft_model.mlp.x": 2, "other": 3})
    assert kept == {"head_ids": 1, "mlp.x": 2}
