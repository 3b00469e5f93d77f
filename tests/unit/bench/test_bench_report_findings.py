"""Sentences over pictures follow from the rows, and change with them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_case import acceptance_rows, load_rows, quality_rows, record, row, speed_rows

from longdraft.bench.lengths import tokens_word
from longdraft.bench.report.charts import pictures
from longdraft.bench.report.derive import bucket_key, budget_curves, front, speedups, steps_of, tradeoffs
from longdraft.bench.report.reading import Book, read_book
from longdraft.bench.report.rows import Quality, Speed
from longdraft.bench.report.tables import tables

RESULTS = Path(__file__).parents[3] / "bench" / "results"
Rows = list[dict[str, Any]]


def book_of(folder: Path, *records: Rows) -> Book:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(records):
        (folder / f"r{number}.json").write_text(json.dumps(record(f"r{number}", rows)))
    return read_book([folder])


def finding(book: Book, name: str) -> str:
    return next(picture.finding for picture in pictures(book) if picture.name == name).replace("\u00a0", " ")


def changed(rows: Rows, where: Callable[[dict[str, Any]], bool], **change: Any) -> Rows:
    found = [each | change if where(each) else each for each in rows]
    assert found != rows
    return found


def test_the_fastest_is_named_with_its_cell(tmp_path: Path) -> None:
    said = finding(book_of(tmp_path / "a", speed_rows()), "speedup_plain")
    assert said.startswith(f"sparse 512 decodes {6900 / 759:.2f} times as fast as plain decoding at batch 16 × 32K;")
    assert said.endswith(f"exact 4K is fastest, {3300 / 759:.2f} times at batch 16 × 32K")

    def slow(each: dict[str, Any]) -> bool:
        return each["system"] in ("sparse", "partial")

    said = finding(book_of(tmp_path / "b", changed(speed_rows(), slow, alpha=100.0)), "speedup_plain")
    assert (
        said
        == f"exact 4K decodes {3300 / 759:.2f} times as fast as plain decoding at batch 16 × 32K; 12 of 28 cells are slower"
    )

    def others(each: dict[str, Any]) -> bool:
        return each["system"] != "plain"

    said = finding(book_of(tmp_path / "c", changed(speed_rows(), others, alpha=100.0)), "speedup_plain")
    assert said.startswith("nothing is faster than plain decoding: ") and said.endswith("28 of 28 cells are slower")


def test_speedups_are_within_one_record_and_carry_both_spreads(tmp_path: Path) -> None:
    double = [each | {"alpha": each["alpha"] * 2} if "alpha" in each else each for each in speed_rows()]
    found = speedups(book_of(tmp_path, speed_rows(), double))
    assert list(found) == ["plain"]
    by_source = {
        source: {(e.row.name, e.row.case): e.value for e in found["plain"] if e.row.source == source}
        for source in ("r0", "r1")
    }
    assert by_source["r0"] == pytest.approx(by_source["r1"])
    each = next(e for e in found["plain"] if e.row.name == "full")
    assert each.spread == pytest.approx(each.value * (0.02**2 + 0.02**2) ** 0.5)
    assert all(e.spread is None and e.value == 1 for e in found["plain"] if e.row is e.base)


def test_a_record_without_plain_decoding_is_given_against_eagle3(tmp_path: Path) -> None:
    rows = [each for each in speed_rows() if each["system"] != "plain"]
    book = book_of(tmp_path, rows)
    assert list(speedups(book)) == ["eagle3"]
    assert f"{6900 / 2335:.2f} times as fast as SGLang's EAGLE-3" in finding(book, "speedup_eagle3")


def test_tau_is_of_the_longest_bucket_and_of_enough_answers(tmp_path: Path) -> None:
    said = finding(book_of(tmp_path / "a", acceptance_rows()), "accept_length")
    assert said == (
        "at 16K tokens full gains 3.30 tokens a verification on lcc (2.30 without the bonus token; 20 answers), 0.30 fewer than at 2K"
    )
    high = row("exact", "exact", task="qmsum", bucket="32K", tau_micro=4.5, tau_micro_no_bonus=3.5)
    said = finding(book_of(tmp_path / "b", [*acceptance_rows(), high]), "accept_length")
    assert said.startswith("at 32K tokens exact gains 4.50") and said.endswith("1.70 more than at 2K")
    said = finding(book_of(tmp_path / "c", [*acceptance_rows(), high | {"n": 4}]), "accept_length")
    assert said.startswith("at 16K tokens full gains 3.30")


def test_closeness_is_told_at_the_smallest_and_the_largest_budget(tmp_path: Path) -> None:
    said = finding(book_of(tmp_path / "a", quality_rows()), "quality")
    assert said == (
        "at 512 tokens sparse is closest to the target's own output (0.63; the worst of 2 has 0.20), "
        "at 4K tokens partial (0.93; the worst of 2 has 0.41)"
    )
    better = changed(quality_rows(), lambda each: each["system"] == "streaming", score_own=0.99)
    assert "at 4K tokens StreamingLLM (0.99; the worst of 2 has 0.93)" in finding(
        book_of(tmp_path / "b", better), "quality"
    )


def test_a_lossless_system_is_no_point_of_the_budgets(tmp_path: Path) -> None:
    exact = quality_rows()[0] | {"system": "exact", "label": "exact 8K", "settings": {"budget": 8192}, "budget": 8192}
    assert "8K" not in finding(book_of(tmp_path, [*quality_rows(), exact]), "quality")


def test_the_front_holds_what_nothing_beats(tmp_path: Path) -> None:
    book = book_of(tmp_path / "a", speed_rows(), quality_rows())
    case, baseline, points = tradeoffs(book)
    assert (case, baseline, len(points)) == ("16 × 32K", "plain", 8)
    assert [p.name for p in front(points)] == ["sparse 512", "partial 2K", "partial 4K", "exact 4K"]
    said = finding(book, "pareto")
    assert "sparse 512 (9.09 ×, 0.63)" in said and "exact 4K (4.35 ×, 1.00); the other 4 gain nothing" in said
    worse = changed(quality_rows(), lambda each: each["system"] == "sparse", score_own=0.9)
    names = [p.name for p in front(tradeoffs(book_of(tmp_path / "b", speed_rows(), worse))[2])]
    assert names == ["sparse 512", "partial 4K", "exact 4K"]


def test_there_is_no_front_without_the_text_of_a_lossy_system(tmp_path: Path) -> None:
    assert tradeoffs(book_of(tmp_path, speed_rows())) == ("", "", [])


def test_steps_tell_the_slowest_and_the_fastest_of_the_largest_case(tmp_path: Path) -> None:
    slow = changed(
        speed_rows(), lambda each: each["system"] == "sparse" and each.get("batch") == 16, phases={"draft": 5.0, "verify": 15.0}
    )  # fmt: skip
    book = book_of(tmp_path, slow)
    assert finding(book, "steps") == (
        "at batch 16 × 32K a step takes sparse 512 20.0 ms, 75% of it verification; partial 2K 10.2 ms, 75% of it verification"
    )
    assert max(step.step for step in steps_of(book)) == 20


def test_load_is_told_at_the_highest_rate_of_all(tmp_path: Path) -> None:
    alone = row(
        "full", "full", rate=8.0, requests=9, tok_s=9e3, ttft_p50_ms=1, ttft_p99_ms=1, itl_p50_ms=1, itl_p99_ms=1
    )
    said = finding(book_of(tmp_path, [*load_rows(), alone]), "load")
    assert (
        said.startswith("at 4 requests a second full gives most tokens (5,600 a second)")
        and "(99 % within 120.0 ms)" in said
    )


@pytest.mark.parametrize(
    ("record_name", "figures"),
    [
        ("modes_speed_h200", ("longdraft_partial_tok_s_b16_c32k", "longdraft_exact_tok_s_b16_c32k")),
        ("full_mode_speed_h200", ("longdraft_tok_s_b1_c32k",)),
    ],
)
def test_findings_of_records_agree_with_them(record_name: str, figures: tuple[str, ...]) -> None:
    path = RESULTS / f"{record_name}.json"
    said = finding(read_book([path]), "speedup_eagle3")
    assert said.startswith("at a forced accept length of 4, ")  # which proves time only
    stored = json.loads(path.read_text())["figures"]
    for name in figures:
        case = name.partition("tok_s_")[2]
        assert f"{stored[name] / stored[f'eagle3_tok_s_{case}']:.2f} times" in said, said


def test_every_figure_of_a_finding_stands_in_a_table_or_a_picture() -> None:
    book = read_book([RESULTS])
    shown = " ".join(cell for table in tables(book) for line in table.rows for cell in line)
    shown += " ".join(f"{step.step:.1f} ms" for step in steps_of(book))
    for picture in pictures(book):
        for figure in re.findall(r"\d+\.\d+(?= times| tokens| ms)", picture.finding):
            assert figure in shown, (picture.name, figure)


def test_buckets_come_in_the_order_of_their_lengths() -> None:
    assert sorted([">32K", "8K", "2K-8K", "<2K", "16K", "500", "2K", "chat"], key=bucket_key) == [
        "500", "<2K", "2K", "2K-8K", "8K", "16K", ">32K", "chat",
    ]  # fmt: skip


def test_lengths_and_names_are_said_shortly() -> None:
    assert [tokens_word(n) for n in (512, 2048, 7900, 32000, 32768, 125000)] == [
        "512",
        "2K",
        "7.9K",
        "32K",
        "32K",
        "125K",
    ]
    rows = [
        Quality(system="partial", label=f"partial {word}", task="a", metric="f1", budget=b)
        for b, word in ((2048, "2K"), (4096, "4K"))
    ]
    assert {name: [r.budget for r in own] for name, own in budget_curves(rows).items()} == {"partial": [2048, 4096]}
    assert Quality(system="sparse", label="512", task="a", metric="f1", budget=512).bare_name == "sparse"
    assert Speed(system="full", batch=1, context=8192, tok_s=3).rate == 3
