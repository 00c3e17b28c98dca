"""Bodies of OpenAI's completion and chat requests, with our extensions.

A body becomes prompts and `SamplingParams`, which check the ranges. OpenAI's fields that are not
served are refused unless they have a neutral value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, SkipValidation

from tllm_spec.config.config_base import check
from tllm_spec.config.neighbours import Ignored, Renamed
from tllm_spec.config.option_checks import LogprobsMode, shown
from tllm_spec.grammar.guided_decoding import GuidedDecodingParams
from tllm_spec.sampling_params import IGNORED, RequestOptions, SamplingParams
from tllm_spec.server.bodies import BodyModel, as_json_type
from tllm_spec.server.chat_message import (
    MAX_TOOLS,
    AllowedTools,
    ChatMessage,
    Choice,
    Tool,
    choice_mistakes,
)
from tllm_spec.server.guard import digest, kept_name
from tllm_spec.text.chat_prompt import Conversation

# The options of a body that say what its text must match: OpenAI's `response_format`, vLLM's
# `guided_*` and `structured_outputs`.


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
        option = "tools = [...]" if name == "tool_choice" else f"{name} = {shown(value)}"
        raise ValueError(f"{option}: {error}") from error


def _of_format(value: object) -> GuidedDecodingParams:
    if not isinstance(value, Mapping):
        raise ValueError("an object with a type is needed")
    kind = value.get("type")
    if kind == "json_object":
        return GuidedDecodingParams(json_object=True)
    if kind == "structural_tag":
        return GuidedDecodingParams(structural_tag=value)
    if kind == "json_schema":
        wrapped = value.get("json_schema", value)  # not nested in `/v1/responses`
        if not isinstance(wrapped, Mapping) or "schema" not in wrapped:
            raise ValueError("json_schema needs an object with a schema")
        return GuidedDecodingParams(json=wrapped["schema"])
    if isinstance(kind, str) and kind in FORMATS:
        key, option = FORMATS[kind]
        return GuidedDecodingParams.of({option: value.get(key)})
    kinds = ", ".join(["text", "json_object", "json_schema", "structural_tag", *FORMATS])
    raise ValueError(f"the types {kinds} are accepted")


SAMPLING_NAMES = frozenset(each.name for each in fields(SamplingParams))
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_LOGPROBS = 20
MAX_SAMPLES = 128  # both as at OpenAI
# Each prompt of a body becomes n requests at once, so a few KB could fill the host's memory.
MAX_CHOICES = 4096
# They are searched for in every round, in the thread of all requests. OpenAI takes 4 stop strings.
MAX_WORDS, MAX_WORD_CHARS, MAX_TOKEN_IDS = 64, 4096, 1024

GENERATION_IGNORED: Ignored = {
    **IGNORED,
    "detokenize": (True,),
    "disaggregated_params": (),
    "priority": (0,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
}
# SGLang's and TensorRT-LLM's names.
GENERATION_RENAMED: Mapping[str, Renamed] = {
    "bad_words": Renamed("bad"),
    "ebnf": Renamed("guided_grammar"),
    "json_schema": Renamed("guided_json"),
    "max_thinking_tokens": Renamed("thinking_token_budget"),
    "no_stop_trim": Renamed("include_stop_str_in_output"),
    "regex": Renamed("guided_regex"),
}
COMPLETION_IGNORED: Ignored = {**GENERATION_IGNORED, "suffix": ("",)}
CHAT_IGNORED: Ignored = {
    **GENERATION_IGNORED,
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "verbosity": (),
    "web_search_options": (),
}


def _token_ids_as_integers(bias: object) -> object:
    """Keys of JSON objects are strings. Raises ValueError for a key that is not a token id, and
    for duplicates."""
    if not isinstance(bias, Mapping):
        return bias
    if wrong := [key for key in bias if not str(key).isdecimal()]:
        raise ValueError(f"{shown(wrong[0])} is not a token id")
    if len(found := {int(key): value for key, value in bias.items()}) < len(bias):
        raise ValueError("it has a token id twice")
    return found


def _check_words(words: object) -> object:
    """Raises ValueError for more text than a round can search for. `SamplingParams` checks the
    types."""
    listed = [words] if isinstance(words, str) else words
    if isinstance(listed, list):
        num_chars = sum(len(word) for word in listed if isinstance(word, str))
        if len(listed) > MAX_WORDS or num_chars > MAX_WORD_CHARS:
            raise ValueError(
                f"{len(listed)} strings with {num_chars} characters in all; at most {MAX_WORDS} "
                f"strings with {MAX_WORD_CHARS} characters are accepted"
            )
    return words


def _check_token_ids(token_ids: object) -> object:
    """The same for a list of token ids or of token sequences."""
    if isinstance(token_ids, list):
        lengths = [len(each) for each in token_ids if isinstance(each, list)]
        number = len(token_ids) - len(lengths) + sum(lengths)
        if len(lengths) > MAX_WORDS or number > MAX_TOKEN_IDS:
            raise ValueError(
                f"{number} token ids, {len(lengths)} sequences; at most {MAX_TOKEN_IDS} ids and "
                f"{MAX_WORDS} sequences are accepted"
            )
    return token_ids


Words = Annotated[str | list[str] | None, SkipValidation, BeforeValidator(_check_words)]


def _minus_one_is_off(top_k: object) -> object:
    """As in vLLM and SGLang."""
    return 0 if type(top_k) is int and top_k == -1 else top_k


class StreamOptions(BodyModel):
    """`include_usage`: a last chunk with the token counts. `continuous_usage_stats`: every chunk
    has the counts so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    ignored: ClassVar[Ignored] = {"include_obfuscation": (False,)}


