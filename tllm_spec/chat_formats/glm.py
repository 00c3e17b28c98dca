"""Calls of GLM-4.5 to GLM-5: keys and values in tags of their own, which some of the models write
without line ends."""

from __future__ import annotations

from tllm_spec.chat_formats.xml_calls import XmlTexts

GLM = XmlTexts(
    block="<tool_call>",
    block_end="</tool_call>",
    head=r'([^\s<>"]+)\s*(?=<)',
    head_text="{}",
    call_end="",
    key=r'<arg_key>([^<>"]+)</arg_key>\s*<arg_value>',
    key_text=("<arg_key>{}</arg_key>", "<arg_value>"),
    value_end="</arg_value>",
).format("<arg_key>", tokens=("<arg_key>", "</arg_key>", "<arg_value>"))
