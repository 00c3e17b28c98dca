"""`LLM`: the front door. Takes prompts in, makes requests of them, hands out results.

It checks what users give against the model; the executor, in its own thread, does everything else.
"""

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from numbers import Integral
from typing import Any, NoReturn, cast

from tllm_spec.config import LlmArgs
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import DraftCounters, LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.response import Response
from tllm_spec.executor.worker import Worker
from tllm_spec.option_checks import shown
from tllm_spec.outputs import RequestOutput
from tllm_spec.request_errors import ContextLengthExceeded
from tllm_spec.request_handle import RequestHandle, Results
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server_info import server_info
from tllm_spec.stop_strings import StopStringChecker
from tllm_spec.tokenizer import IncrementalDetokenizer, Tokenizer, check_text, load_tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model being served in this process. Keyword arguments are those of `LlmArgs`, named as in
    TensorRT-LLM.

    Raises ValueError for arguments, models or tokenizers that cannot be served.
    """

    def __init__(self, /, model: str | os.PathLike[str], **kwargs: Any) -> None:
        self.args = LlmArgs.from_kwargs(model, **kwargs)
        self.tokenizer = _tokenizer(self.args)
        self._results = Results()
        built = build_executor(self.args, self.tokenizer, self._results.respond)
        self.model_config = built.model_config
        self.max_seq_len = built.max_seq_len
        self._max_draft_len = built.max_draft_len
        self._new_mark = built.new_mark
        self._queue = built.queue
        self._executor = built.executor
        self._check_can_run: Callable[[LlmRequest], None] = (
            built.executor.scheduler.check_can_ever_run
        )
        self._lock = threading.Lock()
        self._ids = count(1)
        self._is_shut_down = False
        self._worker = Worker(built.executor, built.queue, self._results.fail_all)
        self._worker.start()
        # At shutdown, when nobody holds this object any more, or when the interpreter ends, which a
        # thread that is inside torch would turn into an abort.
        self._end = weakref.finalize(self, _end, self._worker, self._queue, self._results)

    @classmethod
    def from_args(cls, args: LlmArgs) -> "LLM":
        """From arguments that were read already (a YAML file laid over command-line flags)."""
        return cls(**{name: getattr(args, name) for name in LlmArgs.model_fields})

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams]
        | None = None,
        use_tqdm: bool = True,
        *,
        priority: float | Sequence[float] = 0.5,
    ) -> RequestOutput | list[RequestOutput]:
        """Completes one prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}) or
        a list of them.

        A list is answered by a list in its order; a prompt in it that cannot be served becomes an
        output with `error`, and the others are not affected. A single such prompt raises
        ValueError. `sampling_params` and `priority` (0 to 1, higher first under
        `waiting_queue_policy: priority`) may be lists of the same length."""
        if _is_single(inputs):
            alone = cast(Prompt, inputs)
            (params,), (rank,) = (
                _one_each("sampling_params", sampling_params, 1),
                _one_each("priority", priority, 1),
            )
            result = self.generate_async(alone, params, priority=rank)
            with _aborted_if_interrupted([result]):
                return result.result()
        prompts = list(cast(Sequence[Prompt], inputs))
        all_params = _one_each("sampling_params", sampling_params, len(prompts))
        priorities = _one_each("priority", priority, len(prompts))
        results: list[RequestHandle] = []
        with _aborted_if_interrupted(results):
            for each in zip(prompts, all_params, priorities, strict=True):
                results.append(self._submit_or_explain(*each))
            if not use_tqdm:
                return [result.result() for result in results]
            from tqdm import tqdm

            shown_results = tqdm(results, desc="Processed requests", dynamic_ncols=True)
            return [result.result() for result in shown_results]

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        streaming: bool = False,
        priority: float = 0.5,
    ) -> RequestHandle:
        """Submits one prompt and returns at once. With `streaming`, the result grows token by
        token; without, it arrives whole.

        Raises ValueError for a prompt or parameters that this model cannot serve, RuntimeError
        after shutdown or when the executor has died."""
        self._check_alive()
        params = _params(sampling_params)
        prompt, token_ids = self._tokens_of(inputs, params)
        rules = self._rules(params, token_ids)
        if (
            not isinstance(priority, (int, float))
            or isinstance(priority, bool)
            or not 0 <= priority <= 1
        ):
            raise ValueError(f"priority = {priority!r}: a number of 0 to 1 is accepted")
        with self._lock:
            ids = [next(self._ids) for _ in range(params.n)]
        cancel = self._cancel_of(ids)
        result = RequestHandle(ids[0], prompt, token_ids, params, self.tokenizer, cancel)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests = [
            self._request(index, request_id, token_ids, params, rules, _sample_seed(seed, index))
            for index, request_id in enumerate(ids)
        ]
        self._check_can_run(requests[0])
        for request in requests:
            request.streaming, request.priority = streaming, float(priority)
            self._results.add(request.request_id, result)
        if not self._queue.put(requests):  # it has ended since the first look
            self._results.fail_all(self._worker.why_ended)
            raise RuntimeError(self._worker.why_ended)
        return result

    def check_integrity(self) -> None:
        """Waits until the executor idles. Raises AssertionError when slots or KV pages do not add
        up, RuntimeError after shutdown."""
        if self._is_shut_down:
            raise RuntimeError("the LLM is shut down")
        self._worker.wait_until_idle()
        self._executor.check_integrity()

    def server_info(self) -> dict[str, Any]:
        """The served options, and under `internal_states` what the executor does now: running and
        waiting requests, pages, totals since the start, draft lengths with the estimates, limits
        and last decisions behind them. Plain JSON values. It is read between two rounds.

        Raises RuntimeError after shutdown or when the executor has died, and when called from
        inside a round (by a drafter or a logits processor)."""
        self._check_alive()
        return server_info(self.args, self.max_seq_len, self._worker.call(self._executor.state))

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return not self._is_shut_down and self._worker.failure is None

    def shutdown(self) -> None:
        """Cancels what is running, ends the executor's thread and lets go of models and KV cache,
        so that the next LLM has their memory. May be called twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._end()
        del self._executor
        self._check_can_run = self._new_mark = _refuse  # methods that would keep the executor alive

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _submit_or_explain(
        self, prompt: Prompt, params: SamplingParams | Mapping[str, Any] | None, priority: float
    ) -> RequestHandle:
        try:
            return self.generate_async(prompt, params, priority=priority)
        except ValueError as error:
            result = RequestHandle(0, None, [], SamplingParams(), None, lambda: None)
            result.receive(Response(0, [], finish_reason="error", error=str(error)))
            return result

    def _tokens_of(self, inputs: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt's text, if it was one, and its tokens."""
        if isinstance(inputs, Mapping):
            unknown = inputs.keys() - {"prompt", "prompt_token_ids"}
            if unknown or len(inputs) != 1:
                raise ValueError(
                    "a prompt mapping has either 'prompt' or 'prompt_token_ids', not "
                    f"{sorted(inputs)}"
                )
            ((kind, inputs),) = inputs.items()
            if isinstance(inputs, str) != (kind == "prompt"):
                wanted = "text" if kind == "prompt" else "a list of token ids"
                raise ValueError(f"{kind} = {shown(inputs)}: {wanted} is needed")
        if isinstance(inputs, str):
            check_text(inputs)
            if self.tokenizer is None:
                raise ValueError(
                    "a text prompt needs a tokenizer; give token ids, or drop skip_tokenizer_init"
                )
            if params.truncate_prompt_tokens is None:
                self._check_length(inputs)
            return inputs, self.tokenizer.encode(
                inputs, add_special_tokens=params.add_special_tokens
            )
        return None, _token_ids(inputs)

    def _check_length(self, text: str) -> None:
        """Raises ValueError for a text that has too many tokens whatever they are: finding them
        would take long."""
        if len(text) <= self._longest_prompt:
            return  # as nearly all are, and the vocabulary need not be looked through
        if self._longest_token and len(text) > self._longest_prompt * self._longest_token:
            raise self._too_long(f"{len(text)} characters")

    @property
    def _longest_prompt(self) -> int:
        return min(self.max_seq_len - 1, self.args.max_input_len or self.max_seq_len)

    @cached_property
    def _longest_token(self) -> int:
        """Characters that one token may stand for, at most: vocabularies write each byte of a token
        as one or more. 0
        where nobody can tell: one token stands for whatever is unknown, or a user's tokenizer has
        no vocabulary."""
        tokenizer: Any = self.tokenizer
        if getattr(tokenizer, "unk_token", None) is not None or not hasattr(tokenizer, "get_vocab"):
            return 0
        return max(map(len, tokenizer.get_vocab()), default=0)

    def _too_long(self, length: str) -> ContextLengthExceeded:
        # Clients such as litellm recognise this error by its first words.
        return ContextLengthExceeded(
            f"this model's maximum context length is {self.max_seq_len} tokens, and the prompt has "
            f"{length}; at most {self._longest_prompt} prompt tokens are accepted (max_input_len "
            f"{self.args.max_input_len}; an output needs at least one token)"
        )

    def _rules(self, params: SamplingParams, token_ids: list[int]) -> DecodingRules:
        """What the model makes of the parameters, after all checks of prompt and parameters against
        the model."""
        if params.truncate_prompt_tokens is not None:
            del token_ids[: -params.truncate_prompt_tokens]
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        vocab_size = self.model_config.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(
                "the prompt has token ids outside the vocabulary, which has ids 0 to "
                f"{vocab_size - 1}"
            )
        if len(token_ids) > self._longest_prompt:
            raise self._too_long(f"{len(token_ids)} tokens")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        tokenizer = self.tokenizer
        encode = (
            None
            if tokenizer is None
            else lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
        end_ids = self.model_config.eos_token_ids or _end_of(tokenizer)
        return DecodingRules.from_params(
            params, vocab_size=vocab_size, end_ids=end_ids, encode=encode
        )

    def _request(
        self,
        index: int,
        request_id: int,
        token_ids: list[int],
        params: SamplingParams,
        rules: DecodingRules,
        seed: int,
    ) -> LlmRequest:
        room = self.max_seq_len - len(token_ids)
        wish = params.speculation
        limit = (
            self._max_draft_len
            if wish.max_draft_len is None
            else min(wish.max_draft_len, self._max_draft_len)
        )
        return LlmRequest(
            request_id=request_id,
            tokens=list(token_ids),
            rules=rules,
            seed=seed,
            index=index,
            arrival=request_id,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            draft_limit=limit if wish.enabled else 0,
            counters=DraftCounters(self._max_draft_len),
            draft_mark=self._new_mark(),
            stop_checker=self._stop_checker(params),
        )

    def _stop_checker(self, params: SamplingParams) -> StopStringChecker | None:
        if not params.stop_strings:
            return None
        assert self.tokenizer is not None
        detokenizer = IncrementalDetokenizer(
            self.tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        return StopStringChecker(
            detokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output
        )

    def _cancel_of(self, ids: list[int]) -> Callable[[], None]:
        def cancel() -> None:
            for request_id in ids:
                self._queue.cancel(request_id)

        return cancel

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the LLM is shut down")
        if self._worker.failure is not None:
            raise RuntimeError(f"the executor has died: {self._worker.failure}")


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError("the LLM is shut down")


def _end(worker: Worker, queue: RequestQueue, results: Results) -> None:
    for request_id in results.ids():
        queue.cancel(request_id)
    worker.stop()


@contextmanager
def _aborted_if_interrupted(results: Sequence[RequestHandle]) -> Iterator[None]:
    """Nobody waits any more for what was asked when Ctrl-C (or an error) ends the wait."""
    try:
        yield
    finally:
        for result in results:
            result.abort()


def _tokenizer(args: LlmArgs) -> Tokenizer | None:
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None or isinstance(args.tokenizer, str):
        return load_tokenizer(args.tokenizer or args.model)
    return cast(Tokenizer, args.tokenizer)


def _end_of(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    return () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _is_single(inputs: object) -> bool:
    """One prompt, or something that is none; otherwise a list of prompts."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        return True
    return bool(inputs) and isinstance(inputs[0], Integral)


def _token_ids(prompt: object) -> list[int]:
    """A copy of a prompt's token ids, which may be NumPy's integers."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise ValueError(
            f"prompt = {shown(prompt)}: text, a list of token ids, or one of them as "
            f"{{'prompt': ...}} or "
            "{'prompt_token_ids': ...} is needed"
        )
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
        raise ValueError(f"prompt_token_ids = {shown(prompt)} must be integers")
    return [int(token) for token in prompt]


def _params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    return params if isinstance(params, SamplingParams) else SamplingParams.from_dict(params)


def _one_each(name: str, value: Any, number: int) -> list[Any]:
    """The same value for all prompts, or the caller's list of them."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{name} has {len(value)} entries for {number} prompts")
    return list(value)


def _sample_seed(seed: int, index: int) -> int:
    """The seed of the index-th sample of a request: the first keeps the request's own."""
    mixed = (
        seed + index * 0x9E3779B97F4A7C15
    ) & 0xFFFFFFFFFFFFFFFF  # the golden ratio spreads small indices
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed
