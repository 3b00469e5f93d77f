"""SpecForge's feature files as a store and back: the same rows, training from them, and refusals by name."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tiny import tiny_model, tiny_target

from longdraft import cli
from longdraft.train.specforge_seam.feature_files import (
    FeatureSample,
    feature_files,
    read_feature_file,
    write_feature_file,
)

TARGET = tiny_target("llama", num_hidden_layers=5)
E = TARGET.spec.hidden_size


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    text = [{"text": f"Clause {i}: the tenant pays the rent" + " in full" * i} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    config = {
        "run": {"output_dir": str(tmp_path / "runs"), "name": "r"},
        "target": {"path": str(tiny_model("llama", tmp_path / "target", num_hidden_layers=5))},
        "draft": {"window": 16},
        "data": {"train": "data.jsonl", "max_length": 100},
        "positions": {"max_position": 1000},
        "schedule": {"max_steps": 2, "log_every": 1},
        "evaluation": {"prompts": 0},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def eagle3_sample(count: int, width: int = E, dtype: torch.dtype = torch.float32) -> FeatureSample:
    g = torch.Generator().manual_seed(count)
    tensors = {"aux": torch.randn(count, 3 * width, generator=g), "hidden": torch.randn(count, width, generator=g)}
    ids = torch.randint(0, 99, (count,), generator=g)
    return FeatureSample(ids, torch.arange(count) > 3, {n: t.to(dtype) for n, t in tensors.items()})


def failing(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


def test_files_become_a_store_and_the_store_the_same_files(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = recipe.parent
    for count in (9, 12, 7):
        write_feature_file(eagle3_sample(count), here / "in" / f"{count:02d}.ckpt")
    words = ["features", "import", str(here / "in"), "--config", str(recipe), "--out", str(here / "store")]
    assert cli.main([*words, "features.shard_gib=1e-5"]) == 0
    assert "in 3 shards" in capsys.readouterr().out
    assert cli.main(["features", "export", str(here / "store"), "--out", str(here / "out"), "--gz"]) == 0
    files = feature_files(here / "out")
    assert [f.name for f in files] == [f"data_0_0000000{i}.ckpt.gz" for i in range(3)]
    for path, count in zip(files, (7, 9, 12), strict=True):  # in the order of the names
        back, was = read_feature_file(path), eagle3_sample(count)
        assert torch.equal(back.id_S, was.id_S)
        assert torch.equal(back.supervised_S, was.supervised_S)
        assert torch.equal(back.tensors["position"], torch.arange(count))
        for name, value in was.tensors.items():
            assert torch.equal(back.tensors[name], value)
    assert "is a store already" in failing(words, capsys)


def test_training_from_an_imported_copy_of_a_store_is_training_from_the_store(recipe: Path) -> None:
    here = recipe.parent
    assert cli.main(["capture", "--config", str(recipe), "--out", str(here / "store")]) == 0
    assert cli.main(["features", "export", str(here / "store"), "--out", str(here / "files")]) == 0
    words = ["features", "import", str(here / "files"), "--config", str(recipe), "--out", str(here / "again")]
    assert cli.main(words) == 0
    losses = []
    for name in ("store", "again"):
        data = ["data.source=features", f"data.features={here / name}", f"run.name={name}"]
        assert cli.main(["train", "--config", str(recipe), *data]) == 0
        rows = (here / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows if "loss" in json.loads(row)])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_files_that_do_not_fit_are_refused_by_name(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = recipe.parent

    def refusal(name: str, *samples: FeatureSample) -> str:
        for i, sample in enumerate(samples):
            write_feature_file(sample, here / name / f"{i}.ckpt")
        words = ["features", "import", str(here / name), "--config", str(recipe), "--out", str(here / f"{name}-store")]
        said = failing(words, capsys)
        assert not (here / f"{name}-store" / "index.json").exists()
        return said

    assert "hidden_state has [8] a token, the target makes it [64]" in refusal("width", eagle3_sample(5, width=8))
    assert "several dtypes" in refusal("dtypes", eagle3_sample(5), eagle3_sample(6, dtype=torch.bfloat16))
    part = eagle3_sample(6)
    part = FeatureSample(part.id_S, part.supervised_S, {"hidden": part.tensors["hidden"]})
    assert "import them apart" in refusal("kinds", eagle3_sample(5), part)
    (here / "none").mkdir()
    assert ".ckpt" in refusal("none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.full((9,), 9999)}, "input_ids reach from 9999 to 9999, the target's from 0 to 287"),
        ({"input_ids": torch.full((9,), 1 << 40)}, "input_ids reach"),
        ({"input_ids": torch.full((9,), -1)}, "input_ids reach from -1"),
        ({"input_ids": torch.rand(9)}, "not integers"),
        ({"position_ids": torch.arange(9) + 10**6}, "position_ids reach"),
        ({"position_ids": torch.zeros(9, 3, dtype=torch.int64)}, "not ascending integers"),
        ({"hidden_state": torch.tensor(1.0)}, "hidden_state is no dense tensor"),
        ({"hidden_state": torch.randn(9, E).to_sparse()}, "hidden_state is no dense tensor"),
    ],
)
def test_files_that_no_target_made_are_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], change: dict[str, torch.Tensor], message: str
) -> None:
    """Before they were stored: 32 bits would have wrapped, and training would have died in the middle."""
    path = recipe.parent / "in" / "a.ckpt"
    write_feature_file(eagle3_sample(9), path)
    torch.save(torch.load(path, weights_only=True) | change, path)
    words = ["features", "import", str(path), "--config", str(recipe), "--out", str(recipe.parent / "store")]
    assert message in failing(words, capsys)
    assert not (recipe.parent / "store").exists()


def test_an_export_says_what_is_missing_and_where_it_cannot_write(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = recipe.parent
    write_feature_file(eagle3_sample(9), here / "in" / "a.ckpt")
    words = ["features", "import", str(here / "in"), "--config", str(recipe), "--out", str(here / "store")]
    assert cli.main(words) == 0
    assert "not all is written" in failing(
        ["features", "export", str(here / "store"), "--out", "/proc/nowhere"], capsys
    )
    [shard] = (here / "store").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    words = ["features", "export", str(here / "store"), "--out", str(here / "out")]
    assert "missing or damaged" in failing(words, capsys)
