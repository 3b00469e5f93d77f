"""Documents: loss masks by character offsets, sources, and errors that name file:line and field."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from longdraft.errors import UserError
from longdraft.train.config import DataSettings, TargetSettings
from longdraft.train.documents import Corpus, Renderer, mask_by_offsets
from longdraft.train.target import load_tokenizer
from longdraft.train.tiny_random import byte_tokenizer

SETTINGS = DataSettings(train="unused")
CHAT = [
    {"role": "system", "content": "Be brief. Blue."},
    {"role": "user", "content": "Sky? Blue."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Müde?"},
    {"role": "assistant", "content": "Ja, sehr. 日本"},
]


def supervised_text(row: dict[str, Any], tokenizer: Any = None) -> str:
    tokenizer = tokenizer or byte_tokenizer()
    document = Renderer(tokenizer, SETTINGS).render(row, "here:1")
    assert len(document.ids) == len(document.supervised)
    return str(tokenizer.decode([t for t, kept in zip(document.ids, document.supervised, strict=True) if kept]))


def test_only_the_assistants_turns_and_their_end_marks_are_supervised() -> None:
    """The word of the answer occurs in other turns too; those stay out."""
    assert supervised_text({"conversations": CHAT}) == "Blue.<|end|>\nJa, sehr. 日本<|end|>\n"


def test_from_value_messages_mean_the_same() -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    assert supervised_text({"conversations": turns}) == supervised_text({"conversations": CHAT})


def test_a_template_that_rewrites_earlier_turns_is_searched() -> None:
    """Here only the last answer keeps its prompt, so the first is not where the conversation before it would end."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and loop.last %}(thinks){% endif %}"
        " {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant](thinks){% endif %}"
    )
    assert supervised_text({"conversations": CHAT}, tokenizer) == "Blue. Ja, sehr. 日本\n"


def test_a_plain_text_is_supervised_throughout_and_gets_nothing_added() -> None:
    document = Renderer(byte_tokenizer(), SETTINGS).render({"text": "abc"}, "here:1")
    assert len(document.ids) == 3
    assert document.supervised == [True] * 3


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_tokenizer_from_a_folder_masks_alike(family: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TargetSettings(path=str(tiny_model(family, tmp_path / family))))
    assert supervised_text({"conversations": CHAT}, tokenizer) == supervised_text({"conversations": CHAT})


def test_offsets_that_touch_a_span_count_and_empty_ones_do_not() -> None:
    offsets = [(0, 2), (2, 4), (4, 4), (3, 5), (5, 6), (6, 9)]
    assert mask_by_offsets(offsets, [(4, 6)]) == [False, False, False, True, True, False]


