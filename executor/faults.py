"""Error messages for exceptions. It knows no requests."""

from traceback import TracebackException

from tllm_spec.request_errors import RequestError


def described(error: BaseException) -> str:
    """For example `KeyError: 'x'`, or the message of a request's own mistake. Safe for a user's
    exception whose `__str__` raises."""
    if isinstance(error, RequestError):
        return str(error)
    return f"{type(error).__name__}: {TracebackException(type(error), error, None)}"
