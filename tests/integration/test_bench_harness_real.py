"""The smoke files of the benchmarks as they are, on real servers with SmolLM2 and its shipped draft: ``longdraft bench NAME FILE``."""

import json
from pathlib import Path
from typing import Any

import pytest
from server_process import WarmServer
from warm_python import CPU

from longdraft import cli
from longdraft.bench.harness import run

RECIPES = Path(__file__).parents[2] / "recipes" / "bench"


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a smoke file; its record."""
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "Server", WarmServer)

    def measured(kind: str, *overrides: str) -> dict[str, Any]:
        path = tmp_path / "record.json"
        words = [f"record={path}", f"logs={tmp_path / 'logs'}", *overrides]
        status = cli.main(["bench", kind, str(RECIPES / f"smoke_{kind}.yaml"), *words])
        record = dict(json.loads(path.read_text()))
        assert status == 0, [row["why"] for row in record["rows"]]
        return record

    return measured


def test_speed(smoke: Any) -> None:
    rows = {row["label"]: row for row in smoke("speed")["rows"]}
    assert rows["ngram"]["why"] == "SGLang's ngram needs a GPU"
    plain, full, exact = (rows[name] for name in ("plain (mode off)", "full", "exact 256"))
    assert all(row["ok"] and row["tok_s"] > 0 and row["prefill_s"] > 0 for row in (plain, full, exact))
    assert full["identical"] and exact["identical"], "in float32 on a real model"
    assert plain["tokens_a_step"] == 1 < full["tokens_a_step"] and plain["speedup"] == 1


def test_acceptance(smoke: Any) -> None:
    plain, full, exact = smoke("acceptance")["rows"]
    assert full["identical"] and exact["identical"] and plain["tau_micro"] == 1 < full["tau_micro"]
    assert full["n"] == 2 and full["tokens"] == 46 and full["accept_by_position"]
    assert full["tau_micro_no_bonus"] == round(full["tau_micro"] - 1, 4)
    assert exact["tau_full"] > exact["tau_micro"] > 1 and 0 < exact["confirmed_share"] <= 1


def test_quality(smoke: Any) -> None:
    plain, partial, sparse = smoke("quality")["rows"]
    assert plain["score_own"] == plain["exact_match_own"] == 1 and plain["score_reference"] > 0
    for row in (partial, sparse):
        assert row["ok"] and row["n"] == plain["n"] and 0 <= row["score_own"] <= 1 < row["tau_micro"]
