"""Mathematics whose answers are long: GSM8K, MATH and AIME in their own fields."""

from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.reading import Record
from longdraft.bench.tasks.task import Example, TaskSpec

MARK = "####"  # GSM8K writes what an answer comes to behind it
AFTER = "\n\nWork it out step by step, and write what it comes to in \\boxed{} at the end."


def example(spec: TaskSpec, record: Record, cutter: Cutter) -> Example:
    """A problem; the reference is its final answer in a box, or the worked solution with its own."""
    answer = record.text("answer", "solution").rpartition(MARK)[2].strip()
    if "\\boxed" not in answer:
        answer = f"\\boxed{{{answer}}}"
    text = cutter.around("", record.text("question", "problem").strip(), AFTER)
    return Example(record.id, text, True, (answer,), {"language": "en"})


SPECS = (
    TaskSpec(
        "gsm8k",
        "mathematics",
        "mathematics",
        1024,
        "GSM8K, a JSON object a line; the answer ends with #### and a number",
        example,
        ("gsm8k.jsonl",),
        ("question", "answer"),
    ),
    TaskSpec(
        "math500",
        "mathematics",
        "mathematics",
        4096,
        "MATH or MATH-500, a JSON object a line; a solution with a box may stand for the answer",
        example,
        ("math500.jsonl",),
        ("problem", "answer"),
    ),
    TaskSpec(
        "aime24",
        "mathematics",
        "mathematics",
        16384,
        "problems 60 to 89 of AIMO's validation set, a JSON object a line",
        example,
        ("aime24.jsonl",),
        ("problem", "answer"),
    ),
)
