"""Named chat templates: ids and masks are those of SpecForge's own preprocessing, and what cannot be rendered says why."""

import json
from pathlib import Path
from typing import Any

import pytest

from longdraft.errors import UserError
from longdraft.train.config import DataSettings
from longdraft.train.documents import Corpus, Renderer
from longdraft.train.tiny_random import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI3 = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
CONVERSATION = [
    {"role": "user", "content": "What is a clause?"},
    {"role": "assistant", "content": "A part of a contract."},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "Two parts."},
]


def tokenizer_of(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(("name", "template"), [("qwen", CHATML), ("llama3", LLAMA3), ("phi3", PHI3)])
def test_ids_and_mask_are_specforges(name: str, template: str) -> None:
    from specforge.data import preprocessing
    from specforge.data.template import TEMPLATE_REGISTRY

    settings = DataSettings(train="x", template=f"specforge:{name}")
    ours = Renderer(tokenizer_of(template), settings).render({"conversations": CONVERSATION}, "f:1")
    theirs = preprocessing.preprocess_conversations(
        tokenizer_of(template), [CONVERSATION], TEMPLATE_REGISTRY.get(name), max_length=4096
    )
    assert ours.ids == theirs["input_ids"][0][0].tolist()
    assert ours.supervised == [bool(m) for m in theirs["loss_mask"][0][0].tolist()]
    learnt = tokenizer_of(template).decode([i for i, kept in zip(ours.ids, ours.supervised, strict=True) if kept])
    assert "A part of a contract." in learnt
    assert "Two parts." in learnt
    assert "clause" not in learnt


def test_a_template_of_another_family_is_refused_not_trained_on_nothing() -> None:
    renderer = Renderer(tokenizer_of(CHATML), DataSettings(train="x", template="specforge:llama3"))
    with pytest.raises(UserError, match=r"f:1: .*finds no answer"):
        renderer.render({"conversations": CONVERSATION}, "f:1")


def test_plain_text_needs_no_template() -> None:
    renderer = Renderer(tokenizer_of(CHATML), DataSettings(train="x", template="specforge:qwen"))
    assert all(renderer.render({"text": "words"}, "f:1").supervised)


def test_an_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": CONVERSATION}) + "\n")
    settings = DataSettings(train=str(tmp_path / "a.jsonl"), template="specforge:lama3")
    with pytest.raises(UserError, match="did you mean 'llama3'"):
        Corpus(settings.train, settings, byte_tokenizer())


@pytest.mark.parametrize("bad", ["qwen", "specforge:", "specforge:a b"])
def test_a_setting_that_is_neither_auto_nor_a_name_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="template"):
        DataSettings(train="x", template=bad)
