"""Tables of the pages: made from what the server exports and from records."""

from pathlib import Path
from typing import Any

import pytest

from longdraft.bench.readme_tables import read
from longdraft.ops import pages
from longdraft.ops.alerts import ALERTS
from longdraft.ops.pages import PAGE_TABLES, choose_table, grid, metrics_table, ratio
from longdraft.ops.panels import PANELS
from longdraft.serve.metrics import SERIES


def body(text: str) -> list[list[str]]:
    """Rows of a table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_every_series_alert_and_panel_has_its_row() -> None:
    assert [row[0] for row in body(metrics_table())] == [f"`{series.exported}`" for series in SERIES]
    assert [row[0] for row in body(PAGE_TABLES["alerts"]())] == [f"`{alert.name}`" for alert in ALERTS]
    assert [row[1] for row in body(PAGE_TABLES["panels"]())] == [panel.title for panel in PANELS]
    for row, series in zip(body(metrics_table()), SERIES, strict=True):
        assert row[1] == "counter" and row[3] == series.unit and series.text in row[4]
        assert row[2].split(", ") == [f"`{label}`" for label in series.labels]


def test_speeds_beside_sglang_are_quotients_of_one_record() -> None:
    figures = read("modes_speed_h200")["figures"]
    wanted = figures["longdraft_partial_tok_s_b16_c32k"] / figures["eagle3_tok_s_b16_c32k"]
    assert ratio(("modes_speed_h200", "longdraft_partial"), "b16_c32k") == f"{wanted:.2f} ×"
    rows = {row[0]: row[3:] for row in body(choose_table())}
    assert rows["`partial`"][1] == f"{wanted:.2f} ×" and rows["`off`"] == ["–", "–", "–"]


def row(label: str, batch: int, context: int, **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "batch": batch,
        "context": context,
        "ok": True,
        "n": 48,
        "tok_s": 1234.5,
        "tok_s_spread": 6.4,
        **more,
    }


def test_a_grid_has_a_column_for_every_batch_and_context() -> None:
    rows = [
        row("full", 16, 32000, speedup=2.345),
        row("full", 1, 8000),
        row("partial 4K", 16, 32000, ok=False, why="repeats"),
    ]
    rows += [{"label": "full", "rate": 2.0, "ok": True}]
    made = grid(rows)
    assert made.splitlines()[0] == "| system | 1 × 8K | 16 × 32K |"
    assert body(made) == [
        ["full", "1,234 ± 6 (48)", "1,234 ± 6 (48), 2.35 ×"],
        ["partial 4K", "–", "not counted"],
    ]


def test_pages_are_filled_and_a_missing_one_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "p.md"
    page.write_text("a\n<!-- table labels -->\nold\n<!-- end -->\nb\n")
    assert pages.main([str(page)]) == 0
    text = page.read_text()
    assert (
        text.startswith("a\n<!-- table labels -->\n| label |")
        and text.endswith("<!-- end -->\nb\n")
        and "old" not in text
    )
    with pytest.raises(SystemExit):
        pages.main([str(tmp_path / "q.md")])
    assert "is no file" in capsys.readouterr().err
