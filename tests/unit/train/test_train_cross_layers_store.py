"""A feature store holds the layers that the draft reads, and a run that reads others is told so."""

from pathlib import Path

import pytest
import torch
from train_case import recipe, rows, train

from longdraft.train.features import capture
from longdraft.train.features.format import Index
from longdraft.train.long_draft import main

__all__ = ["recipe"]  # a fixture
LAYERS = ("draft.cross_layers=[0,1]", "schedule.max_steps=2", "data.packing=false")


def test_training_from_stored_layers_equals_training_online(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert capture.main(["--config", str(recipe), "--out", str(store), *LAYERS]) == 0
    index = Index.read(store)
    assert index.identity["features.kv_layers"] == [0, 1]
    assert index.tensors["k"][0] == 4, "two key heads of each of two layers"
    online = rows(train(recipe, "online", *LAYERS))
    stored = rows(train(recipe, "stored", *LAYERS, "data.source=features", f"data.features={store}"))
    want, got = (torch.tensor([row["loss"] for row in found]) for found in (online, stored))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    assert main(["--config", str(recipe), "data.source=features", f"data.features={store}"]) == 2
    assert "holds keys and values of layers [0, 1], draft.cross_layers reads the last layer" in capsys.readouterr().err


def test_a_store_of_the_last_layer_is_what_it_was_before_the_setting(recipe: Path, tmp_path: Path) -> None:
    assert capture.main(["--config", str(recipe), "--out", str(tmp_path / "store")]) == 0
    assert "features.kv_layers" not in Index.read(tmp_path / "store").identity
