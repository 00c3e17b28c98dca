"""What went wrong, in words for whoever asks. It knows no requests."""

from traceback import TracebackException


def described(error: BaseException) -> str:
    """`KeyError: 'x'`. An exception of a user's may fail to say what it is: that must not be the
    next fault."""
    return f"{type(error).__name__}: {TracebackException(type(error), error, None)}"
