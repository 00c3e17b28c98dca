"""What the routes answer, for `/openapi.json`. Answers are made as plain dicts, for speed; tests
compare them with these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """Answers have no other fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(AnswerModel):
    error: ErrorDetail


class Tokenized(AnswerModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(AnswerModel):
    prompt: str


class PromptTokens(AnswerModel):
    cached_tokens: int


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Choice(AnswerModel):
    """What choices of all answers have. `prompt_logprobs` only if asked for."""

    index: int
    finish_reason: Literal["stop", "length", "cancelled", "timeout", "tool_calls"] | None
    stop_reason: str | int | None
    speculative_decoding: dict[str, Any] | None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class CompletionLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Answer(AnswerModel):
    """metrics: only of one sequence that was decoded with speculation."""

    id: str
    created: int
    model: str
    usage: Usage
    metrics: dict[str, Any] | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Function(AnswerModel):
    name: str
    arguments: str


class Call(AnswerModel):
    id: str
    type: Literal["function"]
    function: Function


class Message(AnswerModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class TokenLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerModel):
    content: list[ContentLogprob]


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(AnswerModel):
    object: Literal["list"]
    data: list[Model]


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(AnswerModel):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokens(AnswerModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseObject(AnswerModel):
    """`/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Literal["none"]
    tools: list[Any]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
