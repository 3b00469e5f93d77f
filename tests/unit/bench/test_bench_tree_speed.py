"""bench tree_speed without servers: prompts of every form, servers' command lines, which answers count, and what a record checks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longdraft.bench import tree_speed
from longdraft.errors import UserError


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "<" + "".join(m["content"] for m in messages) + ">"


def test_prompts_come_as_ids_text_or_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no part of the prompt"}]
    rows = [
        {"input_ids": [1, 2, 3, 4], "supervised_from": 2},
        {"input_ids": [7] * 9},
        {"text": "ab"},
        {"conversations": chat},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert tree_speed.read_prompts(path, Letters(), 5) == [[1, 2], [7] * 5, [97, 98], [60, 104, 105, 62]]
    path.write_text(json.dumps({"question": "?"}))
    with pytest.raises(UserError, match=r"prompts.jsonl:1 has \['question'\]: give input_ids, text or conversations"):
        tree_speed.read_prompts(path, Letters(), 5)


def test_every_shape_is_served_as_it_is_named(tmp_path: Path) -> None:
    args = tree_speed.parse(["--target", "T", "--draft", "D", "--prompts", "p", "--record", "r", "--dtype", "float32"])
    words = tree_speed.command("T", args, True, "chain5")
    assert words[words.index("--steps") + 1] == "5" and "--tree" not in words
    for shape in ("4,16,16,16,16", "eagle2:5,8,60", "auto:2,2"):
        words = tree_speed.command("T", args, False, shape)
        assert words[words.index("--tree") + 1] == shape and "--steps" not in words
        assert words[words.index("--draft") + 1] == "D"
    plain = tree_speed.command("T", args, True, None)
    assert "--draft" not in plain and plain[plain.index("--device") + 1] == "cpu"
    assert plain.count("--dtype") == 1 and plain.count("--max-running-requests") == 1
    assert tree_speed.environment(False, plain=True) == {"SGLANG_PLUGINS": "none"}
    for plain in (True, False):
        whole = tree_speed.environment(False, plain, "float32")
        assert whole == {"SGLANG_PLUGINS": "longdraft", "TRITON_F32_DEFAULT": "tf32x3"}, "one row and several are alike"


def test_looping_answers_are_left_out_until_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def generate(server: Any, ids: list[list[int]], new_tokens: int) -> Any:
        asked.append(ids)
        return 1.0, [{"output_ids": [5] * 40 if n % 2 else list(range(40))} for (n,) in ids]

    monkeypatch.setattr(tree_speed, "generate", generate)
    kept, answers = tree_speed.unlooping(None, [[n] for n in range(9)], 2, 40, 2)  # type: ignore[arg-type]
    assert kept == [[0], [2]] and answers == [list(range(40))] * 2
    assert asked == [[[0], [1]], [[2], [3]]], "no more are asked than needed"
    kept, _ = tree_speed.unlooping(None, [[n] for n in range(9)], 2, 40, 9)  # type: ignore[arg-type]
    assert kept == [[0], [2]], "the last batch may have more than asked"
    with pytest.raises(UserError, match="every plain answer loops"):
        tree_speed.unlooping(None, [[1]], 2, 40, 1)  # type: ignore[arg-type]


def test_decoding_is_timed_without_the_prompts_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 1.0, 3.0, 9.0, 0.5, 1.5])
    counters = {"accepted": 6, "target_verifications": 4}

    def generate(server: Any, ids: list[list[int]], new_tokens: int) -> Any:
        answer = {"output_ids": list(range(new_tokens)), "meta_info": {"longdraft": [counters]}}
        return next(seconds), [answer for _ in ids]

    monkeypatch.setattr(tree_speed, "generate", generate)
    run = tree_speed.decode(None, [[1], [2], [3]], 2, 11)  # type: ignore[arg-type]
    assert (run.seconds, run.tok_s, run.tau) == (3.0, 10.0, 2.5)


@pytest.mark.parametrize(
    ("dtype", "gaps", "itself", "good"),
    [
        ("float32", [], 0.0, True),
        ("float32", [0.0], 0.5, False),
        ("bfloat16", [0.06], 0.0, True),
        ("bfloat16", [0.06, 0.4], 0.25, False),
        ("bfloat16", [0.06, 0.4], 0.5, True),
    ],
)
def test_a_record_checks_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, gaps: list[float], itself: float, good: bool
) -> None:
    """``itself``: how far apart candidates are at most where plain decoding parts from itself in other batches."""
    plain = {"plain_b1_largest_gap": 0.0, "plain_b16_largest_gap": itself}
    row = {"shape": "2,3", "batch": 1, "identical": 1, "gaps": gaps}
    monkeypatch.setattr(tree_speed, "measure", lambda *_: (dict(plain), [row]))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Letters())
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "ab"}))
    words = [
        "--target",
        "T",
        "--draft",
        "D",
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--record",
        str(tmp_path / "r.json"),
    ]
    assert tree_speed.main([*words, "--dtype", dtype]) == (0 if good else 1)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["checks"] == {f"beam_2_3_b1_{'equal' if dtype == 'float32' else 'equal_or_tied'}": good}
    assert record["rows"] == [row]
