"""From a conversation to token ids, by the model's chat template. The names of control tokens in a
message are text: a user cannot end a turn or begin another role's."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from tllm_spec.config.option_checks import check_text
from tllm_spec.request_errors import described
from tllm_spec.text.messages import Messages, TemplateOverLimit, Tools, checked, visible
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.text.vocabulary import harmony_message, harmony_tokens

logger = logging.getLogger(__name__)

# Variables that the renderer sets itself. The parameters of `apply_chat_template` are not free,
# either.
RENDERED_NAMES = {"self", "conversations", "messages"}
SWITCHES = ("enable_thinking", "thinking")  # of reasoning
# A template is a program of the model's folder: its loops are over what a client sends.
MAX_CHARS = 16 << 20  # of a rendered text
MAX_MESSAGES = 4096  # templates may look at all messages for each of them
TOO_LARGE = f"the chat template made more than {MAX_CHARS} characters"
# Splits a control token's name until the text is tokenised. A noncharacter of Unicode: it has no
# meaning in text, and a message that has one keeps it.
SPLIT = "\ufdd0"
SPLIT_IN_TEXT = "\ufdd1"


@dataclass(frozen=True)
class Conversation:
    """What a chat template makes a prompt of.

    A message is a mapping with `role` and `content`, as in OpenAI's API: a text or a list of text
    parts. `tools` have OpenAI's form, too; with `needs_tools` a template that leaves them out is
    refused. `chat_template_kwargs` are variables of the model's chat template; where it has a
    switch of reasoning that is not among them, another one or `reasoning_effort` sets it."""

    messages: Messages
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    tools: Tools = None
    needs_tools: bool = True


class ChatPrompts:
    """check_length: raises ValueError for a text that cannot fit, before it is tokenised.
    `harmony`: special tokens of a model that reads and writes this format, or empty."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        check_length: Callable[[str], None],
        *,
        allow_control_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._check_length = check_length
        names = [] if allow_control_tokens else control_tokens(tokenizer)
        # Longest first: of two names that begin alike, the longer one is split.
        ordered = sorted(map(re.escape, names), key=len, reverse=True)
        self._control = re.compile("|".join(ordered)) if ordered else None
        self._has_reported_names = False
        self.harmony = harmony_tokens(tokenizer)

    def token_ids(self, conversation: Conversation) -> list[int]:
        """Raises ValueError when the template does not accept the messages, and when the prompt is
        too long."""
        messages = checked(conversation.messages)
        if self.harmony:
            messages = list(map(harmony_message, messages))
        conversation = replace(conversation, chat_template_kwargs=self._variables(conversation))
        variables = conversation.chat_template_kwargs
        options = signature(self._tokenizer.apply_chat_template).parameters.keys()
        if taken := variables.keys() & (options | RENDERED_NAMES):
            raise ValueError(
                f"chat_template_kwargs = {sorted(taken)} are not variables of a template"
            )
        _check_texts([messages, variables, conversation.tools])
        _check_sizes(len(messages), len(json.dumps(variables)))
        self._check_length("".join(str(message["content"]) for message in messages))

        def rendered(messages: Messages, tools: Tools) -> str:
            return self._rendered(replace(conversation, messages=messages, tools=tools))

        shown = visible(messages, conversation.tools, rendered)
        if not shown.has_tools and conversation.needs_tools:
            raise ValueError(
                "tools = [...]: the model's chat template leaves them out, so the model would not "
                "see them; drop them, or over HTTP force a call: tool_choice = 'required' or a "
                "function"
            )
        if not shown.has_names and not self._has_reported_names:
            self._has_reported_names = True
            logger.warning(
                "messages have a name, and the model's chat template leaves it out: the model does "
                "not see it (said once)"
            )
        text = rendered(shown.messages, conversation.tools)
        self._check_length(text)
        return [
            token_id
            for part in text.split(SPLIT)
            for token_id in self._tokenizer.encode(
                part.replace(SPLIT_IN_TEXT, SPLIT), add_special_tokens=False
            )
        ]

    def _variables(self, conversation: Conversation) -> Mapping[str, Any]:
        given, template = conversation.chat_template_kwargs, str(self._tokenizer.chat_template)
        effort = given.get("reasoning_effort")
        thinks = given.get("enable_thinking", effort and effort != "none")
        if thinks is None:
            return given
        return {name: thinks for name in SWITCHES if name in template} | dict(given)

    def _rendered(self, conversation: Conversation) -> str:
        tools = conversation.tools
        try:
            messages = [self._escaped(message) for message in conversation.messages]
            options = {
                "add_generation_prompt": conversation.add_generation_prompt,
                **({"tools": self._escaped(tools)} if tools else {}),
                **conversation.chat_template_kwargs,
            }
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except MemoryError:
            raise TemplateOverLimit(TOO_LARGE) from None
        except Exception as error:  # a template is a program: any exception can come out of it
            raise ValueError(
                f"messages do not fit the model's chat template: {described(error)}"
            ) from error
        if len(text) > MAX_CHARS:
            raise TemplateOverLimit(TOO_LARGE)
        return text

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._split_control_tokens(value)
        if isinstance(value, Mapping):
            return {self._escaped(name): self._escaped(each) for name, each in value.items()}
        if isinstance(value, Sequence):
            return [self._escaped(each) for each in value]
        return value

    def _split_control_tokens(self, text: str) -> str:
        text = text.replace(SPLIT, SPLIT_IN_TEXT)
        if self._control is None:
            return text
        return self._control.sub(lambda found: f"{found[0][0]}{SPLIT}{found[0][1:]}", text)


def _check_sizes(num_messages: int, num_chars: int) -> None:
    """num_chars: of the variables, which a template may show with every message."""
    if num_messages > MAX_MESSAGES:
        raise ValueError(
            f"messages has {num_messages} entries; at most {MAX_MESSAGES} are accepted"
        )
    if num_messages * num_chars > MAX_CHARS:
        raise ValueError(
            f"chat_template_kwargs has {num_chars} characters for each of {num_messages} messages; "
            f"at most {MAX_CHARS} together are accepted"
        )


def _check_texts(values: object) -> None:
    name = "messages, tools and chat_template_kwargs as JSON"
    try:
        given = json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    check_text(given, name)


def control_tokens(tokenizer: Any) -> set[str]:
    """The texts of the tokenizer's special tokens. One character cannot be split."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in added if token.special}
    return {name for name in names | set(getattr(tokenizer, "all_special_tokens", ())) if name[1:]}
