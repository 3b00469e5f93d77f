"""The benchmarks of mode ``sparse`` as they are, on real servers with a tiny target and its draft."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from server_process import WarmServer
from warm_python import CPU

from longdraft.bench import sparse_drift, sparse_quality

WORDS = "every report that was read here names a cause, an effect and what should be done about both"


@pytest.fixture
def words(tiny_target: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What both command lines share."""
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    for module in (sparse_drift, sparse_quality):
        monkeypatch.setattr(module, "Server", WarmServer)
        monkeypatch.setattr(module, "ALLOWED", 1.0)  # a random model's answers loop
    draw, documents = random.Random(0), tmp_path / "documents.jsonl"
    rows = [{"id": i, "text": " ".join(draw.choices(WORDS.split(), k=120)), "summary": "a cause"} for i in range(4)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"target": tiny_target, "draft": tiny_draft, "documents": documents, "record": tmp_path / "record.json"}
    given |= {"prompt-tokens": 300, "batch": 2, "new-tokens": 48, "logs": tmp_path / "logs"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_drift(words: list[str], tmp_path: Path) -> None:
    own = ["--refresh", "off", "12", "--budget", "64", "--bin", "8", "--plot", str(tmp_path / "plot.png")]
    status = sparse_drift.main([*words, *own])
    record: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
    assert status == 0, record["checks"]
    figures = record["figures"]
    assert figures["whole_cache_agreement"] == 1, (
        "in float32 a verification on the whole cache is the teacher-forced pass"
    )
    assert figures["no_refresh_agreement"] < 1, "a set of 64 of 300 tokens was meant to matter"
    for setting in ("no_refresh", "refresh_12", "whole_cache"):
        assert figures[f"{setting}_first_token_agreement"] == 1 and figures[f"{setting}_answers"] == 4
    curves = record["curves"]
    assert max(row["to"] for row in curves["12"]["agreement"]) <= 24 and len(curves["off"]["agreement"]) == 6
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_quality(words: list[str], tmp_path: Path) -> None:
    own = ["--continue", "--variants", "h", "--selectors", "streaming", "--budgets", "64", "--refresh", "off", "12"]
    status = sparse_quality.main([*words, *own, "--answers", str(tmp_path / "answers.jsonl")])
    record: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
    assert status == 0, record["checks"]
    figures = record["figures"]
    assert figures["full_exact_match"] == 1 and figures["full_rouge_l_to_reference_change"] == 0
    assert list(record["labels"]) == ["full", "streaming_64", "sparse_h_64", "sparse_h_64_refresh_12"]
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(figures[f"{name}_answers"] == 4 for name in record["labels"])
