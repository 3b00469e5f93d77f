"""Pictures and tables of records as one HTML file and PNGs: ``longdraft bench report --records DIR_OR_FILES --out DIR``.

Takes records of ``longdraft bench speed | acceptance | quality`` and older ones of this project. Rows that failed a check are left
out of figures and listed with their reason. The papers' tables stand beside ours.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from longdraft.bench.report.charts import pictures
from longdraft.bench.report.drawing import is_ours, save
from longdraft.bench.report.page import page
from longdraft.bench.report.papers import tables as paper_tables
from longdraft.bench.report.reading import Book, read_book
from longdraft.bench.report.tables import tables
from longdraft.errors import UserError

HTML = "report.html"


def write_report(book: Book, folder: Path) -> list[Path]:
    """Write ``report.html`` and a PNG for each picture; pictures of an earlier report there that this one has not are removed.

    Returns:
        The files.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = []
        for picture in pictures(book):
            path = folder / f"{picture.name}.png"
            save(picture, path)
            drawn.append((picture, path))
        part = folder / f".{HTML}.part"
        part.write_text(page(book, drawn, tables(book), paper_tables(book)), encoding="utf-8")
        part.replace(folder / HTML)
        for path in set(folder.glob("*.png")) - {path for _, path in drawn}:
            if is_ours(path):  # of an earlier report, whose finding is no longer this one's
                path.unlink()
    except OSError as error:
        raise UserError(f"--out {str(folder)!r} cannot be written ({error.strerror}): give another folder") from None
    return [folder / HTML, *(path for _, path in drawn)]


def main(argv: Sequence[str] | None = None) -> int:
    """Read, draw, write; says what each picture shows."""
    parser = argparse.ArgumentParser(prog="longdraft bench report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, nargs="+", required=True, metavar="DIR_OR_FILE", help="records, JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of report.html and the PNGs")
    args = parser.parse_args(argv)
    book = read_book(args.records)
    if not book.rows and not book.excluded:
        raise UserError(
            "no record has rows that the report knows: give records of longdraft bench speed, acceptance or quality"
        )
    written = write_report(book, args.out)
    for picture in pictures(book):
        print(f"{picture.name}: {picture.title}")
    print(
        f"{len(book.rows)} rows of {len(book.sources)} records, {len(book.excluded)} left out; wrote {', '.join(map(str, written))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
