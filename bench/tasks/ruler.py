"""RULER's needle tasks and its variable tracking, generated here: sentences, keys and values are our own (arXiv 2404.06654, section 3).

A key's value stands once in a text of as many tokens as the prompt may have; what is asked for differs: one value, one among other
keys, several values of a key, the values of several keys, or all names that lead to a value.
"""

import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise, product

from longdraft.bench.tasks.cutting import Cutter
from longdraft.bench.tasks.reading import Record
from longdraft.bench.tasks.ruler_words import ADJECTIVES, COLOURS, FILLER, NOUNS
from longdraft.bench.tasks.task import Example, TaskSpec
from longdraft.errors import UserError

BEFORE = "The text below says here and there which number opens a locker. Keep these in mind: a question about them follows.\n\n"
NAMES_BEFORE = "The text below defines names here and there. Keep these in mind: a question about them follows.\n\n"
CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"  # names of these are part of no word
HOPS = 4
CHAINS = 2  # one is asked for


@dataclass(frozen=True)
class Variety:
    """How many keys are asked for, how many values each has, how many other keys stand there; ``dense``: nothing else does."""

    asked: int = 1
    values: int = 1
    others: int = 0
    dense: bool = False


VARIETIES = {
    "ruler_single": Variety(),
    "ruler_multikey": Variety(others=3),
    "ruler_multikey_dense": Variety(dense=True),
    "ruler_multivalue": Variety(values=4),
    "ruler_multiquery": Variety(asked=4),
}


def needle(key: str, value: str) -> str:
    """The sentence that gives a key its value."""
    return f"The locker of the {key} opens with {value}."


def filler(rng: random.Random, count: int) -> list[str]:
    """So many sentences about nothing in particular."""
    return [" ".join(rng.choice(words) for words in FILLER) + "." for _ in range(count)]


def fitted(
    rng: random.Random, needles: list[str], hay: list[str], before: str, after: str, cutter: Cutter
) -> tuple[str, int]:
    """A prompt as long as it may be: needles in their order at random places between as many hay sentences as fit.

    Returns:
        The prompt and how many hay sentences it has.

    Raises:
        UserError: the needles alone are too long.
    """
    text = " ".join(hay)
    token_ends = cutter.ends(text)
    fixed = cutter.count(f"{before}{' '.join(needles)}{after}")
    room = cutter.prompt_tokens - fixed
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + len(sentence) + 1)
    last = token_ends[room] if 0 <= room < len(token_ends) else len(text) + 1
    many = bisect_right(ends, last) - 1 if room > 0 else 0
    while True:
        places = sorted(rng.randint(0, many) for _ in needles)
        sentences = list(hay[:many])
        for number, (place, found) in enumerate(zip(places, needles, strict=True)):
            sentences.insert(place + number, found)
        prompt = f"{before}{' '.join(sentences)}{after}"
        over = cutter.count(prompt) - cutter.prompt_tokens
        if over <= 0:
            return prompt, many
        if not many:
            raise UserError(
                f"prompt_tokens={cutter.prompt_tokens}: needles and question take {fixed} tokens, give more"
            )
        many = max(0, many - 1 - over // 16)


def hidden(spec: TaskSpec, record: Record, cutter: Cutter) -> Example:
    """A prompt of one of the varieties of needles; the values that are asked for must all be in the answer."""
    rng, variety = random.Random(f"{record.fields['seed']} {spec.name} {record.number}"), VARIETIES[spec.name]
    most = cutter.prompt_tokens // 8 + 1  # no sentence has fewer tokens
    names = [" ".join(words) for words in product(ADJECTIVES, COLOURS, NOUNS)]
    keys = rng.sample(names, min(len(names), variety.asked + variety.others + (most if variety.dense else 0)))
    numbers = [str(n) for n in rng.sample(range(1_000_000, 10_000_000), len(keys) * variety.values)]
    given = {key: numbers[i * variety.values : (i + 1) * variety.values] for i, key in enumerate(keys)}
    asked, near = keys[: variety.asked], keys[: variety.asked + variety.others]
    needles = [needle(key, value) for key in near for value in given[key]]
    rng.shuffle(needles)
    if variety.dense:
        hay = [needle(key, given[key][0]) for key in keys[len(near) :]]
    else:
        hay = filler(rng, most)
    whose = " and of the ".join([", of the ".join(asked[:-1]), asked[-1]] if len(asked) > 1 else asked)
    one = variety.asked * variety.values == 1
    after = (
        f"\n\nWhich {'number opens' if one else 'numbers open'} the {'locker' if variety.asked == 1 else 'lockers'} of the "
        f"{whose}, by the text above? {'Write it.' if one else 'Write all of them.'}"
    )
    text, _ = fitted(rng, needles, hay, BEFORE, after, cutter)
    return _example(record, text, [value for key in asked for value in given[key]])


def tracked(spec: TaskSpec, record: Record, cutter: Cutter) -> Example:
    """Variable tracking: names that are given a value or another name; all that lead to one value must be in the answer."""
    rng = random.Random(f"{record.fields['seed']} {spec.name} {record.number}")
    names: list[str] = []
    while len(names) < CHAINS * (HOPS + 1):
        if (name := "".join(rng.choices(CONSONANTS, k=5))) not in names:
            names.append(name)
    values = rng.sample(range(10_000, 100_000), CHAINS)
    chains = [names[i * (HOPS + 1) : (i + 1) * (HOPS + 1)] for i in range(CHAINS)]
    told = [
        [f"Let {chain[0]} be {value}.", *(f"Let {b} be what {a} is." for a, b in pairwise(chain))]
        for chain, value in zip(chains, values, strict=True)
    ]
    turns = [i for i in range(CHAINS) for _ in range(HOPS + 1)]
    rng.shuffle(turns)  # chains lie between one another, each in its own order
    needles = [told[turn].pop(0) for turn in turns]
    after = f"\n\nWhich names are {values[0]} by the text above, directly or through other names? Write all {HOPS + 1} of them."
    text, _ = fitted(rng, needles, filler(rng, cutter.prompt_tokens // 8 + 1), NAMES_BEFORE, after, cutter)
    return _example(record, text, chains[0])


def _example(record: Record, text: str, values: list[str]) -> Example:
    return Example(record.id, text, True, (", ".join(values),), {"language": "en", "values": tuple(values)})


SPECS = (
    *(TaskSpec(name, "needle", "needles", 128, "generated", hidden) for name in VARIETIES),
    TaskSpec("ruler_variables", "needle", "needles", 64, "generated", tracked),
)
