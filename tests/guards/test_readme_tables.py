"""The tables in the README are those that the records make."""

from pathlib import Path

from longdraft.bench.readme_tables import TABLES, fill

README = Path(__file__).resolve().parents[2] / "README.md"


def test_no_figure_in_a_table_is_typed() -> None:
    text = README.read_text()
    assert fill(text) == text, "run python -m longdraft.bench.readme_tables README.md"
    assert all(f"<!-- table {name} -->" in text for name in ("speed",))


def test_a_stale_table_is_replaced() -> None:
    stale = "before\n<!-- table speed -->\nold\n<!-- end -->\nafter"
    assert fill(stale) == f"before\n<!-- table speed -->\n{TABLES['speed']()}\n<!-- end -->\nafter"
