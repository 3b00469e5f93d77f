"""Metrics of answers, each 0 to 1: ``metric(example, reference, prediction)``.

References are a data set's answers or, where a view's text is held against the target's own, that text: every metric reads both
sides by the same rules, so that either may be a whole answer.
"""

import re
import string
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from longdraft.bench.tasks.task import Example

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHINESE_MARKS = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～、《》「」『』【】〔〕“”‘’…—"
NUMBER = re.compile(r"\d+")
# The letter behind "answer is" or "answer:", or one that begins or ends the text by itself.
SAID = re.compile(r"(?i:answer\s*(?:is|:)\s*:?\s*(?:option|choice)?)\s*[(\[\"']?([A-D])\b")
ALONE = re.compile(r"^\W*(A(?![\w'’]| [a-z])|[B-D](?![\w'’]))|\(([A-D])\)\W*$")
SECONDS = 5  # that reading or comparing two formulas may take
ENDS = 4000  # characters at the end of a worked answer in which its result stands


def words(text: str, language: str) -> list[str]:
    """Words that count: lower case, no punctuation and, in English, no articles; Chinese by characters.

    LongBench cuts Chinese into words with a segmenter; by characters needs none and gives somewhat higher figures.
    """
    marks = set(string.punctuation + CHINESE_MARKS)
    bare = "".join("" if c in marks else c for c in text.lower())
    return list("".join(bare.split())) if language == "zh" else ARTICLES.sub(" ", bare).split()


def f1(example: Example, reference: str, prediction: str) -> float:
    """F1 of the words that both have, as SQuAD counts."""
    language = example.answers.get("language", "en")
    right, said = words(reference, language), words(prediction, language)
    common = sum((Counter(right) & Counter(said)).values())
    return 2 * common / (len(right) + len(said)) if common else float(right == said)


class Characters:
    """A tokenizer for rouge-score, whose own drops all that is not Latin."""

    def tokenize(self, text: str) -> list[str]:
        return words(text, "zh")


@cache
def rouge_scorer(language: str) -> Any:
    """rouge-score's ROUGE-L: English words by their stems, Chinese characters."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True, tokenizer=Characters() if language == "zh" else None)


def rouge_l(example: Example, reference: str, prediction: str) -> float:
    """F measure of the longest common subsequence of words."""
    return float(rouge_scorer(example.answers.get("language", "en")).score(reference, prediction)["rougeL"].fmeasure)


def code_line(text: str) -> str:
    """The first line that is code: no comment and no fence of Markdown; a text of one line is that line."""
    lines = text.strip("\n").split("\n")
    if len(lines) == 1:
        return lines[0].strip()
    return next((line.strip() for line in lines if line.strip() and not any(m in line for m in ("`", "#", "//"))), "")


def edit_similarity(example: Example, reference: str, prediction: str) -> float:
    """How alike two lines of code are: one less the insertions and deletions by the lines' lengths."""
    from rapidfuzz import fuzz

    return fuzz.ratio(code_line(reference), code_line(prediction)) / 100


def classification(example: Example, reference: str, prediction: str) -> float:
    """One over the number of classes that an answer names, if the right one is among them.

    A class whose name is a part of the right one's is not counted.
    """
    classes: Sequence[str] = example.answers["classes"]
    # A reference that is a text and not a class says what it names first.
    inside = sorted((c for c in classes if c in reference), key=lambda c: (reference.index(c), -len(c)))
    right = reference if reference in classes else next(iter(inside), None)
    named = {c for c in classes if c in prediction and (right is None or c == right or c not in right)}
    if right is None:
        return float(not named)
    return 1 / len(named) if right in named else 0.0


def number(example: Example, reference: str, prediction: str) -> float:
    """Share of the numbers in an answer that are the reference's first: counts and numbers of paragraphs."""
    right, said = NUMBER.findall(reference), [int(n) for n in NUMBER.findall(prediction)]
    if not right or not said:
        return float(not right and not said)
    return said.count(int(right[0])) / len(said)


def chosen(text: str) -> str | None:
    """The letter of the choice that an answer comes to; the last one that it calls its answer."""
    bare = text.replace("*", "").strip()
    if said := SAID.findall(bare):
        return str(said[-1]).upper()
    alone = ALONE.search(bare)
    return (alone.group(1) or alone.group(2)) if alone else None


def choice(example: Example, reference: str, prediction: str) -> float:
    """1 for the same choice."""
    return float(chosen(reference) == chosen(prediction))


def mathematics(example: Example, reference: str, prediction: str) -> float:
    """1 for the same final answer, which math-verify finds (a box before all else) and compares as a formula."""
    from math_verify import parse, verify

    if reference == prediction:
        return 1.0
    # Its time limits are signals, which only the main thread gets.
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None
    right, said = (parse(text[-ENDS:], parsing_timeout=limit) for text in (reference, prediction))
    return float(verify(right, said, timeout_seconds=limit))


def needles(example: Example, reference: str, prediction: str) -> float:
    """Share of the values in the reference that the answer has too; whole values, in either case."""
    known: Sequence[str] = example.answers["values"]
    right, said = ({v for v in known if v.lower() in text.lower()} for text in (reference, prediction))
    return len(right & said) / len(right) if right else float(not said)


METRICS: dict[str, Callable[[Example, str, str], float]] = {
    f.__name__: f for f in (rouge_l, f1, edit_similarity, classification, number, choice, mathematics, needles)
}
