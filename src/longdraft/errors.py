"""Errors that a user can mend: bad options, files that do not fit, targets that cannot be served."""


class UserError(ValueError):
    """Bad input. The message names the field, its value and the remedy; command lines print it and exit with 2."""
