"""`LLM`: takes prompts, makes requests of them and hands out results.

It checks prompts and parameters against the model. The executor, in its own thread, does the rest.
"""

import logging
import os
import secrets
import socket
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from tllm_spec.adapter_loading import AdapterLoading
from tllm_spec.config.engine_config import NO_KV_EVENTS
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.neighbours import CHAT_IGNORED, GENERATE_IGNORED
from tllm_spec.config.option_checks import LogprobsMode
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.draft_swap import DraftSwap
from tllm_spec.executor.request import Response
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.weight_swap import Part
from tllm_spec.executor.worker import Worker
from tllm_spec.grammars import Grammars
from tllm_spec.intake import (
    Intake,
    Params,
    Prompt,
    is_single,
    mistakes_as_request_errors,
    one_each,
    refuse_not_served,
)
from tllm_spec.lora_request import AdapterInfo, LoRARequest
from tllm_spec.models.automatic import with_drafter
from tllm_spec.models.registry import model_config
from tllm_spec.outputs import RequestOutput
from tllm_spec.rank_calls import Pausing, RankCalls
from tllm_spec.ranks import build_together, join_ranks
from tllm_spec.request_errors import REFUSING_MODES, EnginePaused, PauseMode, RequestError
from tllm_spec.request_handle import RequestHandle, Results, wait_for_all
from tllm_spec.sampling_params import RequestOptions, SamplingParams, SpeculationParams
from tllm_spec.server_info import server_info
from tllm_spec.shared_tensors import SharedTensors
from tllm_spec.target_update import TargetUpdate
from tllm_spec.text.chat_prompt import Conversation
from tllm_spec.text.messages import Messages
from tllm_spec.text.tokenizer import Tokenizer, tokenizer_of
from tllm_spec.zoo.registry import resolve_model

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class LLM:
    """A model being served in this process.

    Keyword arguments are those of `LlmArgs`, named as in TensorRT-LLM. Raises ValueError for
    arguments, models or tokenizers that cannot be served.
    """

    def __init__(
        self, /, model: str | os.PathLike[str], tokenizer: Any = None, **kwargs: Any
    ) -> None:
        self.args = LlmArgs.from_kwargs(model, tokenizer=tokenizer, **with_drafter(model, kwargs))
        self.llm_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        model_config(resolve_model(self.args.model))  # before its tokenizer is read
        self.tokenizer = tokenizer_of(self.args)
        self._results = Results()
        communicator = join_ranks(self.args)
        built = build_together(self.args, self.tokenizer, self._results.respond, communicator)
        self.model_config = built.model_config
        self.max_seq_len = built.limits.max_seq_len
        self._queue = built.queue
        self._executor = built.executor
        self._grammars = Grammars.of(self.args, self.tokenizer, built.limits)
        self._intake = Intake(self.args, self.tokenizer, built.limits, self._grammars.states_of)
        self._is_shut_down = False
        self._worker = Worker(built.executor, built.queue, self._results.fail_all)
        calls = RankCalls(built.executor, self._worker)
        self._swap = DraftSwap(self.args, calls)
        self._update = TargetUpdate(self.args, calls, self._swap.forced)
        self._adapters = AdapterLoading(calls)
        self._pausing = Pausing(calls, partial(_cancel_all, self._queue, self._results))
        communicator.when_lost(self._worker.fail)
        self._worker.start()
        # Runs at shutdown, when this object is collected, or when the interpreter ends: a thread
        # that is inside torch then would abort the process.
        self._end = weakref.finalize(
            self, _end, self._worker, self._queue, self._results, communicator
        )

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[SamplingParams] = None,
        use_tqdm: bool = True,
        *,
        priority: float | Sequence[float] = 0.5,
        cache_salt: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **not_served: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Completes one prompt (text, token ids, {"prompt": ...}, {"prompt_token_ids": ...} or a
        `Conversation`) or a list of them.

        A list gives a list in the same order. If one of its prompts cannot be served, or fails
        while it runs, that output has `error`, and the others are not affected; a single such
        prompt raises RequestError, which is a ValueError.
        `sampling_params`, `priority` (0 to 1, higher first with `waiting_queue_policy: priority`),
        `cache_salt` and `lora_request` may be lists of the same length. Only requests with the same
        `cache_salt` reuse each other's KV cache and n-grams. An adapter with a `lora_path` is
        loaded at its first use.

        TensorRT-LLM's `disaggregated_params` and so on must be None."""
        refuse_not_served(not_served, GENERATE_IGNORED)
        is_one = is_single(inputs)
        prompts = [cast(Prompt, inputs)] if is_one else list(cast(Sequence[Prompt], inputs))
        given = {
            "sampling_params": sampling_params,
            "priority": priority,
            "cache_salt": cache_salt,
            "lora_request": lora_request,
        }
        columns = [one_each(name, value, len(prompts)) for name, value in given.items()]
        submit = self.generate_async if is_one else self._submit_or_explain
        results: list[RequestHandle] = []
        try:
            for prompt, params, rank, salt, adapter in zip(prompts, *columns, strict=True):
                options = {"priority": rank, "cache_salt": salt, "lora_request": adapter}
                results.append(submit(prompt, params, **options))
            if is_one:
                output = results[0].result()
                if output.error is not None:
                    raise RequestError(output.error)
                return output
            if not use_tqdm:
                return [result.result() for result in results]
            return wait_for_all(results)
        finally:  # Ctrl-C or an error may have ended the wait for them
            for result in results:
                result.abort()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[SamplingParams] = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: float | Sequence[float] = 0.5,
        cache_salt: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **not_served: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one conversation, a list of messages, or a list of conversations. The model's
        chat template makes prompts of them, in which names of control tokens that a message has are
        text. The rest is as with `generate`.

        Raises RequestError for messages that the template does not accept or leaves out."""
        refuse_not_served(not_served, CHAT_IGNORED, "chat")

        def prompt(each: Any) -> Conversation:
            return Conversation(each, chat_template_kwargs or {}, add_generation_prompt, tools)

        is_one = is_single(messages) or not messages or isinstance(messages[0], Mapping)
        return self.generate(
            prompt(messages) if is_one else [prompt(each) for each in messages],
            sampling_params,
            use_tqdm,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError with `skip_tokenizer_init`."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer; drop skip_tokenizer_init")
        return self.tokenizer

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: Params = None,
        *,
        streaming: bool = False,
        priority: float = 0.5,
        cache_salt: str | None = None,
        client: tuple[str, ...] = (),
        store: bool | None = None,
        lora_request: LoRARequest | None = None,
        **not_served: Any,
    ) -> RequestHandle:
        """Submits one prompt and returns at once. With `streaming` the result grows while tokens
        come, without it arrives whole. The result of a request that fails while it runs has
        `error`; reading it raises nothing. Waiting requests are taken in turn by `client`, which is
        a name, or the names of a group and of its member. store: whether `record_traffic` may
        record it; None: unless it has a `cache_salt`.

        Raises RequestError, which is a ValueError, for a prompt or parameters that this model
        cannot serve, RuntimeError after shutdown or when the executor has died."""
        refuse_not_served(not_served, GENERATE_IGNORED)
        self._check_alive()
        chosen = nullcontext() if lora_request is None else self._adapters.chosen(lora_request)
        with mistakes_as_request_errors(), chosen as adapter:
            options = RequestOptions(
                streaming=streaming,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
                store=store,
                adapter=adapter,
            )
            return self.submit(inputs, sampling_params, options)

    def submit(self, inputs: Prompt, params: Params, options: RequestOptions) -> RequestHandle:
        """As `generate_async`, which makes `options`."""
        self._check_alive()
        if self._pausing.mode in REFUSING_MODES:
            raise EnginePaused
        with mistakes_as_request_errors():
            submission = self._intake.submission(inputs, params, options)
        ids = [each.request_id for each in submission.requests]

        def cancel() -> None:  # holds the LLM: a running request keeps it alive
            for request_id in ids:
                self._queue.cancel(request_id)

        result = submission.handle(self.tokenizer, cancel)
        for request_id in ids:
            self._results.add(request_id, result)
        if not self._queue.put(submission.requests):  # it has ended since `_check_alive`
            self._results.fail_all(self._worker.why_ended)
            raise RuntimeError(self._worker.why_ended)
        return result

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Prompt | Sequence[Prompt],
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        logprobs_mode: LogprobsMode | None = None,
    ) -> list[list[float]]:
        """For each completion of one prompt, or of as many prompts, the log probabilities (or
        logits) of its tokens. A text is tokenised without special tokens. The options are as in
        `SamplingParams`: in a processed mode a value is that with which the token would have been
        drawn, minus infinity where a filter excludes it. The prefix cache is not read.

        Raises RequestError for what cannot be served, RuntimeError as `generate_async` does."""
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            logprobs_mode=logprobs_mode,
            logprobs=0,
            prompt_logprobs=0,
            max_tokens=1,
            detokenize=False,
            speculation=SpeculationParams(enabled=False),
        )
        given = ([each] if is_single(each) else each for each in (prompts, completions))
        befores, owns = cast("Iterator[Sequence[Prompt]]", given)
        pairs = [*zip(befores, one_each("completions", owns, len(befores)), strict=True)]
        found = [self._start_scoring(*pair, params) for pair in pairs]
        return [handle.result().prompt_values(first) for handle, first in found]

    def _start_scoring(
        self, prompt: Prompt, completion: Prompt, params: SamplingParams
    ) -> tuple[RequestHandle, int]:
        """The request that reads both, and the completion's first token."""
        with mistakes_as_request_errors():
            before = self._intake.token_ids(prompt, add_special_tokens=True)
            own = self._intake.token_ids(completion, add_special_tokens=False)
        options = RequestOptions(scored_from=len(before), store=False)
        return self.submit(before + own, params, options), len(before)

    def check_length(self, text: str | Sequence[int]) -> None:
        """Raises ValueError for token ids that are too many, and for a text that has too many
        whatever they are, without tokenising it."""
        self._intake.check_length(text)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the grammar of `params`, if there is one, so that the request with it starts at
        once. Raises ValueError for a grammar that cannot be used."""
        self._grammars.states_of(self._intake.reasoning.grammar_of(params), 1)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run; each of `n` samples counts."""
        return len(self._results.ids())

    def check_integrity(self) -> None:
        """Waits until the executor idles. Raises AssertionError when slots or KV pages do not add
        up, RuntimeError after shutdown."""
        if self._is_shut_down:
            raise RuntimeError("the LLM is shut down")
        self._worker.wait_until_idle()
        self._executor.check_integrity()

    def server_info(self) -> dict[str, Any]:
        """The served options, and under `internal_states` the executor's state: running and waiting
        requests, pages, totals since the start, draft lengths and the estimates that they follow.
        Plain JSON values, read between two rounds.

        Raises RuntimeError after shutdown, when the executor has died, and when called from inside
        a round (by a drafter or a logits processor)."""
        self._check_alive()
        return server_info(self.args, self.max_seq_len, self._worker.call(self._executor.state))

    def load_draft_weights(
        self, folder: str | os.PathLike[str], *, keep_cache: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Replaces the draft network's weights between two rounds, while requests run. The folder
        has weights of the same shapes. Their texts do not change. Cached prefixes that the old
        weights had read are not reused, unless `keep_cache`. See docs/recording.md.

        Raises ValueError, and changes nothing, for weights that do not fit, and without `force`
        for those that recorded traffic shows to be worse."""
        self._check_alive()
        return self._swap.whole(os.fspath(folder), keep_cache, force)

    def load_adapter(
        self, name: str, folder: str | os.PathLike[str], *, replace: bool = False
    ) -> AdapterInfo:
        """Loads a LoRA adapter in PEFT's format, while requests run. With `replace` its name may be
        in use: requests that have begun keep the adapter that they began with.

        Raises ValueError, and changes nothing, for an adapter that cannot be served."""
        self._check_alive()
        return self._adapters.load(name, os.fspath(folder), replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Requests that have begun go on with the adapter; its memory is free after the last one.
        Raises UnknownAdapter, which is a ValueError, for a name that is not loaded."""
        self._check_alive()
        self._adapters.unload(name)

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The LoRA adapters that are loaded."""
        self._check_alive()
        return self._adapters.infos

    def pause(self, mode: PauseMode = "retract") -> None:
        """Returns when no round runs; none runs before `resume`. Requests go back to the queue to
        be computed again (retract), stay as they are (keep), are finished before (wait) or
        cancelled (abort). Requests that are submitted meanwhile wait; after wait and abort they
        are refused with RuntimeError."""
        self._check_alive()
        self._pausing.pause(mode)

    def resume(self) -> None:
        """Ends a pause, also one that waits for requests."""
        self._check_alive()
        self._pausing.resume()

    @property
    def pause_mode(self) -> str | None:
        """None: there is no pause."""
        return None if self._is_shut_down else self._pausing.mode

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` not since."""
        return self.pause_mode is not None

    def sleep(self, level: int = 1) -> dict[str, Any]:
        """Gives the memory of weights and KV cache back until `wake_up`; on CUDA it needs
        `enable_sleep_mode`. Level 1 keeps the weights in host memory. Level 2 drops the target's:
        after waking, `update_weights` comes before the next request. Running requests go back to
        the queue, and requests wait. Returns the bytes that are free, and what stays."""
        self._check_alive()
        return self._pausing.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """tags: `weights`, `kv_cache`; None: all that is asleep. Rounds run again when nothing
        is. Raises RuntimeError, and it sleeps on, if the device has too little memory."""
        self._check_alive()
        return self._pausing.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether something is asleep."""
        return self._pausing.is_sleeping

    def update_weights(
        self,
        source: str | os.PathLike[str] | Iterable[tuple[str, "torch.Tensor"]] | SharedTensors,
        version: str | None = None,
        part: Part = "target",
        running: Literal["keep", "retract"] = "retract",
    ) -> dict[str, Any]:
        """Replaces the target's weights between two rounds, while it serves. source: a folder with
        a checkpoint of the same model, or its tensors with their names there, also those of another
        process. version: a name for the weights; None: how often they were updated. running:
        whether requests that run are computed again from their tokens, or go on with what the old
        weights have computed.

        part: `target`, with MTP layers, which stay where the source lacks them; `draft`, a
        checkpoint of the draft network, or MTP layers; `all`, where every MTP layer is needed.
        Nothing that was cached before is reused, and what was learned of acceptance is dropped.
        Returns the version, the seconds that staging took, and those in which no round ran. Raises
        ValueError, and changes nothing, for weights that do not fit."""
        self._check_alive()
        return self._update.update(source, version, part, running)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """One dict for each round since the last call, oldest first, with TensorRT-LLM's names;
        `max_stats_len` rounds at most. Empty without `enable_iter_perf_stats`. It never waits for a
        round, so `timeout` has no effect.

        Raises RuntimeError as `server_info` does."""
        self._check_alive()
        stats = self._executor.parts.iteration_stats
        if stats is None:
            logger.warning("get_stats needs enable_iter_perf_stats: true")
            return []
        return self._worker.call(stats.take)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Yields what `get_stats` returns."""
        for stats in self.get_stats(timeout):
            yield stats

    def get_kv_cache_events(self, timeout: float | None = 2) -> NoReturn:
        """Refused with ValueError, as is `get_kv_cache_events_async`."""
        raise ValueError(NO_KV_EVENTS)

    get_kv_cache_events_async = get_kv_cache_events

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return not self._is_shut_down and self._worker.failure is None

    def shutdown(self) -> None:
        """Cancels running requests, ends the executor's thread and drops models and KV cache, so
        that the next LLM can use their memory. May be called twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._end()
        self._pausing.close()
        del self._executor, self._swap, self._update, self._adapters

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled: make one from its arguments in the other process, or pass "
            "outputs"
        )

    def _submit_or_explain(self, prompt: Prompt, params: Params, **options: Any) -> RequestHandle:
        try:
            return self.generate_async(prompt, params, **options)
        except ValueError as error:
            result = RequestHandle(0, None, [], SamplingParams(), None, lambda: None)
            result.receive(Response(0, [], finish_reason="error", error=str(error)))
            return result

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the LLM is shut down")
        if self._worker.failure is not None:
            raise RuntimeError(f"the executor has died: {self._worker.failure}")


def _end(worker: Worker, queue: RequestQueue, results: Results, communicator: Communicator) -> None:
    _cancel_all(queue, results)
    worker.stop()
    communicator.close()


def _cancel_all(queue: RequestQueue, results: Results) -> None:
    for request_id in results.ids():
        queue.cancel(request_id)
