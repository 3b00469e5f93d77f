"""LongBench v2: questions about long texts with four choices, one of which is right."""

from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.reading import Record
from longdraft.bench.tasks.task import Example, TaskSpec
from longdraft.errors import UserError, shown

LETTERS = ("A", "B", "C", "D")
FIELDS = ("_id", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context")
BEFORE = "A text follows, and behind it a question with four choices.\n\nThe text:\n"


def example(spec: TaskSpec, record: Record, cutter: Cutter) -> Example:
    """A text, its question and its choices; the reference is the right one's letter.

    Raises:
        UserError: the answer is no letter of a choice.
    """
    choices = "\n".join(f"({letter}) {record.text(f'choice_{letter}').strip()}" for letter in LETTERS)
    after = (
        f"\n\nWhich choice is right?\n\n{record.text('question').strip()}\n{choices}\n\n"
        'End with a line of the form "The answer is (X)", where X is a choice\'s letter.'
    )
    if (right := record.text("answer").strip()) not in LETTERS:
        raise UserError(f"{record.where}: answer={shown(right)} is none of A, B, C and D: give the data set's own file")
    text = cutter.around(BEFORE, record.text("context"), after)
    return Example(record.id, text, True, (right,), {"language": "en"})


SPECS = (
    TaskSpec(
        "longbench_v2",
        "choice",
        "choice",
        128,
        "LongBench v2's data.json, one list",
        example,
        ("longbench_v2.json", "data.json"),
        FIELDS,
    ),
)
