"""Runs chat templates in processes with limits: a template is a program from a model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from queue import LifoQueue
from time import monotonic
from typing import Any

from tllm_spec.child_process import ChildProcess
from tllm_spec.text.template_child import TOO_LARGE
from tllm_spec.text.tokenizer import Tokenizer

MODULE = "tllm_spec.text.template_child"
MAX_SECONDS = 5.0  # for one conversation
NUM_PROCESSES = 2  # that render at once: a short conversation need not wait for a long one


class TemplateOverLimit(ValueError):
    """A chat template took too long, or made too much."""


class RenderTime:
    """What is left of the seconds for one conversation, which may be rendered several times."""

    def __init__(self) -> None:
        self.left = MAX_SECONDS


class TemplateProcesses:
    """Thread-safe: more threads than processes wait for their turn."""

    def __init__(self) -> None:
        trial = _message("{{ messages[0].content }}", {}, [{"role": "user", "content": "a"}], {})
        # The latest one to be idle comes first: the second one is started when both are needed.
        self._idle: LifoQueue[ChildProcess] = LifoQueue()
        self.all = [ChildProcess(MODULE, trial) for _ in range(NUM_PROCESSES)]
        for process in self.all:
            self._idle.put(process)

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        time: RenderTime,
    ) -> str:
        """The text of the messages, as `tokenizer.apply_chat_template` makes it with these options.
        Takes from `time`. Raises ValueError for messages that the template does not accept."""
        of_transformers: Any = tokenizer
        special_tokens = of_transformers.special_tokens_map
        message = _message(tokenizer.chat_template, special_tokens, messages, options)
        process = self._idle.get()
        try:
            answer = _ask(process, message, time)
        finally:
            self._idle.put(process)
        # The system ends a process without memory or stack.
        if answer is None or "over_limit" in answer:
            raise TemplateOverLimit(TOO_LARGE)
        if "error" in answer:
            raise ValueError(f"messages do not fit the model's chat template: {answer['error']}")
        text: str = answer["text"]
        return text


def _ask(process: ChildProcess, message: Mapping[str, Any], time: RenderTime) -> Any:
    process.start()
    began = monotonic()
    try:
        if not time.left:
            raise TimeoutError
        return process.ask(message, time.left)
    except TimeoutError:
        raise TemplateOverLimit(f"the chat template took over {MAX_SECONDS:g} s") from None
    finally:
        time.left = max(0.0, time.left - (monotonic() - began))


@cache
def template_processes() -> TemplateProcesses:
    """The same for all models: they remember nothing, and their start takes a second."""
    return TemplateProcesses()


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
