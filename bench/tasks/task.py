"""What a task of the quality and acceptance benchmarks is: examples with whole prompts, and what their answers are held against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.reading import Record


@dataclass(frozen=True)
class Example:
    """One prompt.

    ``text`` is the whole prompt, before any chat template; ``chat`` says whether it goes into one. ``references`` are right
    answers, of which the best counts. ``answers`` is what the metric needs beside them: ``language``, ``first_line``,
    ``classes`` or ``values``.
    """

    id: str
    text: str
    chat: bool
    references: tuple[str, ...]
    answers: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """Examples that one metric scores; ``new_tokens`` is how many an answer may have."""

    name: str
    kind: str
    metric: str
    examples: tuple[Example, ...]
    new_tokens: int


@dataclass(frozen=True)
class TaskSpec:
    """A kind of task and where its examples come from.

    ``files`` are names that the data set's file may have, none for what is generated; ``fields`` those that a record needs;
    ``make`` builds an example, or None from a document that is too short for the prompt.
    """

    name: str
    kind: str
    metric: str
    new_tokens: int
    source: str
    make: Callable[["TaskSpec", Record, Cutter], Example | None]
    files: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
