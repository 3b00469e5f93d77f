"""Training data from the target's own answers: what is asked, that the answers are the target's, and stopping at any moment."""

import dataclasses
import errno
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_target

from longdraft import cli
from longdraft.draft_models.reference_decode import greedy_decode
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train import generate
from longdraft.train.config import DataSettings
from longdraft.train.documents import Corpus
from longdraft.train.generation import backends, output
from longdraft.train.generation.backends import Answer, TransformersBackend
from longdraft.train.generation.prompts import Prompt
from longdraft.train.generation.settings import GenerateSettings
from longdraft.train.tiny_random import byte_tokenizer

END = 257
TEXT = "The harbour office keeps a log of every boat that comes in, and of every boat that leaves. "
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye."},
]
RECORDS: list[dict[str, Any]] = [
    {"conversations": CHAT},
    {"text": TEXT * 3},
    {"text": "too short"},
    {"conversations": CHAT[1:2]},
    {"input_ids": [5, 6, 7, 8], "supervised_from": 3},
    {"conversations": CHAT[:1]},
    {"text": TEXT},
]


def prompt_file(folder: Path, records: list[dict[str, Any]] | None = None) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (RECORDS if records is None else records)))
    return path


def arguments(folder: Path, out: str, **changes: Any) -> list[str]:
    """The command's words; ``changes`` are options with ``__`` for the dot."""
    options = {
        "target.path": "tiny-random:llama",
        "prompts.sources": str(folder / "prompts.jsonl"),
        "prompts.lengths": "[24, 40]",
        "prompts.per-document": "2",
        "sampling.max-new-tokens": "12",
        "out": str(folder / out),
    } | {key.replace("__", "."): str(value) for key, value in changes.items()}
    return [word for key, value in options.items() for word in (f"--{key}", value)]


