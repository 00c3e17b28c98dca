"""The parts of a chat body about tools, and the JSON schema that a forced call must match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tllm_spec.grammar.json_schemas import moved
from tllm_spec.server.body_model import BodyModel
from tllm_spec.text.messages import as_object

MAX_TOOLS = 128  # as at OpenAI
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Json = dict[str, Any]


class FunctionDefinition(BodyModel):
    """parameters: a JSON schema. strict has no effect: forced calls always match the schema."""

    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(BodyModel):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(BodyModel):
    """One of the tools."""

    name: str


class NamedChoice(BodyModel):
    """The function that the model must call."""

    type: Literal["function"] = "function"
    function: FunctionName


class CalledFunction(BodyModel):
    """arguments: a JSON object as text. A model may have written something else."""

    name: str
    arguments: str = "{}"


class ToolCall(BodyModel):
    """A call in an earlier answer of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    # Clients that join the chunks of a stream keep it. The order of the list counts.
    index: Annotated[int, Field(ge=0)] | None = None

    def for_template(self) -> Json:
        """The call with its arguments as an object."""
        plain = self.model_dump(exclude_none=True, exclude={"index"})
        arguments = as_object(self.function.arguments)
        return plain | {"function": {"name": self.function.name, "arguments": arguments}}


def _as_choice(given: object) -> object:
    if isinstance(given, dict):
        return NamedChoice(**given)
    if given not in ("none", "auto", "required"):
        raise ValueError("none, auto, required or an object that names a function is needed")
    return given


Choice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | None, BeforeValidator(_as_choice)
]


def choice_mistakes(tools: Sequence[Tool], choice: Choice) -> Iterator[str]:
    """What is wrong with the names of the tools, and with a choice that they do not allow."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        yield "tools = [...] has two functions with the same name"
    if choice is None or choice == "none":
        return
    if not tools:
        yield "tool_choice = ... needs tools"
    elif isinstance(choice, NamedChoice) and choice.function.name not in names:
        yield f"tool_choice = {choice.function.name!r} is not one of the tools: {', '.join(names)}"


def forced_schema(tools: Sequence[Tool], choice: Choice, *, is_parallel: bool) -> Json | None:
    """The schema of one function's arguments, or of a list of `{"name": ..., "parameters":
    {...}}`. None if the model may answer with text. Raises ValueError for a schema that is nested
    too deeply."""
    if isinstance(choice, NamedChoice):
        chosen = next(tool for tool in tools if tool.function.name == choice.function.name)
        return _arguments_schema(chosen)
    if choice != "required":
        return None
    # References are to the root of the schema, so each function's schema is a definition.
    calls, definitions = [], {}
    for tool in tools:
        name = tool.function.name
        there = f"#/$defs/{name}"
        definitions[name] = moved(_arguments_schema(tool), there)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": there}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if is_parallel else {"maxItems": 1}
    items = {"items": {"anyOf": calls}, "$defs": definitions}
    return {"type": "array", "minItems": 1, **limit, **items}


def _arguments_schema(tool: Tool) -> Json:
    return {"type": "object", **(tool.function.parameters or {})}