class AdapterChoice(BodyModel):
    """TensorRT-LLM's `lora_request`. A request may name a loaded adapter, but no folder."""

    lora_name: str

    ignored: ClassVar[Ignored] = {"lora_int_id": (int,), "lora_path": ("",)}


class ClientRequest(BodyModel):
    """What any body that asks for text says of its client, and how it is answered. metadata and
    prompt_cache_key are for the client's records and have no effect."""

    model: str
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    safety_identifier: str | None = None  # OpenAI's newer name of the user
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
    store: bool | None = None  # whether --record_traffic may record it
    lora_request: AdapterChoice | None = None

    def as_chat(self, **own: Any) -> ChatCompletionRequest:
        """A chat request of the same client, with the same options of any body."""
        return ChatCompletionRequest(
            **self.model_dump(include={*ClientRequest.model_fields}), **own
        )

    def request_options(self, state: Mapping[str, Any]) -> RequestOptions:
        """state: of the scope. The client is the name of its key, or its address where keys have no
        names, and then the user that the body names. So a client that invents users takes no turn
        of another client."""
        user, own = kept_name(self.user or self.safety_identifier or ""), self.cache_salt
        salt, client = None, state["client"]
        if state["separate_cache"] or own is not None:
            salt = digest(f"{client if state['separate_cache'] else ''}\n{own or ''}")
        return RequestOptions(
            streaming=self.stream,
            client=(client, user),
            cache_salt=salt,
            store=self.store,
            adapter=state["adapter"],
        )


