"""The options of a body that say what its text must match: OpenAI's `response_format`, vLLM's
`guided_*` and `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.grammar.guided_decoding import GuidedDecodingParams

GUIDED_NAMES = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")
# By type: the key of the format that has the grammar, and the grammar's name in
# GuidedDecodingParams. OpenAI's types and TensorRT-LLM's.
FORMATS: Mapping[str, tuple[str, str]] = {
    "json": ("schema", "json"),
    "regex": ("regex", "regex"),
    "ebnf": ("ebnf", "grammar"),
    "grammar": ("grammar", "grammar"),
}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `guided_params` that say what the text must match."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    return given


def guided_params(options: Mapping[str, Any]) -> GuidedDecodingParams | None:
    """options: `response_format`, `structured_outputs`, the schema of `tool_choice` and
    GUIDED_NAMES, None where they are not given. Raises ValueError for several of them and for
    values that cannot be used."""
    given = _given(options)
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; one of them says what text must match")
    ((name, value),) = given.items()
    try:
        if name == "response_format":
            return _of_format(value)
        if name == "structured_outputs":
            return GuidedDecodingParams.of(value)
        if name == "tool_choice":
            return GuidedDecodingParams(json=value)
        return GuidedDecodingParams(**{name.removeprefix("guided_"): value})
    except ValueError as error:
        shown_value = "[...]" if name == "tool_choice" else shown(value)
        raise ValueError(f"{_client_name(name)} = {shown_value}: {error}") from error


def client_names(options: Mapping[str, Any]) -> dict[str, str]:
    """The client's name of each option of `SamplingParams` that was given. options: as for
    `guided_params`, one of them at most."""
    given = list(_given(options))
    return {"guided_decoding": _client_name(given[0])} if given else {}


def _client_name(option: str) -> str:
    """The option's name at the beginning of a message about its grammar."""
    return "tools" if option == "tool_choice" else option


def _of_format(value: object) -> GuidedDecodingParams:
    if not isinstance(value, Mapping):
        raise ValueError("an object with a type is needed")
    kind = value.get("type")
    if kind == "json_object":
        return GuidedDecodingParams(json_object=True)
    if kind == "structural_tag":
        return GuidedDecodingParams(structural_tag=value)
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, Mapping) or "schema" not in wrapped:
            raise ValueError("json_schema needs an object with a schema")
        return GuidedDecodingParams(json=wrapped["schema"])
    if isinstance(kind, str) and kind in FORMATS:
        key, option = FORMATS[kind]
        return GuidedDecodingParams.of({option: value.get(key)})
    kinds = ", ".join(["text", "json_object", "json_schema", "structural_tag", *FORMATS])
    raise ValueError(f"the types {kinds} are accepted")