def run(folder: Path, out: str, **changes: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    assert generate.main(arguments(folder, out, **changes)) == 0
    lines = (folder / out / "generated.jsonl").read_text().splitlines()
    provenance: dict[str, Any] = json.loads((folder / out / "provenance.json").read_text())
    return [json.loads(line) for line in lines], provenance


def parts(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    return row["input_ids"][: row["supervised_from"]], row["input_ids"][row["supervised_from"] :]


def test_answers_are_the_targets_own_greedy_ones(tmp_path: Path) -> None:
    """Left-padded in one batch, against the reference decoder one by one; an end token is kept and nothing follows it."""
    prompt_file(tmp_path)
    rows, _ = run(tmp_path, "out")
    model = tiny_target("llama").model
    assert len(rows) == 7
    for row in rows:
        prompt, answer = parts(row)
        expected = greedy_decode(model, prompt, 12)
        expected = expected[: expected.index(END) + 1] if END in expected else expected
        assert answer == expected
        assert row["finish"] == ("stop" if END in answer else "length")


def test_an_answer_ends_with_the_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that the target gives third is declared the end."""
    prompt_file(tmp_path, [{"conversations": CHAT}])
    answer = parts(run(tmp_path, "free")[0][0])[1]
    end = answer[2]
    assert end not in answer[:2]
    monkeypatch.setattr(generate, "stop_tokens", lambda *_: [end])
    (row,), provenance = run(tmp_path, "ended")
    assert parts(row)[1] == answer[:3]
    assert row["finish"] == "stop"
    assert provenance["counts"]["stopped"] == 1


def test_conversations_are_asked_up_to_their_last_answer_and_texts_at_seeded_cuts(tmp_path: Path) -> None:
    prompt_file(tmp_path)
    rows, provenance = run(tmp_path, "out")
    tokenizer = byte_tokenizer()
    by_source: dict[str, list[int]] = {row["source"]: parts(row)[0] for row in rows}
    turns = (
        "<|start|>user\nHi<|end|>\n<|start|>assistant\nHello.<|end|>\n<|start|>user\nAnd?<|end|>\n<|start|>assistant\n"
    )
    assert tokenizer.decode(by_source["prompts.jsonl:1#0"]) == turns
    assert by_source["prompts.jsonl:5#0"] == [5, 6, 7]
    assert tokenizer.decode(by_source["prompts.jsonl:6#0"]).endswith("Hi<|end|>\n<|start|>assistant\n")
    cuts = [by_source[f"prompts.jsonl:{line}#{cut}"] for line in (2, 7) for cut in (0, 1)]
    assert all(len(cut) in (24, 40) and tokenizer.decode(cut) in TEXT * 4 for cut in cuts)
    assert provenance["counts"]["skipped"] == {"too_long": 0, "too_short": 1, "no_question": 1}
    other = {row["source"]: parts(row)[0] for row in run(tmp_path, "other", sampling__seed=5)[0]}
    assert [other[f"prompts.jsonl:{line}#{cut}"] for line in (2, 7) for cut in (0, 1)] != cuts


def test_cuts_keep_the_token_that_opens_a_text(tmp_path: Path) -> None:
    prompt_file(tmp_path, [{"input_ids": [256, *range(100)], "supervised_from": 0}])
    rows, _ = run(tmp_path, "out", prompts__per_document=4)
    assert all(row["input_ids"][0] == 256 for row in rows)
    assert any(row["input_ids"][1] != 0 for row in rows)


def test_prompts_that_leave_no_room_are_counted(tmp_path: Path) -> None:
    prompt_file(tmp_path, [{"conversations": [{"role": "user", "content": "x" * 17000}]}, {"text": TEXT}])
    rows, provenance = run(tmp_path, "out")
    assert len(rows) == 2
    assert provenance["counts"]["skipped"]["too_long"] == 1


def test_what_is_written_trains_as_it_is(tmp_path: Path) -> None:
    """Both ways to say where the answer begins read back as the same documents."""
    prompt_file(tmp_path)
    rows, _ = run(tmp_path, "out")
    masked, _ = run(tmp_path, "masked", supervision="loss_mask")
    assert all(len(row["loss_mask"]) == len(row["input_ids"]) for row in masked)
    read = []
    for name in ("out", "masked"):
        corpus = Corpus(str(tmp_path / name / "generated.jsonl"), DataSettings(train="unused"), byte_tokenizer())
        read.append([(corpus[i].ids, corpus[i].supervised) for i in range(len(corpus))])
    assert read[0] == read[1]
    for row, (ids, supervised) in zip(rows, read[0], strict=True):
        assert ids == row["input_ids"]
        assert supervised.index(True) == row["supervised_from"]


class Dying:
    """A backend whose process ends in the n-th batch."""

    def __init__(self, inner: TransformersBackend, batches: int) -> None:
        self.inner, self.left = inner, batches

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return self.inner.generate(prompts)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_killed_run_continues_to_the_same_bytes(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the batch in flight was half written, and in a text between its two cuts."""
    prompt_file(tmp_path)
    options = {"sampling__temperature": temperature, "backend__batch": 2}
    run(tmp_path, "whole", **options)

    def dying(*args: Any) -> Dying:
        return Dying(backends.TransformersBackend(args[0], *args[2:]), 1)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "open_backend", dying)
        with pytest.raises(KeyboardInterrupt):
            generate.main(arguments(tmp_path, "killed", **options))
    with (tmp_path / "killed" / "generated.jsonl").open("ab") as file:
        file.write(b'{"input_ids": [1, 2')
    _, provenance = run(tmp_path, "killed", **options)
    whole, killed = ((tmp_path / name / "generated.jsonl").read_bytes() for name in ("whole", "killed"))
    assert whole == killed
    counts = json.loads((tmp_path / "whole" / "provenance.json").read_text())["counts"]
    assert {**counts, "seconds": 0} == {**provenance["counts"], "seconds": 0}


def test_a_finished_run_answers_nothing_again_and_a_higher_limit_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_file(tmp_path)
    assert len(run(tmp_path, "out", prompts__limit=3)[0]) == 3
    rows, _ = run(tmp_path, "out")
    assert rows == run(tmp_path, "at_once")[0]

    def forbidden(*args: object) -> None:
        raise AssertionError("nothing is left to answer")

    monkeypatch.setattr(generate, "open_backend", forbidden)
    again, provenance = run(tmp_path, "out")
    assert again == rows
    assert provenance["counts"]["skipped"]["too_short"] == 1


def test_sampling_depends_on_the_seed_and_the_prompt_but_not_on_the_batch(tmp_path: Path) -> None:
    prompt_file(tmp_path)
    warm = {"sampling__temperature": 1.5, "sampling__top_p": 0.9}
    rows, _ = run(tmp_path, "a", **warm)
    assert rows == run(tmp_path, "b", backend__batch=1, **warm)[0]
    assert rows != run(tmp_path, "greedy")[0]


def test_sampling_follows_the_targets_distribution() -> None:
    """2,000 first tokens of one prompt, over the likeliest ones; within four standard errors."""
    settings = validate(
        GenerateSettings,
        {
            "out": "unused",
            "target": {"path": "tiny-random:llama"},
            "prompts": {"sources": "unused"},
            "sampling": {"temperature": 0.7, "max_new_tokens": 1},
        },
    )
    backend = TransformersBackend(settings, torch.device("cpu"), [END])
    ids, count = [10, 20, 30], 2000
    found = backend.generate([Prompt(ids, i, 0, "p", seed=i * 7919) for i in range(count)])
    drawn = torch.bincount(torch.tensor([a.ids[0] for a in found]), minlength=288) / count
    with torch.no_grad():
        p = (backend.model(torch.tensor([ids])).logits[0, -1] / 0.7).softmax(-1)
    top = p.topk(10).indices
    assert p[top].sum() > 0.1
    assert ((drawn - p).abs()[top] < 4 * (p * (1 - p) / count).sqrt()[top] + 1e-9).all()


def test_looping_answers_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Looping(Dying):
        def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
            return [Answer([7] * 12 if p.record == 0 else list(range(12)), "length") for p in prompts]

    monkeypatch.setattr(generate, "open_backend", lambda *_: Looping(None, 0))  # type: ignore[arg-type]
    prompt_file(tmp_path, [RECORDS[0], RECORDS[5]])
    rows, provenance = run(tmp_path, "out", **{"drop-repeats": 0.3, "text": "true"})
    assert [row["source"] for row in rows] == ["prompts.jsonl:2#0"]
    assert rows[0]["answer"] == byte_tokenizer().decode(list(range(12)))
    assert (provenance["counts"]["repetitive"], provenance["counts"]["answers"]) == (1, 1)
    rows, provenance = run(tmp_path, "cut", **{"trim-repeats": 0.3})
    assert [(row["finish"], len(row["input_ids"]) - row["supervised_from"]) for row in rows] == [("length", 12)]
    assert provenance["counts"]["repetitive"] == 1  # nothing was left of it


def test_provenance_names_the_prompts_and_hides_secrets(tmp_path: Path) -> None:
    path = prompt_file(tmp_path)
    secret = "hf_" + "a1B2" * 9
    _, provenance = run(tmp_path, "out", target__revision=secret)
    assert provenance["prompts"] == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    assert secret not in (tmp_path / "out" / "provenance.json").read_text()
    assert provenance["counts"]["new_tokens"] > 0
    assert provenance["versions"]["torch"] == torch.__version__.split("+")[0]


CHANGED = {
    "sampling__temperature": (0.5, r"sampling\.temperature=0\.5, but out=.* was begun with 0\.0"),
    "prompts__lengths": ("[24]", r"prompts\.lengths=\[24\]"),
    "target__path": ("tiny-random:qwen3", r"target\.path='tiny-random:qwen3'"),
    "drop-repeats": (0.3, r"drop_repeats=0\.3"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_that_was_begun_with_other_settings_is_refused(name: str, tmp_path: Path) -> None:
    value, message = CHANGED[name]
    prompt_file(tmp_path)
    run(tmp_path, "out", prompts__limit=1)
    before = (tmp_path / "out" / "generated.jsonl").read_bytes()
    with pytest.raises(UserError, match=message):
        generate.main(arguments(tmp_path, "out", **{name: value}))
    assert (tmp_path / "out" / "generated.jsonl").read_bytes() == before


def test_changed_prompts_are_refused(tmp_path: Path) -> None:
    path = prompt_file(tmp_path)
    run(tmp_path, "out", prompts__limit=1)
    path.write_text(path.read_text() + json.dumps({"text": TEXT}) + "\n")
    with pytest.raises(UserError, match=r"prompts\.sources\.sha256"):
        generate.main(arguments(tmp_path, "out"))


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    prompt_file(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "generated.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match=r"holds generated\.jsonl without provenance\.json"):
        generate.main(arguments(tmp_path, "out"))
    assert (tmp_path / "out" / "generated.jsonl").read_text() == "mine\n"


BAD = {
    "no room": ({"sampling__max-new-tokens": 16384}, r"sampling\.max_new_tokens=16384 leaves no room"),
    "no sglang in memory": ({"backend__name": "sglang"}, r"target\.path='tiny-random:llama' exists in memory only"),
    "nothing to keep": ({"prompts__lengths": "[5000]"}, r"gave no answer to keep .*'too_short': 1"),
    "negative length": ({"prompts__lengths": "[0]"}, r"a prompt has 1 token or more"),
    "unknown option": ({"prompts__length": "[5]"}, r"unknown argument '--prompts\.length'"),
    "no prompts": ({"prompts__sources": "nowhere.jsonl"}, r"nowhere\.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_said_with_the_field(name: str, tmp_path: Path) -> None:
    changes, message = BAD[name]
    prompt_file(tmp_path, [{"text": TEXT}])
    with pytest.raises(UserError, match=message):
        generate.main(arguments(tmp_path, "out", **changes))


def test_the_command_line_knows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt_file(tmp_path, [{"text": TEXT}])
    assert cli.main(["generate", *arguments(tmp_path, "out", sampling__top_p=3)]) == 2
    assert capsys.readouterr().err.startswith("error: sampling.top_p=3")


def test_sglangs_engine_takes_the_arguments(tmp_path: Path) -> None:
    """Every name is a field of the installed version's ServerArgs; what is not set is not passed."""
    from sglang.srt.server_args import ServerArgs

    settings = validate(
        GenerateSettings,
        {
            "out": "unused",
            "target": {"path": str(tiny_model("llama", tmp_path / "m")), "revision": "main"},
            "prompts": {"sources": "unused"},
            "sglang": {"mem_fraction": 0.8, "attention_backend": "fa3", "max_running_requests": 64},
        },
    )
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    for device in ("cpu", "cuda"):
        given = backends.engine_arguments(settings, torch.device(device))
        assert given.keys() <= known
        assert given["dtype"] == {"cpu": "float32", "cuda": "bfloat16"}[device]
        assert given["attention_backend"] == "fa3"
    settings.sglang = type(settings.sglang)()
    assert "mem_fraction_static" not in backends.engine_arguments(settings, torch.device("cuda"))


def test_a_full_disk_ends_a_run_in_one_line_and_costs_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt_file(tmp_path)
    whole, _ = run(tmp_path, "whole", backend__batch=2)
    calls: list[int] = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 4:  # two of the folder's first word, one a batch and one behind it
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(output.os, "fsync", full)
        assert cli.main(["generate", *arguments(tmp_path, "parts", backend__batch=2)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: out=") and "No space left on device" in error and "continues" in error
    assert run(tmp_path, "parts", backend__batch=2)[0] == whole
