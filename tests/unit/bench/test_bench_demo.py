"""The demo's parts that need no server: repetition, text, training facts, the record and its picture."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.bench import demo, demo_modes, demo_report, demo_training
from longdraft.bench.demo import DemoSettings, Servers
from longdraft.bench.demo_modes import ModeAnswers, ask_modes, mode_checks, mode_line, mode_rows
from longdraft.bench.demo_record import TAU_EXPECTED, Answers, best_draft, make_record
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
from longdraft.bench.readme_tables import RESULTS
from longdraft.bench.server import Generation, server_sent
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.repetition import repeated_share
from longdraft.errors import UserError
from longdraft.train.config import ObjectiveSettings

STEPS = {"longspec": 3, "eagle3": 4}


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


def generation(tokens: list[int], speed: float, accepted: int | None = None) -> Generation:
    counters = {"target_verifications": 10, "drafted": 30, "accepted": accepted}
    counters |= {"tau": 1 + (accepted or 0) / 10, "tau_without_bonus": (accepted or 0) / 10}
    return Generation(tokens, "text", speed, {} if accepted is None else counters)


def answers(name: str, length: int, tokens: list[int], other: list[int] | None = None, fast: float = 12.0) -> Answers:
    drafted = {"longspec": generation(tokens, fast, 15), "eagle3": generation(other or tokens, 11.0, 12)}
    return Answers(Prompt(name, "text", length), [1] * length, generation(tokens, 10.0), drafted, [])


CALM = list(range(20))


def modes(exact_speed: float = 16.0, exact_tokens: list[int] | None = None) -> dict[str, Any]:
    answers = ModeAnswers([1] * 5200)
    speeds = {"off": 10.0, "full": 12.0, "exact": exact_speed, "partial": 20.0}
    for mode, speed in speeds.items():
        own = {"exact": exact_tokens or CALM, "partial": [*CALM[:7], 99, *CALM[8:]]}.get(mode, CALM)
        answers.found[mode] = [generation(own, speed * f, 15) for f in (0.5, 1.0, 3.0)]
        answers.found[mode][0].counters.update(gained_on_view=40, confirmed=30)
    return mode_rows(answers, "longspec")


def test_modes_are_compared_by_their_middle_turns() -> None:
    made = modes()
    assert [made["rows"][m]["ratio"] for m in ("off", "full", "exact", "partial")] == [1.0, 1.2, 1.6, 2.0]
    assert made["rows"]["partial"]["tokens_before_the_first_other"] == 7 and not made["rows"]["partial"]["identical"]
    assert all(mode_checks(made).values())
    line = mode_line(made, "LongSpec")
    assert "exact 1.60×" in line and "30 of 40" in line and "7 of 20" in line
    assert [passed for _, passed in mode_checks(modes(11.0)).items()] == [True, False]
    assert [passed for _, passed in mode_checks(modes(16.0, [5])).items()] == [False, True]


def test_the_prompt_of_the_modes_is_longer_than_the_others() -> None:
    assert (demo_modes.prompt().tokens or 0) >= 5000


def test_every_mode_is_asked_in_every_turn_and_another_one_first() -> None:
    asked: list[str | None] = []

    class Fake:
        def generate(self, ids: list[int], new_tokens: int, mode: str | None = None) -> Generation:
            asked.append(mode)
            return generation(CALM, 1.0, 1)

    found = ask_modes(Fake(), [1, 2, 3], 8)  # type: ignore[arg-type]
    assert asked[0] is None and [asked[1 + 4 * turn] for turn in range(3)] == ["off", "full", "exact"]
    assert all(len(found.found[mode]) == 3 for mode in ("off", "full", "exact", "partial"))


@pytest.fixture
def record() -> dict[str, Any]:
    asked = [answers("chat: summary", 50, CALM), answers("loops", 900, [3] * 20), answers("long", 4300, CALM)]
    asked[1].drafted["longspec"].counters["accepted"] = 30
    pairs = [(10.0, 11.0), (10.0, 13.0), (8.0, 6.0)]
    training = {"steps": 40, "tokens": 40000, "loss_before": 1.5, "loss_after": 1.4, "checkpoint": "c", "seconds": 60}
    return make_record({"new_tokens": 64, "pairs": 3}, STEPS, asked, "longspec", pairs, training, modes())


def test_the_record_pools_counts_by_draft_and_takes_the_median_of_the_pairs(record: dict[str, Any]) -> None:
    assert record["identical"] is True
    longspec, eagle3 = record["drafts"]["longspec"], record["drafts"]["eagle3"]
    assert (longspec["steps"], longspec["drafted"], longspec["accepted"], longspec["verifications"]) == (3, 90, 60, 30)
    assert (longspec["tau"], longspec["tau_without_bonus"], longspec["tau_not_repetitive"]) == (3.0, 2.0, 2.5)
    assert (eagle3["steps"], eagle3["tau"], eagle3["tau_not_repetitive"]) == (4, 2.2, 2.2)
    assert (record["figures"]["longspec_tau"], record["figures"]["eagle3_tau"]) == (3.0, 2.2)
    assert (record["speed"]["draft"], record["speed"]["median_ratio"]) == ("longspec", 1.1)
    assert record["speed"]["context_tokens"] == 4300
    assert [row["repetitive"] for row in record["prompts"]] == [False, True, False]
    assert all(record["checks"].values())


def test_other_tokens_and_other_chat_texts_are_seen_for_either_draft() -> None:
    differs = answers("short", 50, [1, 2, 3, 4], [1, 2, 3, 5])
    assert differs.same("longspec") and not differs.same("eagle3") and not differs.identical
    chat = answers("short", 50, [1, 2])
    chat.texts = ["a", "a", "b"]
    assert not chat.identical
    record = make_record({}, STEPS, [differs], "eagle3", [(10.0, 9.0)], {}, modes())
    assert not record["identical"]
    assert not record["checks"]["identical"]


def test_a_draft_that_never_drafts_fails_the_check() -> None:
    silent = answers("short", 50, CALM)
    silent.drafted["eagle3"] = generation(CALM, 10.0)
    record = make_record({}, STEPS, [silent], "longspec", [(10.0, 12.0)], {}, modes())
    assert not record["checks"]["drafted"]
    assert (record["drafts"]["eagle3"]["tau"], record["checks"]["EAGLE-3: tau at least 1.5"]) == (1.0, False)


@pytest.mark.parametrize(("accepted", "reached"), [(4, False), (5, True)])
def test_a_draft_is_expected_to_keep_up_with_its_record(accepted: int, reached: bool) -> None:
    asked = answers("long", 4300, CALM)
    asked.drafted["longspec"] = generation(CALM, 12.0, accepted)
    checks = make_record({}, STEPS, [asked], "longspec", [(10.0, 12.0)], {}, modes())["checks"]
    assert checks["LongSpec: tau at least 1.5"] is reached and checks["EAGLE-3: tau at least 1.5"]


def test_what_is_expected_is_no_more_than_four_fifths_of_the_cards_figures() -> None:
    rows = json.loads((RESULTS / "shipped_score_h200.json").read_text())["rows"]
    reached = {row["draft"]: row["reached_depth"] for row in rows if row["group"] == "2048"}
    for kind, steps in demo.STEPS.items():
        assert 1.3 <= TAU_EXPECTED[kind] <= 0.8 * (1 + sum(reached[kind][:steps]))


def test_the_better_draft_is_the_one_that_speeds_up_the_middle_prompt() -> None:
    fast, slow = answers("a", 9, CALM, fast=100.0), answers("b", 9, CALM, fast=10.5)
    assert best_draft([fast]) == "longspec"
    assert best_draft([fast, slow, slow]) == "eagle3"


def test_the_report_is_a_table_a_json_file_and_a_picture(record: dict[str, Any], tmp_path: Path) -> None:
    console = Console(record=True, width=80)
    demo_report.show(record, console)
    demo_report.write(record, tmp_path)
    text = console.export_text()
    flat = " ".join(text.split())
    assert "…" not in text, "an ordinary terminal shows every column whole"
    assert "chat: summary" in text and "loops !" in text
    assert "2.50 (1.50) 1.20×" in text and "2.20 (1.20) 1.10×" in text
    assert "1.500 (the shipped draft) -> 1.400" in flat
    assert "τ without these prompts: LongSpec 2.50, EAGLE-3 2.20" in flat
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads((tmp_path / "report.json").read_text()) == record
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_shipped_drafts_are_served_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longdraft.models.shipped_draft", Path)
    found = DemoSettings(eagle3="mine").drafts()
    assert found == {"longspec": Path("smollm2-135m/longspec"), "eagle3": Path("mine")}
    servers = demo.make_servers(DemoSettings(), Path("out"), Path("model"), found)
    assert list(servers) == ["plain", "longspec", "eagle3"]
    words = servers["eagle3"].command
    assert words[words.index("--draft") + 1] == "mine" and words[words.index("--steps") + 1] == str(
        demo.STEPS["eagle3"]
    )
    assert "--speculative-algorithm" not in servers["plain"].command
    assert DemoSettings(steps=2).chain("longspec") == 2


class Recorded:
    """In a server's place: what was done to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def test_one_server_runs_at_a_time() -> None:
    three = {name: Recorded() for name in ("plain", "longspec", "eagle3")}
    got = Servers(three).only("longspec")  # type: ignore[arg-type]
    assert got is three["longspec"]  # type: ignore[comparison-overlap]
    assert [three[name].calls for name in three] == [["pause"], ["resume"], ["pause"]]


