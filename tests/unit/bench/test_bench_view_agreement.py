"""bench view_agreement without servers: prompts, settings of a view, what counts as identical, and what a record answers for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longdraft.bench import view_agreement as va
from longdraft.bench.demo_text import write_long_text
from longdraft.errors import UserError
from longdraft.serve.settings import ServeSettings

REQUIRED = ["--target", "T", "--documents", "d.jsonl", "--record", "r.json"]
TEXTS = {"off": list(range(40)), "exact": list(range(40)), "partial": [*range(25), *range(100, 115)]}


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(c) for c in text])


def answer(ids: list[int], **counters: int) -> dict[str, Any]:
    keys = ("gained_on_view", "confirmed", "cycles_refused", "full_verifications", "partial_verifications")
    return {"output_ids": ids, "meta_info": {"longdraft": [{}, {**dict.fromkeys(keys, 0), **counters}]}}


def test_prompts_are_cut_to_lengths_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": "abcdefgh"}) + "\n" for i in range(5)))
    found = va.read_documents(path, Letters(), [2, 5, 90], ask=False, count=4)
    assert [len(d["ids"]) for d in found] == [2, 5, 8, 2] and [d["id"] for d in found] == [0, 1, 2, 3]
    assert va.digest(found) == va.digest(list(found)) != va.digest(found[:3])


def test_prompts_of_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    path.write_text(
        json.dumps({"input_ids": [5, 6, 7, 8], "supervised_from": 3}) + "\n" + json.dumps({"input_ids": [9]})
    )
    found = va.read_documents(path, Letters(), [2], ask=False)
    assert [d["ids"] for d in found] == [[5, 6, 7], [9]] and [d["id"] for d in found] == [0, 1]


def test_prompts_and_answers_that_the_target_has_no_positions_for_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    va.check_room([{"ids": [1] * 80}, {"ids": [1]}], str(tmp_path), 20)
    with pytest.raises(UserError, match=r"80 tokens and an answer of 21 .* 100 positions: lower --prompt-tokens by 1"):
        va.check_room([{"ids": [1] * 80}], str(tmp_path), 21)


def test_texts_that_every_machine_has_are_long(tmp_path: Path) -> None:
    write_long_text(tmp_path / "texts.jsonl", 20)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 20
    assert all(row["id"].endswith(".py") == (i % 2 == 0) for i, row in enumerate(rows))
    assert min(len(row["text"]) for row in rows[::2]) > 40_000 and min(len(row["text"]) for row in rows) > 7_000


@pytest.mark.parametrize("draft", [None, "folder"])
@pytest.mark.parametrize("tokens", [64, 128, 512, 4096])
def test_every_case_has_settings_that_a_server_takes(tokens: int, draft: str | None) -> None:
    args = va.parse([*REQUIRED, "--dtype", "float32", *(["--draft", draft] if draft else [])])
    words, environment = va.command(args, va.Case("worst", tokens), on_cpu=False)
    settings = ServeSettings(**json.loads(environment["LONGDRAFT_SETTINGS"]))
    assert settings.view_tokens == tokens and settings.view_selector == "worst" and settings.budget().tokens == tokens
    assert settings.self_draft == (draft is None) == ("--speculative-draft-model-path" not in words)
    assert environment["TRITON_F32_DEFAULT"] == "tf32x3", "several rows and one must be alike"
    chain = 1 if draft is None else va.STEPS + 1
    assert settings.allow_lossy != args.identity, "mode partial is asked for too"
    assert settings.rounds is not None and settings.rounds * chain == va.PENDING
    assert "TRITON_F32_DEFAULT" not in va.command(args, va.Case("mass", tokens), on_cpu=True)[1]


def test_identity_says_where_answers_part() -> None:
    plain = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    exact = [
        answer([1, 2, 3], confirmed=2, partial_verifications=3),
        answer([4, 5, 0]),
        answer([7, 8], gained_on_view=1),
    ]
    figures, parted = va.identity(plain, exact, "seeded")
    assert figures == {
        "seeded_identical": 1, "seeded_partial_verifications": 3, "seeded_gained_on_view": 1, "seeded_confirmed": 2,
    }  # fmt: skip
    assert parted == [{"kind": "seeded", "prompt": 1, "at": 2}, {"kind": "seeded", "prompt": 2, "at": 2}]


def test_agreement_counts_tokens_until_the_first_that_differs() -> None:
    exact = [
        answer([1, 2], confirmed=12, gained_on_view=20, cycles_refused=1),
        answer([3, 4], confirmed=20, gained_on_view=20),
    ]
    partial = [answer([1, 9], partial_verifications=3, full_verifications=1), answer([3, 4])]
    figures, same = va.agreement([[1, 2], [3, 4]], exact, partial)
    assert same == [1, 2]
    assert figures["agreement"] == 32 / 33 and figures["confirmed_of_20"] == 16.0
    assert (figures["partial_identical"], figures["partial_same_tokens_mean"], figures["partial_rounds_share"]) == (
        1,
        1.5,
        0.75,
    )


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Servers that answer by mode, seed and selector; ``bend`` of a selector changes a token of its sampled answers."""
    world: dict[str, Any] = {"bend": None, "asked": []}

    class Answering:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def __enter__(self) -> "Answering":
            return self

        def __exit__(self, *_: object) -> None: ...

    def generate(server: Answering, ids: list[list[int]], new: int, sampling: list[dict[str, Any]]) -> Any:
        found = []
        for own in sampling:
            mode, seed = own["custom_params"]["longdraft"]["mode"], own.get("sampling_seed")
            world["asked"].append((server.name, mode, seed))
            text = list(TEXTS[mode]) if seed is None else [500 + seed + t for t in TEXTS[mode]]
            if seed == 3 and mode == "exact" and world["bend"] == server.name:
                text[7] = 0
            found.append(answer(text, partial_verifications=int(mode != "off"), confirmed=1, gained_on_view=2))
        return 1.0, found

    monkeypatch.setattr(va, "Server", Answering)
    monkeypatch.setattr(va, "generate", generate)
    monkeypatch.setattr(va, "check_room", lambda *_: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Letters())
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"id": i, "text": "abcdefgh" * i}) + "\n" for i in range(1, 8)))
    words = ["--target", "T", "--documents", str(documents), "--record", str(tmp_path / "r.json"), "--count", "5"]
    words += ["--selectors", "mass", "worst", "--budgets", "64", "512", "--dtype", "float32", "--batch", "2"]
    world["run"] = lambda *more: (va.main([*words, *more]), json.loads((tmp_path / "r.json").read_text()))
    return world


