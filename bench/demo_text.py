"""Text that every machine has: what the demo's draft trains on, and the prompts it is measured on.

The standard library's sources and the installed packages' descriptions need no network. The modules that prompts are cut from
are held out of the training text.
"""

import json
import random
import sysconfig
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

HELD_OUT = ("argparse.py", "calendar.py", "fractions.py", "heapq.py", "ipaddress.py", "shlex.py", "textwrap.py")
SKIPPED_PACKAGES = ("__pycache__", "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings")
SHORTEST, LONGEST = 1500, 24_000  # characters of a training document
FACTS = "What is the capital of France? Tell me three facts about it."
LONG_TOKENS = 4300


@dataclass(frozen=True)
class Prompt:
    """A prompt of the demo: text cut to a number of tokens, or a chat message."""

    name: str
    text: str
    tokens: int | None = None
    chat: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids as the server sees them."""
        if self.chat:
            rendered = tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
            return list(tokenizer(rendered, add_special_tokens=False).input_ids)
        return list(tokenizer(self.text).input_ids)[: self.tokens]


def library_folder() -> Path:
    """The standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def module_text(name: str) -> str:
    """Source of a standard library module."""
    return (library_folder() / name).read_text(encoding="utf-8")


def prompts() -> list[Prompt]:
    """The six prompts: two chats, code of three lengths, and one of at least 4,000 tokens."""
    return [
        Prompt("chat: three facts", FACTS, chat=True),
        Prompt(
            "chat: explain code", "Explain what this Python code does.\n\n" + module_text("heapq.py")[-2600:], chat=True
        ),
        Prompt("code, 250 tokens", module_text("shlex.py"), 250),
        Prompt("code, 1,000 tokens", module_text("fractions.py"), 1000),
        Prompt("code, 2,000 tokens", module_text("textwrap.py"), 2000),
        Prompt("code, 4,300 tokens", module_text("argparse.py"), LONG_TOKENS),
    ]


def source_documents() -> list[tuple[str, str]]:
    """``(name, text)`` of the standard library's modules, those for prompts left out."""
    root = library_folder()
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if path.name in HELD_OUT or any(part in SKIPPED_PACKAGES for part in inside.parts):
            continue
        found.append((inside.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return found


def description_documents() -> list[tuple[str, str]]:
    """``(name, text)`` of the installed packages' descriptions (mostly English, in Markdown)."""
    found: dict[str, str] = {}
    for package in distributions():
        fields: Any = package.metadata  # an email.message.Message: the description is its body or a header
        found[str(fields["Name"])] = str(fields.get_payload() or fields.get("Description") or "")
    return sorted((f"{name} (description)", text) for name, text in found.items())


def write_training_text(path: Path, seed: int = 0) -> int:
    """Write the training text as JSONL, in a seeded order; returns the number of documents."""
    documents = [
        (name, text[:LONGEST])
        for name, text in source_documents() + description_documents()
        if len(text) >= SHORTEST and text.isascii()
    ]
    random.Random(seed).shuffle(documents)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in documents))
    return len(documents)
