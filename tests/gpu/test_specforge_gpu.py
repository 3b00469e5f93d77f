"""SpecForge's own trainer on a GPU, FSDP and all: ``longdraft train --trainer specforge`` trains and hands back our draft."""

from pathlib import Path

import pytest
import torch

from longdraft import cli
from longdraft.draft_models.checkpoint import read_config, read_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = """
run: {{name: sf, seed: 2, output_dir: {folder}}}
target: {{path: "tiny-random:{family}"}}
draft: {{window: 64, head_tokens: 60}}
data: {{train: {data}, max_length: 128}}
positions: {{anchors: 2, max_position: 4096}}
objective: {{rows: all}}
lag: {{max: 5}}
optim: {{lr: 3.0e-3}}
schedule: {{max_steps: 5, micro_batch: 2, accumulate: 2, save_every: 5, log_every: 1}}
"""


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_specforge_trains_our_draft(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # the run sets them for itself
        monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data.jsonl"
    lines = [f'{{"text": "Clause {i}: the tenant pays the rent on day {i} of the month, in full."}}' for i in range(12)]
    data.write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path / "runs", data=data, family=family))
    assert cli.main(["train", "--config", str(recipe), "--trainer", "specforge"]) == 0
    assert "step 5:" in capfd.readouterr().out
    root = tmp_path / "runs" / "sf" / "specforge"
    first, trained = (read_weights(root / name / "model.safetensors") for name in ("initial", "draft"))
    assert first.keys() == trained.keys()
    assert all(bool(torch.isfinite(w).all()) for w in trained.values())
    assert not torch.equal(first["mlp.up_proj.weight"], trained["mlp.up_proj.weight"])
    assert trained["mlp.up_proj.weight"].dtype == torch.bfloat16
    assert read_config(root / "draft")["longdraft"]["training"]["steps"] == 5
