"""What the executor sends to the front end: what is new of one request since the last response."""

from collections.abc import Sequence
from dataclasses import dataclass

from tllm_spec.executor.request import LlmRequest, StopMatch
from tllm_spec.outputs import Logprob, SpeculativeStats


@dataclass(slots=True)
class Response:
    """New tokens of a request; the last response has a finish reason.

    Not frozen: streaming builds one for every request in every round, and a frozen dataclass takes
    twice as long to build."""

    request_id: int
    token_ids: list[int]
    index: int = 0  # which of a prompt's n samples it is
    logprobs: Sequence[dict[int, Logprob]] = ()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # with the first tokens
    cached_tokens: int = 0
    first_scheduled_time: float | None = None  # time.monotonic()
    first_token_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stop_match: StopMatch | None = None
    error: str | None = None
    speculative: SpeculativeStats | None = None


def response_of(request: LlmRequest, *, speculating: bool) -> Response:
    """The response for all tokens after `num_responded`, which is updated."""
    start, request.num_responded = request.num_responded, request.num_output_tokens
    finished = request.is_finished
    return Response(
        request_id=request.request_id,
        token_ids=request.tokens[request.prompt_len + start :],
        index=request.index,
        logprobs=request.logprobs[start:],
        prompt_logprobs=request.prompt_logprobs if start == 0 and request.prompt_logprobs else None,
        cached_tokens=request.reported_cached_tokens,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        stop_match=request.stop_match,
        error=request.error,
        speculative=request.counters.stats() if finished and speculating else None,
    )
