"""bench acceptance and quality over generated tasks, on played servers: what is asked, what is left out, and scores by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness_world import EXACT, FULL, PLAIN, World, record_of, target, world

from longdraft import cli
from longdraft.bench.harness import acceptance, asking, quality
from longdraft.bench.harness.answers import Answer
from longdraft.bench.harness.settings import AcceptanceSettings, QualitySettings
from longdraft.bench.tasks import Example, Task
from longdraft.schema import load_settings

__all__ = ["target", "world"]
PARTIAL = {**EXACT, "system": "partial"}
COUNTERS = {"full_verifications": 4, "partial_verifications": 6, "accepted": 16, "target_verifications": 4}


def write(folder: Path, tiny: Path, **changes: Any) -> str:
    """A file that both take."""
    said: dict[str, Any] = {
        "name": "try", "record": str(folder / "record.json"), "logs": str(folder / "logs"), "systems": [PLAIN, FULL, PARTIAL],
        "target": {"path": str(tiny)}, "batch": 2,
        "tasks": [{"name": "ruler_single", "count": 3, "prompt_tokens": [900, 1100], "new_tokens": 21}],
    }  # fmt: skip
    path = folder / "try.yaml"
    path.write_text(yaml.safe_dump({**said, **changes}))
    return str(path)


def test_accept_lengths_by_task_and_bucket(tmp_path: Path, target: Path, world: World) -> None:
    world.counters = {"partial": COUNTERS}
    assert acceptance.main([write(tmp_path, target)]) == 0
    record = record_of(tmp_path)
    rows = record["rows"]
    assert all(row["prompt_tokens"] - 300 < row["mean_prompt_tokens"] <= row["prompt_tokens"] for row in rows)
    assert [(row["label"], row["bucket"]) for row in rows] == [
        (label, bucket) for label in ("plain", "full", "partial 512") for bucket in ("900", "1.1K")
    ]
    plain, full, partial = rows[::2]
    assert plain["tau_micro"] == plain["tau_macro"] == 1 and plain["tau_micro_no_bonus"] == 0
    assert full["identical"] and full["n"] == 3 and full["tau_micro"] == 2 and full["tokens"] == 60
    assert "identical" not in partial and (partial["tau_micro"], partial["tau_full"]) == (2, 5)
    assert record["figures"]["full_tau_ruler_single_900"] == 2
    assert all(sampling["ignore_eos"] for sampling in world.sampling), "answers go on behind a stop token"
    kept = [json.loads(line) for line in (tmp_path / "record.answers.jsonl").read_text().splitlines()]
    assert len(kept) == 6 and [len(line["answers"]) for line in kept] == [3] * 6


def test_a_sitting_compares_with_plain_answers_of_an_earlier_one(tmp_path: Path, target: Path, world: World) -> None:
    world.stop = "full"
    with pytest.raises(KeyboardInterrupt):
        acceptance.main([write(tmp_path, target)])
    world.stop, world.asked = None, []
    world.texts = {"full": [1] * 5 + [3 * i for i in range(50)]}
    assert acceptance.main([write(tmp_path, target)]) == 1
    assert None not in world.asked, "plain decoding is not asked again"
    row = record_of(tmp_path)["rows"][2]
    assert not row["ok"] and row["identical"] is False and row["why"] == "answers are not plain decoding's"


def test_loops_are_left_out_of_accept_lengths(tmp_path: Path, target: Path, world: World) -> None:
    world.texts = {"partial": [9] * 100}
    acceptance.main([write(tmp_path, target)])
    row = record_of(tmp_path)["rows"][4]
    assert (
        not row["ok"]
        and row["why"] == "all 3 answers are left out: 3 looping"
        and row["left_out"] == 3
        and row["n"] == 0
    )
    world.texts = {None: [9] * 100, "full": [9] * 100}
    acceptance.main([write(tmp_path, target, seed=5)])
    whys = {row["label"]: row["why"] for row in record_of(tmp_path)["rows"]}
    assert whys["partial 512"] == "all 3 answers are left out: their plain answers loop"


def test_another_length_of_answers_is_measured_again_and_another_task_is_added(
    tmp_path: Path, target: Path, world: World
) -> None:
    one = {"name": "ruler_single", "count": 1, "prompt_tokens": [900], "new_tokens": 21}
    more = {"name": "ruler_variables", "count": 1, "prompt_tokens": [1500]}
    acceptance.main([write(tmp_path, target, tasks=[one])])
    first = record_of(tmp_path)["rows"]
    acceptance.main([write(tmp_path, target, tasks=[one, more])])
    second = record_of(tmp_path)["rows"]
    assert [row for row in second if row["task"] == "ruler_single"] == first and len(second) == 6
    acceptance.main([write(tmp_path, target, tasks=[{**one, "new_tokens": 22}])])
    assert not {row["cell"] for row in record_of(tmp_path)["rows"]} & {row["cell"] for row in first}


def test_scores_are_against_references_and_the_targets_own_answers(tmp_path: Path, target: Path, world: World) -> None:
    world.counters = {"partial": COUNTERS}
    world.texts = {"partial": list(range(70, 91))}
    assert quality.main([write(tmp_path, target)]) == 0
    record = record_of(tmp_path)
    plain, full, partial = record["rows"][::2]
    assert plain["score_own"] == full["score_own"] == 1 and full["exact_match_own"] == 1 and full["identical"]
    assert partial["exact_match_own"] == 0 and partial["metric"] == "needles" and partial["budget"] == 512
    assert partial["score_reference"] == partial["spread"] == 0, "letters are no needle"
    assert partial["mean_new_tokens"] == 21 and partial["tau_micro"] == 2 and full["budget"] is None
    assert record["figures"]["partial_512_score_own_ruler_single_900"] == partial["score_own"]
    assert not any(sampling["ignore_eos"] for sampling in world.sampling)


def test_scores_by_hand(tmp_path: Path, target: Path, world: World) -> None:
    experiment = quality.Quality(load_settings(QualitySettings, write(tmp_path, target)))
    texts = {1: "the red house stands", 2: "a red house stood", 3: "nothing of the kind"}
    experiment.text = lambda answer: texts[answer.tokens[0]]  # type: ignore[method-assign]
    task = Task("t", "question", "f1", (), 9)
    examples = [Example(str(n), "", False, ("red house",), {"language": "en"}) for n in range(2)]
    plain, own = [Answer("0", [1], 0, 0, 0)] * 2, [Answer("0", [2], 0, 0, 0), Answer("1", [3], 0, 0, 0)]
    found = experiment.scores(task, list(zip(examples, plain, own, strict=True)))
    # red house | red house stood: 4 / 5; red house stands | red house stood: 4 / 6; the last has no common word.
    assert found["score_reference"] == 0.4 and found["spread"] == 0.4
    assert found["score_own"] == round(2 / 3 / 2, 4) and found["exact_match_own"] == 0 and found["mean_new_tokens"] == 1


def test_plain_answers_that_say_nothing_leave_nothing_to_score(tmp_path: Path, target: Path, world: World) -> None:
    world.texts = {None: []}
    quality.main([write(tmp_path, target)])
    assert {row["why"] for row in record_of(tmp_path)["rows"]} == {"all 3 plain answers are empty or loop"}


@pytest.mark.parametrize("command", ["acceptance", "quality"])
@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([{"name": "ruler_singel"}], "task 'ruler_singel' is none (did you mean 'ruler_single'?)"),
        ([{"name": "govreport"}], "govreport.jsonl"),
        ([], "tasks=[]: List should have at least 1 item"),
        ([{"name": "ruler_single", "prompt_tokens": []}], "tasks.0.prompt_tokens=[]"),
    ],
)
def test_tasks_that_are_not_there_are_one_line(
    command: str,
    tasks: list[Any],
    said: str,
    tmp_path: Path,
    target: Path,
    world: World,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", command, write(tmp_path, target, tasks=tasks)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1 and not world.asked


def test_chats_are_rendered_in_the_template() -> None:
    class Letters:
        chat_template: str | None = "yes"

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Found", (), {"input_ids": [ord(c) for c in text]})

        def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
            return f"<{chat[0]['content']}>"

    said, tokenizer = Example("a", "ab", True, (), {}), Letters()
    assert asking.rendered(said, tokenizer) == [ord(c) for c in "<ab>"]
    assert asking.rendered(Example("a", "ab", False, (), {}), tokenizer) == [ord(c) for c in "ab"]
    tokenizer.chat_template = None
    assert asking.rendered(said, tokenizer) == [ord(c) for c in "ab"]


@pytest.mark.parametrize(("schema", "kind"), [(AcceptanceSettings, "acceptance"), (QualitySettings, "quality")])
def test_recipes_are_read(schema: Any, kind: str) -> None:
    paths = list((Path(__file__).parents[3] / "recipes" / "bench").glob(f"*{kind}*.yaml"))
    assert len(paths) >= 2
    for path in paths:
        settings = load_settings(schema, path)
        assert settings.name == path.stem and all(asking.answer_length(task) > 1 for task in settings.tasks)
