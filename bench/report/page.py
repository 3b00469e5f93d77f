"""The report as one HTML file that needs nothing else: pictures inside, no script, no font, no address."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from longdraft.bench.report.drawing import Picture
from longdraft.bench.report.papers import NOT_MEASURED, PaperTable
from longdraft.bench.report.reading import Book
from longdraft.bench.report.tables import Table

STYLE = """
body { margin: 0 auto; padding: 1.5rem; max-width: 80rem; background: #fff; color: #111; font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #999; } h3 { font-size: 1rem; }
figure { margin: 1rem 0 2rem; } img { max-width: 100%; border: 1px solid #ccc; }
figcaption, .note { font-size: .87rem; color: #333; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; }
th, td { border-bottom: 1px solid #bbb; padding: .2rem .6rem; text-align: right; vertical-align: top;
         font-variant-numeric: tabular-nums; }
th.name, td.name { text-align: left; }
tr.ours { background: #eee; font-weight: 600; } td.none { font-style: italic; font-weight: 400; }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
""".strip()
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(
    book: Book, pictures: Sequence[tuple[Picture, Path]], tables: Sequence[Table], papers: Sequence[PaperTable]
) -> str:
    """The whole file. Whatever comes from a record is escaped.

    Args:
        book: what was read.
        pictures: each with its PNG, which is put inside.
        tables: of all rows.
        papers: the papers' tables in our form.
    """
    kept, left = len(book.rows), len(book.excluded)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"><title>longdraft: measurements</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<style>{STYLE}</style></head><body>",
            "<h1>longdraft: measurements</h1>",
            f"<p>{len(book.sources)} records, {kept} rows that count, {left} left out with their reasons.</p>",
            *(f"<p>{escape(picture.title)}.</p>" for picture, _ in pictures),
            "<h2>Pictures</h2>" if pictures else "",
            *(_figure(picture, path) for picture, path in pictures),
            "<h2>The papers' tables in our form</h2>",
            '<p class="note">Rows of a paper are its own figures, in its own setting; ours are what the records below hold.</p>',
            *(_paper(table) for table in papers),
            "<h2>All rows</h2>",
            *(_table(table) for table in tables),
            "</body></html>\n",
        ]
    )


def _figure(picture: Picture, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<figure><img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=name' if i < table.names else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    rows = "".join(f"<tr>{line('td', cells)}</tr>" for cells in table.rows)
    return (
        f'<h3>{escape(table.title)}</h3><p class="note">{escape(table.note)}</p>'
        f'<div class="wide"><table><tr>{line("th", table.head)}</tr>{rows}</table></div>'
    )


def _paper(table: PaperTable) -> str:
    def row(name: str, cells: Sequence[str], own: bool) -> str:
        filled = "".join(f"<td{' class=none' if cell == NOT_MEASURED else ''}>{escape(cell)}</td>" for cell in cells)
        return f"<tr{' class=ours' if own else ''}><td class=name>{escape(name)}</td>{filled}</tr>"

    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = [row(name, cells, False) for name, cells in table.theirs.items()]
    rows += [row(name, cells, True) for name, cells in table.ours.items()]
    return (
        f'<h3>{escape(table.title)}</h3><p class="note">Cells: {escape(table.cell)}. Paper: {escape(table.note)}.</p>'
        f'<div class="wide"><table><tr><th class=name></th>{head}</tr>{"".join(rows)}</table></div>'
        f'<p class="note">{escape(table.why)}</p>'
    )
