"""Semantic retrieval heads: how much each head looks at a needle while an answer is taken from it.

At every step at which the answer's next token stands in the needle, each head's attention on the whole needle is added up, once for
every place in the needle that holds the token; the score of a head is the mean over the answers that count (CompressKV; Dustin,
section 4.2.1). The draft's heads are scored along the same answers, as its chains look among the committed tokens.

Legend: L tokens, P rows that predict a needle's token, N keys, S layers, H query heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.train.calibration.lookahead import Lookahead
from longdraft.train.calibration.needles import Needle, Trial
from longdraft.train.calibration.reading import Reading


@dataclass(frozen=True)
class Heads:
    """Scores of one answer, float64 ``[S, H]``, and the number of its tokens that stand in the needle."""

    hits: int
    target_SH: torch.Tensor
    draft_SH: torch.Tensor | None


@dataclass(frozen=True)
class Asking:
    """How questions are asked.

    Attributes:
        new_tokens: of an own answer at most.
        recall: percent that an own answer's ROUGE-1 recall must be above.
        rule: as in :func:`head_mass`.
        stop_ids: tokens that end an answer.
    """

    new_tokens: int
    recall: float
    rule: str
    stop_ids: Sequence[int]


def rouge_recall(reference: str, text: str) -> float:
    """ROUGE-1 recall, 0 to 100."""
    from rouge_score.rouge_scorer import RougeScorer

    return 100 * float(RougeScorer(["rouge1"]).score(reference, text)["rouge1"].recall)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the generation config's, the model's and the tokenizer's."""
    found = (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id)
    return sorted({t for ids in found if ids is not None for t in (ids if isinstance(ids, list) else [ids])})


def own_answer(reading: Reading, ids: Sequence[int], new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """The target's greedy answer without the token that ends it."""
    answer: list[int] = []
    logits = reading.read(ids)
    while len(answer) < new_tokens and (token := int(logits.argmax())) not in stop_ids:
        answer.append(token)
        logits = reading.read([token])
    return answer


def head_mass(
    score_HPN: torch.Tensor, id_N: torch.Tensor, span: range, said_P: torch.Tensor, times_P: torch.Tensor, rule: str
) -> torch.Tensor:
    """Sum over rows of what one layer's heads give to a needle, float64 ``[H]``.

    Args:
        score_HPN: attention scores of the rows, -inf where a row does not look.
        id_N: tokens of the keys.
        span: keys that are the needle.
        said_P: the token that each row is followed by.
        times_P: how often that stands in the needle.
        rule: ``mass`` of the needle's keys, or ``argmax``: 1 where the favourite key is a place of the needle that holds the token.
    """
    if rule == "mass":
        hit_HP = score_HPN.softmax(-1)[..., span.start : span.stop].sum(-1)
    else:
        best_HP = score_HPN.argmax(-1)
        inside_HP = (best_HP >= span.start) & (best_HP < span.stop)
        hit_HP = (inside_HP & (id_N[best_HP] == said_P)).float()
    return (hit_HP.double() * times_P).sum(-1)


def score_answer(reading: Reading, draft: Lookahead | None, trial: Trial, answer: Sequence[int], rule: str) -> Heads:
    """Scores of an answer that the target is taken to have given.

    Args:
        reading: has read the prompt at least; left with prompt and answer read.
        draft: scored too, if there is one.
        trial: of the prompt.
        answer: at least one token.
        rule: as in :func:`head_mass`.
    """
    prompt, device = len(trial.ids), reading.model.device
    needle = trial.ids[trial.span.start : trial.span.stop]
    row_P = [i for i, token in enumerate(answer) if token in needle]
    said_P = torch.tensor([answer[i] for i in row_P], device=device)
    times_P = torch.tensor([needle.count(answer[i]) for i in row_P], device=device)
    id_N = torch.tensor([*trial.ids, *answer], device=device)
    config = reading.model.config
    target_SH = torch.zeros(config.num_hidden_layers, config.num_attention_heads, dtype=torch.float64)
    draft_SH = None if draft is None else torch.zeros(len(draft.layers), draft.heads, dtype=torch.float64)

    def see_target(layer: int, score_HRN: torch.Tensor) -> None:
        target_SH[layer] = head_mass(score_HRN[:, row_P], id_N, trial.span, said_P, times_P, rule).cpu()

    def see_draft(layer: int, score_HWCN: torch.Tensor) -> None:
        assert draft_SH is not None
        draft_SH[layer] = head_mass(score_HWCN[:, :, 0], id_N, trial.span, said_P, times_P, rule).cpu()

    reading.back_to(prompt - 1)
    reading.look([trial.ids[-1], *answer[:-1]], see_target)  # row i of the pass says answer[i]
    if draft is not None and row_P:
        draft.look(reading, [prompt - 1 + i for i in row_P], 1, see_draft)
    return Heads(len(row_P), target_SH, draft_SH)


def ask(
    model: Any,
    tokenizer: Any,
    draft: Lookahead | None,
    trial: Trial,
    needle: Needle,
    how: Asking,
    given: Sequence[int] | None,
) -> tuple[str, float, Heads | None]:
    """Ask one question: the answer's text, its ROUGE-1 recall in percent, and its scores, None where it does not count.

    Args:
        model: the target.
        tokenizer: the target's.
        draft: scored along the same answer.
        trial: the prompt.
        needle: what it hides.
        how: of own answers.
        given: the right answer's tokens, which count as if the target had said them; None lets it answer.
    """
    reading = Reading(model, draft.aux_layers if draft else ())
    if given is None:
        answer = own_answer(reading, trial.ids, how.new_tokens, how.stop_ids)
    else:
        answer = list(given)
        reading.read(trial.ids)
    text = str(tokenizer.decode(answer, skip_special_tokens=True))
    recall = rouge_recall(needle.answer, text)
    counts = given is not None or recall > how.recall
    return text, recall, score_answer(reading, draft, trial, answer, how.rule) if counts and answer else None


def best_heads(score_SH: torch.Tensor, count: int) -> list[list[int]]:
    """The ``count`` heads of each layer with the largest scores, ascending by number; of equal ones the first."""
    order_SH = score_SH.argsort(dim=1, descending=True, stable=True)
    return [sorted(row[:count]) for row in order_SH.tolist()]
