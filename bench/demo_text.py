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

HELD_OUT_MODULES = ("argparse.py", "textwrap.py")
HELD_OUT_TOPICS = ("naming", "specialnames")
SKIPPED_PACKAGES = ("__pycache__", "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings")
SHORTEST, LONGEST = 1500, 8000  # characters of a training document; longer texts are cut into several
EACH = 64  # documents of code, and as many of prose
SHARED = 80  # characters of a paragraph that no training document may share with a held-out one


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
        return list(tokenizer(self.text, verbose=False).input_ids)[: self.tokens]


def library_folder() -> Path:
    """The standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def module_text(name: str) -> str:
    """Source of a standard library module."""
    return (library_folder() / name).read_text(encoding="utf-8")


def topic_text(name: str) -> str:
    """A chapter of the language reference, as ``help()`` prints it."""
    from pydoc_data.topics import topics

    return str(topics[name])


def prompts() -> list[Prompt]:
    """The six prompts: three chats, code of two lengths, and a chapter of the manual; two have more than 4,000 tokens."""
    summarize = "Summarize the following text in a few sentences.\n\n" + topic_text("naming")[:6300]
    return [
        Prompt("chat: facts", "What is the capital of France? Tell me three facts about it.", chat=True),
        Prompt("chat: plants", "How do plants make food? Explain it to a child.", chat=True),
        Prompt("chat: summary", summarize, chat=True),
        Prompt("code", module_text("textwrap.py"), 1800),
        Prompt("long code", module_text("argparse.py"), 4100),
        Prompt("long manual", topic_text("specialnames"), 4300),
    ]


def source_documents() -> list[tuple[str, str]]:
    """``(name, text)`` of the standard library's modules, those for prompts left out."""
    root = library_folder()
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if path.name in HELD_OUT_MODULES or any(part in SKIPPED_PACKAGES for part in inside.parts):
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


def topic_documents() -> list[tuple[str, str]]:
    """``(name, text)`` of the language reference's chapters, those for prompts left out."""
    from pydoc_data.topics import topics

    return [(f"{name} (manual)", text) for name, text in sorted(topics.items()) if name not in HELD_OUT_TOPICS]


def paragraphs(text: str) -> set[str]:
    """The longer paragraphs of a text."""
    return {part.strip() for part in text.split("\n\n") if len(part.strip()) >= SHARED}


def pieces(documents: list[tuple[str, str]], hidden: set[str]) -> list[tuple[str, str]]:
    """Texts cut to length, at line ends; those that share a paragraph with the hidden ones are left out."""
    found = []
    for name, text in documents:
        start = 0
        while len(text) - start >= SHORTEST:
            end = text.rfind("\n", start + SHORTEST, start + LONGEST) if len(text) - start > LONGEST else len(text)
            end = end if end > 0 else start + LONGEST
            if not paragraphs(text[start:end]) & hidden:
                found.append((name, text[start:end]))
            start = end
    return found


def training_documents(seed: int = 0) -> list[tuple[str, str]]:
    """Code and prose in equal parts, in a seeded order; nothing that the prompts' texts hold too (the manual repeats itself)."""
    held_out = [module_text(name) for name in HELD_OUT_MODULES] + [topic_text(name) for name in HELD_OUT_TOPICS]
    hidden = set().union(*(paragraphs(text) for text in held_out))
    chosen = []
    for documents in (source_documents(), topic_documents() + description_documents()):
        found = pieces(documents, hidden)
        random.Random(seed).shuffle(found)
        chosen += found[:EACH]
    random.Random(seed).shuffle(chosen)
    return chosen


def write_training_text(path: Path, seed: int = 0) -> int:
    """Write the training text as JSONL; returns the number of documents."""
    documents = training_documents(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in documents))
    return len(documents)


def write_long_text(path: Path, count: int) -> None:
    """Write the longest texts that every machine has as JSONL, code and prose in turn."""
    sources = [pair for pair in source_documents() if "/" not in pair[0]]
    kinds = [
        sorted(found, key=lambda pair: (-len(pair[1]), pair[0]))
        for found in (sources, topic_documents() + description_documents())
    ]
    mixed = [pair for pairs in zip(*kinds, strict=False) for pair in pairs][:count]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in mixed))
