"""The report on records that nobody foresaw: mixed, foreign, empty, with names that break pictures; and its command."""

import json
from pathlib import Path
from typing import Any

import pytest
from picture_texts import faults
from report_case import acceptance_rows, load_rows, quality_rows, record, row, speed_rows

from longdraft import cli
from longdraft.bench.report.charts import pictures
from longdraft.bench.report.derive import names_of, short, tradeoffs
from longdraft.bench.report.drawing import draw
from longdraft.bench.report.papers import tables as paper_tables
from longdraft.bench.report.reading import Book, read_book
from longdraft.bench.report.report import main
from longdraft.bench.report.tables import tables

Rows = list[dict[str, Any]]
NAMES = [
    "$x_1^{",
    "_hidden",
    "one\nline",
    "word " * 60,
    "x" * 300,
    "模式",
    "a" * 47 + "1" + "b" * 47,
    "a" * 47 + "2" + "b" * 47,
]


def book_of(folder: Path, *records: Rows, **more: Any) -> Book:
    folder.mkdir(exist_ok=True, parents=True)
    for number, rows in enumerate(records):
        (folder / f"r{number}.json").write_text(json.dumps(record(f"r{number}", rows) | more))
    return read_book([folder])


def finding(book: Book, name: str) -> str:
    return next(picture.finding for picture in pictures(book) if picture.name == name).replace("\u00a0", " ")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book_of(tmp_path / "records", speed_rows())
    words = ["bench", "report", "--out", str(tmp_path / "out"), "--records"]
    assert cli.main([*words, str(tmp_path / "records")]) == 0
    assert "speedup_plain: Sparse 512 decodes 9.09 times" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists()
    (tmp_path / "broken.json").write_text('{"name": "x", "rows": [')
    for path, said in (
        ("broken.json", "the record is corrupted, measure anew"),
        ("gone.json", "there is no such file"),
    ):
        assert cli.main([*words, str(tmp_path / path)]) == 2
        error = capsys.readouterr().err
        assert said in error and path in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_second_report_leaves_no_picture_of_the_first(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    book_of(one, [*speed_rows(), *acceptance_rows()])
    book_of(two, acceptance_rows())
    out = tmp_path / "out"
    main(["--records", str(one), "--out", str(out)])
    (out / "mine.png").write_bytes(b"\x89PNG of someone else")
    main(["--records", str(two), "--out", str(out)])
    assert sorted(path.name for path in out.iterdir()) == ["accept_length.png", "mine.png", "report.html"]


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_that_are_no_names_fit_into_pictures(tmp_path: Path) -> None:
    plain = row("plain", "plain", batch=1, context=8192, tok_s=9.0, phases={"verify": 5}, ms_step=5.0)
    speeds = [row("full", name, batch=1, context=8192, tok_s=10.0, phases={"draft": 2}, ms_step=3.0) for name in NAMES]
    taus = [
        row("full", name, task=name, bucket=name, tau_micro=2.0, tau_micro_no_bonus=1.0) for name in (*NAMES[:5], "...")
    ]
    scores = [row("partial", name, 512, task=name, bucket="2K", metric="rouge_l", score_own=0.5) for name in NAMES[:5]]
    loads = [{**load_rows()[0], "label": name} for name in NAMES]
    book = book_of(tmp_path, [plain, *speeds], taus, scores, loads)
    shown = pictures(book)
    assert {picture.name for picture in shown} == {"speedup_plain", "accept_length", "quality", "steps", "load"}
    for picture in shown:
        assert faults(picture) == [], picture.name
    legend = [text.get_text() for text in draw(shown[0]).legends[0].get_texts()]
    assert len(set(legend)) == len(NAMES) and "hidden" in legend and "$x_1^{" in legend, "each name once, as it is"


def test_long_names_keep_their_ends() -> None:
    assert short("partial 4K") == "partial 4K" and short("x" * 30 + "y" * 30, 12) == "xxxxxxx…yyyy"
    rows = [row("full", name) for name in NAMES]
    from longdraft.bench.report.rows import Row

    names = names_of([Row.model_validate(each | {"source": "s"}) for each in rows])
    assert len(set(names.values())) == len(NAMES)


def test_records_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    slow = [
        each | {"tok_s": each["tok_s"] / 2, "alpha": each["alpha"] / 2} if "tok_s" in each else each
        for each in speed_rows()
    ]
    for folder, rows in (("a", speed_rows()), ("b", slow)):
        book_of(tmp_path / folder, rows)
    book = read_book([tmp_path / "a", tmp_path / "b"])
    assert [source.name for source in book.sources] == ["a/r0", "b/r0"]
    assert finding(book, "speedup_plain").startswith("sparse 512 (a/r0) decodes 9.09 times as fast"), (
        "each by its own plain"
    )


@pytest.mark.parametrize("figure", [0, -1, "fast", None, float("nan"), True])
def test_records_of_kernels_without_times_give_no_picture(tmp_path: Path, figure: Any) -> None:
    case = "bf16_page1_b16_c32000_r"
    figures = {
        "prefix_attention": {"fa3_" + case + "6_us": figure},
        "head_mass": {"choice_" + case + "5_us": 5.0},
        "block_lse": {"bound_" + case + "5_us": 5.0},
    }
    for name, own in figures.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "figures": own, "settings": {"layers": "x"}}))
    book = read_book([tmp_path])
    assert pictures(book) == [] and paper_tables(book)
    path = tmp_path / "prefix_attention.json"
    path.write_text(json.dumps({"name": "prefix_attention", "figures": {"fa3_" + case + "6_us": 10.0}}))
    (picture,) = pictures(read_book([tmp_path]))
    assert picture.name == "choosing" and "Quest" in picture.title and "Dustin" not in picture.title, (
        "no layers are named"
    )


