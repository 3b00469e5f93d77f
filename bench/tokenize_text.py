"""Text to token ids, by many processes: ``longdraft bench tokenize_text --target T --text IN.jsonl --out OUT.jsonl``.

Training reads ids faster than a GPU takes them; a tokenizer in the loop may not keep up. Every token is supervised.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from longdraft.train.config import TargetSettings
from longdraft.train.documents import FROM, TOKENS
from longdraft.train.target import load_tokenizer

BATCH = 32  # lines a task


@cache
def tokenizer(target: str) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_tokenizer(TargetSettings(path=target))


def convert(lines: list[str], target: str) -> list[str]:
    """Lines of ``{text}`` to lines of ``{input_ids, supervised_from}``."""
    found = tokenizer(target)([json.loads(line)["text"] for line in lines], verbose=False).input_ids
    return [json.dumps({TOKENS: ids, FROM: 0}) for ids in found]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench tokenize_text", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--text", type=Path, required=True, help="JSONL with a text field")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    lines = iter(args.text.read_text().splitlines())
    batches = list(iter(lambda: list(islice(lines, BATCH)), []))
    work = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    with ProcessPoolExecutor(args.processes) as pool, work.open("w") as file:
        for part in pool.map(convert, batches, repeat(args.target)):
            file.writelines(line + "\n" for line in part)
    work.replace(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
