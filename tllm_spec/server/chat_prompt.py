"""From a conversation to token ids, by the model's chat template. The names of control tokens in a
message are text: a user cannot end a turn or begin another role's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from tllm_spec.executor.faults import described
from tllm_spec.option_checks import check_text
from tllm_spec.server.protocol import ChatCompletionRequest
from tllm_spec.server.visible_messages import Messages, visible
from tllm_spec.tokenizer import Tokenizer

# Variables that the renderer sets itself. The parameters of `apply_chat_template` are not free,
# either.
RENDERED_NAMES = {"self", "conversations", "messages"}
# Splits a control token's name until the text is tokenised. A noncharacter of Unicode: it has no
# meaning in text, and a message that has one keeps it.
SPLIT = "\ufdd0"
SPLIT_IN_TEXT = "\ufdd1"


class ChatPrompts:
    """check_length: raises ValueError for a text that cannot fit, before it is tokenised."""

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

    def token_ids_of(self, body: ChatCompletionRequest) -> list[int]:
        """The prompt of a chat body. Raises ValueError as `token_ids`."""
        return self.token_ids(
            [message.for_template() for message in body.messages],
            body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            tools=body.tools_for_template,
        )

    def token_ids(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Raises ValueError when the template does not accept the messages, and when the prompt is
        too long."""
        options = signature(self._tokenizer.apply_chat_template).parameters.keys()
        if taken := variables.keys() & (options | RENDERED_NAMES):
            raise ValueError(
                f"chat_template_kwargs = {sorted(taken)} are not variables of a template"
            )
        given = json.dumps([messages, variables, tools], ensure_ascii=False)
        check_text(given, "messages, tools and chat_template_kwargs as JSON")
        self._check_length("".join(str(message["content"]) for message in messages))

        def rendered(conversation: Messages) -> str:
            return self._rendered(conversation, variables, add_generation_prompt, tools)

        text = rendered(visible(messages, rendered))
        self._check_length(text)
        return [
            token_id
            for part in text.split(SPLIT)
            for token_id in self._tokenizer.encode(
                part.replace(SPLIT_IN_TEXT, SPLIT), add_special_tokens=False
            )
        ]

    def _rendered(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        with_tools = {"tools": self._escaped(tools)} if tools else {}
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._escaped(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **with_tools,
                **variables,
            )
        except Exception as error:  # a template is a program: any exception can come out of it
            raise ValueError(
                f"messages do not fit the model's chat template: {described(error)}"
            ) from error
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


def control_tokens(tokenizer: Any) -> set[str]:
    """The texts of the tokenizer's special tokens. One character cannot be split."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in added if token.special}
    return {name for name in names | set(getattr(tokenizer, "all_special_tokens", ())) if name[1:]}
