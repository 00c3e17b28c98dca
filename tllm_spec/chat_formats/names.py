"""The names of `reasoning_parser`."""

from __future__ import annotations

from collections.abc import Mapping

from tllm_spec.text.reasoning import ReasoningFormat

THINK = ReasoningFormat()
KIMI = ReasoningFormat(ends_at=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"))
REASONING: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "minimax_m2", "qwen3", "qwen3_5"), THINK),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "glm45": ReasoningFormat(ends_at=("<tool_call>",)),
    "kimi": KIMI,
    "kimi_k2": KIMI,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_name(name: str, template: str) -> str | None:
    """The name as in the table. template: the chat template, by which `auto` is known."""
    return name.replace("-", "_")