def test_the_loss_of_a_draft_is_that_of_its_text_alone(tmp_path: Path) -> None:
    """Documents are packed, positions start anew, and none sees another."""
    target = tiny_target("llama", num_hidden_layers=4)
    save_draft(tiny_draft(target, window=16), tmp_path / "draft", "t")
    one, two = ([[5, 6, 7, 8, 9], [7, 3, 1, 2]][i] for i in (0, 1))
    batch = demo_training.packed([one, two])
    assert (batch.cu, batch.supervised) == ([0, 5, 9], 7)
    assert batch.position_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.label_T.tolist() == [6, 7, 8, 9, -100, 3, 1, 2, -100]

    def loss(*documents: list[int]) -> float:
        made = demo_training.packed(documents)
        return demo_training.mean_loss(tmp_path / "draft", target, made, ObjectiveSettings(name="kl"))

    assert loss(one, two) == pytest.approx((4 * loss(one) + 3 * loss(two)) / 7, rel=1e-5)
    assert loss(one) > 0


def test_an_eagle3_draft_is_not_trained_on(tmp_path: Path) -> None:
    target = tiny_target("llama", num_hidden_layers=4)
    save_draft(tiny_eagle3(target), tmp_path / "draft", "t")
    with pytest.raises(UserError, match="no LongSpec draft"):
        demo_training.mean_loss(tmp_path / "draft", target, demo_training.packed([[1, 2]]), ObjectiveSettings())


