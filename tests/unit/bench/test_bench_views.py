"""What the benchmarks of views compute, without a server."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_model

from longdraft.bench import steady_arrivals, view_agreement, view_quality
from longdraft.bench.gpu_full_speed import LOOKAHEAD, check_systems, launch_command, sparse_recipe, steady
from longdraft.bench.steady_arrivals import LONGEST, SHORTEST, Served, figures_of, lengths, percentile
from longdraft.bench.token_compare import same_tokens
from longdraft.bench.view_agreement import Case, command, summed
from longdraft.bench.view_quality import quality, rouge_l
from longdraft.errors import UserError
from longdraft.serve.settings import ServeSettings


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    score = rouge_l()
    assert score("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(100)
    assert score("a b c d", "a x c") == pytest.approx(100 * 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert score("one", "two") == 0


def test_quality_is_given_against_the_target_and_against_references() -> None:
    rows = [
        {"case": "mass_512", "id": "a", "plain": [1, 2, 3, 4], "partial": [1, 2, 3, 4]},
        {"case": "mass_512", "id": "b", "plain": [1, 2, 3, 4], "partial": [1, 2, 9, 9]},
        {"case": "quest_512", "id": "c", "plain": [5], "partial": [6]},
    ]
    words = {i: f"w{i}" for i in range(10)}

    def decode(ids: list[int]) -> str:
        return " ".join(words[i] for i in ids)

    found = quality(rows, decode, {"a": "w1 w2 w3 w4", "b": ""}, rouge_l())
    assert found["mass_512_exact_match"] == 0.5 and found["mass_512_answers"] == 2
    assert found["mass_512_rouge_l_to_target"] == pytest.approx((100 + 50) / 2)
    assert found["mass_512_references"] == 1 and found["mass_512_rouge_l_to_reference"] == pytest.approx(100)
    assert "quest_512_references" not in found and found["quest_512_rouge_l_to_target"] == 0


def test_answers_become_a_record(tmp_path: Path) -> None:
    target = tiny_model("llama", tmp_path / "target")
    answers, documents, record = (tmp_path / name for name in ("a.jsonl", "d.jsonl", "r.json"))
    answers.write_text(json.dumps({"case": "mass_64", "id": "x", "plain": [65, 66], "partial": [65, 66]}) + "\n")
    documents.write_text(json.dumps({"id": "x", "text": "t", "summary": "AB"}) + "\n")
    words = ["--target", str(target), "--answers", str(answers), "--documents", str(documents), "--record", str(record)]
    assert view_quality.main(words) == 0
    figures = json.loads(record.read_text())["figures"]
    assert figures["mass_64_exact_match"] == 1 and figures["mass_64_rouge_l_to_target"] == pytest.approx(100)
    answers.write_text("\n")
    with pytest.raises(UserError, match="holds no answers"):
        view_quality.main(words)


def test_lengths_are_log_uniform_and_the_same_for_every_system() -> None:
    drawn = lengths(4000)
    assert drawn == lengths(4000) and min(drawn) >= SHORTEST and max(drawn) <= LONGEST
    assert sum(n < math.sqrt(SHORTEST * LONGEST) for n in drawn) == pytest.approx(2000, abs=120)


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.99, 4), (0.25, 1), (1.0, 4)])
def test_percentiles_are_values(share: float, value: float) -> None:
    assert percentile([4, 1, 3, 2], share) == value
    assert percentile([], share) == 0


def test_latencies_are_those_of_tokens() -> None:
    one, two, lost = Served(10.0), Served(12.0), Served(13.0)
    one.chunk(11.0, 1)
    one.chunk(11.5, 4)  # three tokens at once have waited half a second together
    two.chunk(12.5, 1)
    two.chunk(12.5 + 0.5 / 3, 2)
    one.counters = {"partial_verifications": 3, "full_verifications": 1}
    lost.error = "refused"
    found = figures_of([one, two, lost])
    assert found["answered"] == 2 and found["failed"] == 1
    assert found["tok_s"] == pytest.approx(6 / (2.5 + 0.5 / 3))
    assert found["first_token_p50_s"] == 0.5 and found["first_token_p99_s"] == 1.0
    assert found["between_tokens_p50_ms"] == found["between_tokens_p99_ms"] == pytest.approx(500 / 3, abs=1e-3)
    assert found["between_chunks_p99_ms"] == 500
    assert one.row() == {"tokens": 4, "chunks_ms": "1000.0 1500.0", "counters": one.counters, "error": None}
    assert found["partial_share"] == 0.75
    assert "partial_share" not in figures_of([two])
    assert figures_of([lost])["tok_s"] == 0


def test_requests_are_sent_on_time_and_all_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(server: Any, ids: list[int], new_tokens: int, served: Served) -> None:
        served.chunk(served.sent + 0.01, new_tokens)

    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(steady_arrivals, "request", answer)
    monkeypatch.setattr(steady_arrivals, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep))
    found = steady_arrivals.run(None, rate=50, seconds=0.2, new_tokens=3)  # type: ignore[arg-type]
    assert len(found) == 10 and all(len(s.times) == 3 for s in found)
    assert [s.sent - 100 for s in found] == pytest.approx([n / 50 for n in range(10)])


@pytest.mark.parametrize("before", [0, 1, 2])
def test_full_verifications_among_partial_ones_are_no_gaps(before: int) -> None:
    """Whatever is left of earlier answers."""

    def line(ms: float, batch: int = 2) -> dict[str, Any]:
        return {"batch": batch, "wall_ms": ms / 2, "gap_ms": ms / 2}

    lines = (
        [line(10.0)] * before
        + [line(900.0), line(3.0), line(2.0)]
        + [line(10.0)] * 6
        + [line(30.0)] * 2
        + [line(10.0, 1), {"batch": 2, "wall_ms": 1, "gap_ms": None}]
    )
    found = steady(lines, 2, 4.0)
    assert found["steady_ms_step"] == pytest.approx((60 + 60) / 8)
    assert found["steady_tok_s"] == pytest.approx(1000 * 2 * 4 / 15)
    assert steady([], 2, 4.0) == {}


def test_systems_of_ours_say_their_mode(tmp_path: Path) -> None:
    models = {name: tmp_path / name for name in ("target", "eagle3", "longdraft", "longdraft-eagle3", "counts")}
    modes = {}
    for system in ("longdraft", "longdraft-exact", "longdraft-eagle3-partial", "longdraft-exact-sync"):
        words, environment = launch_command(system, models, 1000)
        given = json.loads(environment["LONGDRAFT_SETTINGS"])
        assert given.get("allow_lossy", False) == system.endswith("-partial")
        modes[system] = given.get("mode"), words[words.index("--speculative-draft-model-path") + 1]
        assert ("--disable-overlap-schedule" in words) == system.endswith("-sync")
    assert modes == {
        "longdraft": (None, str(models["longdraft"])),
        "longdraft-exact": ("exact", str(models["longdraft"])),
        "longdraft-eagle3-partial": ("partial", str(models["longdraft-eagle3"])),
        "longdraft-exact-sync": ("exact", str(models["longdraft"])),
    }
    for system, selector in (("longdraft-exact", None), ("longdraft-exact-sets", "dustin")):
        given = json.loads(launch_command(system, models, 1000)[1]["LONGDRAFT_SETTINGS"])
        assert (given["mode"], given.get("view_selector")) == ("exact", selector)
    for ranks in (1, 2):
        words, _ = launch_command("eagle3", models, 1000, ranks=ranks)
        assert ("--tp-size" in words) == (ranks > 1) and (
            words[words.index("--tp-size") + 1] == "2" if ranks > 1 else True
        )


def test_sparse_sets_are_timed_with_a_recipe_too(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    models = {name: tmp_path / name for name in ("target", "longdraft", "counts")} | {"longdraft-recipe": path}
    sparse_recipe(31).save(path)
    for system, recipe in (("longdraft-sparse", None), ("longdraft-sparse-recipe", str(path))):
        words, environment = launch_command(system, models, 1000)
        given = json.loads(environment["LONGDRAFT_SETTINGS"])
        assert (given["mode"], given.get("sparse_recipe"), given.get("view_selector")) == ("sparse", recipe, None)
        assert words[words.index("--speculative-draft-model-path") + 1] == str(models["longdraft"])
    found = ServeSettings(**given)
    assert found.set_budget().lookahead == LOOKAHEAD and found.recipe() == sparse_recipe(31)


@pytest.mark.parametrize("system", ["vllm", "longdraft-eagle2", "longdraft-lossy", "eagle3-windows"])
def test_what_is_no_system_is_refused_before_a_server_starts(tmp_path: Path, system: str) -> None:
    names = ("target", "eagle3", "longdraft", "longdraft-eagle3", "counts")
    models = {name: tmp_path / name for name in names}
    check_systems(["plain", "eagle3", "eagle3-window", "longdraft", "longdraft-eagle3-partial-eager"], models)
    with pytest.raises(UserError, match=f"'{system}' is none: give plain"):
        check_systems(["plain", system], models)


def test_a_language_model_drafts_shorter_chains(tmp_path: Path) -> None:
    names = ("target", "longdraft", "longdraft-lm", "longdraft-lm-whole", "counts")
    models = {name: tmp_path / name.removesuffix("-whole") for name in names}
    seen = {}
    for system in ("longdraft", "longdraft-lm", "longdraft-lm-whole-exact"):
        words, environment = launch_command(system, models, 1000)
        given = json.loads(environment["LONGDRAFT_SETTINGS"])
        folder, steps = (words[words.index(f"--speculative-{name}") + 1] for name in ("draft-model-path", "num-steps"))
        seen[system] = Path(folder).name, int(steps), given.get("draft_context"), "draft_head_tokens" in given
    assert seen == {
        "longdraft": ("longdraft", 5, None, True),
        "longdraft-lm": ("longdraft-lm", 4, None, False),
        "longdraft-lm-whole-exact": ("longdraft-lm", 4, 1000, False),
    }


def test_agreement_counts_tokens_of_all_answers() -> None:
    counters = {
        "gained_on_view": 20,
        "confirmed": 15,
        "cycles_refused": 1,
        "full_verifications": 1,
        "partial_verifications": 20,
    }
    answers = [{"meta_info": {"longdraft": [{}, counters]}}] * 3
    assert summed(answers)["confirmed"] == 45
    assert same_tokens([1, 2, 3], [1, 2, 4]) == 2 and same_tokens([1, 2], [1, 2, 3]) == 2
    args = view_agreement.parse(["--target", "T", "--documents", "D", "--record", "R"])
    args.dtype = "float32"
    words, environment = command(args, Case("quest", 512), True)
    given = json.loads(environment["LONGDRAFT_SETTINGS"])
    assert given["view_selector"] == "quest" and given["view_tokens"] == 512 and given["self_draft"]
    assert words.count("--dtype") == 1
