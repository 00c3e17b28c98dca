"""Calls of DeepSeek: JSON between tokens (R1, V3, V3.1), or each argument in a tag of its own
(V3.2, V4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from tllm_spec.chat_formats.chat_format import (
    ChatFormat,
    Function,
    Part,
    arguments,
    named_call,
    sequence,
    text,
)
from tllm_spec.chat_formats.marked_calls import MarkedCalls
from tllm_spec.chat_formats.pieces import Steps
from tllm_spec.chat_formats.xml_calls import XmlTexts

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HEAD = re.compile(rf"(.*?){SEPARATOR}([^{{]*)(?=\{{)", re.DOTALL)
DSML = "｜DSML｜"


class DeepSeekCalls(MarkedCalls):
    """V3 and R1: `function<sep>NAME`, a line with ```json, the arguments, ```. V3.1:
    `NAME<sep>ARGUMENTS`. Both between the same markers."""

    start, end, ignored = BEGIN, END, (SECTION, SECTION_END)

    def call(self) -> Steps[None]:
        """The name is before the separator, or after the kind of tool and the separator."""
        if head := (yield from self.head(HEAD)):
            before, after = head[1].strip(), head[2].strip()
            yield from self.json_arguments(after.split("\n")[0].strip() or before)


def _v3(function: Function) -> Part:
    head = text(f"function{SEPARATOR}{function.name}\n```json")
    return sequence(head, arguments(function), text("```"))


def _with_tokens(call: Callable[[Function], Part], *template: str) -> ChatFormat:
    around, own = (BEGIN, END, SECTION, SECTION_END), (SEPARATOR,)
    return ChatFormat(DeepSeekCalls, call, *around, tokens=own, template=template)


def _dsml(block: str) -> ChatFormat:
    return XmlTexts(
        block=f"<{DSML}{block}>",
        block_end=f"</{DSML}{block}>",
        head=rf'<{DSML}invoke name="([^<>"]+)"\s*(?P<closed>/?)>',
        head_text=f'<{DSML}invoke name="{{}}">',
        call_end=f"</{DSML}invoke>",
        key=rf'<{DSML}parameter name="([^<>"]+)"(?:\s+string="(?P<is_text>true|false)")?\s*>',
        key_text=(f'<{DSML}parameter name="{{}}" string="{{}}">',),
        value_end=f"</{DSML}parameter>",
        is_section=True,
    ).format(DSML, block, tokens=(DSML,))


DEEPSEEK_V3 = _with_tokens(_v3, SECTION, "```json")
DEEPSEEK_V31 = _with_tokens(partial(named_call, separator=SEPARATOR), SECTION)
DEEPSEEK_V32, DEEPSEEK_V4 = map(_dsml, ("function_calls", "tool_calls"))
