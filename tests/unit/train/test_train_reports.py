"""Logs, progress lines, redaction, and the evaluation's prompts and buckets."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.acceptance import AcceptStats
from longdraft.draft_models.buckets import bucket_of
from longdraft.draft_models.reference_decode import Decoded, speculative_decode
from longdraft.draft_models.repetition import repeated_share
from longdraft.train import evaluation
from longdraft.train.config import EvaluationSettings
from longdraft.train.documents import Document
from longdraft.train.evaluation import BucketResult, cut_prompts, evaluate
from longdraft.train.tracking import JsonLines, ProgressLine, clock, evaluation_text, read_rows, redact


def test_secrets_are_redacted_by_name_and_by_shape() -> None:
    shown = redact(
        {
            "hf_token": "abc",
            "api_key": "k",
            "new_tokens": 5,
            "tokenizer": "t",
            "nested": [{"password": "p"}],
            "path": "https://me:pw@host/x?token=zzz&a=1",
            "note": "hf_abcdefghijk and sk-1234567890ab",
        }
    )
    assert shown == {
        "hf_token": "***", "api_key": "***", "new_tokens": 5, "tokenizer": "t", "nested": [{"password": "***"}],
        "path": "https://***@host/x?token=***&a=1", "note": "*** and ***",
    }  # fmt: skip


def test_a_resumed_log_drops_the_steps_that_will_come_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    JsonLines(path, 2).write({"step": 3, "new": True})
    assert read_rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "new": True}]
    JsonLines(path, 0)
    assert read_rows(path) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "accuracy": 0.25, "tokens_per_s": 1234.0}


def test_progress_is_plain_lines_off_a_terminal_and_a_bar_on_one() -> None:
    plain = io.StringIO()
    ProgressLine(10, 0, plain).show(row(4))
    assert plain.getvalue().startswith("step 4/10  loss 2.5000  acc 25.0%  1,234 tok/s  ETA 0:0")
    terminal = Terminal()
    line = ProgressLine(10, 0, terminal)
    line.show(row(4))
    line.show(row(5))
    line.pause()
    assert "5/10" in terminal.getvalue()
    assert "ETA" in terminal.getvalue()


def test_clock() -> None:
    assert [clock(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_buckets_meet_at_their_limits() -> None:
    lengths = (1, 2047, 2048, 8191, 8192, 32767, 32768, 1 << 20)
    assert [bucket_of(n) for n in lengths] == ["<2K", "<2K", "2K-8K", "2K-8K", "8K-32K", "8K-32K", ">32K", ">32K"]


def documents() -> Any:
    text = Document(list(range(100)), [True] * 100, "text")
    chat = Document(list(range(200, 280)), [False] * 30 + [True] * 10 + [False] * 20 + [True] * 20, "chat")
    return [text, chat, Document([1] * 20, [True] * 20, "short"), text]


def test_prompts_end_where_the_answer_begins() -> None:
    settings = EvaluationSettings(prompts=2, new_tokens=4)
    prompts = cut_prompts(documents(), settings, 1000)
    assert [(p[0], len(p)) for p in prompts] == [(0, 50), (200, 60)]


def test_prompts_are_cut_at_given_lengths_where_they_fit() -> None:
    settings = EvaluationSettings(prompts=9, lengths=[40, 90], new_tokens=4)
    assert [len(p) for p in cut_prompts(documents(), settings, 1000)] == [40, 90, 40, 40, 90]
    assert [len(p) for p in cut_prompts(documents(), settings, 4 + 64 + 50)] == [40, 40, 40]


def test_evaluation_sums_the_reference_decoder_by_bucket_over_ranks() -> None:
    target = tiny_target("llama")
    draft = tiny_draft(target, window=16)
    prompts = [[i] * 20 for i in range(3)] + [[7, 8] * 1100]
    decoded = [speculative_decode(target.model, draft, prompt, 10, 2) for prompt in prompts]
    results = evaluate(target, draft, prompts, 10, 2)
    assert results["<2K"].prompts == 3
    assert results["2K-8K"].prompts == 1
    assert results["<2K"].stats.verifications == sum(d.stats.verifications for d in decoded[:3])
    assert results["all"].stats.accepted == sum(d.stats.accepted for d in decoded)
    assert results["all"].accepted_at == [sum(d.accepted_at[i] for d in decoded) for i in range(2)]
    parts: list[list[float]] = []
    for rank in range(2):
        evaluate(target, draft, prompts, 10, 2, lambda *v: parts.append(list(v)) or list(v), rank, 2)
    both = evaluate(target, draft, [], 10, 2, lambda *v: [a + b for a, b in zip(*parts, strict=True)])
    assert {name: r.figures() for name, r in both.items()} == {name: r.figures() for name, r in results.items()}
    json.dumps(results["all"].figures())


def test_looping_outputs_are_counted_and_left_out_of_the_accept_length() -> None:
    result = BucketResult(accepted_at=[0, 0])
    result.add(Decoded(list(range(20)), AcceptStats(10, 20, 5), [4, 1]))
    result.add(Decoded([1, 2, 3, 4] * 5, AcceptStats(6, 12, 12), [6, 6]))
    assert result.figures() == {
        "prompts": 2, "looping": 1, "looping_share": 0.5, "verifications": 10, "tau": 1.5, "tau_without_bonus": 0.5,
        "tau_looping_too": round(1 + 17 / 16, 4), "reached_depth": [0.4, 0.1],
    }  # fmt: skip
    assert BucketResult.of(result.numbers()) == result
    assert "looping 1, not counted" in evaluation_text(result.figures())


def test_a_bucket_of_loops_has_no_accept_length() -> None:
    result = BucketResult(accepted_at=[0])
    result.add(Decoded([7] * 30, AcceptStats(10, 10, 9), [9]))
    figures = result.figures()
    assert figures["tau"] is None and figures["tau_without_bonus"] is None
    assert figures["tau_looping_too"] == 1.9
    assert "every output loops" in evaluation_text(figures)


def test_evaluation_tells_looping_outputs_by_the_tokens_they_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = tiny_draft(target, window=16)
    prompts = [[i] * 20 for i in range(6)]
    decoded = [speculative_decode(target.model, draft, prompt, 60, 2) for prompt in prompts]
    shares = sorted(repeated_share(d.tokens) for d in decoded)
    between = (shares[0] + shares[-1]) / 2
    kept = [d for d in decoded if repeated_share(d.tokens) <= between]
    assert 0 < len(kept) < 6
    monkeypatch.setattr(evaluation, "ALLOWED", between)
    total = evaluate(target, draft, prompts, 60, 2)["all"]
    assert (total.prompts, total.looping) == (6, 6 - len(kept))
    assert total.stats.accepted == sum(d.stats.accepted for d in kept)
    assert total.every.accepted == sum(d.stats.accepted for d in decoded)
