"""The generated needle tasks: lengths, places, what is asked and what is right."""

import re

import pytest

from longdraft.bench.tasks import TASKS, Example, load_task, score
from longdraft.bench.tasks.ruler import CONSONANTS, HOPS, VARIETIES
from longdraft.errors import UserError
from longdraft.train.tiny_random import byte_tokenizer

TOKENIZER = byte_tokenizer()
NAMES = [name for name in TASKS if name.startswith("ruler_")]
NEEDLE = re.compile(r"The locker of the ([\w ]+?) opens with (\d{7})\.")
LET = re.compile(r"Let (\w{5}) be (?:what (\w{5}) is|(\d{5}))\.")


def examples(name: str, count: int = 4, seed: int = 0, tokens: int = 3000) -> tuple[Example, ...]:
    return load_task(name, None, count, seed, TOKENIZER, tokens).examples


@pytest.mark.parametrize("name", NAMES)
def test_prompts_fill_their_length(name: str) -> None:
    for tokens, count in ((1500, 4), (6000, 1)):
        for example in examples(name, count, tokens=tokens):
            assert tokens - 300 < len(TOKENIZER(example.text, add_special_tokens=False).input_ids) <= tokens


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_gives_the_examples(name: str) -> None:
    three = examples(name, 3, tokens=1500)
    assert three[:2] == examples(name, 2, tokens=1500) != examples(name, 2, seed=1, tokens=1500)
    assert len({example.references for example in three}) == 3


@pytest.mark.parametrize("name", VARIETIES)
def test_the_asked_keys_have_the_values_that_count(name: str) -> None:
    variety = VARIETIES[name]
    for example in examples(name):
        given: dict[str, list[str]] = {}
        for key, value in NEEDLE.findall(example.text):
            given.setdefault(key, []).append(value)
        question = example.text.rpartition("\n\n")[2]
        asked = [key for key in given if f"of the {key}" in question]
        assert len(asked) == variety.asked and all(len(given[key]) == variety.values for key in asked)
        assert sorted(v for key in asked for v in given[key]) == sorted(example.answers["values"])
        if variety.dense:
            assert len(given) > 20 and "Early in the morning" not in example.text
        else:
            assert len(given) == variety.asked + variety.others


def test_needles_lie_at_all_depths() -> None:
    depths = [e.text.index("The locker of") / len(e.text) for e in examples("ruler_single", count=40, tokens=1200)]
    assert min(depths) < 0.25 and max(depths) > 0.75


def test_names_lead_to_the_value_over_other_names() -> None:
    for example in examples("ruler_variables"):
        told = LET.findall(example.text)
        asked = re.search(r"Which names are (\d{5})", example.text)
        assert asked is not None and len(told) == 2 * (HOPS + 1)
        values: dict[str, str] = {}
        for name, other, value in told:  # a name is told before another leads to it
            values[name] = value or values[other]
        assert {name for name, value in values.items() if value == asked.group(1)} == set(example.answers["values"])
        assert all(set(name) <= set(CONSONANTS) for name in values)


def test_the_score_is_the_share_of_the_values_found() -> None:
    task = load_task("ruler_multivalue", None, 1, 0, TOKENIZER, 2000)
    (example,) = task.examples
    a, b, c, d = example.answers["values"]
    assert score(task, example, f"{a}, {b}, {c} and {d}") == 1
    assert score(task, example, f"They are {d} and {b}, or 1234567") == 0.5
    assert score(task, example, "I cannot say") == 0


def test_a_prompt_too_short_for_its_needles_is_told() -> None:
    with pytest.raises(UserError, match=r"prompt_tokens=200: needles and question take \d+ tokens, give more"):
        examples("ruler_multivalue", tokens=200)
