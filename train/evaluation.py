"""True prefix-hit accept length by context bucket: the reference decoder on prompts cut from documents.

Legend: K drafted tokens a verification.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longdraft.draft_models.acceptance import AcceptStats
from longdraft.draft_models.buckets import BUCKET_NAMES, TOTAL, bucket_of
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.reference_decode import Decoded, speculative_decode
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.kernels.view_attention import View
from longdraft.train.config import EvaluationSettings
from longdraft.train.documents import Corpus, Document
from longdraft.train.samples import answer_start
from longdraft.train.target import FrozenTarget

SHORTEST_PROMPT = 16


@dataclass
class BucketResult:
    """Sums over the prompts of a bucket.

    An output that loops flatters every draft: it is counted in ``looping`` and is in no other figure but ``every``.

    Attributes:
        prompts: decoded prompts, looping ones included.
        looping: outputs of which more than 30 % of the 4-grams repeat.
        stats: over the outputs that do not loop.
        every: over all outputs.
        accepted_at: of the outputs that do not loop; ``[d]`` counts the verifications that kept more than d drafts.
    """

    prompts: int = 0
    looping: int = 0
    stats: AcceptStats = field(default_factory=AcceptStats)
    every: AcceptStats = field(default_factory=AcceptStats)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, decoded: Decoded) -> None:
        """One prompt's output."""
        loops = repeated_share(decoded.tokens) > ALLOWED
        self.prompts, self.looping = self.prompts + 1, self.looping + loops
        self.every.merge(decoded.stats)
        if not loops:
            self.stats.merge(decoded.stats)
            self.accepted_at = [a + b for a, b in zip(self.accepted_at, decoded.accepted_at, strict=True)]

    def numbers(self) -> list[int]:
        """Everything, to be summed over ranks and buckets."""
        return [self.prompts, self.looping, *_numbers(self.stats), *_numbers(self.every), *self.accepted_at]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "BucketResult":
        """From sums of :meth:`numbers`."""
        n = [int(x) for x in numbers]
        return cls(n[0], n[1], AcceptStats(*n[2:5]), AcceptStats(*n[5:8]), n[8:])

    def figures(self) -> dict[str, object]:
        """For logs: τ with and without the bonus token (None if every output loops), and the share of verifications that reached each depth."""
        count = self.stats.verifications
        return {
            "prompts": self.prompts,
            "looping": self.looping,
            "looping_share": round(self.looping / max(self.prompts, 1), 4),
            "verifications": count,
            "tau": round(self.stats.tau, 4) if count else None,
            "tau_without_bonus": round(self.stats.tau_without_bonus, 4) if count else None,
            "tau_looping_too": round(self.every.tau, 4) if self.every.verifications else None,
            "reached_depth": [round(n / max(count, 1), 4) for n in self.accepted_at],
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
    view: View | None = None,
) -> dict[str, BucketResult]:
    """Decode the prompts speculatively, each rank its share, and sum by bucket.

    Args:
        target, draft: bound to each other.
        prompts: token ids.
        new_tokens: greedy tokens behind each prompt.
        steps: K.
        sum_over_ranks: adds numbers over ranks.
        rank, world: this process and how many there are.
        view: what the draft reads of the target's cache; None is all of it.

    Returns:
        One result for each bucket that has prompts, and ``"all"``.
    """
    sums = {name: BucketResult(accepted_at=[0] * steps) for name in BUCKET_NAMES}
    training = draft.training
    draft.eval()
    for prompt in prompts[rank::world]:
        sums[bucket_of(len(prompt))].add(speculative_decode(target.model, draft, prompt, new_tokens, steps, view))
    draft.train(training)
    flat = sum_over_ranks(*(n for result in sums.values() for n in result.numbers()))
    width = len(flat) // len(sums)
    rows = [flat[i : i + width] for i in range(0, len(flat), width)]
    results = {name: BucketResult.of(row) for name, row in zip(sums, rows, strict=True)}
    total = BucketResult.of([sum(column) for column in zip(*rows, strict=True)])
    return {name: result for name, result in results.items() if result.prompts} | {TOTAL: total}


def _numbers(stats: AcceptStats) -> tuple[int, int, int]:
    return stats.verifications, stats.drafted, stats.accepted
