"""Calls of Qwen and of Hermes: JSON in `<tool_call>`, or each argument in a tag of its own
(Qwen3-Coder, Qwen3.5 and later, MiMo)."""

from __future__ import annotations

from functools import partial

from tllm_spec.chat_formats.chat_format import ChatFormat, json_call
from tllm_spec.chat_formats.xml_calls import XmlCalls, XmlTexts

QWEN = XmlTexts(
    block="<tool_call>",
    block_end="</tool_call>",
    head=r'<function=([^<>"\n]+)>',
    head_text="<function={}>",
    call_end="</function>",
    key=r'<parameter=([^<>"\n]+)>',
    key_text=("<parameter={}>",),
    value_end="</parameter>",
    strips=True,
    may_be_json=True,
)
QWEN_CODER = QWEN.format("<tool_call>", "<function=")
# Answers of either kind are read.
HERMES = ChatFormat(
    partial(XmlCalls, QWEN), json_call, QWEN.block, QWEN.block_end, template=("<tool_call>",)
)
