"""The papers' tables in our form: what they print (``papers.yaml``) and, labelled, what our records have for the same cells."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from longdraft.bench.lengths import tokens_word
from longdraft.bench.report.derive import LOSSLESS, choosing, mean_score, speedups
from longdraft.bench.report.reading import Book
from longdraft.bench.report.rows import Acceptance, Quality, Row, Speed

NOT_MEASURED, UNKNOWN = "not measured", "not in the text that we hold"
NAMES = {  # columns of the papers, as tasks of ours
    "GovReport": ("govreport", "gov_report"),
    "QMSum": ("qmsum",),
    "Multi-News": ("multi_news",),
    "LCC": ("lcc",),
    "RepoBench-P": ("repobench-p",),
    "TriviaQA": ("triviaqa",),
    "Single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "Multi-doc QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "Summarization": ("govreport", "gov_report", "qmsum", "multi_news", "vcsum"),
    "Few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "Synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "Code": ("lcc", "repobench-p"),
}
SPECULATIVE = ("full", "eagle3")  # what a paper calls plain speculative decoding, ours first


@dataclass(frozen=True)
class PaperTable:
    """A table with the paper's rows and ours; ``why`` says why ours differ, where there is one to compare."""

    title: str
    cell: str
    note: str
    columns: list[str]
    theirs: dict[str, list[str]]
    ours: dict[str, list[str]]
    why: str

    @property
    def measured(self) -> int:
        """How many cells of ours hold a figure."""
        return sum(cell != NOT_MEASURED for cells in self.ours.values() for cell in cells)


@cache
def printed() -> dict[str, Any]:
    """The papers' figures."""
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "papers.yaml").read_text())
    return found


def tables(book: Book) -> list[PaperTable]:
    """All tables, in the order of ``papers.yaml``."""
    return [_table(book, key) for key in printed()]


def _table(book: Book, key: str) -> PaperTable:
    own, (columns, ours, rows, why) = printed()[key], OURS[key](book)
    placed = [*own["columns"], *(column for column in columns if column not in own["columns"])]
    if all(column[:-1].replace(".", "").isdecimal() for column in placed):  # contexts
        placed.sort(key=lambda column: float(column[:-1]))
    cells_of = {name: dict(zip(own["columns"], map(str, cells), strict=True)) for name, cells in own["rows"].items()}
    theirs = {
        f"paper: {name}": [UNKNOWN if cells.get(c) == "unknown" else cells.get(c, "–") for c in placed]
        for name, cells in cells_of.items()
    }
    mine = {f"ours: {name}": [cells.get(c, NOT_MEASURED) for c in placed] for name, cells in ours.items()}
    told = f"Ours: {book.where(rows)}. {why}" if rows else "Nothing of this table is in the records."
    return PaperTable(own["title"], own["cell"], own["note"], placed, theirs, mine, told)


Ours = tuple[list[str], dict[str, dict[str, str]], list[Row], str]


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def longspec_1(book: Book) -> Ours:
    """τ by task; speeds are measured by context and not by task, and stand in their own table."""
    columns = printed()["longspec_1"]["columns"]
    ours: dict[str, dict[str, str]] = {}
    used: list[Row] = []
    for label, systems in (("LongSpec (mode full)", ("full",)), ("MagicDec (the target drafts for itself)", ("self",))):
        ours[label] = {}
        for column in columns:
            rows = [r for r in book.of(Acceptance) if r.system in systems and r.task in NAMES[column]]
            if (tau := _tau(rows)) is not None:
                ours[label][column] = f"{tau:.2f} / {NOT_MEASURED} / {NOT_MEASURED}"
                used += rows
    why = (
        "The paper drafts trees of 68 tokens, five deep, for targets of 7B to 13B, and its tokens a second are of an A100; ours are "
        "of the drafts and chains that the records name, and their speeds are by batch and context, not by task."
    )
    return columns, ours, used, why


def _tau(rows: Sequence[Acceptance]) -> float | None:
    """Micro τ over rows: all tokens over all verifications, or by answers where a row has no counts."""
    if not rows:
        return None
    weights = [row.verifications or row.n or 1 for row in rows]
    return sum(row.tau_micro * w for row, w in zip(rows, weights, strict=True)) / sum(weights)


def _cells(
    book: Book, wanted: Callable[[Speed], bool], cell: Callable[[Speed, float | None], str]
) -> dict[str, dict[str, Any]]:
    """Cells by name and context of speed rows: with the speed against plain decoding where the record has it."""
    against = {id(each.row): each.value for each in speedups(book).get("plain", [])}
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in book.of(Speed):
        if wanted(row):
            found[row.name].setdefault(tokens_word(row.context), (cell(row, against.get(id(row))), row))
    return found


def _specpv(book: Book, chosen: Callable[[str], bool]) -> Ours:
    models = {source.name: source.model for source in book.sources}

    def wanted(row: Speed) -> bool:
        return row.batch == 1 and row.system in ("partial", *SPECULATIVE) and chosen(models.get(row.source, ""))

    def cell(row: Speed, alpha: float | None) -> str:
        tau = None if row.tokens_a_step is None else row.tokens_a_step - 1
        return f"{NOT_MEASURED if alpha is None else f'{alpha:.2f}'} / {_number(tau)}{' (forced)' if row.forced_accept else ''}"

    found = _cells(book, wanted, cell)
    names = sorted(found, key=lambda name: (next(iter(found[name].values()))[1].system != "partial", name))
    ours = {name: {context: text for context, (text, _) in found[name].items()} for name in names}
    rows: list[Row] = [row for cells in found.values() for _, row in cells.values()]
    if not ours:
        ours = {"partial": {}}
    why = (
        "The paper measures against PyTorch's SDPA on an A100, which leaves more to gain than SGLang with its attention kernels and "
        "CUDA graphs."
    )
    return list(dict.fromkeys(context for cells in ours.values() for context in cells)), ours, rows, why


