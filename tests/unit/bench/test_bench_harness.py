"""bench.harness without servers: what a file may say, which servers start, what is kept of a killed run, and what counts.

Servers are played: every mode answers as the test says, and a decode of a token takes ten milliseconds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness_world import EXACT, FULL, PLAIN, World, record_of, target, world, write

from longdraft import cli
from longdraft.bench import token_compare
from longdraft.bench.harness import answers, run, speed
from longdraft.bench.harness.answers import Answer, tau_figures
from longdraft.bench.harness.ledger import Ledger
from longdraft.bench.harness.place import Place
from longdraft.bench.harness.settings import SpeedSettings, SystemSettings
from longdraft.bench.harness.systems.base import servings
from longdraft.bench.harness.systems.registry import KINDS, make_systems
from longdraft.bench.lengths import lengths_in, tokens_word
from longdraft.bench.record import command
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.serve.settings import ServeSettings

__all__ = ["target", "world"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contxts": [5]}, "unknown key 'contxts' (did you mean 'contexts'?)"),
        ({"systems": [PLAIN, {"system": "fulll"}]}, "systems.1.system='fulll': Input should be 'plain', "),
        (
            {"systems": [PLAIN, {"system": "full", "bugdet": 5}]},
            "unknown key 'systems.1.bugdet' (did you mean 'systems.budget'?)",
        ),
        ({"systems": [PLAIN, {"system": "full", "budget": 512}]}, "budget says nothing of system 'full'"),
        ({"systems": [{"system": "plain", "steps": 5}]}, "steps beside plain stock SGLang"),
        ({"systems": [FULL]}, "systems need plain exactly once"),
        ({"batches": [0]}, "give one size or more"),
        ({"contexts": []}, "give one size or more"),
        ({"max_minutes": 0}, "max_minutes=0: Input should be greater than 0"),
        ({"target": {"path": "llama-8b-shape"}}, "has random weights: force acceptance"),
        ({"systems": [PLAIN, {**FULL, "accept_length": 3}]}, "accept_length without force"),
        ({"share_servers": True, "load": {"rates": [1]}}, "load with share_servers"),
        ({"share_servers": True, "phases": True}, "phases with share_servers"),
        ({"load": {"rates": [0]}}, "give rates above 0"),
        ({"target": {"path": "nowhere"}}, "target.path='nowhere' holds no config.json"),
        ({"target": {"path": "llama-8b-shape"}, "force": {}}, "needs a GPU, there is none"),
        ({"systems": [PLAIN, {"system": "full", "draft": "nowhere"}]}, "draft 'nowhere' is no folder"),
        ({"systems": [PLAIN, {"system": "full"}]}, "draft 'longspec' is shipped for smollm2 only"),
        ({"systems": [PLAIN, FULL, FULL]}, "two systems are 'full': give each a label of its own"),
        ({"prompts": "nowhere.jsonl"}, "prompts: 'nowhere.jsonl' cannot be read"),
    ],
)
def test_what_does_not_fit_is_one_line_and_status_2(
    changes: dict[str, Any], said: str, tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "speed", str(write(tmp_path, target, **changes))]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1
    assert not world.asked, "nothing was measured"


def test_documents_that_are_no_texts_are_named(tmp_path: Path, target: Path, world: World) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "short"}\n{"words": 1}\n')
    path = str(write(tmp_path, target, prompts=str(texts)))
    with pytest.raises(UserError, match=r"texts.jsonl:2 has no field 'text': "):
        speed.main([path])
    texts.write_text('{"text": "short"}\n{"text": "one line, though\u2028not to all"}\n', encoding="utf-8-sig")
    with pytest.raises(UserError, match="has 0 documents of 50 tokens, 2 are needed"):
        speed.main([path])


def test_rows_of_a_grid(tmp_path: Path, target: Path, world: World) -> None:
    assert speed.main([str(write(tmp_path, target, batches=[1, 2], seed=3))]) == 0
    record = record_of(tmp_path)
    assert {"commit", "date", "device", "versions", "command"} <= record.keys() & record["sittings"][0].keys()
    assert record["checks"] == {"every_cell_was_tried": True, "tokens_are_plain_where_promised": True}
    cases = [(row["label"], row["batch"], row["context"]) for row in record["rows"]]
    assert cases == [(s, b, 50) for s in ("plain", "full", "exact 512") for b in (2, 1)]
    row = record["rows"][2]
    assert row["ok"] and row["identical"] and row["n"] == 2 and row["seed"] == 3 and row["forced_accept"] is None
    assert row["settings"] == {"system": "full", "draft": "none", "steps": 4}
    # 40 tokens of each of two requests in 0.4 s; a step gives two tokens where plain decoding's gives one.
    assert row["tok_s"] == row["alpha"] == pytest.approx(200) and row["tok_s_spread"] == 0 and row["repeats"] == 2
    assert row["ms_step"] == pytest.approx(20) and row["tokens_a_step"] == pytest.approx(2) and row["speedup"] == 1
    assert "prefill_s" in record["rows"][2] and "prefill_s" not in record["rows"][3], "its prompts were cached"
    assert record["rows"][0]["prompts_sha256"] == row["prompts_sha256"] != record["rows"][1]["prompts_sha256"]
    assert record["figures"]["exact_512_tok_s_b1_c50"] == pytest.approx(100)
    assert world.started == ["plain", "full", "exact-512"], "a server for each system, once"


def test_texts_that_fail_do_not_count(tmp_path: Path, target: Path, world: World) -> None:
    world.texts = {"full": [7 * i for i in range(20)] + [1], "exact": [5] * 1000}
    assert speed.main([str(write(tmp_path, target, systems=[PLAIN, FULL, {**EXACT, "system": "partial"}]))]) == 1
    plain, full, partial = record_of(tmp_path)["rows"]
    assert plain["ok"] and not full["ok"] and full["why"] == "2 of 2 answers are not plain decoding's"
    assert full["identical"] is False and "speedup" not in full
    assert partial["ok"] and "identical" not in partial, "a lossy mode promises nothing"
    world.texts = {"partial": [5] * 1000, "full": []}
    speed.main([str(write(tmp_path, target, systems=[PLAIN, {**EXACT, "system": "partial"}, FULL], seed=1))])
    plain, partial, full = record_of(tmp_path)["rows"]
    assert partial["why"] == "2 of 2 answers are looping" and not partial["ok"] and partial["tok_s"] > 0
    assert not full["ok"] and full["why"].startswith("2 of 2 answers are not plain")


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, target: Path, world: World) -> None:
    path = str(write(tmp_path, target))
    world.stop = "exact"
    with pytest.raises(KeyboardInterrupt):
        speed.main([path])
    first = record_of(tmp_path)
    assert [row["label"] for row in first["rows"]] == ["plain", "full"] and not first["checks"]["every_cell_was_tried"]
    world.stop, world.asked = None, []
    assert speed.main([path]) == 0
    assert set(world.asked) == {"exact"}, "what was finished is not measured again"
    second = record_of(tmp_path)
    assert second["rows"][:2] == first["rows"] and second["rows"][2]["identical"], "plain answers were kept too"
    assert [row["sitting"] for row in second["rows"]] == [0, 0, 1] and len(second["sittings"]) == 2
    world.asked = []
    assert speed.main([path]) == 0 and not world.asked
    assert [row["sitting"] for row in record_of(tmp_path)["rows"]] == [0, 0, 1]


def test_what_changed_is_measured_again(
    tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    speed.main([str(write(tmp_path, target))])
    world.asked = []
    assert speed.main([str(write(tmp_path, target, systems=[PLAIN, FULL, {**EXACT, "budget": 256}]))]) == 0
    said = capsys.readouterr().out
    assert set(world.asked) == {"exact"} and "1 rows are of cells that the file no longer asks for" in said
    (dropped,) = [json.loads(line) for line in (tmp_path / "record.dropped.jsonl").read_text().splitlines()]
    assert dropped["label"] == "exact 512" and dropped["tok_s"] and dropped["sitting"]["device"], "it is kept, aside"
    assert [row["label"] for row in record_of(tmp_path)["rows"]] == ["plain", "full", "exact 256"]
    world.asked = []
    speed.main([str(write(tmp_path, target, systems=[PLAIN, FULL], repeats=1))])
    assert set(world.asked) == {None, "full"}


def test_time_ends_a_sitting_between_cells(
    tmp_path: Path, target: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 10_000, 20))  # every look at the clock is 20 seconds later
    monkeypatch.setattr(run.time, "monotonic", lambda: next(now))
    path = str(write(tmp_path, target, max_minutes=3.5))
    assert speed.main([path]) == run.LEFT
    done = len(record_of(tmp_path)["rows"])
    assert 0 < done < 3 and f"{3 - done} cells are left" in capsys.readouterr().out
    sittings = 1
    while speed.main([path]) == run.LEFT:
        sittings += 1
        assert sittings < 5
    assert [row["label"] for row in record_of(tmp_path)["rows"]] == ["plain", "full", "exact 512"]


def test_what_does_not_fit_into_memory_is_a_row(tmp_path: Path, target: Path, world: World) -> None:
    world.room = 150
    assert speed.main([str(write(tmp_path, target, batches=[1, 2]))]) == 0
    rows = record_of(tmp_path)["rows"]
    assert [row["ok"] for row in rows] == [False, True] * 3
    assert rows[0]["why"] == "does not fit: 196 cached tokens are needed, the server has room for 150"


def test_a_server_that_dies_costs_its_cell_alone(tmp_path: Path, target: Path, world: World) -> None:
    world.die = "full"
    path = str(write(tmp_path, target, contexts=[50, 60]))
    assert speed.main([path]) == 0
    rows = record_of(tmp_path)["rows"]
    assert [row["ok"] for row in rows] == [True, True, False, False, True, True]
    assert rows[2]["why"] == "the server ended: torch.OutOfMemoryError: CUDA out of memory. Tried 9 GiB"
    assert world.started == ["plain", "full", "full", "exact-512"], "the next cell has a new one"
    world.die, world.asked = None, []
    assert speed.main([path]) == 0 and not world.asked, "a failed cell is finished too"
    assert speed.main([path, "--retry"]) == 0 and set(world.asked) == {"full"}
    assert all(row["ok"] for row in record_of(tmp_path)["rows"])


def test_a_server_that_does_not_start_is_rows_with_its_error(tmp_path: Path, target: Path, world: World) -> None:
    world.refuses = True
    assert speed.main([str(write(tmp_path, target))]) == 0
    rows = record_of(tmp_path)["rows"]
    assert [row["why"] for row in rows] == ["RuntimeError: CUDA out of memory"] * 3 and not any(r["ok"] for r in rows)


def test_systems_that_need_a_gpu_say_so(tmp_path: Path, target: Path, world: World) -> None:
    asked = [PLAIN, {"system": "ngram"}, {"system": "eagle3", "draft": str(target)}]
    assert speed.main([str(write(tmp_path, target, systems=asked))]) == 0
    whys = [row["why"] for row in record_of(tmp_path)["rows"]]
    assert whys == ["", "SGLang's ngram needs a GPU", "SGLang's eagle3 needs a GPU"] and world.started == ["plain"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, '{"rows": [1]}', '{"name": "x", "rows": [], "sittings": []}']
)
def test_a_broken_record_is_one_line(
    text: str, tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record.json").write_text(text)
    assert cli.main(["bench", "speed", str(write(tmp_path, target))]) == 2
    error = capsys.readouterr().err
    assert "is not one that `longdraft bench speed` can go on with" in error and "move it away" in error
    assert error.count("\n") == 1 and (tmp_path / "record.json").read_text() == text, "it is left as it is"


def test_a_record_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "record.json", "speed", {})
    ledger.begin()
    ledger.write("x", {}, {}, [])
    with pytest.raises(UserError, match=r"it is of 'speed'"):
        Ledger(tmp_path / "record.json", "quality", {})


def test_answers_that_a_kill_cut_short_are_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "record.json", "quality", {})
    ledger.begin()
    one = Answer("a", [1, 2], 1, 1, 1)
    ledger.add("c1", [{"ok": True}], [one])
    ledger.add("c2", [{"ok": False}], [one])
    path = tmp_path / "record.answers.jsonl"
    path.write_text(path.read_text()[:-20])
    assert Ledger(tmp_path / "record.json", "quality", {}).answers == {"c1": [one]}
    assert ledger.finished("c1") and ledger.finished("c2") and not ledger.finished("c3")
    assert ledger.finished("c1", retry=True) and not ledger.finished("c2", retry=True)


def place_for(target: Path, folder: Path, *systems: dict[str, Any], force: bool = False, gpu: bool = False) -> Any:
    said = {"name": "x", "record": folder / "r.json", "contexts": [50], "logs": folder, "target": {"path": str(target)}}
    settings = SpeedSettings(**said, systems=[PLAIN, *systems], force={} if force else None)
    return make_systems(settings.systems, Place(settings, not gpu, 2, 100, force=settings.force))


def test_every_system_starts_a_server_that_its_settings_allow(tmp_path: Path, target: Path) -> None:
    ours = [{"system": name, "draft": "none"} for name in KINDS if name not in ("plain", "eagle3", "ngram", "self")]
    found = place_for(target, tmp_path, *ours, {"system": "self", "steps": 3}, force=True)
    assert {system.kind for system in found} == KINDS.keys() - {"eagle3", "ngram"}
    for system in found[1:]:
        launch = system.launch()
        own = ServeSettings(**json.loads(launch.process_environment()["LONGDRAFT_SETTINGS"]))
        mode = system.request()["custom_params"]["longdraft"]["mode"]
        assert own.mode == mode and launch.process_environment()["SGLANG_SIMULATE_ACC_LEN"] == "4.0"
        assert own.simulate_confirmed_share == (0.95 if mode == "exact" else None)
    selectors = {system.kind: (system.launch().settings or {}).get("view_selector") for system in found}
    assert {selectors[name] for name in ("streaming", "self")} == {"streaming"} and selectors["quest"] == "quest"
    alone = next(system for system in found if system.kind == "self").launch()
    assert (alone.settings or {})["self_draft"] and (alone.settings or {})["rounds"] == 3


def test_stock_systems_have_sglangs_own_arguments(tmp_path: Path, target: Path) -> None:
    window = {"system": "eagle3", "draft": str(target), "steps": 5, "window": 4096}
    plain, eagle, ngram = place_for(target, tmp_path, window, {"system": "ngram"}, force=True, gpu=True)
    words = eagle.launch().command
    assert (
        words[words.index("--speculative-num-draft-tokens") + 1] == "6" and "--speculative-draft-window-size" in words
    )
    assert words[words.index("--attention-backend") + 1] == "fa3"
    assert eagle.launch().environment == {"SGLANG_PLUGINS": "none", "SGLANG_SIMULATE_ACC_LEN": "4.0"}
    assert plain.launch().environment == {"SGLANG_PLUGINS": "none"} and "NGRAM" in ngram.launch().words
    assert eagle.missing() is None and eagle.label == "eagle3 window 4K" and not eagle.promised


def test_systems_share_a_server_where_their_settings_agree(tmp_path: Path, target: Path) -> None:
    sparse = [{"system": "sparse", "draft": "none", "budget": n} for n in (128, 256)]
    other = {**EXACT, "budget": 256, "label": "other"}
    systems = place_for(
        target, tmp_path, FULL, EXACT, *sparse, other, {**EXACT, "system": "partial"}, {"system": "self"}
    )
    alone, shared = servings(systems, share=False), servings(systems, share=True)
    assert len(alone) == 8
    assert [serving.name for serving in shared] == [
        "plain",
        "full+exact-512+sparse-128+sparse-256+partial-512",
        "other",
        "self-4K",
    ]
    settings = shared[1].launch.settings or {}
    assert settings["mode"] == "exact" and settings["allow_lossy"] and settings["sparse_tokens"] == 256
    assert ServeSettings(**settings).viewed


def test_tau_by_hand() -> None:
    found = [
        Answer("a", list(range(11)), 10, 5, 5, [1, 2, 1, 1]),  # 10 tokens in 5 verifications
        Answer("b", list(range(4)), 3, 3, 3, [3]),  # 3 in 3
        Answer("c", [1], 0, 0, 0),  # the prefill's token alone
    ]
    figures = tau_figures(found)
    assert figures["tau_micro"] == round(13 / 8, 4) and figures["tau_macro"] == round((2 + 1) / 2, 4)
    assert figures["tau_micro_no_bonus"] == round(5 / 8, 4) and figures["tau_macro_no_bonus"] == 0.5
    assert figures["accept_by_position"] == [0.5, 0.25, 0.125], "4, 2 and 1 of 8 steps"
    assert figures["tokens"] == 13 and figures["verifications"] == 8 and "tau_full" not in figures
    assert tau_figures([found[2]]) == {"tokens": 0, "verifications": 0}


def test_an_answer_is_read_by_what_served_it() -> None:
    meta: dict[str, Any] = {"completion_tokens": 3}
    reply = {"output_ids": [1, 2, 3], "meta_info": meta}
    assert (plain := Answer.read("a", reply)).verifications == plain.gained == 2 and not plain.kept
    meta |= {"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 1]}
    assert Answer.read("a", reply).verifications == 1 and Answer.read("a", reply).kept == [0, 1]
    own = {"full_verifications": 2, "partial_verifications": 3, "accepted": 8, "target_verifications": 2}
    meta["longdraft"] = [{}, {**own, "gained_on_view": 8, "confirmed": 6}]
    views = Answer.read("a", reply)
    assert (views.full, views.verifications, views.gained) == (2, 5, 10)
    figures = tau_figures([views])
    assert (figures["tau_micro"], figures["tau_full"], figures["confirmed_share"]) == (2.0, 5.0, 0.75)


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(512, "512"), (1536, "1.5K"), (2048, "2K"), (8000, "8K"), (7600, "7.6K"), (125_000, "125K")],
)
def test_sizes_in_words(tokens: int, word: str) -> None:
    assert tokens_word(tokens) == word
    assert lengths_in(word)[0] == pytest.approx(tokens, rel=0.03)


def test_what_names_no_length_has_none() -> None:
    assert lengths_in("2K-8K") == [2048, 8192] and lengths_in("...") == lengths_in("chat K") == []


def recipes() -> Iterator[Path]:
    yield from sorted((Path(__file__).parents[3] / "recipes" / "bench").glob("*speed*.yaml"))


@pytest.mark.parametrize("path", list(recipes()), ids=lambda path: path.stem)
def test_recipes_of_speed_are_read(path: Path) -> None:
    settings = load_settings(SpeedSettings, path)
    assert all(isinstance(system, SystemSettings) for system in settings.systems) and settings.name == path.stem


def test_answers_in_bfloat16_may_part_where_candidates_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [(name, [1]) for name in "abc"]
    want = [Answer(name, [1, 2, 3], 2, 2, 2) for name in "abc"]
    got = [want[0], Answer("b", [1, 2, 9], 2, 2, 2), Answer("c", [1, 8, 3], 2, 2, 2)]
    near = {"best": {2: -1.0, 3: -1.0, 8: -1.1, 9: -1.0625}}
    monkeypatch.setattr(token_compare, "candidates", lambda server, ids: near["best"])
    server: Any = None
    assert answers.compared(server, prompts, want, got, exact=True) == {"identical": False, "parted": 2}
    found = answers.compared(server, prompts, want, got, exact=False)
    assert found == {"identical": True, "parted": 2, "largest_gap": 0.1}, "a step at 16 is 0.125"
    near["best"] = {2: -1.0, 3: -1.0, 8: -1.2, 9: -1.0}
    assert answers.compared(server, prompts, want, got, exact=False)["identical"] is False
    near["best"] = {2: -1.0, 3: -1.0}
    assert answers.compared(server, prompts, want, got, exact=False) == {"identical": False, "parted": 2}
    cut = [want[0], want[1], Answer("c", [1, 2], 1, 1, 1)]
    assert answers.compared(server, prompts, want, cut, exact=False)["identical"] is False, "an end is no tie"
    assert answers.compared(server, prompts, want, want, exact=False)["largest_gap"] == 0


def test_where_answers_part() -> None:
    assert token_compare.first_difference([1, 2], [1, 2]) is None and token_compare.same_tokens([1, 2], [1, 2]) == 2
    assert token_compare.first_difference([1, 2, 3], [1, 2]) == 2 and token_compare.first_difference([], [4]) == 0
    assert token_compare.first_difference([1, 5, 3], [1, 6, 3]) == 1


def test_records_name_no_folder_of_this_machine(tmp_path: Path, target: Path, world: World) -> None:
    draft = tmp_path / "drafts" / "mine"
    draft.mkdir(parents=True)
    speed.main([str(write(tmp_path, target, systems=[PLAIN, {"system": "full", "draft": str(draft)}]))])
    record = record_of(tmp_path)
    assert str(tmp_path) not in json.dumps({key: record[key] for key in ("settings", "rows", "sittings")})
    assert record["settings"]["target"]["path"] == target.name and record["rows"][1]["settings"]["draft"] == "mine"


def test_a_command_is_recorded_as_it_is_typed() -> None:
    assert command(["/some/where/bin/longdraft", "bench", "speed", "x.yaml"]) == "longdraft bench speed x.yaml"
    assert command(["-m", "longdraft.bench.arr", "--help"]) == "python -m longdraft.bench.arr --help"
