"""The tables in the README are those that the records make."""

from pathlib import Path

import pytest

from longdraft.bench.readme_tables import TABLES, fill, tau_rows, training_cell

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("page", "tables"),
    [("README.md", ("speed", "tau", "training", "ablation")), ("recipes/smollm2-135m/README.md", ("tau", "reads"))],
)
def test_no_figure_in_a_table_is_typed(page: str, tables: tuple[str, ...]) -> None:
    text = (ROOT / page).read_text()
    assert fill(text) == text, f"run python -m longdraft.bench.readme_tables {page}"
    assert all(f"<!-- table {name} -->" in text for name in tables)


def test_a_stale_table_is_replaced() -> None:
    stale = "before\n<!-- table speed -->\nold\n<!-- end -->\nafter"
    assert fill(stale) == f"before\n<!-- table speed -->\n{TABLES['speed']()}\n<!-- end -->\nafter"


def score(draft: str, group: str, tau: float, answers: int = 20) -> dict[str, object]:
    return {"draft": draft, "group": group, "answers": answers, "tau": tau, "tau_without_bonus": tau - 1}


def test_tau_is_told_by_context_with_and_without_the_bonus() -> None:
    """A made-up record of ``bench score_drafts``: lengths by size, kinds of document left out."""
    rows = [score("longspec", g, t) for g, t in (("1024", 2.6), ("16384", 2.4), ("2048", 2.546), ("2048 code", 2.9))]
    rows += [score("eagle3", "2048", 2.71)]
    record = {"settings": {"steps": 4, "new_tokens": 256}, "figures": {"2048_looping": 3}, "rows": rows}
    head, line, *body = tau_rows(record).splitlines()
    assert head.startswith("| greedy, chains of 4, 256 tokens |")
    assert head.endswith("| LongSpec: τ (without bonus) | EAGLE-3: τ (without bonus) |")
    assert line.count("|") == head.count("|")
    assert body == [
        "| <2K | 1,024 tokens | 20, 0 | 2.60 (1.60) | - |",
        "| 2K-8K | 2,048 tokens | 20, 3 | 2.55 (1.55) | 2.71 (1.71) |",
        "| 8K-32K | 16,384 tokens | 20, 0 | 2.40 (1.40) | - |",
    ]


def test_a_trial_that_was_not_run_has_no_figure() -> None:
    figures = {"a_tok_s": 1234.5, "a_peak_gib": 10.77, "a_ms_step": 1106.6, "a_floor_ms": 22.2}
    assert training_cell(figures, "a") == "1,234 tokens/s, 10.8 GiB, 1,107 ms (22)"
    assert training_cell(figures, "b") == "–"
