"""Runs chat templates in a process with limits: a template is a program from a model's folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tllm_spec.child_process import ChildProcess
from tllm_spec.text.template_child import TOO_LARGE
from tllm_spec.text.tokenizer import Tokenizer

MAX_SECONDS = 5.0  # for one conversation


class TemplateOverLimit(ValueError):
    """A chat template took too long, or made too much."""


class TemplateProcess:
    """Thread-safe: conversations are rendered one after the other."""

    def __init__(self) -> None:
        trial = _message("{{ messages[0].content }}", {}, [{"role": "user", "content": "a"}], {})
        self._child = ChildProcess("tllm_spec.text.template_child", trial)
        self._lock = threading.Lock()

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """The text of the messages, as `tokenizer.apply_chat_template` makes it with these options.
        Raises ValueError for messages that the template does not accept."""
        of_transformers: Any = tokenizer
        special_tokens = of_transformers.special_tokens_map
        message = _message(tokenizer.chat_template, special_tokens, messages, options)
        with self._lock:
            try:
                answer = self._child.ask(message, MAX_SECONDS)
            except TimeoutError:
                reason = f"the chat template took over {MAX_SECONDS:g} s"
                raise TemplateOverLimit(reason) from None
        # The system ends a process without memory or stack.
        if answer is None or "over_limit" in answer:
            raise TemplateOverLimit(TOO_LARGE)
        if "error" in answer:
            raise ValueError(f"messages do not fit the model's chat template: {answer['error']}")
        text: str = answer["text"]
        return text


@cache
def template_process() -> TemplateProcess:
    """One for all models: it remembers nothing, and its start takes a second."""
    return TemplateProcess()


def has_own_renderer(tokenizer: Tokenizer) -> bool:
    """Whether it is a user's program that makes a text of messages, not a template."""
    from transformers import PreTrainedTokenizerBase  # heavy

    render = getattr(type(tokenizer), "apply_chat_template", None)
    return render is not PreTrainedTokenizerBase.apply_chat_template


def _message(
    template: Any,
    special_tokens: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "template": template,
        "special_tokens": dict(special_tokens),
        "messages": list(messages),
        "options": dict(options),
    }
