"""Metrics against cases worked out by hand."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from longdraft.bench.tasks import Example, Task, score
from longdraft.bench.tasks.metrics import chosen, code_line


def scored(metric: str, references: str | tuple[str, ...], prediction: str, **answers: Any) -> float:
    right = (references,) if isinstance(references, str) else references
    example = Example("1", "a prompt", True, right, {"language": "en"} | answers)
    return score(Task("by hand", "case", metric, (example,), 8), example, prediction)


@pytest.mark.parametrize(
    ("reference", "prediction", "wanted"),
    [
        ("the cat sat", "A cat sat!", 1),  # articles, case and marks do not count
        ("red green blue", "green", 2 * 1 * (1 / 3) / (1 + 1 / 3)),
        ("a b b c", "b b b", 2 * (2 / 3) * (2 / 3) / (2 / 3 + 2 / 3)),  # "a" is an article
        ("yes", "no", 0),
        ("yes", "", 0),
    ],
)
def test_f1(reference: str, prediction: str, wanted: float) -> None:
    assert scored("f1", reference, prediction) == pytest.approx(wanted)


def test_the_best_reference_counts() -> None:
    assert scored("f1", ("the chapel", "Tarn's old chapel"), "old chapel") == pytest.approx(2 * 2 / 5)
    assert scored("rouge_l", ("x y", "a b"), "a b") == 1


def test_chinese_is_compared_by_characters() -> None:
    assert scored("f1", "一七〇二年", "1702年，", language="zh") == pytest.approx(2 * 1 / (5 + 5))
    assert scored("rouge_l", "石桥很老", "石桥老了", language="zh") == pytest.approx(3 / 4)
    assert scored("rouge_l", "石桥", "木船", language="zh") == 0


def test_rouge_l() -> None:
    assert scored("rouge_l", "a b c d", "a x c") == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert scored("rouge_l", "the bridges were closing", "the bridge was closed") == pytest.approx(3 / 4)  # stems


def test_edit_similarity() -> None:
    assert scored("edit_similarity", "    return a + b", "return a + b") == 1
    # One deletion and one insertion of the eight characters of both.
    assert scored("edit_similarity", "abcd", "abed") == pytest.approx(1 - 2 / 8)
    assert scored("edit_similarity", "return x", "```python\n# it is x\nreturn x\nmore") == 1
    assert scored("edit_similarity", "return x", "# only\n// comments") == 0


def test_the_line_of_code_of_an_answer() -> None:
    assert code_line("\n\nx = 1  # one\n") == "x = 1  # one"
    assert code_line("# why\nx = 1\ny = 2") == "x = 1"
    assert code_line("") == ""


def test_classification() -> None:
    classes = ("City", "Other location", "location", "Individual")
    assert scored("classification", "City", "Type: City", classes=classes) == 1
    assert scored("classification", "City", "City or Individual", classes=classes) == 0.5
    assert scored("classification", "City", "Individual", classes=classes) == 0
    # A name inside the right one's is not another class.
    assert scored("classification", "Other location", "Other location", classes=classes) == 1
    assert scored("classification", "I think that it is City.", "City", classes=classes) == 1
    assert scored("classification", "none of them", "City", classes=classes) == 0
    assert scored("classification", "none of them", "no idea", classes=classes) == 1


def test_numbers() -> None:
    assert scored("number", "Paragraph 15", "Paragraph 15") == 1
    assert scored("number", "15", "It is 15, of 30") == 0.5
    assert scored("number", "15", "151") == 0
    assert scored("number", "15", "I cannot say") == 0
    assert scored("number", "段落7", "是段落07") == 1


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(C)", "C"),
        ("The correct answer is (D).", "D"),
        ("The answer is a hard one to give. **Answer: A**", "A"),
        ("At first the answer is B, but then: the answer is C", "C"),
        ("D. Felled woods", "D"),
        ("It must be (B)", "B"),
        ("A long text about nothing", None),
        ("Because of the dam", None),
        ("", None),
    ],
)
def test_the_choice_of_an_answer(text: str, letter: str | None) -> None:
    assert chosen(text) == letter


def test_choices() -> None:
    assert scored("choice", "B", "The answer is (B)") == 1
    assert scored("choice", "B", "The answer is (C)") == 0
    assert scored("choice", "B", "no idea") == 0


@pytest.mark.parametrize(
    ("reference", "prediction", "wanted"),
    [
        ("\\boxed{94}", "144 - 50 = 94, so it is \\boxed{94}.", 1),
        ("\\boxed{94}", "She has 144.\n#### 94", 1),
        ("\\boxed{1,400}", "\\boxed{1400}", 1),
        ("\\boxed{\\frac{1}{2}}", "That is $\\boxed{0.5}$", 1),
        ("\\boxed{x^2-x-2}", "\\boxed{(x+1)(x-2)}", 1),
        ("\\boxed{94}", "First \\boxed{94}; no: \\boxed{95}", 0),
        ("\\boxed{94}", "It is 94, no, it is \\boxed{49}", 0),
        ("\\boxed{94}", "I cannot say", 0),
    ],
)
def test_mathematics(reference: str, prediction: str, wanted: float) -> None:
    assert scored("mathematics", reference, prediction) == wanted


def test_mathematics_is_scored_in_any_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(scored("mathematics", "\\boxed{2}", "\\boxed{\\frac{4}{2}}")))
    thread.start()
    thread.join()
    assert found == [1]


def test_needles() -> None:
    values = ("1234567", "ABCDE")
    assert scored("needles", "1234567, ABCDE", "abcde", values=values) == 0.5
    assert scored("needles", "1234567", "1234567 and ABCDE", values=values) == 1


def test_only_the_first_line_of_a_few_shot_answer_counts() -> None:
    assert scored("f1", "Farnby", "\nFarnby\nQuestion: and then?", first_line=True) == 1
    assert scored("f1", "Farnby", "\nFarnby\nQuestion: and then?") < 1


@pytest.mark.parametrize(
    ("metric", "own", "same", "other", "answers"),
    [
        ("f1", "It was the old chapel", "it was the old chapel.", "no", {}),
        ("rouge_l", "the bridge was closed", "the bridge was closed", "nothing", {}),
        ("edit_similarity", "# mean\nreturn a\n", "return a", "", {}),
        ("classification", "the type is City", "City", "Individual", {"classes": ("City", "Individual")}),
        ("number", "Paragraph 3, I think", "3", "4", {}),
        ("choice", "I would say: the answer is (B)", "B", "C", {}),
        ("mathematics", "so \\boxed{7}\nas was asked", "\\boxed{7}", "\\boxed{8}", {}),
        ("needles", "I only see 11", "It is 11", "12", {"values": ("11", "12")}),
        ("needles", "I see none", "none", "12", {"values": ("11", "12")}),
    ],
)
def test_an_answer_is_held_against_the_targets_own(
    metric: str, own: str, same: str, other: str, answers: dict[str, Any]
) -> None:
    example = Example("1", "a prompt", True, ("not used",), {"language": "en"} | answers)
    task = Task("by hand", "case", metric, (example,), 8)
    against = replace(example, references=(own,))
    assert score(task, against, own) == score(task, against, same) == 1
    assert score(task, against, other) == 0
