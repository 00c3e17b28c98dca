"""An LLM without a model for the HTTP server: it answers every prompt with a known text, token by
token."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.option_checks import check_text
from tllm_spec.executor.request import Response
from tllm_spec.outputs import Logprob, SpeculativeStats
from tllm_spec.request_errors import SLOW_GRAMMAR, ContextLengthExceeded
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from tllm_spec.text.stop_strings import StopMatch, StopStringChecker
from tllm_spec.text.tokenizer import IncrementalDetokenizer, load_tokenizer

STATS = SpeculativeStats(2, 5, (2, 2), (2, 1))
STATE = {
    "speculative_num_steps": 2,
    "draft_shape": {"name": "2", "depth": 2, "drafts": 2, "topk": 1},
    "num_requests_running": 3,
    "num_requests_waiting": 4,
    "num_preemptions": 5,
    "ranks": [{"device": "cuda:0"}],
    "adapters": {"max": 2, "running": ["a", "b"], "waiting": ["c"]},
    "kv_cache": {"num_pages": 10, "page_size": 32, "free": 1, "cached": 3, "used": 6},
    "totals": {
        "requests_by_finish_reason": {"stop": 7, "cancelled": 8},
        "prompt_tokens": 40,
        "cached_prompt_tokens": 10,
        "generated_tokens": 11,
        "speculation": STATS.to_dict(),
        "by_draft_len": {
            "2": {
                "rounds": 12,
                "request_rounds": 13,
                "emitted_tokens": 14,
                "seconds": 1.5,
                "timed_rounds": 9,
            }
        },
        "draft_len_changes": 15,
    },
    "controller": {"decisions": {"num_switches": 16}},
}
MODEL = "fake"
MAX_LEN = 100_000  # tokens of a prompt
LONGEST_TOKEN = 20  # characters
# Prompts of requests that fail in the engine, with the reason.
FAILING_PROMPT, SLOW_GRAMMAR_PROMPT = "fail", "fail slowly"
FAILURES = {FAILING_PROMPT: "the logits are not numbers", SLOW_GRAMMAR_PROMPT: SLOW_GRAMMAR}
SLOW_PROMPT = "slow"


def answer_text(index: int) -> str:
    return f"answer {index} is naïve 😀 done"


class FakeLLM:
    """`running` and `aborted` hold request ids. A slow prompt generates until it is aborted.
    `answer` gives the text of a sample, `compiling` is called with each grammar. With `is_paced`,
    each token of a stream is an event of its own: it is read before the next one is made."""

    def __init__(self, **arguments: Any) -> None:
        self.args = LlmArgs.from_kwargs("fake", **{"enable_chunked_prefill": True} | arguments)
        self.rounds: list[dict[str, Any]] = []
        self.tokenizer = load_tokenizer("zoo:llama")
        self.is_healthy = True
        self.is_shut_down = False
        self.pause_mode = None
        self.is_paced = False
        self.running: set[int] = set()
        self.aborted: set[int] = set()
        self.sampling: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.callers: list[tuple[tuple[str, ...], str | None]] = []
        self.adapters: list[str | None] = []  # of the requests
        self.max_seq_len = MAX_LEN + 1
        self.answer = answer_text
        self.compiling: Callable[[SamplingParams], None] = lambda params: None

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def check_length(self, text: str | list[int]) -> None:
        if len(text) > MAX_LEN * (LONGEST_TOKEN if isinstance(text, str) else 1):
            raise ContextLengthExceeded(f"the maximum context length is {MAX_LEN} tokens")

    def compile_grammar(self, params: SamplingParams) -> None:
        self.compiling(params)

    def server_info(self) -> dict[str, Any]:
        self._check_alive()
        return {"version": "9", "internal_states": [STATE]}

    def get_stats(self) -> list[dict[str, Any]]:
        self._check_alive()
        taken, self.rounds = self.rounds, []
        return taken

    def _check_alive(self) -> None:
        if not self.is_healthy:
            raise RuntimeError("the executor has died: no more")

    def shutdown(self) -> None:
        self.is_shut_down = True

    def submit(
        self,
        inputs: str | list[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> RequestHandle:
        if options.store:
            raise ValueError("store = True: nothing is stored without record_traffic")
        if isinstance(inputs, str):
            check_text(inputs)
        token_ids = self.tokenizer.encode(inputs) if isinstance(inputs, str) else inputs
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if not 0 <= min(token_ids) <= max(token_ids) < 1 << 31:
            raise ValueError("the prompt has token ids outside the vocabulary")
        if len(token_ids) > MAX_LEN:
            raise ContextLengthExceeded(f"the maximum context length is {MAX_LEN} tokens")
        request_id = len(self.prompts)
        self.prompts.append(token_ids)
        self.sampling.append(params)
        self.callers.append((options.client, options.cache_salt))
        self.adapters.append(options.adapter)
        self.running.add(request_id)

        def abort() -> None:
            self.aborted.add(request_id)

        prompt = inputs if isinstance(inputs, str) else None
        handle = RequestHandle(request_id, prompt, token_ids, params, self.tokenizer, abort)
        threading.Thread(
            target=self._answer, args=(handle, params, options.streaming), daemon=True
        ).start()
        return handle

    def _answer(self, handle: RequestHandle, params: SamplingParams, streaming: bool) -> None:
        first_token_time = time.monotonic()

        def respond(index: int, tokens: list[int], **end: Any) -> None:
            more = {"logprobs": _logprobs(params, tokens), **end}
            if tokens:
                more["first_token_time"] = first_token_time
            handle.receive(Response(handle.request_id, tokens, index=index, **more))

        if handle.prompt in FAILURES:
            respond(0, [], finish_reason="error", error=FAILURES[handle.prompt])
        for index in range(params.n):
            tokens, match = self._until_stop(self.tokenizer.encode(self.answer(index)), params)
            if params.prompt_logprobs is not None:
                respond(index, [], prompt_logprobs=_prompt_logprobs(handle.prompt_token_ids))
            limit = len(tokens) if params.max_tokens is None else params.max_tokens
            while handle.prompt == SLOW_PROMPT and handle.request_id not in self.aborted:
                time.sleep(0.005)
                if streaming:
                    respond(index, tokens[:1])
            # The token that completes a stop string comes with the end.
            num_early = len(tokens[:limit]) - (match is not None) if streaming else 0
            for token in tokens[:num_early]:
                respond(index, [token])
                time.sleep(0)
                while self.is_paced and handle._arrived:
                    time.sleep(0.0005)
            reason = "length" if limit < len(tokens) else "stop"
            rest = tokens[num_early:limit]
            end = {"finish_reason": reason, "speculative": STATS, "cached_tokens": 1}
            if match is not None and reason == "stop":
                end |= {"stop_reason": match.stop, "stop_match": match}
            respond(index, rest, **end, first_scheduled_time=handle.metrics.arrival_time)
        self.running.discard(handle.request_id)

    def _until_stop(
        self, tokens: list[int], params: SamplingParams
    ) -> tuple[list[int], StopMatch | None]:
        """The tokens up to the one that completes a stop string."""
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        stops = StopStringChecker(detokenizer, params.stop_strings, include_stop=False)
        matches = enumerate(map(stops.feed, tokens), start=1)
        return next(((tokens[:i], each) for i, each in matches if each), (tokens, None))


def _logprobs(params: SamplingParams, tokens: list[int]) -> list[dict[int, Logprob]]:
    """The chosen token is certain, the runner-up (the next id) impossible."""
    if params.logprobs is None:
        return []
    return [{token: Logprob(0.0, 1), token + 1: Logprob(float("-inf"), 2)} for token in tokens]


def _prompt_logprobs(tokens: list[int]) -> list[dict[int, Logprob] | None]:
    """Token i has -i/2 and is the best one if i is even; the next id has -0.6."""
    known: list[dict[int, Logprob] | None] = [
        {token: Logprob(-i / 2, 1), token + 1: Logprob(-0.6, 2)} for i, token in enumerate(tokens)
    ]
    return [None, *known[1:]]
