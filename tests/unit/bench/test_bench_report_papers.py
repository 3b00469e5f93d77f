"""The papers' tables beside ours, and older records as rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_case import acceptance_rows, quality_rows, record, row, speed_rows, write_records

from longdraft.bench.report.charts import pictures
from longdraft.bench.report.papers import NOT_MEASURED, UNKNOWN, PaperTable, printed, tables
from longdraft.bench.report.reading import Book, read_book
from longdraft.bench.report.rows import Acceptance, Quality, Speed, Steps

RESULTS = Path(__file__).parents[3] / "bench" / "results"
KEYS = ("longspec_1", "specpv_1", "specpv_3", "dustin_1", "dustin_2", "dustin_3", "dustin_8")


def of_papers(book: Book) -> dict[str, PaperTable]:
    return dict(zip(KEYS, tables(book), strict=True))


def book_of(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Book:
    (folder / "r.json").write_text(json.dumps(record("r", rows, **settings)))
    return read_book([folder])


def cell(table: PaperTable, name: str, column: str) -> str:
    return {**table.theirs, **table.ours}[name][table.columns.index(column)]


def test_the_papers_figures_are_whole() -> None:
    assert tuple(printed()) == KEYS
    for own in printed().values():
        assert all(len(cells) == len(own["columns"]) for cells in own["rows"].values())


def test_what_is_not_measured_says_so() -> None:
    for key, table in of_papers(Book()).items():
        assert table.measured == 0 and table.ours, key
        assert {cell for cells in table.ours.values() for cell in cells} == {NOT_MEASURED}
        assert table.why == "Nothing of this table is in the records."
        assert all(name.startswith("paper: ") for name in table.theirs) and all(
            name.startswith("ours: ") for name in table.ours
        )


def test_cells_of_the_papers_are_theirs() -> None:
    found = of_papers(Book())
    assert cell(found["dustin_2"], "paper: Qwen2.5-72B, Dustin, batch 16", "32K") == "235.81 / 2.2 / 9.17"
    assert cell(found["longspec_1"], "paper: Vicuna-7B, LongSpec", "LCC") == "3.73 / 107.3 / 1.99"
    assert cell(found["specpv_1"], "paper: SpecPV, best budget", "60K") == "6.29 / unknown"
    assert cell(found["specpv_1"], "paper: TriForce, 4K", "10K") == UNKNOWN


def test_acceptance_stands_beside_longspecs(tmp_path: Path) -> None:
    table = of_papers(book_of(tmp_path, acceptance_rows()))["longspec_1"]
    # Verifications are 5,000 tokens by τ, so that the micro mean over buckets is a harmonic one.
    wanted = 3 / (1 / 3.2 + 1 / 3.05 + 1 / 2.9)
    assert cell(table, "ours: LongSpec (mode full)", "GovReport") == f"{wanted:.2f} / {NOT_MEASURED} / {NOT_MEASURED}"
    assert cell(table, "ours: LongSpec (mode full)", "Multi-News") == NOT_MEASURED
    assert table.why.startswith("Ours: a model on a card. The paper")


def test_speed_stands_beside_specpvs_and_dustins(tmp_path: Path) -> None:
    book = book_of(tmp_path, speed_rows())
    found = of_papers(book)
    specpv, dustin = found["specpv_1"], found["dustin_2"]
    assert specpv.columns == ["8K", "10K", "20K", "30K", "32K", "40K", "50K", "60K"]
    assert cell(specpv, "ours: partial 4K", "32K") == f"{514 / 163:.2f} / 3.00"
    assert cell(specpv, "ours: partial 4K", "10K") == NOT_MEASURED
    assert cell(specpv, "paper: SpecPV, best budget", "32K") == "–"
    assert cell(dustin, "ours: sparse 512, batch 16", "32K") == f"6,900.0 / 4.00 / {6900 / 759:.2f}"
    assert cell(dustin, "ours: plain, batch 16", "8K") == "1,900.0 / – / 1.00"
    assert found["specpv_3"].measured == 0


def test_qwen_goes_into_the_table_of_qwen(tmp_path: Path) -> None:
    found = of_papers(book_of(tmp_path, speed_rows(), model="Qwen3-8B shape"))
    assert (
        found["specpv_1"].measured == 0
        and cell(found["specpv_3"], "ours: partial 2K", "8K") == f"{515 / 210:.2f} / 3.00"
    )


def test_quality_stands_beside_dustins_by_category(tmp_path: Path) -> None:
    table = of_papers(book_of(tmp_path, quality_rows()))["dustin_1"]
    assert cell(table, "ours: full cache", "Few-shot") == "80.00 (1 of 4 tasks)"
    assert cell(table, "ours: sparse, 512 tokens", "Summarization") == f"{100 * 0.24 * 0.63:.2f} (1 of 5 tasks)"
    assert cell(table, "ours: sparse, 512 tokens", "Code") == cell(table, "ours: full cache", "Average") == NOT_MEASURED


def test_halves_of_a_set_stand_beside_dustins(tmp_path: Path) -> None:
    rows = quality_rows()
    for label, lookahead, score in (("sparse T 512", 0, 0.7), ("sparse D 512", 492, 0.75), ("sparse H 512", 192, 0.78)):
        settings = {"budget": 512, "settings": {"sparse_lookahead": lookahead}}
        rows.append(
            row("sparse", label, task="triviaqa", metric="f1", budget=512, score_reference=score)
            | {"settings": settings}
        )
    rows = [each for each in rows if each["label"] != "sparse 512"]
    table = of_papers(book_of(tmp_path, rows))["dustin_3"]
    wanted = {
        "history alone (T)": "70.00 / -10.00",
        "lookahead alone (D)": "75.00 / -5.00",
        "both (H)": "78.00 / -2.00",
    }
    assert {name: cell(table, f"ours: {name}", "TriviaQA") for name in wanted} == wanted


def test_what_choosing_costs_is_of_the_kernels_records() -> None:
    names = ("prefix_attention_h200", "head_mass_h200", "block_lse_h200")
    figures = {name: json.loads((RESULTS / f"{name}.json").read_text())["figures"] for name in names}
    table = of_papers(read_book([RESULTS / f"{name}.json" for name in names]))["dustin_8"]
    full = figures["prefix_attention_h200"]["fa3_bf16_page1_b16_c32768_r6_us"]
    choice = figures["head_mass_h200"]["choice_bf16_page1_b16_c32768_r5_us"]
    bound = figures["block_lse_h200"]["bound_bf16_page1_b16_c32768_r5_us"]
    assert cell(table, "ours: Dustin's choice (H)", "16\u00a0×\u00a032K") == f"{choice / (32 * full):.4f}"
    assert cell(table, "ours: Quest, blocks of 16", "16\u00a0×\u00a032K") == f"{bound / full:.2f}"
    assert "NVIDIA H200" in table.why
    book = read_book([RESULTS / f"{name}.json" for name in names])
    (picture,) = pictures(book)
    most = figures["head_mass_h200"]["choice_bf16_page1_b1_c125000_r5_us"]
    share = most / (32 * figures["prefix_attention_h200"]["fa3_bf16_page1_b1_c125000_r6_us"])
    assert (
        picture.name == "choosing"
        and f"at most {share:.1%} by Dustin's rule (once a round, 1\u00a0×\u00a0125K)" in picture.finding
    )


def test_a_choice_without_the_attention_it_is_a_share_of_is_not_drawn() -> None:
    assert pictures(read_book([RESULTS / "prefix_attention_h200.json"])) == []
    assert pictures(read_book([RESULTS / "head_mass_h200.json"])) == []


def test_all_records_of_this_project_are_read() -> None:
    book = read_book([RESULTS])
    assert len(book.sources) == len(list(RESULTS.glob("*.json")))
    stored = json.loads((RESULTS / "modes_speed_h200.json").read_text())
    speeds = {(r.name, r.batch, r.context): r for r in book.of(Speed) if r.source == "modes_speed_h200"}
    exact = speeds["exact 4K", 16, 32_000]
    assert exact.tok_s == stored["figures"]["longdraft_exact_tok_s_b16_c32k"] and exact.view_tokens == 4096
    assert exact.forced_accept == stored["settings"]["accept_length"] and len(speeds) == 9
    steps = {(s.name, s.batch, s.context): s for s in book.of(Steps)}
    assert steps["full, EAGLE-3", 16, "32K"].phases["verify"] == 20.63 and steps["exact", 1, "125K"].step == 24.768


def test_systems_of_speed_records_have_the_labels_and_budgets_that_they_ran_with() -> None:
    rows = read_book([RESULTS / "sparse_mode_speed_h200.json", RESULTS / "full_mode_speed_h200.json"]).of(Speed)
    assert {(row.system, row.name, row.view_tokens) for row in rows} == {
        ("eagle3", "SGLang EAGLE-3", None), ("eagle3", "SGLang EAGLE-3, window 4K", None), ("full", "full, LongSpec", None),
        ("full", "full, EAGLE-3", None), ("full", "full, LongSpec, no graphs", None), ("sparse", "sparse 512", 512),
        ("sparse", "sparse 512, language model", 512), ("sparse", "sparse 512, recipe", 512), ("exact", "exact 4K", 4096),
        ("exact", "exact 4K, on sets", 4096),
    }  # fmt: skip


def test_answers_of_a_server_become_accept_lengths() -> None:
    stored = json.loads((RESULTS / "served_drafts_tau_h200.json").read_text())
    book = read_book([RESULTS / "served_drafts_tau_h200.json"])
    rows = {row.bucket: row for row in book.of(Acceptance)}
    for bucket, length in (("2K", 2048), ("7.9K", 7900)):
        assert rows[bucket].tau_micro == pytest.approx(stored["figures"][f"longspec_{length}_tau_served"], abs=1e-3)
        assert rows[bucket].n == stored["figures"][f"longspec_{length}_answers"]
        own = [r for r in stored["rows"] if r["length"] == length and not r["looping"]]
        each = [r["gained"] / r["served_verifications"] for r in own]
        assert rows[bucket].tau_macro == pytest.approx(sum(each) / len(each))
    looping = sum(r["looping"] for r in stored["rows"])
    assert sum(int(each.why.split()[0]) for each in book.excluded) == looping > 0


def test_a_run_that_failed_is_left_out_with_the_reason(tmp_path: Path) -> None:
    stored = json.loads((RESULTS / "modes_speed_h200.json").read_text())
    stored["checks"]["longdraft_partial_ran"] = False
    (tmp_path / "r.json").write_text(json.dumps(stored))
    book = read_book([tmp_path])
    assert {row.name for row in book.of(Speed)} == {"SGLang EAGLE-3", "exact 4K"}
    assert {(each.name, each.why) for each in book.excluded} == {("partial 4K", "its run failed a check")}


def test_scores_of_views_and_sets_become_quality_rows(tmp_path: Path) -> None:
    figures: dict[str, float] = {}
    for name in ("full", "mass_512", "quest_512", "sparse_h_256", "sparse_t_256", "sparse_d_512_refresh_64"):
        figures |= {f"{name}_rouge_l_to_target": 80.0, f"{name}_answers": 7, f"{name}_exact_match": 0.25}
    figures["mass_512_rouge_l_to_reference"] = 22.0
    made = record("sparse_quality", [], asked_for_a_summary=True) | {"figures": figures}
    (tmp_path / "r.json").write_text(json.dumps(made))
    rows = {(r.system, r.label, r.budget): r for r in read_book([tmp_path]).of(Quality)}
    assert set(rows) == {
        ("full", "full", None), ("partial", "partial", 512), ("quest", "quest", 512), ("sparse", "sparse", 256),
        ("sparse", "sparse, history", 256), ("sparse", "sparse, lookahead, refresh 64", 512),
    }  # fmt: skip
    mass = rows["partial", "partial", 512]
    assert (mass.score_own, mass.score_reference, mass.exact_match_own, mass.n) == (0.8, 0.22, 0.25, 7)
    assert rows["full", "full", None].score_reference is None


def test_the_written_page_has_every_table_of_the_papers(tmp_path: Path) -> None:
    from longdraft.bench.report.report import main

    assert main(["--records", str(write_records(tmp_path / "in")), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert all(f"<h3>{own['title']}".split(" (")[0] in text for own in printed().values())
