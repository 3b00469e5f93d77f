"""Attention recovery of sparse sets, from a YAML file or from options: ``longdraft bench arr FILE.yaml | --target T ...``.

The measurement is :mod:`longdraft.bench.arr`'s. A record that was made of the same settings is not made again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from longdraft.bench import arr
from longdraft.bench.harness.place import KINDS, SHIPPED_FOR
from longdraft.bench.harness.settings import ArrSettings
from longdraft.draft_models.sparse_recipe import SparseRecipe
from longdraft.errors import UserError
from longdraft.models import MODELS, fetch, shipped_draft
from longdraft.schema import load_settings


def words_of(settings: ArrSettings) -> list[str]:
    """The options of :mod:`longdraft.bench.arr` for what a file says."""
    found: list[str] = []
    for name in sorted(settings.model_fields_set):
        value: Any = getattr(settings, name)
        if value is None or value is False:
            continue
        found.append("--" + name.replace("_", "-"))
        if value is not True:
            found += [str(each) for each in (value if isinstance(value, list) else [value])]
    return found


def is_made(settings: ArrSettings) -> bool:
    """Whether the record is there and of these settings.

    Raises:
        UserError: something else is there.
    """
    if not settings.record.exists():
        return False
    try:
        before = dict(json.loads(settings.record.read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"record {str(settings.record)!r} is no record of `longdraft bench arr`: move it away, or give another"
        ) from None
    args = arr.parse(words_of(settings))
    asked = arr.settings_of(args, SparseRecipe.load(args.recipe))
    return bool(json.loads(json.dumps(asked)) == before)


def main(argv: Sequence[str] | None = None) -> int:
    """A file's measurement; options go to :mod:`longdraft.bench.arr` as they are."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        return arr.main(words)
    parser = argparse.ArgumentParser(
        prog="longdraft bench arr", description="Attention recovery of sparse sets.", epilog=OPTIONS
    )
    parser.add_argument("file", metavar="FILE.yaml", help="what is measured; recipes/bench has some")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="laid over the file")
    args = parser.parse_args(words)
    settings = load_settings(ArrSettings, args.file, args.overrides)
    if settings.draft in KINDS and settings.target in SHIPPED_FOR:
        settings.draft = str(shipped_draft(SHIPPED_FOR[settings.target], settings.draft))
    if settings.target in MODELS:
        settings.target = str(fetch(settings.target))
    if is_made(settings):
        print(f"{settings.record} is there and of these settings")
        return 0
    return arr.main(words_of(settings))


OPTIONS = (
    "Or with options in place of a file: --target, --recipe, --documents, --record and those of longdraft.bench.arr."
)


if __name__ == "__main__":
    sys.exit(main())
