"""Errors of single requests that a caller may want to tell apart from other mistakes."""

# Of a request with a grammar. xgrammar does not tell beforehand that a grammar leads nowhere.
NO_GUIDED_TOKEN = (
    "guided_decoding: no token can be chosen next: the grammar, min_tokens and the excluded words "
    "leave none (or the model's logits are not numbers)"
)


class RequestError(ValueError):
    """A request of `LLM` that cannot be served, or that has failed while it ran."""


class GrammarsUnavailable(RuntimeError):
    """Grammars cannot be compiled, while everything else is served."""


class ContextLengthExceeded(RequestError):
    """The prompt is longer than the model's context."""
