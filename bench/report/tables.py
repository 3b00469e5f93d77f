"""Tables of the report: every row that counts with its n and spread, rows that do not with their reason, and the records."""

from collections.abc import Sequence
from dataclasses import dataclass

from longdraft.bench.report.derive import BASELINES, bucket_key, names_of, speedups
from longdraft.bench.report.reading import Book
from longdraft.bench.report.rows import Acceptance, Load, Quality, Speed

NONE = "–"


@dataclass(frozen=True)
class Table:
    """Cells are text; the first ``names`` columns stand to the left, numbers to the right."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return NONE if value is None else f"{value:,.{digits}f}"


def tables(book: Book) -> list[Table]:
    """All tables with rows."""
    found = [speed_table(book), load_table(book), acceptance_table(book), quality_table(book), excluded_table(book)]
    return [table for table in [*found, sources_table(book)] if table.rows]


def speed_table(book: Book) -> Table:
    """Speed by batch, context and system."""
    rows = sorted(book.of(Speed), key=lambda row: (row.batch, row.context))
    names, against = names_of(rows), {id(e.row): (e, base) for base, found in speedups(book).items() for e in found}
    cells = []
    for row in rows:
        each, base = against.get(id(row), (None, ""))
        times = NONE if each is None else f"{each.value:.2f}" + ("" if each.spread is None else f" ± {each.spread:.2f}")
        forced = NONE if row.forced_accept is None else f"{row.forced_accept:g}"
        cells.append(
            [
                names[row.name, row.source], f"{row.batch:,}", f"{row.context:,}", number(row.tok_s, 1),
                "one run" if row.tok_s_spread is None else f"± {row.tok_s_spread:,.1f} ({row.repeats} runs)", times,
                BASELINES.get(base, NONE), number(row.ms_step), number(row.tokens_a_step), forced, number(row.prefill_s), f"{row.n:,}",
            ]
        )  # fmt: skip
    head = [
        "system",
        "batch",
        "context, tokens",
        "tokens/s",
        "spread",
        "speedup",
        "against",
        "ms a step",
        "tokens a step",
    ]
    head += ["forced acceptance", "prefill, s", "n answers"]
    note = "Speedups of tokens over decode seconds (α), within one record. Forced acceptance proves time only."
    return Table("Speed", note, head, cells)


def load_table(book: Book) -> Table:
    """Requests at given rates."""
    rows = sorted(book.of(Load), key=lambda row: row.rate)
    names = names_of(rows)
    cells = [
        [
            names[row.name, row.source], f"{row.rate:g}", f"{row.requests:,}", number(row.tok_s, 1), number(row.ttft_p50_ms, 1),
            number(row.ttft_p99_ms, 1), number(row.itl_p50_ms, 1), number(row.itl_p99_ms, 1), number(row.partial_share),
        ]
        for row in rows
    ]  # fmt: skip
    head = [
        "system",
        "requests/s",
        "n requests",
        "tokens/s",
        "first token, ms, median",
        "99 %",
        "pause, ms, median",
        "99 %",
    ]
    return Table("Load", "By sglang.bench_serving.", [*head, "share of verifications on views"], cells)


def acceptance_table(book: Book) -> Table:
    """Accept length by task, bucket and system."""
    rows = sorted(book.of(Acceptance), key=lambda row: (row.task, bucket_key(row.bucket)))
    names = names_of(rows)
    cells = [
        [
            names[row.name, row.source], row.task, row.bucket, number(row.mean_prompt_tokens, 0), number(row.tau_micro), number(row.tau_micro_no_bonus),
            number(row.tau_macro), number(row.tau_macro_no_bonus), NONE if row.tau_spread is None else f"± {row.tau_spread:.2f}",
            " ".join(f"{share:.2f}" for share in row.accept_by_position or []) or NONE, number(row.tau_full), number(row.confirmed_share),
            f"{row.n:,}", number(row.verifications, 0),
        ]
        for row in rows
    ]  # fmt: skip
    head = [
        "system",
        "task",
        "context",
        "mean prompt, tokens",
        "τ micro",
        "without bonus",
        "τ macro",
        "without bonus",
        "spread over answers",
    ]
    note = "Micro: all tokens over all verifications; macro: the mean over answers."
    return Table(
        "Accept length",
        note,
        [*head, "reached depth 1, 2, …", "tokens a full verification", "confirmed share", "n answers", "verifications"],
        cells,
        3,
    )


def quality_table(book: Book) -> Table:
    """Scores by task, bucket, budget and system: both kinds, labelled."""
    rows = sorted(book.of(Quality), key=lambda row: (row.task, bucket_key(row.bucket), row.view_tokens or 0))
    names = names_of(rows)
    cells = [
        [
            names[row.name, row.source], row.task, row.bucket, row.metric.replace("_", " "), number(row.mean_prompt_tokens, 0),
            NONE if row.view_tokens is None else f"{row.view_tokens:,}", number(row.score_reference, 3), number(row.score_own, 3),
            number(row.exact_match_own, 3),
            *(NONE if spread is None else f"± {spread:.3f}" for spread in (row.spread, row.spread_own)), number(row.mean_new_tokens, 0), f"{row.n:,}",
        ]
        for row in rows
    ]  # fmt: skip
    head = [
        "system",
        "task",
        "context",
        "metric",
        "mean prompt, tokens",
        "budget, tokens",
        "score against references",
        "score against the target's own output",
    ]
    head += [
        "equal to it as a whole",
        "spread over answers, references",
        "spread, own output",
        "mean new tokens",
        "n answers",
    ]
    return Table("Quality", "Scores from 0 to 1, on two scales that are never mixed.", head, cells, 4)


def excluded_table(book: Book) -> Table:
    """What does not count, and why."""
    cells = [[row.name, row.where, row.why, row.source] for row in book.excluded]
    return Table(
        "Left out",
        "These rows are in the records and in no figure above.",
        ["system", "where", "why", "record"],
        cells,
        4,
    )


def sources_table(book: Book) -> Table:
    """The records."""
    cells = []
    for source in book.sources:
        record = source.record
        versions = record.get("versions") or {}
        told = ", ".join(f"{name} {versions[name]}" for name in ("sglang", "torch", "transformers") if name in versions)
        used = f"{source.used:,}" if source.used else "none, or in the papers' tables only"
        cells.append(
            [
                source.path.name,
                used,
                source.model,
                *(str(record.get(k) or NONE) for k in ("device", "date", "commit")),
                told or NONE,
                str(record.get("command") or NONE),
                str(record.get("note") or NONE),
            ]
        )
    head = ["record", "rows that count", "model", "device", "date", "commit", "versions", "command", "note"]
    return Table("Records", "Where each figure comes from.", head, cells, 9)
