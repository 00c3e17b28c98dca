"""Errors of single requests that a caller may want to tell apart from other mistakes."""


class ContextLengthExceeded(ValueError):
    """The prompt is longer than the model's context."""
