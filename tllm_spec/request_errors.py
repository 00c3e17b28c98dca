"""Errors of single requests that a caller may want to tell apart from other mistakes, and the
messages of exceptions."""

from traceback import TracebackException
from typing import Literal

# A compilation does not tell that a grammar leads nowhere: the request fails later.
NO_GUIDED_TOKEN = (
    "guided_decoding: no token can be chosen next: the grammar, min_tokens and the excluded words "
    "leave none (or the model's logits are not numbers)"
)
NO_TOKEN_ERROR = (
    "no token can be chosen next: the logits are not numbers (NaN), or every token is excluded "
    "(-inf)"
)
# Where a grammar can read a text in very many ways, its mask is over a limit.
SLOW_GRAMMAR = (
    "guided_decoding: the grammar takes too long for a round's masks or drafts; nested repetitions "
    "and rules that read the same text in many ways do: write it with fewer of these"
)


class RequestError(ValueError):
    """A request of `LLM` that cannot be served, or that has failed while it ran."""


class GrammarsUnavailable(RuntimeError):
    """Grammars cannot be compiled, while everything else is served."""


class AdaptersInUse(RuntimeError):
    """No adapter can make room for another one before requests end."""


class ContextLengthExceeded(RequestError):
    """The prompt is longer than the model's context."""


def described(error: BaseException) -> str:
    """For example `KeyError: 'x'`, or the message of a request's own mistake. Safe for a user's
    exception whose `__str__` raises."""
    if isinstance(error, RequestError):
        return str(error)
    return f"{type(error).__name__}: {TracebackException(type(error), error, None)}"


PauseMode = Literal["abort", "wait", "keep", "retract"]
PAUSE_MODES = "abort", "wait", "keep", "retract"
REFUSING_MODES = "abort", "wait"  # in which an engine takes no requests


class EnginePaused(RuntimeError):
    """The engine is paused in a mode in which it takes no requests."""

    def __init__(self) -> None:
        super().__init__("the engine is paused and takes no requests until it is resumed")
