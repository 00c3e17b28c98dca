"""The names of `--tool_call_parser`, as in vLLM and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping

from tllm_spec.server.parsers.llama_calls import LlamaJsonCalls, PythonicCalls
from tllm_spec.server.parsers.marked_calls import DeepSeekCalls, HermesCalls
from tllm_spec.server.parsers.pieces import NewParser

TOOL_PARSERS: Mapping[str, NewParser] = {
    "hermes": HermesCalls,
    "qwen3": HermesCalls,
    "llama3_json": LlamaJsonCalls,
    "llama4_json": LlamaJsonCalls,
    "pythonic": PythonicCalls,
    "llama4_pythonic": PythonicCalls,
    "deepseek_v3": DeepSeekCalls,
    "deepseek_v31": DeepSeekCalls,
}
