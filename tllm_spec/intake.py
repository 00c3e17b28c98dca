"""Makes requests of prompts and parameters: reads, checks and tokenises them, draws seeds.

It knows the model by its limits only, so it works in any process."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, cast

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.option_checks import check_text
from tllm_spec.executor.request import (
    DecodingRules,
    DraftCounters,
    LlmRequest,
    RequestPause,
    StopOptions,
    rules_of_sample,
)
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.grammars import end_ids_of
from tllm_spec.prompts import Prompt, PromptReader, check_salt, longest_prompt
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.stop_strings import StopStringChecker
from tllm_spec.text.tokenizer import Tokenizer

Params = SamplingParams | Mapping[str, Any] | None


@dataclass(frozen=True)
class Submission:
    """A prompt's requests, one for each of the n samples, with consecutive ids."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    requests: list[LlmRequest]

    @property
    def ids(self) -> list[int]:
        return [request.request_id for request in self.requests]

    def handle(self, tokenizer: Tokenizer | None, cancel: Callable[[], None]) -> RequestHandle:
        first_id = self.requests[0].request_id
        return RequestHandle(first_id, self.prompt, self.token_ids, self.params, tokenizer, cancel)


class Intake:
    """Thread-safe. Its request ids begin at 1. new_states: makes the grammars of a prompt's
    requests, None for each one without."""

    def __init__(
        self,
        args: LlmArgs,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        new_states: Callable[[SamplingParams, int], Sequence[GrammarState | None]],
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._end_ids = end_ids_of(limits, tokenizer)
        self._prompts = PromptReader(
            tokenizer,
            vocab_size=limits.vocab_size,
            max_seq_len=limits.max_seq_len,
            longest=longest_prompt(args),
        )
        self._new_states = new_states
        self._num_ranks = args.tensor_parallel_size
        self._records = args.record_traffic is not None
        self._lock = threading.Lock()
        self._ids = count(1)

    def limit_sequences(self, max_seq_len: int) -> None:
        """For an engine that runs shorter sequences than the first: tokens of prompt and output."""
        if max_seq_len < self._limits.max_seq_len:
            self._limits = replace(self._limits, max_seq_len=max_seq_len)
            self._prompts.limit_sequences(max_seq_len)

    def check_length(self, text: str | Sequence[int]) -> None:
        """Raises ValueError for token ids that are too many, and for a text that has too many
        whatever they are, without tokenising it."""
        self._prompts.check_length(text)

    def submission(
        self,
        inputs: Prompt,
        params: Params,
        *,
        streaming: bool,
        priority: float,
        cache_salt: str | None = None,
        client: tuple[str, ...] = (),
        store: bool | None = None,
    ) -> Submission:
        """Raises ValueError for a prompt or parameters that the model cannot serve."""
        checked = _params(params)
        if store and not self._records:
            raise ValueError("store = True: nothing is stored without record_traffic")
        if self._num_ranks > 1 and checked.logits_processors:
            raise ValueError(
                "logits_processor is a function of this process, and tensor_parallel_size = "
                f"{self._num_ranks} has other processes that would need it; use logit_bias, "
                "bad or guided_decoding"
            )
        prompt, token_ids = self._prompts.read(inputs, checked)
        rules = self._rules(checked)
        grammars = self._new_states(checked, checked.n)
        _check_priority(priority)
        check_salt(cache_salt)
        with self._lock:
            ids = [next(self._ids) for _ in range(checked.n)]
        seed = secrets.randbits(63) if checked.seed is None else checked.seed
        requests = [
            self._request(
                index,
                request_id,
                token_ids,
                checked,
                rules_of_sample(rules, index),
                _sample_seed(seed, index),
                grammar,
            )
            for index, (request_id, grammar) in enumerate(zip(ids, grammars, strict=True))
        ]
        for request in requests:
            request.streaming, request.priority = streaming, float(priority)
            request.cache_salt, request.client, request.store = cache_salt, client, store
        return Submission(prompt, token_ids, checked, requests)

    def _rules(self, params: SamplingParams) -> DecodingRules:
        """The parameters, checked against the model."""
        tokenizer = self._tokenizer
        if params.stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        for word in params.stop_strings:
            check_text(word, "stop")
        encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
        return DecodingRules.from_params(
            params, vocab_size=self._limits.vocab_size, end_ids=self._end_ids, encode=encode
        )

    def _request(
        self,
        index: int,
        request_id: int,
        token_ids: list[int],
        params: SamplingParams,
        rules: DecodingRules,
        seed: int,
        grammar: GrammarState | None,
    ) -> LlmRequest:
        room = self._limits.max_seq_len - len(token_ids)
        limit, wanted = self._limits.max_draft_len, params.speculation
        if wanted.max_draft_len is not None:
            limit = min(limit, wanted.max_draft_len)
        return LlmRequest(
            request_id=request_id,
            tokens=list(token_ids),
            rules=rules,
            seed=seed,
            index=index,
            arrival=request_id,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            draft_limit=limit if wanted.enabled else 0,
            counters=DraftCounters(self._limits.max_draft_len),
            draft_pause=RequestPause(self._limits.pause_patience),
            stop_options=(stop := stop_options(params)),
            stop_checker=self._stop_checker(stop),
            grammar=grammar,
        )

    def _stop_checker(self, options: StopOptions | None) -> StopStringChecker | None:
        if options is None:
            return None
        assert self._tokenizer is not None
        return StopStringChecker.of(self._tokenizer, options)


def stop_options(params: SamplingParams) -> StopOptions | None:
    """None without stop strings."""
    if not params.stop_strings:
        return None
    return StopOptions(
        params.stop_strings, params.include_stop_str_in_output, params.skip_special_tokens
    )


def _params(params: Params) -> SamplingParams:
    if params is None:
        return SamplingParams()
    return params if isinstance(params, SamplingParams) else SamplingParams.from_dict(params)


def _check_priority(priority: object) -> None:
    is_number = isinstance(priority, (int, float)) and not isinstance(priority, bool)
    if not is_number or not 0 <= cast(float, priority) <= 1:
        raise ValueError(f"priority = {priority!r}: a number of 0 to 1 is accepted")


def _sample_seed(seed: int, index: int) -> int:
    """The seed of the index-th sample of a request: the first keeps the request's own. The factor,
    from the golden ratio, spreads small indices over 64 bits."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed
