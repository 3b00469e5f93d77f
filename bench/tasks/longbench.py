"""LongBench v1: one loader for its 21 tasks, since their records all have the same fields."""

from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.longbench_prompts import PROMPTS
from longdraft.bench.tasks.reading import Record
from longdraft.bench.tasks.task import Example, TaskSpec
from longdraft.errors import UserError, shown

# Answers of few-shot prompts end with their first line: what follows continues the list of examples.
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
FIELDS = ("_id", "input", "context", "answers", "length", "dataset", "language", "all_classes")

# kind, metric and tokens of an answer, as LongBench has them; Chinese ones are told apart by the records' language
TASKS = {
    "narrativeqa": ("question", "f1", 128),
    "qasper": ("question", "f1", 128),
    "multifieldqa_en": ("question", "f1", 64),
    "multifieldqa_zh": ("question", "f1", 64),
    "hotpotqa": ("question", "f1", 32),
    "2wikimqa": ("question", "f1", 32),
    "musique": ("question", "f1", 32),
    "dureader": ("question", "rouge_l", 128),
    "gov_report": ("summary", "rouge_l", 512),
    "qmsum": ("summary", "rouge_l", 512),
    "multi_news": ("summary", "rouge_l", 512),
    "vcsum": ("summary", "rouge_l", 512),
    "trec": ("few-shot", "classification", 64),
    "triviaqa": ("few-shot", "f1", 32),
    "samsum": ("few-shot", "rouge_l", 128),
    "lsht": ("few-shot", "classification", 64),
    "passage_count": ("synthetic", "number", 32),
    "passage_retrieval_en": ("synthetic", "number", 32),
    "passage_retrieval_zh": ("synthetic", "number", 32),
    "lcc": ("code", "edit_similarity", 64),
    "repobench-p": ("code", "edit_similarity", 64),
}


def example(spec: TaskSpec, record: Record, cutter: Cutter) -> Example:
    """A record in its task's prompt.

    Raises:
        UserError: the record is of another data set, in no known language, or lacks classes that its metric needs.
    """
    if (dataset := record.text("dataset")) not in (
        spec.name,
        f"{spec.name}_e",
    ):  # LongBench-E's files say <name>_e or <name>
        raise UserError(f"{record.where} is of dataset={shown(dataset)}: give the file of {spec.name!r}")
    prompt = PROMPTS[spec.name]
    answers = {"language": record.text("language"), "first_line": spec.name in FIRST_LINE}
    if spec.metric == "classification":
        answers["classes"] = record.texts("all_classes")
    # The record's input may hold braces, of code for instance: replaced, not formatted.
    after = prompt.after.replace("{input}", record.text("input"))
    text = cutter.around(prompt.before, record.text("context"), after)
    return Example(record.id, text, prompt.chat, record.texts("answers"), answers)


SPECS = tuple(
    TaskSpec(name, kind, metric, tokens, "LongBench v1's file", example, (f"{name}.jsonl",), FIELDS)
    for name, (kind, metric, tokens) in TASKS.items()
)
