"""The tables in the README are those that the records make."""

from pathlib import Path

from longdraft.bench.readme_tables import TABLES, fill, training_cell

README = Path(__file__).resolve().parents[2] / "README.md"


def test_no_figure_in_a_table_is_typed() -> None:
    text = README.read_text()
    assert fill(text) == text, "run python -m longdraft.bench.readme_tables README.md"
    assert all(f"<!-- table {name} -->" in text for name in ("speed", "training", "ablation"))


def test_a_stale_table_is_replaced() -> None:
    stale = "before\n<!-- table speed -->\nold\n<!-- end -->\nafter"
    assert fill(stale) == f"before\n<!-- table speed -->\n{TABLES['speed']()}\n<!-- end -->\nafter"


def test_a_trial_that_was_not_run_has_no_figure() -> None:
    figures = {"a_tok_s": 1234.5, "a_peak_gib": 10.77, "a_ms_step": 1106.6, "a_floor_ms": 22.2}
    assert training_cell(figures, "a") == "1,234 tokens/s, 10.8 GiB, 1,107 ms (22)"
    assert training_cell(figures, "b") == "–"
