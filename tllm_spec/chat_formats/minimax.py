"""Calls of MiniMax M2: one tag around all of them, each argument in a tag of its own."""

from __future__ import annotations

from tllm_spec.chat_formats.xml_calls import XmlTexts

MINIMAX = XmlTexts(
    block="<minimax:tool_call>",
    block_end="</minimax:tool_call>",
    head=r'<invoke name="([^<>"]+)"\s*>',
    head_text='<invoke name="{}">',
    call_end="</invoke>",
    key=r'<parameter name="([^<>"]+)"\s*>',
    key_text=('<parameter name="{}">',),
    value_end="</parameter>",
    is_section=True,
).format("<minimax:tool_call>")
