"""The report as a whole: one file without outside resources, pictures whose texts fit, rows left out, errors in one line."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from picture_texts import faults
from report_case import acceptance_rows, record, row, speed_rows, write_records

from longdraft.bench.report.charts import pictures
from longdraft.bench.report.drawing import HATCHES, Picture, draw, style
from longdraft.bench.report.reading import Book, read_book
from longdraft.bench.report.report import main
from longdraft.errors import UserError

RESULTS = Path(__file__).parents[3] / "bench" / "results"
EVIL = "<script>alert('x')</script> & $x$"
SENT = ("speedup_plain", "accept_length", "quality", "pareto", "steps", "load")


class Resources(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert main(["--records", str(folder), "--out", str(out)]) == 0
    return out


def test_the_page_loads_nothing_and_has_all_pictures_inside(written: Path) -> None:
    page = Resources((written / "report.html").read_text())
    assert len(page.loaded) == len(SENT) and all(value.startswith("data:image/png;base64,") for value in page.loaded)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    stored = {(written / f"{name}.png").read_bytes() for name in SENT}
    assert {base64.b64decode(value.partition(",")[2]) for value in page.loaded} == stored
    assert sorted(path.name for path in written.iterdir()) == sorted(["report.html", *(f"{name}.png" for name in SENT)])


def test_pictures_are_for_print(written: Path) -> None:
    from PIL import Image

    for name in SENT:
        with Image.open(written / f"{name}.png") as image:
            assert image.width >= 2000 and round(image.info["dpi"][0]) == 300


def test_the_page_has_every_finding_every_row_and_what_is_left_out(written: Path, folder: Path) -> None:
    book = read_book([folder])
    text = "\n".join(Resources((written / "report.html").read_text()).words)
    assert all(picture.title in text and picture.caption in text for picture in pictures(book))
    assert "41 % repeated 4-grams" in text and "batch 16, context 32768" not in text
    assert "context 32768, batch 16" in text and "not measured" in text
    for tok_s, spread in ((759, 15.2), (6900, 138.0)):
        assert f"{tok_s:,.1f}" in text and f"± {spread:,.1f} (3 runs)" in text


def test_no_text_of_a_picture_overlaps_or_is_cut_off(folder: Path) -> None:
    for book in (read_book([folder]), read_book([RESULTS])):
        shown = pictures(book)
        assert shown
        for picture in shown:
            assert faults(picture) == [], picture.name


def test_the_check_of_overlaps_finds_one() -> None:
    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.text(0.5, 0.5, "one text", transform=axes.transAxes)
        axes.text(0.5, 0.5, "another text", transform=axes.transAxes)
        axes.text(2.5, 0.5, "outside", transform=axes.transAxes, in_layout=False)

    assert faults(Picture("x", "a finding", "", 3, paint)) == ["outside", "'one text' and 'another text'"]


def test_axes_carry_units(folder: Path) -> None:
    units = ("tokens", "ms", "times", "0 to 1", "a second")
    for picture in pictures(read_book([folder, RESULTS / "step_times_modes_h200.json"])):
        figure = draw(picture)
        labels = [axes.get_xlabel() for axes in figure.axes] + [figure.axes[0].get_ylabel()]
        named = [label for label in labels if label]
        assert named and all(any(unit in label for unit in units) for label in named), (picture.name, labels)


def test_lines_and_bars_differ_without_colour() -> None:
    looks = [style(number) for number in range(12)]
    assert len({(look["marker"], str(look["linestyle"]), look["markerfacecolor"]) for look in looks}) == 12
    for look in looks:
        assert re.fullmatch(r"0\.\d+", look["color"])  # a grey
    assert len(set(HATCHES)) == len(HATCHES) >= 9


def test_many_steps_are_a_picture_a_batch(tmp_path: Path) -> None:
    rows = [
        row(
            "partial",
            f"partial {i}",
            batch=batch,
            context=8192,
            tok_s=100.0,
            ms_step=9.0,
            phases={"draft": 2, "verify": 6},
        )
        for batch in (1, 16)
        for i in range(13)
    ]
    (tmp_path / "a.json").write_text(json.dumps(record("a", rows)))
    assert [picture.name for picture in pictures(read_book([tmp_path]))] == ["steps_b1", "steps_b16"]


def test_two_records_with_the_same_label_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record(name, speed_rows())))
    (picture, *_) = pictures(read_book([tmp_path]))
    names = [text.get_text() for text in draw(picture).legends[0].get_texts()]
    assert {"full (one)", "full (two)"} <= set(names) and len(names) == len(set(names))


def test_what_comes_from_a_record_is_escaped(tmp_path: Path) -> None:
    rows = [
        *speed_rows(),
        row("full", EVIL, batch=1, context=8192, tok_s=300.0),
        row("full", EVIL) | {"ok": False, "why": EVIL},
    ]
    (tmp_path / "r.json").write_text(json.dumps(record("evil", rows, model=EVIL) | {"note": EVIL}))
    assert main(["--records", str(tmp_path / "r.json"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in text and text.count("&lt;script&gt;") >= 4


def test_rows_without_tau_say_nothing_and_are_no_error(tmp_path: Path) -> None:
    plain = row("plain", "plain", task="pg19", bucket="2K", tokens=512, verifications=0)
    (tmp_path / "r.json").write_text(json.dumps(record("acceptance", [plain, *acceptance_rows()])))
    assert len(read_book([tmp_path]).rows) == len(acceptance_rows())


def test_a_missing_or_empty_place_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file or folder"):
        read_book([tmp_path / "none"])
    with pytest.raises(UserError, match=r"has no file that ends in \.json"):
        read_book([tmp_path])
    (tmp_path / "r.json").write_text(json.dumps(record("nothing", [])))
    with pytest.raises(UserError, match="no record has rows that the report knows"):
        main(["--records", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .* cannot be written"):
        main(["--records", str(folder), "--out", str(tmp_path / "file")])


def _changed(**change: Any) -> str:
    return json.dumps(record("speed", [speed_rows()[0] | change]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "speed", "rows": [', "is no JSON"),
        ("[1]", "is no record: it has no name"),
        ('{"name": "speed", "rows": 3}', "corrupted record: rows=3"),
        (
            '{"name": "speed", "rows": [{"system": "full"}]}',
            "row 1 is corrupted .* says no system or not whether it is ok",
        ),
        (
            '{"name": "speed", "rows": [{"system": "full", "ok": true}]}',
            "row 1 has none of rate, metric, context, task",
        ),
        (_changed(tok_s="fast"), "row 1 is corrupted: tok_s='fast': Input should be a valid number"),
        (_changed(tok_s=float("nan")), "row 1 is corrupted: tok_s=nan: Input should be a finite number"),
        (_changed(batch=0), "row 1 is corrupted: batch=0: Input should be greater than 0"),
        (_changed(tok_s=None), "row 1 is corrupted: tok_s=None"),
        (
            '{"name": "full_mode_speed", "settings": {}, "figures": {"eagle3_tok_s_b1_c8k": 5}}',
            "broken record of 'full_mode_speed'",
        ),
        ('{"name": "served_drafts_tau", "rows": [{"draft": "x"}]}', "broken record of 'served_drafts_tau'"),
    ],
)
def test_a_corrupted_record_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_book([path])
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_a_file_given_twice_is_read_once(folder: Path) -> None:
    assert len(read_book([folder, folder / "speed.json"]).rows) == len(read_book([folder]).rows)


def test_a_book_without_rows_has_no_pictures() -> None:
    assert pictures(Book()) == []
