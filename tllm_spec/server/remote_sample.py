"""A request that runs in the engine's process, as a front process sees it: it looks for the stop
strings here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tllm_spec.executor.request import Response, StopChecker, StopMatch
from tllm_spec.outputs import Logprob
from tllm_spec.request_handle import RequestHandle


@dataclass(slots=True)
class RemoteSample:
    """index: which of a prompt's samples it is. num_wanted: tokens of the prompt, and of the output
    at most. checker: None without stop strings."""

    handle: RequestHandle
    index: int
    num_wanted: int
    checker: StopChecker | None = None
    min_tokens: int = 0
    num_tokens: int = 0
    match: StopMatch | None = None
    # The tokens from the last ones shown to the end of the stop string.
    last_token_ids: list[int] = field(default_factory=list)
    last_logprobs: Sequence[dict[int, Logprob]] = ()

    def checked(self, response: Response) -> tuple[Response | None, bool]:
        """What the reader gets, and whether the engine must be told to stop.

        The engine goes on for a round or two after a stop string. What it says then is dropped, but
        for its last response, which has the figures of speculation."""
        if self.checker is None:
            return response, False
        if self.match is not None:
            return (self._ended(response), False) if response.finish_reason else (None, False)
        end = self._find_stop(response)
        if end is None:
            return response, False
        self.last_token_ids = response.token_ids[:end]
        self.last_logprobs = response.logprobs[:end]
        if response.finish_reason is not None:
            return self._ended(response), False
        return None, True

    def _find_stop(self, response: Response) -> int | None:
        """How many of the new tokens there are up to the end of a stop string. An end token that
        completes one ends the text as an end token, as in the engine."""
        assert self.checker is not None
        for number, token in enumerate(response.token_ids, start=1):
            self.num_tokens += 1
            match = self.checker.feed(token)
            is_end = response.finish_reason == "stop" and number == len(response.token_ids)
            if match is not None and self.num_tokens > self.min_tokens and not is_end:
                self.match = match
                return number
        return None

    def _ended(self, last: Response) -> Response:
        assert self.match is not None
        return Response(
            last.request_id,
            self.last_token_ids,
            self.index,
            self.last_logprobs,
            last.prompt_logprobs,
            last.cached_tokens,
            last.first_scheduled_time,
            last.first_token_time,
            finish_reason="error" if last.error else "stop",
            stop_reason=self.match.stop,
            stop_match=self.match,
            error=last.error,
            speculative=last.speculative,
        )