def test_a_record_of_identity_answers_for_every_case(served: dict[str, Any]) -> None:
    status, record = served["run"]("--identity")
    assert status == 0 and record["name"] == "exact_matrix" and all(record["checks"].values())
    assert set(record["checks"]) == {
        "every_case_ran", "views_were_read", "exact_identical", "seeded_identical", "most_seeded_answers_differ_from_greedy",
    }  # fmt: skip
    assert record["figures"]["prompts"] == 5 == record["figures"]["worst_512_seeded_identical"]
    assert record["differing"] == [] and record["settings"]["temperature"] == 0.8
    assert {name for name, _, _ in served["asked"]} == {"mass_64", "mass_512", "worst_64", "worst_512"}
    seeds = [seed for name, mode, seed in served["asked"] if name == "mass_64" and mode == "exact" and seed is not None]
    assert seeds == [0, 1, 2, 3, 4], "the same in both modes, whatever the batches are"
    assert all(mode != "partial" for _, mode, _ in served["asked"])


def test_one_wrong_token_fails_the_record_and_is_named(served: dict[str, Any]) -> None:
    served["bend"] = "worst_64"
    status, record = served["run"]("--identity")
    assert status == 1 and not record["checks"]["seeded_identical"] and record["checks"]["exact_identical"]
    assert record["differing"] == [{"case": "worst_64", "kind": "seeded", "prompt": 3, "at": 7}]


def test_a_record_of_agreement_has_partial_answers_too(served: dict[str, Any], tmp_path: Path) -> None:
    status, record = served["run"]("--answers", str(tmp_path / "answers.jsonl"))
    assert status == 0 and record["name"] == "view_agreement"
    assert record["checks"] == {"every_case_ran": True, "views_were_read": True, "exact_identical": True}
    assert record["figures"]["mass_512_partial_same_tokens_mean"] == 25 and record["figures"]["mass_512_documents"] == 5
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and rows[0]["id"] == 1 and rows[0]["same"] == 25


def test_a_server_that_fails_fails_the_record(served: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: va.Case, *rest: Any) -> Any:
        if case.name == "mass_512":
            raise RuntimeError("the server ended")
        return whole(case, *rest)

    whole = va.one_case
    monkeypatch.setattr(va, "one_case", broken)
    status, record = served["run"]("--identity")
    assert status == 1 and not record["checks"]["every_case_ran"] and record["checks"]["exact_identical"]


@pytest.mark.parametrize("more", ["--identity", "--ask"])
def test_a_call_goes_on_where_the_one_before_stopped(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: str
) -> None:
    def stopped(case: va.Case, *rest: Any) -> Any:
        if case.name == "mass_512":
            raise RuntimeError("the machine went away")
        return whole(case, *rest)

    monkeypatch.setattr(Letters, "decode", lambda self, ids: "text", raising=False)
    monkeypatch.setattr(Letters, "apply_chat_template", lambda self, chat, **_: chat[0]["content"], raising=False)
    whole, words = va.one_case, (more, "--answers", str(tmp_path / "answers.jsonl"))
    monkeypatch.setattr(va, "one_case", stopped)
    assert served["run"](*words)[0] == 1
    monkeypatch.setattr(va, "one_case", whole)
    served["asked"].clear()
    status, record = served["run"](*words)
    assert status == 0 and record["checks"]["every_case_ran"]
    assert {name for name, _, _ in served["asked"]} == {"mass_512"}, "nothing is measured twice"
    assert set(record["cases"]) == {"mass_64", "mass_512", "worst_64", "worst_512"}
    assert all(set(when) == {"commit", "date", "device"} for when in record["cases"].values())
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(lines) == (0 if more == "--identity" else 20)
    served["asked"].clear()
    status, record = served["run"](*words, "--new-tokens", "7")
    assert len({name for name, _, _ in served["asked"]}) == 4, "other settings are another record"
