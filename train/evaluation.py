"""True prefix-hit accept length by context bucket: the reference decoder on prompts cut from documents.

Legend: K drafted tokens a verification.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longdraft.draft_models.acceptance import AcceptStats
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.reference_decode import speculative_decode
from longdraft.train.config import EvaluationSettings
from longdraft.train.documents import Corpus, Document
from longdraft.train.samples import answer_start
from longdraft.train.target import FrozenTarget

BUCKETS = ((2048, "<2K"), (8192, "2K-8K"), (32768, "8K-32K"), (1 << 62, ">32K"))
SHORTEST_PROMPT = 16


def bucket_of(length: int) -> str:
    """Name of the context bucket of a prompt of so many tokens."""
    return next(name for limit, name in BUCKETS if length < limit)


@dataclass
class BucketResult:
    """Sums over the prompts of a bucket; ``accepted_at[d]`` counts the verifications that kept more than d drafts."""

    prompts: int = 0
    stats: AcceptStats = field(default_factory=AcceptStats)
    accepted_at: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """For logs: τ with and without the bonus token, and the share of verifications that reached each depth."""
        count = max(self.stats.verifications, 1)
        return {
            "prompts": self.prompts,
            "verifications": self.stats.verifications,
            "tau": round(self.stats.tau, 4),
            "tau_without_bonus": round(self.stats.tau_without_bonus, 4),
            "reached_depth": [round(n / count, 4) for n in self.accepted_at],
        }


def cut_prompts(corpus: Corpus, settings: EvaluationSettings, limit: int) -> list[list[int]]:
    """Prompts in document order: before the last answer, at the listed lengths, or the first half of a plain text.

    Args:
        corpus: the evaluation documents.
        settings: how many and where to cut.
        limit: positions that the target has; a prompt leaves room for its continuation.
    """
    prompts: list[list[int]] = []
    room = limit - settings.new_tokens - 64  # the last verification may look a chain beyond the last token
    for index in range(len(corpus)):
        document = corpus[index]
        for end in _cuts(document, settings.lengths):
            if SHORTEST_PROMPT <= end <= min(room, len(document.ids)):
                prompts.append(document.ids[:end])
        if len(prompts) >= settings.prompts:
            break
    return prompts[: settings.prompts]


def _cuts(document: Document, lengths: Sequence[int]) -> Sequence[int]:
    if lengths:
        return lengths
    start = answer_start(document.supervised)
    return [start if 0 < start < len(document.ids) else len(document.ids) // 2]


def evaluate(
    target: FrozenTarget,
    draft: LongSpecDraft,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    steps: int,
    sum_over_ranks: Callable[..., list[float]] = lambda *values: list(values),
    rank: int = 0,
    world: int = 1,
) -> dict[str, BucketResult]:
    """Decode the prompts speculatively, each rank its share, and sum by bucket.

    Args:
        target, draft: bound to each other.
        prompts: token ids.
        new_tokens: greedy tokens behind each prompt.
        steps: K.
        sum_over_ranks: adds numbers over ranks.
        rank, world: this process and how many there are.

    Returns:
        One result for each bucket that has prompts, and ``"all"``.
    """
    names = [name for _, name in BUCKETS]
    sums = {name: BucketResult(accepted_at=[0] * steps) for name in names}
    training = draft.training
    draft.eval()
    for prompt in prompts[rank::world]:
        decoded = speculative_decode(target.model, draft, prompt, new_tokens, steps)
        result = sums[bucket_of(len(prompt))]
        result.prompts += 1
        result.stats.merge(decoded.stats)
        result.accepted_at = [a + b for a, b in zip(result.accepted_at, decoded.accepted_at, strict=True)]
    draft.train(training)
    flat = [n for r in sums.values() for n in (r.prompts, *_numbers(r.stats), *r.accepted_at)]
    return _with_total(names, [int(n) for n in sum_over_ranks(*flat)], steps)


def _numbers(stats: AcceptStats) -> tuple[int, int, int]:
    return stats.verifications, stats.drafted, stats.accepted


def _with_total(names: list[str], flat: list[int], steps: int) -> dict[str, BucketResult]:
    width, out = 4 + steps, {}
    total = BucketResult(accepted_at=[0] * steps)
    for i, name in enumerate(names):
        prompts, verifications, drafted, accepted, *at = flat[i * width : (i + 1) * width]
        result = BucketResult(prompts, AcceptStats(verifications, drafted, accepted), at)
        total.prompts += prompts
        total.stats.merge(result.stats)
        total.accepted_at = [a + b for a, b in zip(total.accepted_at, at, strict=True)]
        if prompts:
            out[name] = result
    return out | {"all": total}
