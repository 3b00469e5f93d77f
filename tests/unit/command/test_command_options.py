"""Options made from a settings schema."""

import re
from typing import Literal

import pytest
from pydantic import Field

from longdraft.errors import UserError
from longdraft.options import leaf_fields, option_parser, parse_all, parse_options, to_overrides
from longdraft.schema import Settings


class Inner(Settings):
    rate: float = Field(0.5, gt=0, description="learning rate, 100% sure")
    kind: Literal["one", "two"] = "one"
    names: list[str] = []


class Outer(Settings):
    """What it does."""

    inner: Inner = Inner()
    draft_context: int = Field(4, ge=1)
    fast: bool = False
    folder: str | None = None


def test_every_value_is_an_option_and_no_section_is() -> None:
    names = [name for name, _ in leaf_fields(Outer)]
    assert names == ["inner.rate", "inner.kind", "inner.names", "draft_context", "fast", "folder"]


@pytest.mark.parametrize("spelling", ["--draft-context", "--draft_context"])
def test_both_spellings_work(spelling: str) -> None:
    for words in ([spelling, "7"], [f"{spelling}=7"]):
        assert parse_options(Outer, words, "x")[0].draft_context == 7


def test_values_are_read_as_in_yaml_and_sections_as_dots() -> None:
    options, rest = parse_options(
        Outer, ["--inner.rate", "1e-3", "--inner.names", "[a, b]", "--fast", "--folder", "null"], "x"
    )
    assert rest == []
    assert (options.inner.rate, options.inner.names, options.fast, options.folder) == (1e-3, ["a", "b"], True, None)


def test_other_arguments_come_back_in_order() -> None:
    options, rest = parse_options(Outer, ["--model-path", "m", "--fast", "--tp", "2", "--port=1"], "x")
    assert options.fast
    assert rest == ["--model-path", "m", "--tp", "2", "--port=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-context", "0"], "draft_context=0"),
        (["--inner.kind", "three"], "inner.kind='three'"),
        (["--inner.rate", "fast"], "inner.rate='fast'"),
        (["--inner.rate", "["], "--inner.rate '[' is not valid YAML"),
        (["--draft-contxt", "3"], "did you mean '--draft-context'"),
    ],
)
def test_a_bad_option_is_a_users_error_that_names_it(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_all(Outer, words, "x")


def test_options_become_overrides_behind_the_rest() -> None:
    words = ["--config", "c.yaml", "--inner.rate", "2", "a.b=1", "--plan"]
    assert to_overrides(Outer, words, "x") == ["--config", "c.yaml", "a.b=1", "--plan", "inner.rate=2"]


def test_help_has_choices_defaults_and_descriptions() -> None:
    text = option_parser(Outer, "x").format_help()
    assert "{one,two}" in text
    assert "learning rate, 100% sure (default: 0.5)" in " ".join(text.split())
    assert "What it does." in text
