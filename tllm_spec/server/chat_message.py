"""Messages and tools of chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_serializer

from tllm_spec.config.config_base import check
from tllm_spec.config.neighbours import Ignored, Renamed
from tllm_spec.server.bodies import BodyModel, as_json_type
from tllm_spec.text.messages import as_object

# The parts of a chat body about tools.


MAX_TOOLS = 128  # as at OpenAI
# As long as Anthropic takes, for names of MCP servers' tools; OpenAI takes 64 characters.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Json = dict[str, Any]


class FunctionDefinition(BodyModel):
    """parameters: a JSON schema. strict: calls match it also where the model need not call."""

    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def to_chat(self) -> Json:
        """The tool of a chat request that has the same function."""
        names = {"name", "description", "parameters", "strict"}
        return {"function": self.model_dump(include=names)}


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

    @model_serializer
    def flat(self) -> Json:
        """The choice as bodies and answers of `/v1/responses` have it."""
        return {"type": self.type, "name": self.function.name}


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

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> ToolCall:
        return cls(id=call_id, function=CalledFunction(name=name, arguments=arguments))

    def for_template(self) -> Json:
        """The call with its arguments as an object."""
        plain = self.model_dump(exclude_none=True, exclude={"index"})
        arguments = as_object(self.function.arguments)
        return plain | {"function": {"name": self.function.name, "arguments": arguments}}


def _as_choice(given: object) -> object:
    """Names of functions may be nested, or not, as in `/v1/responses`."""
    if isinstance(given, dict):
        named = dict(given)
        if named.get("type") == "allowed_tools":
            nested = named.get("allowed_tools")
            if isinstance(nested, dict) and not nested.keys() & named.keys():
                named = {**named, **nested}
                del named["allowed_tools"]
            return AllowedTools(**named)
        if (name := named.pop("name", None)) is not None:
            named["function"] = {"name": name}
        return NamedChoice(**named)
    is_choice = isinstance(given, NamedChoice | AllowedTools)
    if given not in ("none", "auto", "required") and not is_choice:
        raise ValueError("none, auto, required or an object that names a function is needed")
    return given


class AllowedTools(BodyModel):
    """The functions that the model may call, or with mode required must call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedChoice, BeforeValidator(_as_choice)]], Field(min_length=1)]


Choice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedTools | None,
    BeforeValidator(_as_choice),
]


def chosen_names(choice: Choice, names: list[str]) -> list[str]:
    """The functions that may be called, of these."""
    if isinstance(choice, NamedChoice):
        return [choice.function.name]
    return [t.function.name for t in choice.tools] if isinstance(choice, AllowedTools) else names


def choice_mistakes(tools: Sequence[Tool], choice: Choice) -> Iterator[str]:
    """What is wrong with the names of the tools, and with a choice that they do not allow."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        yield "tools = [...] has two functions with the same name"
    if choice is None or choice == "none":
        return
    if not tools:
        yield "tool_choice = ... needs tools"
    for name in chosen_names(choice, names):
        if tools and name not in names:
            yield f"tool_choice = {name!r} is not one of the tools: {', '.join(names)}"


# A message of a conversation, as chat bodies have it.


# Other fields of OpenAI's answers: clients send them back with the conversation.
MESSAGE_IGNORED: Ignored = {
    # Older clients and those of /v1/responses send it.
    "type": ("text", "message"),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


class TextPart(BodyModel):
    """A part of a text. cache_control has no effect: prefixes are always cached."""

    type: str = "text"
    text: str
    cache_control: dict[str, Any] | None = None

    # Of earlier answers of `/v1/responses` and `/v1/messages`, and of openai's client.
    ignored: ClassVar[Ignored] = {
        "annotations": (list,),
        "citations": ([],),
        "logprobs": (list,),
        "parsed": (dict, list),
    }


def text_of(*types: str, separator: str = "") -> BeforeValidator:
    """Joins a list of parts of these types; a text stays as it is."""

    def joined(content: object) -> object:
        if not isinstance(content, list):
            return content
        if not all(isinstance(part, dict) and part.get("type") in types for part in content):
            names = " or ".join(f'"{each}"' for each in types)
            raise ValueError(
                f'parts have the form {{"type": {names}, "text": "..."}}; only text is served'
            )
        return separator.join(TextPart(**part).text for part in content)

    return BeforeValidator(joined)


class ChatMessage(BodyModel):
    """One message. `name` is passed to the chat template."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["content"]},
                {"properties": {"role": {"const": "assistant"}}},
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        text_of("text"),
        as_json_type(str | list[dict[str, str]] | None),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    ignored: ClassVar[Ignored] = MESSAGE_IGNORED
    renamed: ClassVar[Mapping[str, Renamed]] = {"reasoning": Renamed("reasoning_content")}

    @check
    def _check_content(self) -> Iterator[str]:
        if self.tool_calls and self.role != "assistant":
            yield f"role = {self.role!r}: only an assistant's message has tool_calls"
        # An answer may have reasoning or calls only, or nothing.
        if self.content is None and self.role != "assistant":
            yield "content is required"

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: arguments of calls are objects, not text."""
        plain = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template() for call in self.tool_calls]
            plain.setdefault("content", None)
        return plain
