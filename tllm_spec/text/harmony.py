"""OpenAI's Harmony format, which gpt-oss reads and writes: the tokens between the parts of
messages, and messages as its chat template takes them. server/parsers/harmony.py reads answers.

A message is `<|start|>HEADER<|message|>CONTENT<|end|>`. The header has the role, maybe
` to=RECIPIENT`, and after `<|channel|>` the channel: `analysis` for reasoning, `commentary` for
calls, `final` for the answer. `<|return|>` ends the last message, `<|call|>` a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"
)  # fmt: skip
# An answer ends with one of them. Some folders do not list the second as an end token.
ENDS = ("<|return|>", "<|call|>")


def harmony_tokens(tokenizer: Any) -> Mapping[int, str]:
    """The names of NAMES by token id; empty if the tokenizer does not have all of them as special
    tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {
        token_id: str(token)
        for token_id, token in added.items()
        if token.special and str(token) in NAMES
    }
    return found if len(found) == len(NAMES) else {}


def harmony_ends(tokenizer: Any) -> list[int]:
    """Tokens that end an answer."""
    return [token_id for token_id, name in harmony_tokens(tokenizer).items() if name in ENDS]


def harmony_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The template has `thinking` for reasoning, needs a text as content, and takes only one of the
    two next to a call."""
    content, thinking = message.get("content") or "", message.get("reasoning_content")
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    plain["content"] = content
    if thinking:
        plain["thinking"] = thinking
        if content and message.get("tool_calls"):
            plain |= {"thinking": f"{thinking}\n{content}", "content": ""}
    return plain
