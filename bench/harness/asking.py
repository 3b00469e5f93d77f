"""What acceptance and quality share: tasks' prompts as token ids, and every system's answers to them."""

import statistics
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from longdraft.bench.harness.answers import Answer, ask, compared
from longdraft.bench.harness.ledger import digest
from longdraft.bench.harness.place import Place, place_of
from longdraft.bench.harness.run import Cell, Experiment
from longdraft.bench.harness.settings import AskingSettings, TaskSettings
from longdraft.bench.harness.systems.base import System
from longdraft.bench.lengths import tokens_word
from longdraft.bench.server import Server
from longdraft.bench.tasks import TASKS, Example, Task, load_task
from longdraft.errors import UserError
from longdraft.schema import nearest

TEMPLATE = 512  # tokens that a chat template may add
A = TypeVar("A", bound=AskingSettings)


@dataclass(frozen=True)
class Asked:
    """A task's examples of one length, and their token ids as the server gets them."""

    task: Task
    new_tokens: int
    prompts: list[tuple[str, list[int]]]


def rendered(example: Example, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, in the chat template where it belongs into one and the tokenizer has one."""
    if not example.chat or tokenizer.chat_template is None:
        return list(tokenizer(example.text, verbose=False).input_ids)
    chat = [{"role": "user", "content": example.text}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def answer_length(asked: TaskSettings) -> int:
    """Tokens of an answer at most.

    Raises:
        UserError: no such task.
    """
    if asked.name not in TASKS:
        raise UserError(
            f"task {asked.name!r} is none{nearest(asked.name, list(TASKS))}: give one of {', '.join(TASKS)}"
        )
    return asked.new_tokens or TASKS[asked.name].new_tokens


class Asking(Experiment[A]):
    """Cells are tasks and lengths of prompts."""

    beyond_the_end = False  # whether answers go on behind a stop token

    def make_place(self) -> Place:
        own = self.settings
        longest = max(max(task.prompt_tokens) + answer_length(task) for task in own.tasks)
        return place_of(own, own.batch, longest + TEMPLATE)

    def conditions(self, system: System) -> list[dict[str, Any]]:
        return [
            {"task": task.name, "bucket": tokens_word(tokens), "prompt_tokens": tokens}
            for task in self.settings.tasks
            for tokens in task.prompt_tokens
        ]

    @cache  # noqa: B019  # one experiment a process
    def asked(self, name: str, tokens: int) -> Asked:
        """A task's prompts."""
        task = next(task for task in self.settings.tasks if task.name == name)
        folder = task.folder or self.settings.data
        found = load_task(name, folder, task.count, self.settings.seed, self.place.tokenizer, tokens)
        prompts = [(example.id, rendered(example, self.place.tokenizer)) for example in found.examples]
        return Asked(found, answer_length(task), prompts)

    def of_cell(self, cell: Cell) -> Asked:
        return self.asked(cell.facts["task"], cell.facts["prompt_tokens"])

    def decisive(self, facts: dict[str, Any]) -> dict[str, Any]:
        asked = self.asked(facts["task"], facts["prompt_tokens"])
        references = [[example.references, dict(example.answers)] for example in asked.task.examples]
        return {
            "prompts": digest([asked.prompts, references]),
            "new_tokens": asked.new_tokens,
            "batch": self.settings.batch,
        }

    def lengths(self, cell: Cell) -> dict[str, Any]:
        """How long a cell's prompts are: tasks that cut long documents ask short ones as they are, whatever the bucket says."""
        return {"mean_prompt_tokens": round(statistics.fmean(len(ids) for _, ids in self.of_cell(cell).prompts), 1)}

    def answers(self, server: Server, cell: Cell) -> tuple[list[Answer], list[Answer] | None, dict[str, Any]]:
        """A cell's answers, plain decoding's (None where there are none), and whether they are equal where that is promised."""
        asked = self.of_cell(cell)
        own = ask(
            server, asked.prompts, cell.system.request(), asked.new_tokens, self.settings.batch, self.beyond_the_end
        )
        if cell.system is self.systems[0]:
            return own, own, {}
        plain = self.ledger.answers.get(self.plain_cell(cell).key)
        if plain is None or not cell.system.promised:
            return own, plain, {}
        return own, plain, compared(server, asked.prompts, plain, own, self.place.dtype == "float32")
