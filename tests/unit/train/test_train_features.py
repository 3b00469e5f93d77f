"""The feature store: what is stored is what the target gives, training from it equals training online, captures can be stopped."""

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from longdraft import cli
from longdraft.draft_models.eagle3_config import default_aux_layers
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TargetSettings, TrainSettings
from longdraft.train.features import capture as capture_module
from longdraft.train.features import format as format_module
from longdraft.train.features.capture import main as capture
from longdraft.train.features.format import Index, shard_is_whole
from longdraft.train.features.reader import FeatureCorpus
from longdraft.train.long_draft import main as train
from longdraft.train.target import FrozenTarget, load_target

TEXTS = [
    "short one of these",
    "a somewhat longer text " * 3,
    "the longest of these few lines, by a good margin " * 5,
    "tiny",  # below min_length: never stored
    "x" * 40,
    "y z " * 30,
    "and some more of it, " * 4,
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = {
        "run": {"output_dir": str(tmp_path / "runs"), "seed": 3},
        "target": {"path": "tiny-random:llama"},
        "draft": {"window": 16},
        "data": {"train": "data.jsonl", "max_length": 100, "truncation": "crop"},
        "positions": {"max_position": 1000, "offset_share": 0.7},
        "lag": {"max": 3},
        "optim": {"lr": 0.003, "schedule": "constant", "warmup_ratio": 0.0},
        "schedule": {"max_steps": 3, "micro_batch": 2, "log_every": 1},
        "evaluation": {"prompts": 0},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def store(recipe: Path, name: str, *words: str) -> Path:
    folder = recipe.parent / name
    assert capture(["--config", str(recipe), "--out", str(folder), *words]) == 0
    return folder


def trained(recipe: Path, name: str, *overrides: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses by step and the last weights."""
    assert train(["--config", str(recipe), f"run.name={name}", *overrides]) == 0
    run = recipe.parent / "runs" / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], load_file(run / "checkpoints" / "latest" / "draft" / "model.safetensors")


def from_store(folder: Path) -> tuple[str, str]:
    return "data.source=features", f"data.features={folder}"


CASES = {
    "next tokens": (),
    "the target's distribution, packed": ("objective.name=kl", "data.packing=true", "schedule.micro_batch=1"),
    "a fitted start, alone": ("draft.fit_tokens=100", "objective.name=greedy", "schedule.micro_batch=1"),
    "two epochs of two variants": ("features.variants=2", "schedule.max_steps=6"),
}


@pytest.mark.parametrize("name", CASES)
def test_training_from_features_equals_training_online(
    name: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights; the target is not run, and the data is not read.

    Bit for bit where a document went through the target alone both times; in a padded batch sums have another order.
    """
    losses, weights = trained(recipe, "online", *CASES[name])
    folder = store(recipe, "store", *CASES[name], "features.shard_gib=0.00002")
    assert Index.read(folder).shards > 2
    (recipe.parent / "data.jsonl").unlink()

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the target must not run")

    monkeypatch.setattr(FrozenTarget, "capture", forbidden)
    again, other = trained(recipe, "features", *CASES[name], *from_store(folder))
    tolerance = 0 if "alone" in name else 1e-6
    assert again == pytest.approx(losses, rel=tolerance, abs=tolerance)
    assert weights.keys() == other.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(other[key], weight, rtol=10 * tolerance, atol=tolerance)


def test_the_order_of_training_may_have_another_seed(recipe: Path) -> None:
    """Crops and offsets are the store's then, whatever the run's seed."""
    folder = store(recipe, "store")
    first, _ = trained(recipe, "a", *from_store(folder))
    second, _ = trained(recipe, "b", *from_store(folder), "run.seed=4")
    assert first != second


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with enough layers for three features."""
    return tiny_model("qwen3", tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=5)


def test_stored_rows_are_the_targets_own(recipe: Path, deep: Path) -> None:
    """Against a plain forward pass of transformers that keeps everything, at the stored positions."""
    words = (f"target.path={deep}", "features.store=[kv, hidden, aux]")
    folder = store(recipe, "store", *words)
    model = load_target(TargetSettings(path=str(deep)), torch.device("cpu")).model
    settings = load_settings(TrainSettings, recipe, [*words, *from_store(folder)])
    corpus = FeatureCorpus(settings, load_target(settings.target, torch.device("cpu")).spec)
    assert [corpus.stored(0, i) is None for i in range(len(corpus))] == [text == "tiny" for text in TEXTS]
    offset = 0
    for index in (0, 2, 6):
        found = corpus.stored(0, index)
        assert found is not None
        document, position_L, seen = found
        offset = max(offset, int(position_L[-1]) + 1 - len(document.ids))
        ids = torch.tensor([document.ids])
        # A mask keeps transformers from taking the jump of the positions for a new document.
        out = model(ids, torch.ones_like(ids), position_L[None], use_cache=True, output_hidden_states=True)
        last = out.past_key_values.layers[-1]
        layers = default_aux_layers(5)
        want = {
            "k": last.keys[0].transpose(0, 1),
            "v": last.values[0].transpose(0, 1),
            "hidden": out.hidden_states[-1][0],
            "aux": torch.cat([out.hidden_states[layer + 1][0] for layer in layers], -1),
        }
        assert seen.tensors.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(seen.tensors[name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen.hidden_TE @ model.lm_head.weight.t(), out.logits[0], rtol=1e-4, atol=1e-4)
    assert offset > 0


def test_a_store_of_aux_and_hidden_holds_no_cache(recipe: Path, deep: Path) -> None:
    folder = store(
        recipe, "store", f"target.path={deep}", "features.store=[aux, hidden]", "features.aux_layers=[0,1,2]"
    )
    index = Index.read(folder)
    assert index.tensors == {"hidden": [64], "aux": [192]}
    assert index.identity["features.aux_layers"] == [0, 1, 2]
    assert index.row_bytes == 4 * (64 + 192) + 9
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > index.tokens * index.row_bytes


def failing(recipe: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert train(["--config", str(recipe), *overrides]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


SMALL = "features.shard_gib=0.00002"


def test_a_stopped_capture_continues_with_the_first_missing_shard(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = store(recipe, "whole", SMALL)

    def full(*args: Any) -> None:
        if "00001-of" in str(args[1]):
            Path(args[1]).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    original = format_module.save_file
    with monkeypatch.context() as patch:
        patch.setattr(format_module, "save_file", full)
        with pytest.raises(UserError, match=r"features-00001-of.* cannot be written .*No space left.*it continues"):
            store(recipe, "parts", SMALL)
    parts = recipe.parent / "parts"
    assert list(shards(parts)) == [next(iter(shards(whole)))]
    assert not list(parts.glob(".*"))
    assert "lacks features-00001-of-00006.safetensors: run longdraft capture" in failing(
        recipe, capsys, *from_store(parts)
    )
    first = next(iter(sorted(parts.glob("*.safetensors"))))
    written = first.stat().st_mtime_ns
    store(recipe, "parts", SMALL)
    assert "1 shards are there" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == written
    assert shards(parts) == shards(whole)


def test_ranks_share_the_shards(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store(recipe, "whole", SMALL)
    monkeypatch.setenv("WORLD_SIZE", "2")
    counts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        folder = store(recipe, "shared", SMALL)
        counts.append(len(shards(folder)))
    assert 0 < counts[0] < counts[1]
    assert shards(folder) == shards(whole)


def test_a_shard_of_another_store_is_not_taken_for_ours(recipe: Path) -> None:
    folder = store(recipe, "store")
    other = store(recipe, "other", "run.seed=9")
    name = Index.read(folder).shard_name(0)
    shutil.copy(other / name, folder / name)
    assert not shard_is_whole(folder, Index.read(folder), 0)
    store(recipe, "store")
    assert shard_is_whole(folder, Index.read(folder), 0)


def test_the_size_is_said_first_and_refused_above_the_limit(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("no weights are loaded before the size is agreed")

    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "load_target", forbidden)
        store(recipe, "planned", "--plan")
        assert not (recipe.parent / "planned").exists()
        assert "6 documents (1 of each), 411 tokens of 265 bytes" in capsys.readouterr().out
        with pytest.raises(UserError, match=r"features\.max_gib=1e-05 is below the 0\.10 MiB"):
            store(recipe, "store", "features.max_gib=0.00001")
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(UserError, match=r"0\.10 MiB are to be written and 0\.00 MiB are free"):
            store(recipe, "store")
    assert len(shards(store(recipe, "store", "features.max_gib=0.00001", "--yes"))) == 1


def test_the_recorded_size_is_the_files(recipe: Path) -> None:
    folder = store(recipe, "store")
    index = Index.read(folder)
    header = 2000
    size = (folder / index.shard_name(0)).stat().st_size
    assert index.tokens * index.row_bytes <= size <= index.tokens * index.row_bytes + header


def test_a_folder_of_another_capture_is_refused_by_the_setting(recipe: Path) -> None:
    store(recipe, "store")
    for words, message in (
        ("positions.anchors=2", r"positions\.anchors=2, but --out .* was captured with 4"),
        ("data.max_length=90", r"data\.max_length=90"),
        ("target.path=tiny-random:qwen3", r"target\.path='tiny-random:qwen3'"),
        ("features.store=[kv, hidden]", r"another dtype, features\.store or features\.shard_gib"),
    ):
        with pytest.raises(UserError, match=message):
            store(recipe, "store", words)
    with (recipe.parent / "data.jsonl").open("a") as file:
        file.write(json.dumps({"text": TEXTS[1]}) + "\n")
    with pytest.raises(UserError, match=r"data\.train\.sha256"):
        store(recipe, "store")


def test_a_store_that_does_not_fit_the_recipe_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store(recipe, "store")
    use = from_store(folder)
    assert "reads hidden too" in failing(recipe, capsys, *use, "objective.name=kl")
    assert "another target" in failing(recipe, capsys, *use, "target.path=tiny-random:qwen2")
    assert "data.max_length=50 is below" in failing(recipe, capsys, *use, "data.max_length=50")
    assert "set both" in failing(recipe, capsys, "data.source=features")
    assert "set both" in failing(recipe, capsys, use[1])
    assert "has no index.json" in failing(recipe, capsys, use[0], f"data.features={recipe.parent}")
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "schema": 99}))
    assert "is not of schema 1" in failing(recipe, capsys, *use)
    (folder / "index.json").write_text(json.dumps(index)[:-100])
    assert "is damaged" in failing(recipe, capsys, *use)


@pytest.mark.parametrize("layers", ["[2, 1, 0]", "[0, 1, 9]"])
def test_layers_that_are_not_there_are_refused(layers: str, recipe: Path, deep: Path) -> None:
    with pytest.raises(UserError, match=r"features\.aux_layers=.* three ascending layers from 0 to 3"):
        store(recipe, "store", f"target.path={deep}", "features.store=[aux]", f"features.aux_layers={layers}")


def test_the_command_line_takes_the_recipes_options(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["capture", "--config", str(recipe), "--out", str(recipe.parent / "o"), "--plan", "--data.max-length", "50"]
    assert cli.main(words) == 0
    assert "tokens of 265 bytes" in capsys.readouterr().out
    assert cli.main([*words, "featurs.store=[kv]"]) == 2
    assert "did you mean 'features" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"shards": "../x"}, {"documents": 0}, {"variants": 0}, {"tensors": []}, {"identity": None}, {"documents": "many"}],
)
def test_a_damaged_index_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]) -> None:
    folder = store(recipe, "s")
    record = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(record | change))
    assert "index.json is damaged" in failing(recipe, capsys, *from_store(folder))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda k: k[:10].clone(), r"k is \[10, 2, 16"),
        ("v", lambda v: v.half(), "torch.float16"),
        ("loss_mask", lambda m: m[:, None].clone(), "loss_mask is"),
        ("input_ids", lambda i: i + 5000, "ids beyond the target's vocabulary of 288"),
        ("input_ids", lambda i: i - 5000, "ids beyond the target's vocabulary of 288"),
        ("position_ids", lambda p: p + 16384, "holds positions up to"),
    ],
)
def test_a_shard_of_other_rows_than_its_index_says_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, message: str
) -> None:
    folder = store(recipe, "s")
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, {"longdraft-features": Index.read(folder).digest})
    assert re.search(message, failing(recipe, capsys, *from_store(folder)))


def test_stored_positions_beyond_the_drafts_rotation_are_refused(
    recipe: Path, deep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were drawn at the capture: what the training's own positions say does not bound them."""
    words = [f"target.path={deep}", "draft={arch: eagle3}", "lag={}"]
    folder = store(recipe, "s", *words, "positions.offset_share=1.0")
    plain = [*words, *from_store(folder), "positions.offset_share=0.0"]
    error = failing(recipe, capsys, *plain, "eagle3.max_position=300")
    assert "pass the 300 positions" in error and "capture with" in error
    trained(recipe, "r", *plain, "ttt.steps=2")
