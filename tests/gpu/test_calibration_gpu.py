"""A calibration on a card: in float32 it sees what a CPU sees, and it runs in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_case import small_words, write_documents, write_drafts

from longdraft.draft_models.sparse_recipe import SparseRecipe
from longdraft.train.calibrate import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TARGETS = {"longspec": "llama:3", "eagle3": "llama:4", "model": "llama:3"}
CLOSE = 2e-3


def calibrate(folder: Path, kind: str, device: str, dtype: str) -> dict[str, Any]:
    """What the recipe tells of its making."""
    out = folder / f"{device}-{dtype}.json"
    words = small_words(write_documents(folder / "documents.jsonl"), out)
    words += ["--draft", write_drafts(folder)[kind], "--target.path", f"tiny-random:{TARGETS[kind]}"]
    assert main([*words, "--device", device, "--target.dtype", dtype, "--needles.answers", "given"]) == 0
    return SparseRecipe.load(out).provenance


@pytest.mark.parametrize("kind", list(TARGETS))
def test_a_card_sees_what_a_cpu_sees(kind: str, tmp_path: Path) -> None:
    on_card, on_cpu = (calibrate(tmp_path, kind, device, "float32") for device in ("cuda", "cpu"))
    assert on_card["answers"] == on_cpu["answers"]
    for side in ("target", "draft"):
        got, want = (torch.tensor(facts["head_scores"][side]) for facts in (on_card, on_cpu))
        torch.testing.assert_close(got, want, rtol=CLOSE, atol=CLOSE)
    for layer in range(int(TARGETS[kind][-1])):
        got, want = (facts["recovery"]["tried"][f"target {layer}"] for facts in (on_card, on_cpu))
        assert got == pytest.approx(want, abs=CLOSE)


@pytest.mark.parametrize("kind", list(TARGETS))
def test_a_card_calibrates_in_bfloat16(kind: str, tmp_path: Path) -> None:
    assert 0 < calibrate(tmp_path, kind, "cuda", "bfloat16")["recovery"]["found"] <= 1
