"""Errors that a user can mend: bad options, files that do not fit, targets that cannot be served."""


class UserError(ValueError):
    """Bad input. The message names the field, its value and the remedy; command lines print it and exit with 2."""


def shown(value: object, most: int = 80) -> str:
    """A value as a message quotes it: its start where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
