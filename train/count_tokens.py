"""longdraft counts --target.path TARGET --data.train TEXT.jsonl --out counts.safetensors

Counts how often each of a target's tokens comes in text, for a draft head over the most frequent ones: `longdraft serve
--draft-head-tokens N --draft-head-counts FILE`, or `longdraft bench score_drafts --head-tokens N --head-counts FILE`, which
measures what it costs in accept length. Best counted on what the target itself says (`longdraft generate`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from longdraft.draft_models.target import TargetSpec
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError
from longdraft.schema import Settings
from longdraft.train.config import DataSettings, TargetSettings
from longdraft.train.documents import Corpus
from longdraft.train.target import load_config, load_tokenizer
from longdraft.train.vocabulary import count_tokens

SIZES = (4096, 8192, 16384, 32768, 65536)


class CountSettings(Settings):
    """Count a target's tokens in text."""

    target: TargetSettings
    data: DataSettings
    out: str = Field(min_length=1, description="file to write, .safetensors")
    prompts: bool = Field(False, description="count prompts too, not the answers alone")
    limit: int | None = Field(None, ge=1, description="documents that are counted, from the front; None: all")


def count(settings: CountSettings) -> TokenCounts:
    """Counts of the data; the tokenizer's special tokens rank first, since a draft must be able to end a turn.

    Raises:
        UserError: data that cannot be read, or nothing to count.
    """
    tokenizer = load_tokenizer(settings.target)
    vocab = TargetSpec.from_config(load_config(settings.target)).vocab_size
    corpus = Corpus(settings.data.train, settings.data, tokenizer, vocab)
    documents = (corpus[i] for i in range(min(len(corpus), settings.limit or len(corpus))))
    counted = count_tokens(documents, vocab, all_rows=settings.prompts)
    if not bool(counted.count_V.any()):
        raise UserError(
            f"data.train={settings.data.train!r} has no answers to count: set prompts=true to count prompts"
        )
    return TokenCounts(counted.count_V, counted.ranked(tokenizer.all_special_ids))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    from longdraft.options import parse_all

    settings = parse_all(CountSettings, list(sys.argv[1:] if argv is None else argv), "longdraft counts")
    counts = count(settings)
    total, vocab = int(counts.count_V.sum()), len(counts.count_V)
    counts.save(Path(settings.out), {"target": settings.target.path, "tokens": str(total)})
    print(f"{settings.out}: {total:,} tokens, {int((counts.count_V > 0).sum()):,} of {vocab:,} different ones")
    for size in SIZES:
        if size < vocab:
            print(f"  {size:>6} most frequent: {counts.coverage(counts.top(size)):.2%} of the text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