@pytest.mark.parametrize("budget", [0, -512, True, "512", None])
def test_budgets_that_are_none(tmp_path: Path, budget: Any) -> None:
    scored = row("partial", "partial", task="pg19", bucket="2K", metric="rouge_l", score_own=0.5, score_reference=0.2)
    book = book_of(tmp_path, [scored | {"settings": {"budget": budget, "settings": "none"}}, *speed_rows()])
    assert "quality" not in [picture.name for picture in pictures(book)] and tables(book) and paper_tables(book)


def test_nothing_gained_is_drawn(tmp_path: Path) -> None:
    zero = row("full", "full", task="pg19", bucket="2K", tau_micro=0.0, tau_micro_no_bonus=0.0)
    (picture,) = pictures(book_of(tmp_path, [zero]))
    assert faults(picture) == []


def test_only_rows_that_do_not_count(tmp_path: Path) -> None:
    book_of(tmp_path / "in", [each | {"ok": False, "why": "it loops"} for each in speed_rows()])
    assert main(["--records", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    assert "it loops" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is no JSON"),
        ('{"name": "x", "versions": ["sglang"]}', "corrupted record: versions"),
        ('{"name": "x", "checks": 3}', "corrupted record: checks=3"),
        (
            '{"name": "served_drafts_tau", "rows": [{"draft": "x", "length": 5, "looping": false, "gained": 1, "served_verifications": 0}]}',
            "broken record of 'served_drafts_tau'",
        ),
    ],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read_book([tmp_path])
    assert "\n" not in str(raised.value)


def test_forced_acceptance_is_said_of_what_was_forced(tmp_path: Path) -> None:
    free = [each | {"forced_accept": None} for each in speed_rows()]
    slow = [each | {"forced_accept": 4.0} for each in speed_rows() if each["system"] in ("plain", "ngram")]
    assert finding(book_of(tmp_path / "a", free, slow), "speedup_plain").startswith("sparse 512 decodes 9.09")
    forced = [each | {"forced_accept": 4.0} for each in speed_rows() if each["system"] in ("plain", "sparse")]
    free = [each for each in free if each["system"] != "sparse"]
    said = finding(book_of(tmp_path / "b", free, forced), "speedup_plain")
    assert said.startswith("in part at a forced accept length of 4, sparse 512 decodes")


def test_the_front_is_of_tasks_that_all_have(tmp_path: Path) -> None:
    hard = [each | {"task": "math", "score_own": 0.1} for each in quality_rows() if each["system"] == "sparse"]
    points = {p.name: p.score for p in tradeoffs(book_of(tmp_path / "a", speed_rows(), [*quality_rows(), *hard]))[2]}
    assert points["sparse 512"] == pytest.approx(0.63) and points["partial 4K"] == pytest.approx(0.93)
    apart = [each for each in [*quality_rows(), *hard] if (each["system"] == "sparse") == (each["task"] == "math")]
    assert tradeoffs(book_of(tmp_path / "b", speed_rows(), apart))[2] == []


def test_systems_are_compared_on_the_tasks_that_all_have(tmp_path: Path) -> None:
    def easy(each: dict[str, Any]) -> bool:
        return each["system"] == "partial" and each["budget"] == 4096 and each["task"] == "triviaqa"

    rows = [each | {"score_own": 0.1} if easy(each) else each for each in quality_rows()]
    said = finding(book_of(tmp_path / "a", rows), "quality")
    assert said.endswith("at 4K tokens partial (0.52; the worst of 2 has 0.41)")
    hard = [each for each in rows if each["system"] != "streaming" or each["task"] == "govreport"]
    assert finding(book_of(tmp_path / "b", hard), "quality").endswith(
        "at 4K tokens partial (0.93; the worst of 2 has 0.41)"
    )
    apart = [each for each in hard if each["system"] != "partial" or each["task"] == "triviaqa"]
    said = finding(book_of(tmp_path / "c", apart), "quality")
    assert "4K" not in said and said.startswith("at 512 tokens sparse is closest"), "no task is common to both at 4K"
    alone = [each for each in rows if each["system"] in ("full", "partial") and each.get("budget") in (None, 1024)]
    assert (
        finding(book_of(tmp_path / "d", alone), "quality")
        == "at 1K tokens partial scores 0.71 against the target's own output"
    )
