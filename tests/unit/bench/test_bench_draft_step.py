"""The benchmark of a draft's steps: its three ways draft the same, and its floor counts what they read; without a card."""

from pathlib import Path

import pytest
import torch

from longdraft.bench import draft_step as bench
from longdraft.bench.gpu_full_speed import LLAMA_8B

TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 260,
}  # fmt: skip


@pytest.fixture(scope="module")
def case() -> bench.Case:
    return bench.Case.build(bench.make_draft(TINY, 60, torch.float32, "cpu", window=6), batch=3, context=20, steps=4)


@torch.no_grad()
def test_all_ways_draft_the_same_ranked_tokens(case: bench.Case) -> None:
    drafted = {way: case.run(way) for way in bench.WAYS}
    assert torch.equal(drafted["masked"], drafted["module"]) and torch.equal(drafted["masked"], drafted["fused"])
    assert drafted["fused"].shape == (3, 4) and (drafted["fused"] % (260 // 60) == 0).all()
    assert len(case.hidden) == 4
    assert set(bench.checks(case).values()) == {True} and len(bench.checks(case)) == 4


@torch.no_grad()
def test_the_check_sees_a_step_that_computes_something_else(case: bench.Case) -> None:
    case.fused.gate_up[:5] += 1.0  # the module's own weights too
    changed = case.fused.gate_up.clone()
    case.fused.gate_up = changed + 1.0
    assert not bench.checks(case)["fused_first_step_equals_masked"]
    case.fused.gate_up = changed
    assert bench.checks(case)["fused_first_step_equals_masked"]


def test_the_floor_is_what_a_chain_has_to_read(case: bench.Case) -> None:
    weights = 64 * (64 + 32 + 32) + 64 * 64 + 2 * 64 * 64 + 3 * 64 * 96 + 3 * 64  # three norms
    token, tokens = 2 * 2 * 16, 3 * (20 + 6)
    assert case.floor_bytes == 4 * (4 * (weights + 60 * 64 + token * tokens) + 2 * 32 * 64)


def test_llama_8bs_floor_is_the_docstrings() -> None:
    """Counted without making it."""
    with torch.device("meta"):
        spec = bench.TargetSpec.from_config(bench.LlamaConfig(**LLAMA_8B))
        draft = bench.LongSpecDraft(bench.LongSpecConfig(spec))
    weights = sum(p.numel() for p in draft.parameters())
    assert round(weights / 1e6) == 252 and round(bench.HEAD * 4096 / 1e6) == 134
    for batch, gigabytes in ((1, 3.98), (16, 5.4)):
        read = batch * (512 + 4096) * 2 * 8 * 128
        total = 5 * 2 * (weights + bench.HEAD * 4096 + read) + 2 * 2 * 1024 * 4096
        assert total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_without_a_card_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "measured on a GPU, and there is none" in capsys.readouterr().err