def test_the_training_continues_from_the_draft_and_gives_both_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, commands = tiny_target("llama", num_hidden_layers=4), []

    def trainer(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        facts = TrainingFacts(steps=7, tokens=700)
        save_draft(tiny_draft(target, window=16), tmp_path / "runs/demo/checkpoints/step-00000007/draft", "t", facts)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo_training.subprocess, "run", trainer)
    monkeypatch.setattr(demo_training, "held_out_losses", lambda model, drafts, objective: [2.0, 1.0])
    facts = demo_training.train(tmp_path, Path("model"), Path("shipped"), ["schedule.max_steps=7"])
    assert "draft.init_from=shipped" in commands[0] and commands[0][-1] == "schedule.max_steps=7"
    assert (facts["loss_before"], facts["loss_after"], facts["steps"], facts["tokens"]) == (2.0, 1.0, 7, 700)
    assert facts["objective"] == "greedy" and "step-00000007" in facts["checkpoint"]


def test_a_training_that_failed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, message in ((3, "exit status 3"), (0, "left no checkpoint")):
        done = subprocess.CompletedProcess([], status)
        monkeypatch.setattr(demo_training.subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(UserError, match=message):
            demo_training.train(tmp_path, Path("model"), Path("shipped"), [])


def test_server_sent_events() -> None:
    lines = [b'data: {"a": 1}\n', b"\n", b": comment\n", b'data: {"a": 2}\n', b"data: [DONE]\n"]
    assert [event["a"] for event in server_sent(iter(lines))] == [1, 2]
