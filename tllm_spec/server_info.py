"""What `/server_info` shows: the served options and the executor's state, under SGLang's names, as
plain JSON values."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from pydantic import BaseModel

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.version import __version__


def server_info(args: LlmArgs, max_seq_len: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """state: the executor's. max_seq_len: the value in force, given or the model's."""
    options = plain(args) | {"max_seq_len": max_seq_len}
    return {"version": __version__, **options, "internal_states": [internal_state(state)]}


def internal_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The executor's state after SGLang's figures: `speculative_num_steps` is the present draft
    length for a batch of the latest size, and `draft_shape` the shape of these drafts;
    `avg_spec_accept_length` is the acceptance length since the start, absent before the first
    round."""
    others = {key: plain(value) for key, value in state.items() if key != "draft_len"}
    figures = {"speculative_num_steps": state["draft_len"]}
    speculation = state["totals"]["speculation"]
    if speculation["rounds"]:
        figures["avg_spec_accept_length"] = speculation["acceptance_length"]
    return figures | others


def plain(value: Any) -> Any:
    """`value` in JSON's types: null for infinite and NaN, the class's name for an object without a
    JSON form."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"
