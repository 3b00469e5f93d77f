"""A calibration of SmolLM2 with small settings: it ends soon, survives a kill, and finds the same again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longdraft.bench.demo_text import write_long_text
from longdraft.draft_models.sparse_recipe import SparseRecipe
from longdraft.models import demo_model_folder, shipped_draft
from longdraft.train.calibrate import main

MOST_SECONDS = 300  # on two cores that other tests share; half a minute on idle ones
SMALL = [
    "--needles.lengths", "[400]", "--needles.depths", "1", "--needles.haystacks", "1", "--needles.new-tokens", "24",
    "--traces.documents", "2", "--traces.tokens", "400", "--traces.windows", "6", "--search.budget", "128", "--seed", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    documents = tmp_path_factory.mktemp("text") / "documents.jsonl"
    write_long_text(documents, 6)
    draft = str(shipped_draft("smollm2-135m", "longspec"))
    return ["--target.path", str(demo_model_folder()), "--draft", draft, "--documents", str(documents), *SMALL]


@pytest.fixture(scope="module")
def found(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> SparseRecipe:
    out, began = tmp_path_factory.mktemp("whole") / "recipe.json", time.monotonic()
    assert main([*words, "--out", str(out)]) == 0
    assert time.monotonic() - began < MOST_SECONDS
    return SparseRecipe.load(out)


def test_the_model_answers_and_its_heads_recover_attention(found: SparseRecipe) -> None:
    answers, recovery = found.provenance["answers"], found.provenance["recovery"]
    assert answers["how"] == "own" and answers["counted"] >= 1 and answers["hits"] >= 5
    assert {each.layer for each in found.draft} <= {18, 20} and found.draft
    assert found.lookahead <= 108 and 0.5 < recovery["found"] <= 1
    assert recovery["found"] >= max(recovery["tried"][f"lookahead {m}"] for m in (0, 108))
    best = max(
        (x, layer, head)
        for layer, row in enumerate(found.provenance["head_scores"]["target"])
        for head, x in enumerate(row)
    )
    middle = sorted(x for row in found.provenance["head_scores"]["target"] for x in row)[30 * 9 // 2]
    assert best[0] > 10 * middle, "a few heads retrieve, most do not"


def test_a_killed_run_goes_on_to_the_same_recipe(found: SparseRecipe, words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "recipe.json"
    command = [sys.executable, "-m", "longdraft.train.calibrate", *words, "--out", str(out)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("needle 2 of 3"):
            process.send_signal(signal.SIGKILL)
            break
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL and not out.exists()
    assert main([*words, "--out", str(out)]) == 0
    again = SparseRecipe.load(out)
    for recipe in (found, again):
        for name in ("command", "date", "seconds"):
            recipe.provenance.pop(name, None)
    assert again == found
