"""Whole documents: a book that is continued (PG-19) and a report that is summarised (GovReport)."""

from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.reading import Record
from longdraft.bench.tasks.task import Example, TaskSpec

BEFORE = "A United States government agency wrote the report that follows.\n\nThe report:\n"
AFTER = "\n\nSummarise this report on one page, in full sentences.\n\nThe summary:"


def continued(spec: TaskSpec, record: Record, cutter: Cutter) -> Example | None:
    """A book's start as the prompt, with no word of ours; the reference is how the book goes on for ``new_tokens``.

    SpecPV, section 4. None for a book that has no more than the prompt's tokens: it would belong to another context length.
    """
    cut = cutter.start(record.text("text"))
    if cut is None:
        return None
    start, rest = cut
    return Example(record.id, start, False, (cutter.first(rest, spec.new_tokens),), {"language": "en"})


def summarised(spec: TaskSpec, record: Record, cutter: Cutter) -> Example:
    """A report within an instruction; the reference is the report's own summary."""
    text = cutter.around(BEFORE, record.text("text", "report"), AFTER)
    return Example(record.id, text, True, (record.text("summary"),), {"language": "en"})


SPECS = (
    TaskSpec(
        "pg19",
        "continuation",
        "rouge_l",
        256,
        "PG-19, a JSON object a line",
        continued,
        ("pg19.jsonl",),
        ("text",),
    ),
    TaskSpec(
        "govreport",
        "summary",
        "rouge_l",
        512,
        "GovReport, a JSON object a line; `report` may stand for `text`",
        summarised,
        ("govreport.jsonl",),
        ("text", "summary"),
    ),
)
