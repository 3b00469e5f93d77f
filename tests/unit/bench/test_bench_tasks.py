"""Tasks from files: prompts, lengths in tokens, references, and what is said about files that do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from longdraft.bench.tasks import TASKS, load_task, longbench, score
from longdraft.bench.tasks.longbench_prompts import PROMPTS
from longdraft.bench.tasks.metrics import METRICS
from longdraft.errors import UserError
from longdraft.train.tiny_random import byte_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tasks"
STORED = sorted(path.stem for path in FIXTURES.iterdir())
TOKENIZER = byte_tokenizer()


def load(name: str, folder: Path | None = FIXTURES, count: int = 3, seed: int = 0, prompt_tokens: int = 4096) -> Any:
    return load_task(name, folder, count, seed, TOKENIZER, 600 if name == "pg19" else prompt_tokens)


def length(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False).input_ids)


def records(name: str) -> list[dict[str, Any]]:
    path = next(FIXTURES.glob(f"{name}.json*"))
    text = path.read_text()
    return list(json.loads(text)) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def test_records_of_one_id_are_told_apart_and_halves_of_characters_are_marks(tmp_path: Path) -> None:
    text = json.dumps({"id": "a", "text": "A report \ud83d of a year. " * 9, "summary": "Half \ud83d"})
    (tmp_path / "govreport.jsonl").write_text(f"{text}\n{text}\n", encoding="utf-8-sig")
    one, two = load_task("govreport", tmp_path, 2, 0, TOKENIZER, 2000).examples
    assert one.id != two.id and "A report ? of" in one.text and one.references == ("Half ?",)


@pytest.mark.parametrize("name", STORED)
def test_a_data_set_is_read_in_its_own_fields(name: str) -> None:
    task = load(name)
    assert len(task.examples) == 3 and len({example.id for example in task.examples}) == 3
    assert (task.name, task.metric, task.new_tokens) == (name, TASKS[name].metric, TASKS[name].new_tokens)
    for example in task.examples:
        assert score(task, example, example.references[0]) == pytest.approx(1)
        assert score(task, example, "zzz") < 0.2
    shown = " ".join(example.text for example in task.examples)
    for record in records(name):
        told = record.get("context") or record.get("text") or record.get("question") or record.get("problem")
        assert told[:500] in shown
        assert (record.get("input") or "") in shown


def test_every_task_has_a_metric_and_every_longbench_task_a_prompt() -> None:
    assert {spec.metric for spec in TASKS.values()} == set(METRICS)
    assert set(PROMPTS) == set(longbench.TASKS) and len(PROMPTS) == 21
    assert all(spec.new_tokens > 0 and spec.kind and spec.source for spec in TASKS.values())


@pytest.mark.parametrize("name", longbench.TASKS)
def test_a_longbench_prompt_holds_the_context_and_what_is_asked(name: str, tmp_path: Path) -> None:
    record = {
        "_id": "1",
        "input": "what {x} is",
        "context": "the context",
        "answers": ["one"],
        "length": 2,
        "dataset": name,
        "language": "en",
        "all_classes": ["one", "two"],
    }
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    (example,) = load(name, tmp_path).examples
    assert "the context" in example.text and "{input}" not in example.text
    asks = name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert ("what {x} is" in example.text) == asks
    assert example.chat == (name not in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"))


def test_records_come_in_an_order_that_the_seed_gives() -> None:
    orders = {tuple(example.id for example in load("qmsum", seed=seed).examples) for seed in range(8)}
    assert len(orders) > 1
    assert load("qmsum", seed=5) == load("qmsum", seed=5)
    assert load("qmsum", count=2).examples == load("qmsum").examples[:2]
    assert len(load("qmsum", count=50).examples) == 3


@pytest.mark.parametrize("tokens", [100, 321, 600])
def test_a_book_is_cut_behind_a_word_and_goes_on_in_the_reference(tokens: int) -> None:
    task = load_task("pg19", FIXTURES, 3, 0, TOKENIZER, tokens)
    whole = {record["id"]: record["text"] for record in records("pg19")}
    for example in task.examples:
        text = whole[example.id]
        assert text.startswith(example.text) and tokens - 15 < length(example.text) <= tokens
        assert text[len(example.text)].isspace()
        assert text[len(example.text) :].startswith(example.references[0])
        assert length(example.references[0]) <= task.new_tokens and not example.chat


def test_books_no_longer_than_the_prompt_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"prompt_tokens=5,000: no document .* the longest has 1,\d\d\d tokens: give less"
    ):
        load_task("pg19", FIXTURES, 3, 0, TOKENIZER, 5000)
    (tmp_path / "pg19.jsonl").write_text('{"text": "short"}\n{"text": "a text that is longer"}\n')
    (example,) = load_task("pg19", tmp_path, 3, 0, TOKENIZER, 10).examples
    assert example.text == "a text" and example.references == (" that is longer",) and example.id == "2"


def test_a_long_context_loses_its_middle_and_keeps_the_instructions() -> None:
    (whole,) = load("govreport", count=1).examples
    (cut,) = load("govreport", count=1, prompt_tokens=400).examples
    assert length(whole.text) > 400 and 395 <= length(cut.text) <= 400
    assert cut.text.startswith(whole.text[:100]) and cut.text.endswith(whole.text[-120:])
    head, tail = cut.text.split("\n")[3:5]
    assert head in whole.text and tail in whole.text and whole.text.index(tail) > whole.text.index(head) + len(head)
    with pytest.raises(
        UserError, match=r"prompt_tokens=40: what stands round the text alone takes \d+ tokens, give more"
    ):
        load("govreport", prompt_tokens=40)


def test_govreport_is_read_under_the_data_sets_own_names_too(tmp_path: Path) -> None:
    (tmp_path / "govreport.jsonl").write_text(json.dumps({"report": "the text", "summary": "it"}) + "\n")
    (example,) = load("govreport", tmp_path).examples
    assert "the text" in example.text and example.references == ("it",)


def test_a_choice_is_asked_with_its_letters() -> None:
    example = next(e for e in load("longbench_v2").examples if e.id == "v2-1")
    assert "(A) The smith\n(B) The miller\n(C) The priest\n(D) Nobody" in example.text and example.references == ("B",)


def test_the_final_answer_is_the_reference_of_worked_mathematics(tmp_path: Path) -> None:
    assert {e.references[0] for e in load("gsm8k").examples} == {"\\boxed{94}", "\\boxed{1,400}", "\\boxed{30}"}
    (tmp_path / "math500.jsonl").write_text(json.dumps({"problem": "2+2?", "solution": "So $\\boxed{4}$."}) + "\n")
    task = load("math500", tmp_path)
    assert score(task, task.examples[0], "It comes to \\boxed{4}.") == 1


def test_a_missing_file_is_told_with_its_fields_and_place(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"'qmsum'.* has no qmsum\.jsonl: put qmsum\.jsonl with the fields _id, input, .* there"
    ):
        load("qmsum", tmp_path)
    with pytest.raises(
        UserError, match=r"'longbench_v2' needs data: put longbench_v2\.json or data\.json with .* name the folder"
    ):
        load("longbench_v2", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"', r"pg19\.jsonl:1 is no JSON .*is the file whole\?"),
        ("", "holds no record"),
        ("[1]\n", r"pg19\.jsonl:1 holds \[1\]: every record is an object"),
        ('{"title": "a"}\n', "pg19.jsonl:1 has no field 'text'"),
        ('{"text": 3}\n', r"pg19\.jsonl:1: text=3 is no text"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pg19.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        load("pg19", tmp_path)
    assert "\n" not in str(raised.value)


def test_wrong_records_are_one_line(tmp_path: Path) -> None:
    trec = records("trec")[0]
    for change, message in (
        ({"dataset": "lsht"}, "is of dataset='lsht': give the file of 'trec'"),
        ({"answers": []}, r"answers=\[\] is no list of texts"),
        ({"all_classes": None}, "all_classes=None is no list of texts"),
    ):
        (tmp_path / "trec.jsonl").write_text(json.dumps(trec | change) + "\n")
        with pytest.raises(UserError, match=message):
            load("trec", tmp_path)
    (tmp_path / "longbench_v2.json").write_text(json.dumps([records("longbench_v2")[0] | {"answer": "E"}]))
    with pytest.raises(UserError, match="record 1: answer='E' is none of A, B, C and D"):
        load("longbench_v2", tmp_path)
    (tmp_path / "longbench_v2.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="holds a dict: give a list of records"):
        load("longbench_v2", tmp_path)
    (tmp_path / "longbench_v2.json").write_text('[{"a": 1}')
    with pytest.raises(UserError, match="is no JSON"):
        load("longbench_v2", tmp_path)
    (tmp_path / "pg19.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load("pg19", tmp_path)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(UserError, match=r"task 'qsum' is none \(did you mean 'qmsum'\?\)"):
        load("qsum")
    with pytest.raises(UserError, match="count=0"):
        load("qmsum", count=0)
    with pytest.raises(UserError, match="prompt_tokens=0"):
        load("qmsum", prompt_tokens=0)