def specpv_1(book: Book) -> Ours:
    return _specpv(book, lambda model: "qwen" not in model.lower())


def specpv_3(book: Book) -> Ours:
    return _specpv(book, lambda model: "qwen" in model.lower())


def dustin_1(book: Book) -> Ours:
    """Means over the tasks of a category that were measured; how many stands behind where not all were."""
    columns = printed()["dustin_1"]["columns"]
    groups: dict[str, list[Quality]] = defaultdict(list)
    for row in book.of(Quality):
        if row.score_reference is not None:
            lossless = row.system in LOSSLESS
            groups["full cache" if lossless else f"{row.bare_name}, {row.view_tokens} tokens"].append(row)
    ours: dict[str, dict[str, str]] = {}
    used: list[Row] = []
    for name, rows in groups.items():
        means, cells = [], {}
        for column in columns[:-1]:
            own = [row for row in rows if row.task in NAMES[column]]
            if (mean := mean_score(own, "score_reference")) is not None:
                tasks, all_of = len({row.task for row in own}), len(NAMES[column])
                cells[column] = f"{100 * mean:.2f} ({tasks} of {all_of} tasks)"
                means.append(100 * mean)
                used += own
        if len(means) == len(columns) - 1:
            cells["Average"] = f"{sum(means) / len(means):.2f}"
        if cells:
            ours[name] = cells
    why = "The paper's targets are 7B to 72B and its scores those of LongBench's own prompts; ours are of the tasks that were measured."
    return columns, ours or {"full cache": {}, "sparse": {}}, used, why


def dustin_2(book: Book) -> Ours:
    """Speed by batch and context: plain, speculative, MagicDec's way and sparse sets."""
    kinds = {"plain": "plain", "self": "MagicDec", "sparse": "Dustin", **dict.fromkeys(SPECULATIVE, "speculative")}

    def wanted(row: Speed) -> bool:
        return row.system in kinds

    def cell(row: Speed, alpha: float | None) -> str:
        tau = "–" if row.system == "plain" else _number(row.tokens_a_step)
        forced = " (forced)" if row.forced_accept and row.system != "plain" else ""
        return f"{row.tok_s:,.1f} / {tau}{forced} / {NOT_MEASURED if alpha is None else f'{alpha:.2f}'}"

    ours: dict[str, dict[str, str]] = {}
    rows: list[Row] = []
    for batch in sorted({row.batch for row in book.of(Speed)}):
        found = _cells(book, lambda row, batch=batch: wanted(row) and row.batch == batch, cell)  # type: ignore[misc]
        for name, cells in found.items():
            ours[f"{name}, batch {batch}"] = {context: text for context, (text, _) in cells.items()}
            rows += [row for _, row in cells.values()]
    why = (
        "The paper's plain decoding of 72B at batch 16 and 32K takes about nine times what reading weights and cache takes, so that "
        "not reading the cache gains more there than beside an engine near that bound."
    )
    columns = list(dict.fromkeys(context for cells in ours.values() for context in cells))
    return columns, ours or {"Dustin (mode sparse)": {}}, rows, why


def dustin_3(book: Book) -> Ours:
    """Sparse sets by history alone, by lookahead alone and by both, by their settings or their labels."""
    columns = printed()["dustin_3"]["columns"]
    ours: dict[str, dict[str, str]] = {"history alone (T)": {}, "lookahead alone (D)": {}, "both (H)": {}}
    used: list[Row] = []
    quality = [row for row in book.of(Quality) if row.score_reference is not None]
    for column in columns:
        own = [row for row in quality if row.task in NAMES[column]]
        whole = mean_score([row for row in own if row.system in LOSSLESS], "score_reference")
        for name in ours:
            rows = [row for row in own if row.system == "sparse" and row.view_tokens == 512 and _half(row) == name]
            if (mean := mean_score(rows, "score_reference")) is not None:
                change = NOT_MEASURED if whole is None else f"{100 * (mean - whole):+.2f}"
                ours[name][column] = f"{100 * mean:.2f} / {change}"
                used += rows
    return (
        columns,
        ours,
        used,
        "The paper's pair is Qwen2.5-72B with a draft of 0.5B; what a half brings depends on the pair.",
    )


def _half(row: Quality) -> str:
    server = row.settings.get("settings")
    lookahead = server.get("sparse_lookahead") if isinstance(server, dict) else None
    if "history" in row.name or lookahead == 0:
        return "history alone (T)"
    if "lookahead" in row.name or (isinstance(lookahead, int) and lookahead >= 512 - 20):
        return "lookahead alone (D)"
    return "both (H)"


def dustin_8(book: Book) -> Ours:
    """What choosing costs, from records of kernels."""
    costs = choosing(book)
    ours: dict[str, dict[str, str]] = {
        "attention to the full cache": {cost.case: "1.00" for cost in costs},
        "Dustin's choice (H)": {cost.case: f"{cost.choice:.4f}" for cost in costs if cost.choice is not None},
        "Quest, blocks of 16": {cost.case: f"{cost.bound:.2f}" for cost in costs if cost.bound is not None},
    }
    why = (
        "Ours chooses from two layers of an 8B, of 32; the paper's 72B has 80, so that a layer there is a smaller share. Our Quest "
        "reads all keys anew for its bounds in every layer; kept bounds read an eighth."
    )
    return [cost.case for cost in costs], ours, [row for cost in costs for row in cost.rows], why


OURS: dict[str, Callable[[Book], Ours]] = {
    f.__name__: f for f in (longspec_1, specpv_1, specpv_3, dustin_1, dustin_2, dustin_3, dustin_8)
}
