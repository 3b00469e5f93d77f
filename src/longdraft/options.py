"""Command-line options made from a settings schema, so that no option is written twice.

A field ``b`` of a section ``a`` is ``--a.b VALUE``; a top-level ``some_field`` is ``--some-field VALUE``. Values are read as in the
YAML file and validated by the schema. Both spellings of every name (``_`` and ``-``) work.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from longdraft.errors import UserError
from longdraft.schema import nearest, read_value, validate

S = TypeVar("S", bound=BaseModel)


def leaf_fields(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """``(dotted name, field)`` of every value of a schema, sections left out."""
    for name, field in schema.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaf_fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    inner = [arg for arg in get_args(annotation) if arg is not type(None)]
    if get_origin(annotation) is tuple:
        return "[" + ",".join(_metavar(arg) for arg in inner) + "]"
    if get_origin(annotation) is dict:
        return "{NAME: VALUE,...}"
    if get_origin(annotation) is list:
        return "[" + ",".join(_metavar(arg) for arg in inner) + ",...]"
    if inner:
        return "|".join(_metavar(arg) for arg in inner)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ",".join(annotation.model_fields) + "}"
    return str(getattr(annotation, "__name__", annotation)).upper()


def _help(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    text = "required" if default is PydanticUndefined else f"default: {'none' if default is None else default}"
    return f"{field.description or ''} ({text})".strip().replace("%", "%%")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(
    parser: argparse.ArgumentParser, schema: type[BaseModel], argv: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    flags = {_flag(name) for name, _ in leaf_fields(schema)}
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append(_flag(name[2:]) + equals + value if name.startswith("--") and _flag(name[2:]) in flags else word)
    found, rest = parser.parse_known_args(words)
    return vars(found), rest


def option_parser(schema: type[BaseModel], prog: str, description: str | None = None) -> argparse.ArgumentParser:
    """A parser with one option for each value of a schema; an option that is not given leaves no attribute."""
    first = " ".join((schema.__doc__ or "").split("\n\n")[0].replace("``", "").split())
    parser = argparse.ArgumentParser(
        prog=prog, description=description or first, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for name, field in leaf_fields(schema):
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(_flag(name), dest=name, metavar=_metavar(field.annotation), help=_help(field), **switch)
    return parser


def parse_options(
    schema: type[S], argv: Sequence[str], prog: str, description: str | None = None
) -> tuple[S, list[str]]:
    """Settings from a command line, and the arguments that are not the schema's, in order.

    Raises:
        UserError: a value that the schema refuses.
        SystemExit: for ``--help``, and for an option without its value.
    """
    found, rest = _parse(option_parser(schema, prog, description), schema, argv)
    data: dict[str, Any] = {}
    for name, text in found.items():
        *parents, leaf = name.split(".")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = read_value(text, f"{_flag(name)} {text!r}")
    return validate(schema, data), rest


def parse_all(schema: type[S], argv: Sequence[str], prog: str, description: str | None = None) -> S:
    """:func:`parse_options` for commands that take nothing else.

    Raises:
        UserError: an unknown argument too, with the nearest option.
    """
    options, rest = parse_options(schema, argv, prog, description)
    if rest:
        known = [_flag(name) for name, _ in leaf_fields(schema)]
        raise UserError(f"unknown argument {rest[0]!r}{nearest(rest[0], known)}: {prog} --help lists the options")
    return options


def to_overrides(schema: type[BaseModel], argv: Sequence[str], prog: str) -> list[str]:
    """The command line with every ``--a.b VALUE`` of the schema as an ``a.b=VALUE`` override behind the other arguments."""
    found, rest = _parse(option_parser(schema, prog), schema, argv)
    return [*rest, *(f"{name}={text}" for name, text in found.items())]
