"""Tasks whose prompts and metrics the quality and acceptance benchmarks use: books, reports, LongBench, RULER, mathematics.

``load_task`` reads a data set's own file or generates; ``score`` gives an answer its 0 to 1.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longdraft.bench.tasks import documents, longbench, longbench_v2, maths, ruler
from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.metrics import METRICS
from longdraft.bench.tasks.reading import Record, find_file, read_records
from longdraft.bench.tasks.task import Example, Task, TaskSpec
from longdraft.errors import UserError, shown
from longdraft.schema import nearest

__all__ = ["TASKS", "Example", "Task", "TaskSpec", "load_task", "score"]

TASKS: Mapping[str, TaskSpec] = {
    spec.name: spec for spec in (*documents.SPECS, *longbench.SPECS, *longbench_v2.SPECS, *ruler.SPECS, *maths.SPECS)
}


def load_task(name: str, folder: Path | None, count: int, seed: int, tokenizer: Any, prompt_tokens: int) -> Task:
    """Examples of a task, the same for the same file, seed, tokenizer and length.

    Args:
        name: one of :data:`TASKS`.
        folder: holds the data set's file; generated tasks need none.
        count: examples; fewer where the file has fewer that fit.
        seed: of the order in which records are drawn, and of what is generated.
        tokenizer: a fast one of transformers.
        prompt_tokens: a prompt's length. ``pg19`` and the generated tasks fill it, a word or a sentence less at most; of other
            tasks' prompts what is too much is cut out of the context's middle.

    Raises:
        UserError: no such task, a missing or a wrong file (says which file with which fields belongs where), or no document is
            long enough.
    """
    if name not in TASKS:
        raise UserError(f"task {shown(name)} is none{nearest(name, list(TASKS))}: give one of {', '.join(TASKS)}")
    if count < 1:
        raise UserError(f"count={count}: give how many examples of {name!r}, 1 or more")
    spec, cutter = TASKS[name], Cutter(tokenizer, prompt_tokens)
    if spec.files:
        path = find_file(name, folder, spec.files, spec.fields, spec.source)
        records = read_records(path)
        random.Random(seed).shuffle(records)
    else:
        records = [Record(f"{name}, example {n}", n, {"seed": seed}) for n in range(1, count + 1)]
    examples: list[Example] = []
    for record in records:
        if len(examples) == count:
            break
        if (example := spec.make(spec, record, cutter)) is not None:
            if any(example.id == other.id for other in examples):  # answers go by ids
                example = replace(example, id=f"{example.id} ({record.number})")
            examples.append(example)
    if not examples:
        longest = max(cutter.count(record.text("text")) for record in records)
        raise UserError(
            f"prompt_tokens={prompt_tokens:,}: no document of {str(path)!r} is longer, the longest has {longest:,} tokens: give less"
        )
    return Task(name, spec.kind, spec.metric, tuple(examples), spec.new_tokens)


def score(task: Task, example: Example, prediction: str) -> float:
    """How good an answer is, 0 to 1: by the task's metric against the best of the example's references.

    To hold an answer against the target's own, replace the references by that text: metrics read both sides alike.
    """
    metric = METRICS[task.metric]
    if example.answers.get("first_line"):
        return max(metric(example, _first_line(text), _first_line(prediction)) for text in example.references)
    return max(metric(example, text, prediction) for text in example.references)


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n")[0]
