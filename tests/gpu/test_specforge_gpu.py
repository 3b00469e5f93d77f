"""SpecForge's own trainer on a GPU, FSDP and all: ``longdraft train --trainer specforge`` trains and hands back our draft."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longdraft import cli
from longdraft.bench.training_specforge import stand_in
from longdraft.draft_models.checkpoint import read_config, read_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = """
run: {{name: sf, seed: 2, output_dir: {folder}}}
target: {{path: "tiny-random:{target}"}}
data: {{train: {data}, max_length: 256}}
objective: {{rows: all}}
{draft}
optim: {{lr: 3.0e-3}}
schedule: {{max_steps: 5, micro_batch: 2, accumulate: 2, save_every: 5, log_every: 1}}
"""

LONGSPEC = """draft: {window: 64, head_tokens: 60}
positions: {anchors: 2, max_position: 4096}
lag: {max: 5}"""
EAGLE3 = """draft: {arch: eagle3}
eagle3: {draft_vocab_size: 250}
ttt: {steps: 3, compat: specforge-0.2.0}
positions: {offset_share: 0.0}"""


@pytest.fixture(autouse=True)
def packages_that_are_only_imported() -> Iterator[None]:
    """``datasets`` and the like are heavy to bring to a card, and this training calls nothing of them."""
    made = stand_in()
    yield
    for name in made:
        del sys.modules[name]


@pytest.mark.parametrize(("target", "draft"), [("llama", LONGSPEC), ("qwen3", LONGSPEC), ("llama:5", EAGLE3)])
def test_specforge_trains_our_draft(
    target: str, draft: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # the run sets them for itself
        monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data.jsonl"
    lines = [
        f'{{"text": "Clause {i}: the tenant pays the rent on day {i} of the month, {"in full, " * 15}"}}'
        for i in range(12)
    ]
    data.write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path / "runs", data=data, target=target, draft=draft))
    assert cli.main(["train", "--config", str(recipe), "--trainer", "specforge"]) == 0
    assert "step 5:" in capfd.readouterr().out
    root = tmp_path / "runs" / "sf" / "specforge"
    first, trained = (read_weights(root / name / "model.safetensors") for name in ("initial", "draft"))
    assert first.keys() == trained.keys()
    assert all(bool(torch.isfinite(w).all()) for w in trained.values())
    name = "midlayer.mlp.up_proj.weight" if draft == EAGLE3 else "mlp.up_proj.weight"
    assert not torch.equal(first[name], trained[name])
    assert trained[name].dtype == torch.bfloat16
    assert read_config(root / "draft")["longdraft"]["training"]["steps"] == 5
