"""Typed settings: one pydantic schema is the YAML file, the ``a.b=value`` overrides and the command line's options."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from longdraft.errors import UserError, shown


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


def _switch_word(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OnOff = BeforeValidator(_switch_word)  # for words of which YAML reads on and off as truth values

S = TypeVar("S", bound=BaseModel)


def load_settings(schema: type[S], path: str | Path | None = None, overrides: Sequence[str] = ()) -> S:
    """Read a YAML file, lay ``a.b=value`` overrides over it and validate.

    Raises:
        UserError: no such file, bad YAML, an override without ``=``, an unknown key (with the nearest one) or a value that
            does not fit.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except UnicodeDecodeError:
            raise UserError(f"config {str(path)!r} is not UTF-8 text: give a YAML file") from None
        except OSError as error:
            raise UserError(
                f"config {str(path)!r} cannot be read ({error.strerror}): give an existing YAML file"
            ) from None
        except yaml.YAMLError as error:
            raise UserError(f"config {str(path)!r} is not valid YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(loaded or {}, dict):
            raise UserError(f"config {str(path)!r} holds a {type(loaded).__name__}: write a mapping of sections")
        data = loaded or {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"override {text!r} is not of the form a.b=value")
        node = data
        *parents, leaf = key.split(".")
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UserError(f"override {text!r}: {name} is a value, not a section")
        node[leaf] = read_value(value, f"override {text!r}")
    return validate(schema, data)


def read_value(text: str, where: str) -> Any:
    """A value as YAML reads it; ``where`` names it in the :class:`UserError` of one that YAML cannot read."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{where} is not valid YAML: quote special characters") from None


def validate(schema: type[S], data: dict[str, Any]) -> S:
    """Validate plain data; the error names the first field that is wrong, its value and the remedy."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(_explain(schema, first)) from None


def field_paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections first; of lists of sections without numbers."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from field_paths(inner, f"{prefix}{name}.")


def nearest(word: str, choices: Sequence[str]) -> str:
    """`` (did you mean …?)`` or an empty string."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explain(schema: type[BaseModel], error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(field_paths(schema))
        plain = ".".join(str(part) for part in error["loc"] if not isinstance(part, int))
        near = nearest(plain, known) or nearest(path.rsplit(".", 1)[-1], known)
        return f"unknown key {path!r}{near}"
    if error["type"] == "missing":
        return f"{path} is missing: set it in the file or as {path}=VALUE"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{path}={shown(error['input'])}: {message}" if path else message