class GenerationRequest(ClientRequest):
    """The options of completions and chat, with OpenAI's defaults."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: Words = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_ids_as_integers)] = None

    # Extensions, named as in SamplingParams.
    top_k: Annotated[int | None, BeforeValidator(_minus_one_is_off)] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_check_token_ids)] = None
    include_stop_str_in_output: bool | None = None
    bad: Words = None
    bad_token_ids: Annotated[
        list[int] | list[list[int]] | None, SkipValidation, BeforeValidator(_check_token_ids)
    ] = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprobs_mode: LogprobsMode | None = None
    speculation: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    # What the text must match; see guided_options.py.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Annotated[list[str] | None, Field(json_schema_extra={"minItems": 1})] = None

    renamed: ClassVar[Mapping[str, Renamed]] = GENERATION_RENAMED

    @check
    def _check_stream_options(self) -> Iterator[str]:
        if self.stream_options is not None and not self.stream:
            yield "stream_options = {...} needs stream = true"
        if self.prompt_logprobs is not None and self.stream:
            yield f"prompt_logprobs = {self.prompt_logprobs} needs stream = false"

    def sampling_params(self, **own: object) -> SamplingParams:
        """The sampling options of the body, and `own`. Raises ValueError for a value out of
        range."""
        given = {name: getattr(self, name) for name in self.model_fields_set & SAMPLING_NAMES}
        if given.get("temperature") is None:
            given["temperature"] = 1.0  # OpenAI's default; SamplingParams would decode greedily
        guided = guided_params(self._grammars())
        return SamplingParams.from_dict(given | own | {"guided_decoding": guided})

    @property
    def client_names(self) -> dict[str, str]:
        """What the client calls the option of `SamplingParams` that several options set."""
        given = list(_given(self._grammars()))  # one at most
        return {"guided_decoding": given[0]} if given else {}

    def _grammars(self) -> dict[str, Any]:
        """The options that say what the text must match."""
        names = ("response_format", "structured_outputs", *GUIDED_NAMES)
        return {name: getattr(self, name) for name in names}


def _as_prompts(prompt: object) -> object:
    """A list of prompts, each text or token ids, from any of OpenAI's four forms."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(
            isinstance(item, list) and all(type(token) is int for token in item) for item in prompt
        ):
            return prompt
    raise ValueError("a text, a list of texts, token ids or a list of token id lists is needed")


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_as_prompts),
        as_json_type(str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    echo: bool = False  # the text begins with the prompt

    ignored: ClassVar[Ignored] = COMPLETION_IGNORED

    @check
    def _check_number_of_choices(self) -> Iterator[str]:
        number, samples = len(self.prompt), self.n or 1
        if number * samples > MAX_CHOICES:
            yield (
                f"prompt = [...] has {number} prompts with {samples} choices each; a body may ask "
                f"for {MAX_CHOICES} choices, so send several bodies"
            )

    def to_sampling_params(self) -> SamplingParams:
        """Raises ValueError for a value out of range. With `echo`, max_tokens may be 0; then one
        token is generated and left out."""
        limit = 16 if self.max_tokens is None else self.max_tokens
        own = {"max_tokens": limit or int(self.echo)}
        if self.echo and self.logprobs is not None:
            own["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.sampling_params(**own)


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`. `chat_template_kwargs` are variables of the model's chat
    template."""

    # FailFast: thousands of wrong messages would take seconds to describe.
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None  # OpenAI's older name
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None

    ignored: ClassVar[Ignored] = CHAT_IGNORED

    @check
    def _check_pairs(self) -> Iterator[str]:
        if self.top_logprobs is not None and not self.logprobs:
            yield f"top_logprobs = {self.top_logprobs} needs logprobs = true"
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            yield (
                f"max_tokens = {self.max_tokens} repeats max_completion_tokens under its older name"
            )
        yield from choice_mistakes(self.tools or [], self.tool_choice)
        for name in ("reasoning_effort", "enable_thinking"):
            value, variables = getattr(self, name), self.chat_template_kwargs or {}
            if value is not None and variables.get(name, value) != value:
                yield f"{name} = {shown(value)} and another one in chat_template_kwargs"

    @property
    def mode(self) -> Choice:
        """The choice among the functions that may be called."""
        given = self.tool_choice or ("auto" if self.tools else "none")
        return given.mode if isinstance(given, AllowedTools) else given

    @property
    def conversation(self) -> Conversation:
        own = self.model_dump(include={"reasoning_effort", "enable_thinking"}, exclude_none=True)
        return _conversation(self, needs_tools=self.mode == "auto", **own)

    def to_sampling_params(self) -> SamplingParams:
        """Without a limit an answer may be as long as the model's context allows. Raises ValueError
        for a value out of range."""
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return self.sampling_params(
            max_tokens=limit, logprobs=self.top_logprobs or 0 if self.logprobs else None
        )


# Bodies of the other routes, with vLLM's names.


class TokenizeRequest(BodyModel):
    """Body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool = False

    @check
    def _check_one(self) -> Iterator[str]:
        if (self.prompt is None) == (self.messages is None):
            yield "either prompt or messages is needed"

    @property
    def conversation(self) -> Conversation:
        return _conversation(self)


class DetokenizeRequest(BodyModel):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _conversation(
    body: ChatCompletionRequest | TokenizeRequest, *, needs_tools: bool = True, **variables: Any
) -> Conversation:
    return Conversation(
        [message.for_template() for message in body.messages or ()],
        {**(body.chat_template_kwargs or {}), **variables},
        body.add_generation_prompt,
        [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        needs_tools=needs_tools,
    )
