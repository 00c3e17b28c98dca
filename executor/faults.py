"""Error messages for exceptions. It knows no requests."""

from traceback import TracebackException


def described(error: BaseException) -> str:
    """For example `KeyError: 'x'`. Safe for a user's exception whose `__str__` raises."""
    return f"{type(error).__name__}: {TracebackException(type(error), error, None)}"
