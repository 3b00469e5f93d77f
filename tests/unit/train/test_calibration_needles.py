"""Prompts that hide a needle: where it stands, how long they are, and what cannot be made."""

import pytest

from longdraft.errors import UserError
from longdraft.models import demo_model_folder
from longdraft.train.calibration.needles import NEEDLES, Prompter, haystacks, trials
from longdraft.train.calibration.settings import NeedleSettings
from longdraft.train.config import TargetSettings
from longdraft.train.target import load_tokenizer
from longdraft.train.tiny_random import byte_tokenizer

HAY = "One day it rained. " * 200


@pytest.fixture(params=["bytes", "smollm2"])
def prompter(request: pytest.FixtureRequest) -> Prompter:
    if request.param == "bytes":
        return Prompter(byte_tokenizer(), chat=True)
    return Prompter(load_tokenizer(TargetSettings(path=str(demo_model_folder()))), chat=True)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_a_prompt_is_as_long_as_asked_and_the_span_is_the_needle(prompter: Prompter, chat: bool, depth: float) -> None:
    prompter, needle, length = Prompter(prompter.tokenizer, chat), NEEDLES[1], 700
    hay = prompter.encode(HAY)
    ids, span = prompter.hide(needle, hay, depth, length)
    assert len(ids) == length
    decode = prompter.tokenizer.decode
    assert decode(ids[span.start : span.stop]) == f" {needle.sentence}"
    before, behind = decode(ids[: span.start]), decode(ids[span.stop :])
    assert needle.question in behind and needle.sentence not in before + behind
    assert before.rstrip(" ").endswith(("rained.", "text.\n\n") if chat else ("rained.",)) or depth == 0.0
    assert abs(before.count("rained") - depth * (before + behind).count("rained")) <= 1
    assert behind.endswith("assistant\n") == chat and behind.endswith("Answer:") == (not chat)


def test_every_answer_stands_in_its_needle_word_for_word() -> None:
    assert all(needle.answer in needle.sentence for needle in NEEDLES)
    assert len({needle.question for needle in NEEDLES}) == len(NEEDLES) == 3


def test_trials_are_every_length_depth_haystack_and_needle_once() -> None:
    prompter = Prompter(byte_tokenizer(), chat=True)
    settings = NeedleSettings(lengths=[400, 500], depths=3, haystacks=2, count=2)
    hay = haystacks([prompter.encode(HAY), prompter.encode(HAY.upper())], 2, 500, None)
    found = list(trials(settings, prompter, hay))
    keys = [(t.length, t.depth, t.haystack, t.needle) for t in found]
    assert len(keys) == len(set(keys)) == 2 * 3 * 2 * 2
    assert keys[:3] == [(400, 0.0, 0, 0), (400, 0.0, 0, 1), (400, 0.0, 1, 0)] and keys[-1] == (500, 1.0, 1, 1)
    assert [len(t.ids) for t in found] == [t.length for t in found]
    assert found[0].name == "length 400, depth 0%, haystack 1, needle 1"


def test_haystacks_are_made_of_whole_documents_in_turn() -> None:
    assert haystacks([[1, 2], [3], [4], [5, 6]], 2, 3, None) == [[1, 2, 4], [3, 5, 6]]
    with pytest.raises(
        UserError, match=r"haystack of 3 tokens only, needles\.lengths wants 4 of each of needles\.haystacks=2"
    ):
        haystacks([[1, 2], [3], [4], [5, 6]], 2, 4, None)


def test_no_haystack_holds_the_token_that_begins_a_text() -> None:
    assert haystacks([[9, 1, 9], [9, 2, 3]], 1, 2, 9) == [[1, 9, 2, 3]], "one in the midst of a text is the text's own"


def test_a_template_is_rendered_the_same_every_day_and_without_thinking() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ date_string if date_string is defined else strftime_now('%s') }}{{ messages[0]['content'] }}"
        "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    )
    before, behind = Prompter(tokenizer, chat=True).around(NEEDLES[0].question)
    assert tokenizer.decode(before).startswith("1 Jan 2026Read") and tokenizer.decode(behind).endswith("hang?")


def test_a_length_that_the_question_fills_is_refused() -> None:
    prompter = Prompter(byte_tokenizer(), chat=True)
    with pytest.raises(UserError, match=r"needles\.lengths=60: question and needle alone take"):
        prompter.hide(NEEDLES[0], prompter.encode(HAY), 0.5, 60)


def test_depths_reach_from_front_to_end() -> None:
    assert NeedleSettings(depths=1).depth_shares == [0.5]
    assert NeedleSettings(depths=5).depth_shares == [0, 0.25, 0.5, 0.75, 1]
