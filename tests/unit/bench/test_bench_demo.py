"""The demo's parts that need no server: repetition, text, the record and its picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longdraft.bench import demo_report
from longdraft.bench.demo import Both, DemoSettings, make_record
from longdraft.bench.demo_text import (
    HELD_OUT_MODULES,
    HELD_OUT_TOPICS,
    Prompt,
    module_text,
    paragraphs,
    prompts,
    topic_text,
    training_documents,
)
from longdraft.bench.server import Generation, server_sent
from longdraft.draft_models.repetition import repeated_share


@pytest.mark.parametrize(
    ("tokens", "share"), [([], 0), ([1, 2, 3], 0), (range(50), 0), ([7] * 13, 0.9), ([1, 2, 3, 4] * 3, 5 / 9)]
)
def test_repeated_share(tokens: list[int], share: float) -> None:
    assert repeated_share(list(tokens)) == pytest.approx(share)


def test_training_text_is_the_same_every_time_and_holds_nothing_of_the_prompts() -> None:
    documents = training_documents()
    assert documents == training_documents()
    held_out = [module_text(name) for name in HELD_OUT_MODULES] + [topic_text(name) for name in HELD_OUT_TOPICS]
    hidden = set().union(*(paragraphs(text) for text in held_out))
    assert hidden
    assert not any(paragraphs(text) & hidden for _, text in documents)
    assert len(documents) > 100


def test_there_are_six_prompts_with_a_chat_and_a_long_one() -> None:
    assert len(prompts()) == 6
    assert any(p.chat for p in prompts())
    assert any((p.tokens or 0) >= 4000 for p in prompts())


def both(name: str, length: int, tokens: list[int], drafted: list[int] | None = None) -> Both:
    counters = {"target_verifications": 10, "drafted": 20, "accepted": 5, "tau": 1.5, "tau_without_bonus": 0.5}
    return Both(
        Prompt(name, "text", length),
        [1] * length,
        Generation(tokens, "text", 10.0, {}),
        Generation(drafted or tokens, "text", 12.0, counters),
        None,
    )


@pytest.fixture
def record() -> dict[str, Any]:
    answers = [both("short", 50, list(range(20))), both("loops", 900, [3] * 20), both("long", 4300, list(range(20)))]
    return make_record(DemoSettings(), answers, [(10.0, 11.0), (10.0, 13.0), (8.0, 6.0)], {"steps": 3})


def test_the_record_pools_counts_and_takes_the_median_of_the_pairs(record: dict[str, Any]) -> None:
    assert record["identical"] is True
    assert (record["drafted"], record["accepted"], record["tau"], record["tau_without_bonus"]) == (60, 15, 1.5, 0.5)
    assert record["speed"]["median_ratio"] == 1.1
    assert record["speed"]["context_tokens"] == 4300
    assert [row["repetitive"] for row in record["prompts"]] == [False, True, False]
    assert all(record["checks"].values())


def test_other_tokens_and_other_chat_texts_are_seen() -> None:
    differs = both("short", 50, [1, 2, 3, 4], [1, 2, 3, 5])
    assert not differs.identical
    chat = both("short", 50, [1, 2])
    chat.texts = ("a", "b")
    assert not chat.identical
    record = make_record(DemoSettings(), [differs], [(10.0, 9.0)], {})
    assert not record["identical"]
    assert not record["checks"]["identical"]


def test_the_report_is_a_table_a_json_file_and_a_picture(record: dict[str, Any], tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    demo_report.show(record, console)
    demo_report.write(record, tmp_path)
    text = console.export_text()
    assert "short" in text
    assert "30 % of the 4-grams" in text
    assert json.loads((tmp_path / "report.json").read_text()) == record
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_server_sent_events() -> None:
    lines = [b'data: {"a": 1}\n', b"\n", b": comment\n", b'data: {"a": 2}\n', b"data: [DONE]\n"]
    assert [event["a"] for event in server_sent(iter(lines))] == [1, 2]
