"""bench sparse_drift and sparse_quality without servers: what they ask for, whom they leave out, and what a record answers for."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_drift_figures import totals
from tiny import tiny_target

from longdraft.bench import sparse_drift as sd
from longdraft.bench import sparse_quality as sq
from longdraft.bench.drift_figures import CONTROL, OFF, Answer, trace
from longdraft.bench.view_agreement import Case
from longdraft.errors import UserError
from longdraft.serve.request_checks import check_own
from longdraft.serve.settings import RequestSettings, ServeSettings

REQUIRED = ["--target", "T", "--draft", "D", "--documents", "d.jsonl", "--record", "r.json"]
NEW = 41


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(f"w{i}" for i in ids)


def drift_args(*words: str) -> argparse.Namespace:
    return sd.parse([*REQUIRED, "--plot", "p.png", *words])


# drift


def test_what_drift_asks_for_is_what_its_server_takes() -> None:
    args = drift_args("--budget", "256", "--recipe", "", "--lookahead", "100")
    server = ServeSettings(**{**sd.sparse_settings(args), "sparse_recipe": None})
    assert server.set_budget().tokens == 256 and server.set_budget().lookahead == 100
    asked = {name: RequestSettings(**sd.request(name, 256)) for name in (*args.refresh, CONTROL)}
    for own in asked.values():
        check_own(own, server)
    assert [(own.mode, own.refresh) for own in asked.values()] == [
        ("sparse", None), ("sparse", 64), ("sparse", 256), ("full", None),
    ]  # fmt: skip
    assert set(sd.sparse_settings(drift_args())) == {"mode", "allow_lossy", "sparse_tokens"}


@pytest.mark.parametrize("word", ["0", "-5", "none", "2000", "1.5"])
def test_a_refresh_that_no_server_takes_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drift_args("--refresh", word)
    assert "is no refresh: write off, or 1 to 1024 tokens" in capsys.readouterr().err


def looped(document: int, loops: bool) -> Answer:
    return Answer(document, tuple([1, 2] * 20 if loops else range(40)), (), 0, 0)


def test_loops_are_left_out_and_counted() -> None:
    found = {OFF: [looped(i, i < 2) for i in range(6)], CONTROL: [looped(i, i == 5) for i in range(6)]}
    kept, loops = sd.without_loops(found)
    assert loops == {OFF: 2, CONTROL: 1}
    assert [a.document for a in kept[OFF]] == [2, 3, 4, 5] and len(kept[CONTROL]) == 5
    found[OFF] = [looped(i, i < 4) for i in range(6)]
    with pytest.raises(UserError, match=r"of 6 answers each.*'off': 4.*raise --count"):
        sd.without_loops(found)


def test_the_target_has_the_last_word_on_every_token() -> None:
    """Its own greedy answer agrees everywhere; a token that it would not choose does not, wherever it stands."""
    target = tiny_target()
    ids, prompt = [5, 80, 30, 7, 200, 41], 6
    with torch.no_grad():
        for step in range(12):
            logits_V = target.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits_V.argsort()[-1 if step != 7 else -2]))
    own = sd.judged(target, ids[:prompt], Answer(0, tuple(ids[prompt:]), (), 0, 0))
    assert own.agrees == tuple(step != 7 for step in range(12))


def drift(folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], bend: Any = None) -> Any:
    """A run over a server that keeps all drafts, and a target that disagrees with the second half of unrefreshed answers."""

    class Streaming:
        def __init__(self, name: str, *_: Any) -> None:
            self.name, self.log = name, folder / "log"

        def __enter__(self) -> "Streaming":
            return self

        def __exit__(self, *_: object) -> None: ...

        def stream(self, ids: list[int], sampling: dict[str, Any]) -> Any:
            own, count = sampling["custom_params"]["longdraft"], sampling["max_new_tokens"]
            rounds, every, on_view = (count - 1) // 4, own.get("refresh"), int(own["mode"] == "sparse")
            steps = [(3, int(bool(every) and i > 0 and i % (int(every) // 4) == 0), on_view) for i in range(rounds)]
            found = totals(*steps)
            for i in range(len(found)):
                yield {"output_ids": list(range(1 + 4 * i)), "meta_info": {"longdraft": found[: i + 1]}}

    def judged(_: Any, prompt: list[int], own: Answer) -> Answer:
        wrong = own.refreshes == 0 and own.on_view > 0
        agrees = tuple(not (wrong and i > NEW // 2 and (i + prompt[0]) % 3 == 0) for i in range(len(own.tokens)))
        return Answer(own.document, own.tokens, own.verified, own.refreshes, own.on_view, agrees)

    for name, value in (("Server", Streaming), ("judged", judged), ("load_target", lambda *_: None)):
        monkeypatch.setattr(sd, name, value)
    monkeypatch.setattr(sd, "check_room", lambda *_: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Letters())
    if bend is not None:
        bend(Streaming)
    documents = folder / "d.jsonl"
    documents.write_text("".join(json.dumps({"id": i, "text": chr(97 + i) * 300}) + "\n" for i in range(5)))
    given = ["--documents", str(documents), "--record", str(folder / "r.json"), "--plot", str(folder / "p.png")]
    common = [
        "--target",
        "T",
        "--draft",
        "D",
        "--budget",
        "128",
        "--new-tokens",
        str(NEW),
        "--bin",
        "8",
        "--batch",
        "2",
    ]
    return sd.main([*common, *given, "--refresh", "off", "8", *words])


def test_a_record_of_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drift(tmp_path, monkeypatch, []) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["recommended"] == "8" and record["finding"].startswith("No refresh: agreement falls from 100.0 %")
    figures, curves = record["figures"], record["curves"]
    assert set(curves) == {OFF, "8", CONTROL}
    assert figures["whole_cache_agreement"] == figures["refresh_8_agreement"] == 1 > figures["no_refresh_agreement"]
    assert figures["no_refresh_accept_length"] == 4 and figures["refresh_8_refreshes_per_1000_tokens"] > 90
    assert [row["from"] for row in curves["8"]["agreement"]] == [0], "no token is further away than a refresh"
    late = [row["mean"] for row in curves[OFF]["agreement"]]
    assert len(late) == 5 and late[0] == 1 > late[-1]
    assert len(curves[CONTROL]["agreement"]) == 5, "the control goes by place"
    assert record["settings"]["prompts_sha256"] and all(record["checks"].values())
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_refreshes_that_do_not_come_fail_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bend(server: Any) -> None:
        whole = server.stream

        def stream(self: Any, ids: list[int], sampling: dict[str, Any]) -> Any:
            sampling["custom_params"]["longdraft"].pop("refresh", None)
            return whole(self, ids, sampling)

        server.stream = stream

    assert drift(tmp_path, monkeypatch, [], bend) == 1
    checks = json.loads((tmp_path / "r.json").read_text())["checks"]
    assert [name for name, passed in checks.items() if not passed] == ["refresh_8_refreshed"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "300"], "5 of 5 prompts have no more than --budget 300 tokens"),
        (["--new-tokens", "16"], "--new-tokens 16 has no quarters"),
        (["--bin", "0"], "--bin 0 with --new-tokens 41"),
        (["--count", "2"], "of 2 answers each"),
    ],
)
def test_what_can_show_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        drift(tmp_path, monkeypatch, words)


# quality


def quality_args(*words: str) -> argparse.Namespace:
    return sq.parse([*REQUIRED, *words])


def test_variants_divide_every_budget_as_they_say() -> None:
    args = quality_args("--lookahead", "100")
    found = {s.variant: ServeSettings(**s.settings(args)).set_budget() for s in sq.servings(args) if s.variant}
    assert {name: (b.tokens, b.lookahead) for name, b in found.items()} == {
        "h": (512, 100),
        "t": (512, 0),
        "d": (512, 492),
    }
    plain = sq.servings(quality_args())[0]
    assert ServeSettings(**plain.settings(quality_args())).set_budget().lookahead == 246, "halves without a recipe"


def test_few_servers_serve_every_case_at_equal_budgets() -> None:
    args = quality_args("--refresh", "off", "64")
    every = sq.servings(args)
    assert len(every) == 12, "one for each view; the variants ride along"
    cases = [case for serving in every for case in serving.cases(args)]
    assert len({case.name for case in cases}) == len({case.label for case in cases}) == len(cases) == 12 + 3 * 3 * 2
    for serving in every:
        server = ServeSettings(**serving.settings(args))
        for case in serving.cases(args):
            own = RequestSettings(**case.own)
            check_own(own, server)
            tokens = own.budget if own.mode == "sparse" else server.view_tokens
            assert f"_{tokens}" in case.name and f"{tokens} tokens" in case.label
            assert own.mode == "sparse" or server.view_selector == case.name.split("_")[0]
    assert [s.name for s in sq.servings(quality_args("--selectors"))] == ["sparse_h", "sparse_t", "sparse_d"]
    assert sq.Serving(Case("quest", 128), None).name == "sparse_quest_128"


def quality(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str = "", words: list[str] | None = None) -> int:
    """A run over servers of which one ends; views and sets lose the answer's end, the whole cache does not."""

    class Answering:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def __enter__(self) -> "Answering":
            if self.name == broken:
                raise UserError("it ended")
            return self

        def __exit__(self, *_: object) -> None: ...

    def generate(_: Any, ids: list[list[int]], new: int, sampling: list[dict[str, Any]]) -> Any:
        found = []
        for prompt, each in zip(ids, sampling, strict=True):
            assert each["ignore_eos"] is False
            own, first = each["custom_params"]["longdraft"], prompt[0]
            same = 8 - own.get("budget", 128) // 64 if own["mode"] != "off" and own["mode"] != "full" else 0
            tokens = [first] * 8 if first == 97 else [*range(first, first + 8 - same), *range(900, 900 + same)]
            counters = {"target_verifications": 4, "accepted": 4, "verified_on_view": 8, "partial_verifications": 2}
            found.append({"output_ids": tokens, "meta_info": {"longdraft": [counters]}})
        return 1.0, found

    monkeypatch.setattr(sq, "Server", Answering)
    monkeypatch.setattr(sq, "generate", generate)
    monkeypatch.setattr(sq, "check_room", lambda *_: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Letters())
    documents = folder / "d.jsonl"
    summaries = [" ".join(f"w{i}" for i in range(97 + n, 105 + n)) for n in range(4)]
    rows = [{"id": i, "text": chr(97 + i) * 600, "summary": s if i != 3 else None} for i, s in enumerate(summaries)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--documents", str(documents), "--record", str(folder / "r.json"), "--answers", str(folder / "a.jsonl")]
    common = ["--target", "T", "--draft", "D", "--continue", "--batch", "3", "--budgets", "128", "256", *given]
    return sq.main([*common, *(words or [])])


def test_a_record_of_quality_labels_every_case_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality(tmp_path, monkeypatch) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    figures = record["figures"]
    assert figures["documents"] == 3 and figures["left_out_looping"] == 1
    assert len(record["labels"]) == 1 + 8 + 6
    for name in record["labels"]:
        assert figures[f"{name}_answers"] == 3 and figures[f"{name}_references"] == 2
        assert figures[f"{name}_accept_length"] == 2
    assert figures["full_exact_match"] == 1 and figures["full_rouge_l_to_reference_change"] == 0
    assert figures["sparse_t_128_same_tokens_mean"] == 2 and figures["sparse_t_256_same_tokens_mean"] == 4
    assert (
        figures["sparse_t_256_rouge_l_to_target"] == 50 and figures["sparse_t_256_rouge_l_to_reference_change"] == -50
    )
    assert figures["quest_128_same_tokens_share"] == 0.25
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 15 * 3 and {row["case"] for row in rows} == set(record["labels"])
    shown = capsys.readouterr().out
    assert "| sparse, history alone, 256 tokens | 0.00 | 0.50 | 50.00 | 50.00 | -50.00 |" in shown


def test_a_server_that_ends_fails_the_record_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality(tmp_path, monkeypatch, broken="sparse_quest_256") == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["checks"] == {"every_case_ran": False, "every_case_was_verified_as_it_says": False}
    assert "quest_256_answers" not in record["figures"] and record["figures"]["mass_256_answers"] == 3
    assert "sparse_quest_256 failed: it ended" in capsys.readouterr().out


def test_quality_needs_prompts_that_no_set_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="4 of 4 prompts have no more than 256 tokens"):
        quality(tmp_path, monkeypatch, words=["--prompt-tokens", "200"])


def test_quality_needs_an_answer_that_does_not_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="all 1 plain answers"):
        quality(tmp_path, monkeypatch, words=["--count", "1"])


def test_no_trace_without_verifications() -> None:
    assert trace([{}]) == ()