BAD_LINES = {
    "not json": ('{"text": ', r"data\.jsonl:2: not valid JSON"),
    "no object": ("[1]", r"data\.jsonl:2: holds a list"),
    "neither field": ('{"body": "x"}', r"data\.jsonl:2: text is NoneType.*it has \['body'\]"),
    "text of a wrong type": ('{"text": 5}', r"data\.jsonl:2: text is int"),
    "empty conversation": ('{"conversations": []}', r"data\.jsonl:2: conversations must be a list"),
    "unknown role": (
        '{"conversations": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]}',
        r"data\.jsonl:2: conversations\[1\]\.role='robot'",
    ),
    "content of a wrong type": (
        '{"conversations": [{"role": "user", "content": 3}]}',
        r"conversations\[0\]\.content is int",
    ),
    "role of a wrong type": (
        '{"conversations": [{"role": ["user"], "content": "a"}]}',
        r"conversations\[0\]\.role=\['user'\]",
    ),
    "half a surrogate pair": (
        r'{"text": "ab\ud800"}',
        r"data\.jsonl:2: text has half of a surrogate pair at character 2",
    ),
    "half a surrogate pair in a turn": (
        r'{"conversations": [{"role": "user", "content": "\udc00"}]}',
        r"conversations\[0\]\.content has half of a surrogate pair",
    ),
    "tokens of a wrong type": (
        '{"input_ids": [1, "2"], "supervised_from": 0}',
        r"data\.jsonl:2: input_ids must be a list",
    ),
    "no tokens": ('{"input_ids": [], "supervised_from": 0}', r"data\.jsonl:2: input_ids must be a list"),
    "negative token": ('{"input_ids": [1, -2], "supervised_from": 0}', r"data\.jsonl:2: input_ids holds -2"),
    "tokens without a mask": ('{"input_ids": [1], "text": "a"}', r"needs one of 'supervised_from' and 'loss_mask'"),
    "tokens with two masks": (
        '{"input_ids": [1], "supervised_from": 0, "loss_mask": [1]}',
        r"needs one of 'supervised_from' and 'loss_mask'",
    ),
    "an answer behind the end": ('{"input_ids": [1, 2], "supervised_from": 3}', r"supervised_from=3: give .* 0 \.\. 2"),
    "a mask of another length": ('{"input_ids": [1, 2], "loss_mask": [1]}', r"loss_mask has 1 entries for 2 input_ids"),
    "a mask of other values": ('{"input_ids": [1], "loss_mask": [2]}', r"loss_mask must be a list of 0 and 1"),
    "endless nesting": ('{"text": ' + "[" * 100000, r"data\.jsonl:2: not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_before_training_starts(name: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[name]
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        Corpus(str(path), SETTINGS, byte_tokenizer())


def test_tokenised_records_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "supervised_from": 1}, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = Corpus(str(tmp_path / "data.jsonl"), SETTINGS, byte_tokenizer())
    assert [corpus[i].ids for i in range(2)] == [[5, 6, 7]] * 2
    assert [corpus[i].supervised for i in range(2)] == [[False, True, True], [True, False, True]]


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """The tokenizer's vocabulary, unless the target's is given: its embedding may have rows without a name."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"input_ids": [1, 288], "supervised_from": 0}\n')
    with pytest.raises(
        UserError, match=r"data\.jsonl:1: input_ids holds 288, not below the target's vocabulary of 288"
    ):
        Corpus(str(path), SETTINGS, byte_tokenizer())[0]
    assert Corpus(str(path), SETTINGS, byte_tokenizer(), 289)[0].ids == [1, 288]


@pytest.mark.parametrize("content", [None, ""])
def test_a_missing_or_empty_file_is_a_users_error(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"data\.jsonl"):
        Corpus(str(path), SETTINGS, byte_tokenizer())


def test_several_files_are_one_corpus_in_order(tmp_path: Path) -> None:
    for name, texts in (("a", ["1", "ü2"]), ("b", ["3"])):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + "\n\n"
        )
    corpus = Corpus([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], SETTINGS, byte_tokenizer())
    documents = [corpus[i] for i in range(len(corpus))]
    assert [byte_tokenizer().decode(d.ids) for d in documents] == ["1", "ü2", "3"]
    assert [d.name.rsplit("/", 1)[-1] for d in documents] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]


def test_hugging_face_folders_load(tmp_path: Path) -> None:
    """A saved data set, a saved dictionary of splits, and a plain folder of files that ``load_dataset`` understands."""
    import datasets

    data = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    data.save_to_disk(str(tmp_path / "set"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    tokenizer = byte_tokenizer()
    for name in ("set", "splits", "plain"):
        corpus = Corpus(str(tmp_path / name), SETTINGS, tokenizer)
        assert [tokenizer.decode(corpus[i].ids) for i in range(len(corpus))] == ["one", "two"]
    test = DataSettings(train="unused", split="test")
    assert len(Corpus(str(tmp_path / "splits"), test, tokenizer)) == 1
    with pytest.raises(UserError, match="no split 'dev'"):
        Corpus(str(tmp_path / "splits"), DataSettings(train="unused", split="dev"), tokenizer)


def test_fingerprints_tell_the_contents_apart(tmp_path: Path) -> None:
    """A file by its hash, a data set by the library's mark; another text changes either."""
    import datasets

    def prints(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        line = json.dumps({"text": text}) + "\n"
        (tmp_path / "a.jsonl").write_text(line + "\n" + line)
        datasets.Dataset.from_list([{"text": text}]).save_to_disk(str(tmp_path / "set"))
        names = [str(tmp_path / "a.jsonl"), str(tmp_path / "set")]
        one, two = Corpus(names, SETTINGS, byte_tokenizer()).fingerprints()
        data = (tmp_path / "a.jsonl").read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        assert one == {"source": names[0], "documents": 2, "bytes": len(data), "sha256": digest}
        assert (two["source"], two["documents"]) == (f"{names[1]}[train]", 1)
        return one, two

    first, again, other = prints("one"), prints("one"), prints("two")
    assert first[0] == again[0] != other[0]
    assert first[1]["fingerprint"] and first[1]["fingerprint"] != other[1]["fingerprint"]


def test_an_unknown_data_set_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="cannot be loaded"):
        Corpus(str(tmp_path / "nothing"), SETTINGS, byte_tokenizer())
