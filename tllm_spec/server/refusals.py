"""Answers that end a request early: OpenAI's error object with a status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse

from tllm_spec.sampling_params import SamplingParams

MAX_MISTAKES = 11  # lines about mistakes in a body; a summary of unknown options has as many
MAX_MESSAGE = 8192  # characters; a message may quote what a client has sent


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object. A long message is cut. A lone surrogate that the message quotes
    becomes '?': UTF-8 cannot encode it."""
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    texts = [
        None if text is None else text.encode(errors="replace").decode()
        for text in (message, param)
    ]
    return {"error": {"message": texts[0], "type": kind, "param": texts[1], "code": code}}


def first_mistakes(lines: list[str]) -> str:
    """The lines, the last ones counted where they are many."""
    if len(lines) > MAX_MISTAKES:
        more = len(lines) - MAX_MISTAKES + 1
        lines = [*lines[: MAX_MISTAKES - 1], f"... and {more} more mistakes"]
    return "\n".join(lines)


def param_of(message: str) -> str | None:
    """The option that one of our error messages starts with."""
    named = re.match(r"([\w.]+)(?:\[\S+\])?(?: = | is required|: )", message)
    return named[1] if named else None


class RequestRefused(Exception):
    """Ends a request with an error status and OpenAI's error object. retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param=param_of(message), code=code)
        self.headers: Mapping[str, str] = (
            {} if retry_after is None else {"Retry-After": str(retry_after)}
        )

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers))


# How large an answer may become, estimated before any work: what log probabilities and echoed
# prompts add to it. The text itself is not counted; --max_request_tokens limits it.


MIB = 1 << 20
RETRY_AFTER = 1  # seconds
# JSON takes so much for one log probability, with the token's text and bytes, and for one token of
# a prompt.
LOGPROB_BYTES = 100
TOKEN_BYTES = 8


class AnswerSize(NamedTuple):
    """The size of an answer in bytes. prompts: of all prompts and their log probabilities, which
    are certain. per_token: of each generated token, beyond its text."""

    prompts: int = 0
    per_token: int = 0


def size_of(
    prompt_lens: Sequence[int], params: SamplingParams, *, echo: bool, own_field: bool
) -> AnswerSize:
    """prompt_lens: tokens, at most. echo: every choice begins with the prompt, and with its log
    probabilities if those of the output are wanted. own_field: each prompt's log probabilities are
    sent once, in a field of their own."""
    of_prompt = _entries(params.prompt_logprobs) * LOGPROB_BYTES
    of_output = _entries(params.logprobs) * LOGPROB_BYTES
    num_copies = int(own_field) + (params.n if echo and params.logprobs is not None else 0)
    per_prompt_token = num_copies * of_prompt + (params.n * TOKEN_BYTES if echo else 0)
    return AnswerSize(sum(prompt_lens) * per_prompt_token, of_output)


def _entries(num_best: int | None) -> int:
    """Entries of one token: the best ones, and the token itself."""
    return 0 if num_best is None else num_best + 1


class AnswerLimit:
    """max_bytes: of one answer, and of what is certain of all running ones."""

    def __init__(self, max_bytes: int, max_seq_len: int) -> None:
        self._max_bytes = max_bytes
        self._max_seq_len = max_seq_len
        self._num_held = 0

    def take(
        self, request: Request, size: AnswerSize, params: SamplingParams, num_choices: int
    ) -> SamplingParams:
        """The parameters; max_tokens is lowered to what fits where the request does not limit it.
        Raises RequestRefused for an answer that would be too large, and while others are."""
        left = self._max_bytes - size.prompts
        if left < 0:
            raise self._too_large(size.prompts)
        if size.per_token:
            most = left // (size.per_token * num_choices)
            if params.max_tokens is None and most < self._max_seq_len:
                params = replace(params, max_tokens=max(most, 1))
            num_tokens = min(params.max_tokens or 0, self._max_seq_len)
            if num_tokens > most:
                raise self._too_large(size.prompts + size.per_token * num_choices * num_tokens)
        if self._num_held + size.prompts > self._max_bytes:
            raise RequestRefused(
                503, "too many large answers at once", "overloaded", retry_after=RETRY_AFTER
            )
        if size.prompts:
            self._num_held += size.prompts
            request.scope["state"]["at_end"].append(partial(self._give_back, size.prompts))
        return params

    def _give_back(self, num_bytes: int) -> None:
        self._num_held -= num_bytes

    def _too_large(self, num_bytes: int) -> RequestRefused:
        return RequestRefused(
            400,
            f"the answer may have {-(-num_bytes // MIB)} MiB of log probabilities and echoed "
            f"prompts, and {self._max_bytes // MIB} MiB are accepted; lower n, max_tokens or the "
            "number of log probabilities, or send several requests",
        )
