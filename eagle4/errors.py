"""The one exception that users see as a single line."""


class BadInput(ValueError):
    """Something the user gave is wrong. The message names the thing and the remedy, in one line.

    Apps print it without a traceback and exit with status 2. Everything else is a bug and keeps its traceback.
    """


def require(condition: bool, message: str) -> None:
    """Raise BadInput with the message unless the condition holds."""
    if not condition:
        raise BadInput(message)
