"""``longdraft counts``: the text's answers are counted, ends of turns rank first, the file serves."""

import json
from pathlib import Path

import pytest
import torch

from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError
from longdraft.train import count_tokens
from longdraft.train.tiny_random import byte_tokenizer

VOCAB = 288


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(tmp_path: Path, rows: list[dict[str, object]], *more: str) -> TokenCounts:
    data, out = write(tmp_path / "text.jsonl", rows), tmp_path / "counts.safetensors"
    words = ["--target.path", "tiny-random:llama", "--data.train", str(data), "--out", str(out), *more]
    assert count_tokens.main(words) == 0
    return TokenCounts.load(out, VOCAB)


ROWS: list[dict[str, object]] = [
    {"input_ids": [9, 9, 9, 5, 5, 6], "supervised_from": 3},
    {"input_ids": [9, 6, 6, 7], "supervised_from": 1},
]


def test_answers_are_counted_and_prompts_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = counted(tmp_path, ROWS)
    assert {v: int(answers.count_V[v]) for v in answers.count_V.nonzero()[:, 0].tolist()} == {5: 2, 6: 3, 7: 1}
    assert "6 tokens, 3 of 288 different ones" in capsys.readouterr().out
    special = sorted(byte_tokenizer().all_special_ids)
    first = answers.rank_V[: len(special) + 3].tolist()
    assert sorted(first[: len(special)]) == special, "a draft must be able to end a turn"
    assert first[len(special) :] == [6, 5, 7]
    assert int(counted(tmp_path, ROWS, "--prompts").count_V[9]) == 4
    assert int(counted(tmp_path, ROWS, "--limit", "1").count_V.sum()) == 3


def test_text_is_counted_by_the_targets_tokenizer(tmp_path: Path) -> None:
    found = counted(tmp_path, [{"text": "abba"}])
    ids = byte_tokenizer()("abba").input_ids
    assert torch.equal(found.count_V, torch.bincount(torch.tensor(ids), minlength=VOCAB))


def test_nothing_to_count_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no answers to count: set prompts=true"):
        counted(tmp_path, [{"input_ids": [1, 2], "supervised_from": 2}])
