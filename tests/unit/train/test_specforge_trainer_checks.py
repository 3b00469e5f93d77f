"""What SpecForge's trainer does not have is refused before any work, and a changed recipe does not reuse old features."""

import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_target

from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.specforge_seam.sides import indexed_target
from longdraft.train.specforge_seam.trainer import Places, check, keep_trajectory, run_config


def settings(**sections: dict[str, object]) -> TrainSettings:
    base: dict[str, dict[str, object]] = {"target": {"path": "tiny-random:llama"}, "data": {"train": "x.jsonl"}}
    return validate(TrainSettings, {**base, **{n: {**base.get(n, {}), **v} for n, v in sections.items()}})


@pytest.mark.parametrize(
    ("section", "value", "named"),
    [
        ("objective", {"name": "kl"}, "objective.name=kl"),
        ("optim", {"name": "muon"}, "optim.name=muon"),
        ("optim", {"schedule": "linear"}, "optim.schedule=linear"),
        ("optim", {"min_ratio": 0.1}, "optim.min_ratio=0.1"),
        ("data", {"packing": True}, "data.packing=True"),
        ("data", {"source": "features", "features": "x"}, "data.source=features"),
        ("views", {"share": 0.5}, "views.share=0.5"),
        ("schedule", {"max_seconds": 9}, "schedule.max_seconds=9"),
        ("tracking", {"wandb": "offline"}, "tracking.wandb=offline"),
        ("engine", {"name": "deepspeed", "config": "x.yaml"}, "engine.name=deepspeed"),
    ],
)
def test_a_setting_that_it_would_ignore_is_refused(section: str, value: dict[str, object], named: str) -> None:
    check(settings(), "NO_SHARD")
    with pytest.raises(UserError, match=named):
        check(settings(**{section: value}), "NO_SHARD")


@pytest.mark.parametrize(
    ("section", "value", "named"),
    [
        ("ttt", {"decay": 0.9}, "ttt.decay=0.9"),
        ("ttt", {"out_of_vocab": "keep"}, "ttt.out_of_vocab=keep"),
        ("ttt", {"compat": "none"}, "ttt.compat=none"),
        ("positions", {"offset_share": 0.5}, "positions.offset_share=0.5"),
        ("eagle3", {"window": 9}, "eagle3.window=9"),
        ("eagle3", {"norm_output": True}, "eagle3.norm_output=True"),
    ],
)
def test_what_its_eagle3_is_not_is_refused_too(section: str, value: dict[str, object], named: str) -> None:
    base: dict[str, dict[str, object]] = {
        "draft": {"arch": "eagle3"},
        "ttt": {"compat": "specforge-0.2.0"},
        "positions": {"offset_share": 0.0},
    }
    check(settings(**base), "NO_SHARD")
    with pytest.raises(UserError, match=named):
        check(settings(**{**base, section: {**base.get(section, {}), **value}}), "NO_SHARD")


@pytest.mark.parametrize("package", ["specforge", "datasets"])
def test_a_package_that_is_not_there_is_said_before_any_work(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "specforge" or n.startswith("specforge.data")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"not installed .*{package}"):
        check(settings(), "NO_SHARD")


def test_a_single_file_target_gets_the_index_that_its_head_loader_wants(tmp_path: Path) -> None:
    from specforge.modeling.target.target_head import TargetHead

    source = tiny_model("llama", tmp_path / "target")
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        TargetHead(str(source)).load_weights(str(source))
    indexed = indexed_target(source, tmp_path / "indexed")
    head = TargetHead(str(indexed))
    head.load_weights(str(indexed))
    assert torch.equal(head.fc.weight, tiny_target("llama").head_VE)
    assert indexed_target(source, tmp_path / "indexed") == indexed
    assert indexed_target(indexed, tmp_path / "again") == indexed
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no safetensors"):
        indexed_target(tmp_path / "empty", tmp_path / "other")


def test_a_recipe_becomes_its_run_config(tmp_path: Path) -> None:
    s = settings(
        schedule={"max_steps": 6, "micro_batch": 2, "accumulate": 3},
        optim={"lr": 1e-3, "clip": 0.7, "schedule": "constant"},
        run={"name": "r", "seed": 9},
        data={"max_length": 99},
    )
    config = run_config(s, Places(tmp_path), "FULL_SHARD")
    t = config.training
    assert (t.strategy, t.max_steps, t.batch_size, t.accumulation_steps) == ("longspec", 6, 2, 3)
    assert (t.learning_rate, t.max_grad_norm, t.lr_scheduler, t.seed) == (1e-3, 0.7, "constant", 9)
    assert (config.data.max_length, t.fsdp_sharding, t.resume_from) == (99, "FULL_SHARD", None)
    assert config.model.draft_checkpoint_path == str(tmp_path / "initial")
    (tmp_path / "checkpoints" / "r-step3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "r-latest").symlink_to("r-step3")
    resumed = run_config(s, Places(tmp_path), "FULL_SHARD")
    assert resumed.training.resume_from == str(tmp_path / "checkpoints" / "r-step3")
    assert resumed.model.draft_checkpoint_path is None


def test_features_of_another_recipe_are_not_reused(tmp_path: Path) -> None:
    keep_trajectory(settings(), Places(tmp_path))
    keep_trajectory(settings(), Places(tmp_path))
    with pytest.raises(UserError, match=r"positions\.anchors=2, but run"):
        keep_trajectory(settings(positions={"anchors": 2}), Places(tmp_path))
