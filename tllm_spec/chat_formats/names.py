"""The names of `--reasoning_parser` and `--tool_parser`, as in vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping

from tllm_spec.chat_formats import deepseek
from tllm_spec.chat_formats.chat_format import ChatFormat
from tllm_spec.chat_formats.gemma import GEMMA
from tllm_spec.chat_formats.glm import GLM
from tllm_spec.chat_formats.kimi import KIMI
from tllm_spec.chat_formats.llama import LLAMA_JSON, PYTHONIC
from tllm_spec.chat_formats.minimax import MINIMAX
from tllm_spec.chat_formats.mistral import MISTRAL, MISTRAL_NAMED
from tllm_spec.chat_formats.qwen import HERMES, QWEN_CODER
from tllm_spec.text.reasoning import ReasoningFormat

AUTO = "auto"
REASONING: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "minimax_m2", "qwen3", "qwen3_5"), ReasoningFormat()
    ),
    **dict.fromkeys(("kimi", "kimi_k2"), ReasoningFormat(ends_at=(KIMI.begin, KIMI.call_begin))),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "glm45": ReasoningFormat(ends_at=(GLM.call_begin,)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
# Of several formats that models of a name write, the chat template says which. The first is the
# usual one, the last has the most texts of its own in a template.
TOOLS: Mapping[str, tuple[ChatFormat, ...]] = {
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), (QWEN_CODER,)),
    **dict.fromkeys(("glm45", "glm47"), (GLM,)),
    "kimi_k2": (KIMI,),
    "minimax_m2": (MINIMAX,),
    "deepseek_v32": (deepseek.DEEPSEEK_V32,),
    "deepseek_v4": (deepseek.DEEPSEEK_V4,),
    "deepseek_v3": (deepseek.DEEPSEEK_V3,),
    "deepseek_v31": (deepseek.DEEPSEEK_V31,),
    "gemma4": (GEMMA,),
    "mistral": (MISTRAL, MISTRAL_NAMED),
    "hermes": (HERMES,),
    "qwen3": (HERMES, QWEN_CODER),
    **dict.fromkeys(("llama4_pythonic", "pythonic"), (PYTHONIC,)),
    **dict.fromkeys(("llama3_json", "llama4_json"), (LLAMA_JSON,)),
}
# Texts that are markers where they are tokens of their own, special or not.
MARKERS = frozenset(
    [each for form in REASONING.values() for each in (form.opener, form.closer, *form.ends_at)]
    + [each for formats in TOOLS.values() for form in formats for each in form.markers]
)
# `auto` stands for the first name whose texts are all in the chat template.
AUTO_TOOLS: Mapping[str, tuple[str, ...]] = {
    name: formats[0].template for name, formats in TOOLS.items()
}
AUTO_REASONING: Mapping[str, tuple[str, ...]] = {
    "gemma4": ("<|channel>",),
    "mistral": ("[THINK]",),
    "glm45": ("</think>", "<arg_key>"),
    "kimi_k2": ("</think>", KIMI.begin),
    "minimax_m2": ("</think>", MINIMAX.begin),
    "deepseek_v3": ("</think>", deepseek.SECTION),
    "qwen3": ("</think>",),
}


def plain_name(name: str) -> str:
    """A name as in the tables: `-` is `_`."""
    return name.replace("-", "_")


def name_of(name: str, auto: Mapping[str, tuple[str, ...]], template: str) -> str | None:
    """The name that `auto` stands for with a chat template, None for none; or `name` itself."""
    if plain_name(name) != AUTO:
        return plain_name(name)
    return next((each for each, texts in auto.items() if _has(template, texts)), None)


def tools_format(name: str, template: str) -> ChatFormat:
    """The format of a name in TOOLS that fits the chat template best."""
    usual, *others = TOOLS[name]
    return next((each for each in others if _has(template, each.template)), usual)


def _has(template: str, texts: tuple[str, ...]) -> bool:
    return all(each in template for each in texts)
