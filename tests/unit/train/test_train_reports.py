"""Logs, progress lines, redaction, and the evaluation's prompts and buckets."""

import io
import json
from pathlib import Path
from typing import Any

from tiny import tiny_draft, tiny_target

from longdraft.draft_models.reference_decode import speculative_decode
from longdraft.train.config import EvaluationSettings
from longdraft.train.documents import Document
from longdraft.train.evaluation import bucket_of, cut_prompts, evaluate
from longdraft.train.tracking import JsonLines, ProgressLine, clock, read_rows, redact


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
