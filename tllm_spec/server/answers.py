"""OpenAI's response objects, made from `RequestOutput`: whole answers and the chunks of a stream.

Each choice has two extensions: `stop_reason`, and `speculative_decoding` once it is finished."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tllm_spec.outputs import CompletionOutput, Logprob, RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.protocol import CompletionRequest
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.tokenizer import IncrementalDetokenizer, Tokenizer

# JSON of answers: server-sent events, and large answers. The encoder in C holds Python's lock
# until it is done, so a large answer is encoded in parts, between which other threads run.


DONE = b"data: [DONE]\n\n"

# `json.dumps` would make one for each call.
encode = json.JSONEncoder(ensure_ascii=False).encode
encode_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % encode(data).encode()


class TextEvent:
    """An event of which only the text MARK changes: the rest is encoded once."""

    MARK = "7d1a2b9e-the-text"

    def __init__(self, data: dict[str, Any]) -> None:
        self._head, self._tail = event(data).split(encode(self.MARK).encode())

    def with_text(self, text: str) -> bytes:
        """The event with a text instead of MARK."""
        return b"%b%b%b" % (self._head, encode(text).encode(), self._tail)


# Down to single tokens: answer, choices, choice, logprobs, content, token.
DEPTH = 5


def render(answer: dict[str, Any]) -> bytes:
    """As starlette's JSONResponse does."""
    return "".join(_parts(answer, DEPTH)).encode()


def large_event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % render(data)


def _parts(value: Any, depth: int) -> Iterator[str]:
    if not depth or not value or not isinstance(value, (dict, list)):
        yield encode_compact(value)
    elif isinstance(value, dict):
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else '{'}{encode_compact(name)}:"
            yield from _parts(each, depth - 1)
        yield "}"
    elif isinstance(value[0], (dict, list, type(None))):
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _parts(each, depth - 1)
        yield "]"
    else:
        yield encode_compact(value)


MANY = 1000  # log probabilities, with which an answer is not made in the event loop
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses this number

Json = dict[str, Any]
Logprobs = Sequence["dict[int, Logprob] | None"]  # of tokens; a prompt's first has none


def usage_of(results: Sequence[RequestOutput]) -> Json:
    """Token counts of an HTTP request."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sum(output.length for result in results for output in result.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }


def metrics_of(results: Sequence[RequestOutput]) -> Json:
    """`metrics.speculative_decoding` as vLLM writes it and AIPerf reads it: of one sequence only,
    and only with speculation."""
    outputs = [output for result in results for output in result.outputs]
    stats = outputs[0].speculative_decoding
    if len(outputs) > 1 or stats is None or not stats.rounds:
        return {}
    accepted = stats.num_accepted_tokens
    figures = {
        "mean_acceptance_length": 1 + accepted / stats.rounds,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.num_drafted_tokens,
        "num_spec_tokens": len(stats.per_position_drafted),
    }
    return {"metrics": {"speculative_decoding": figures}}


def weights_of(output: CompletionOutput) -> Json:
    """Which weights computed a sample's tokens; empty where they cannot be updated, and before the
    end."""
    if not (spans := output.weight_versions):
        return {}
    return {
        "weight_version": spans[-1].version,
        "weight_versions": [span._asdict() for span in spans],
    }


class Answer(ABC):
    """The answer to one HTTP request. Its choices are the `n` samples of the first prompt, followed
    by those of the next."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        num_samples: int,
        top_logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),  # noqa: TID251  # a date
            "model": model,
        }
        self._tokenizer = tokenizer
        self._num_samples = num_samples
        self._top_logprobs = top_logprobs  # None: without logprobs
        self._prompt_logprobs = prompt_logprobs  # the same for the prompt
        self._texts: dict[tuple[int, bool], str] = {}  # of tokens
        self._text_events: dict[int, TextEvent] = {}  # by choice
        self.chunk_usage: Json = {}  # what chunks say about usage before it is known
        self._started: set[int] = set()
        self._finished: set[int] = set()

    def is_slow(self, results: Sequence[RequestOutput]) -> bool:
        """Whether making and writing the whole answer takes long: it has the log probabilities of a
        prompt or of many tokens."""
        if self._prompt_logprobs is not None:
            return True
        num_tokens = sum(output.length for result in results for output in result.outputs)
        return self._top_logprobs is not None and num_tokens * (1 + self._top_logprobs) > MANY

    def starts_slowly(self, prompt_index: int, result: RequestOutput) -> bool:
        """Whether the next chunks of a stream have the log probabilities of a prompt."""
        return False

    @property
    def has_text_only(self) -> bool:
        """Whether a chunk between the first and the last brings a new text and nothing else."""
        return self._top_logprobs is None

    @abstractmethod
    def _content(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json:
        """A finished sample's text and logprobs."""

    @abstractmethod
    def _delta(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json | None:
        """A growing sample's new text and logprobs; None if there is nothing to send yet."""

    def _ending(self, index: int, output: CompletionOutput) -> Json:
        """How a sample has ended, if it has."""
        stats = output.speculative_decoding
        return {
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "speculative_decoding": stats.to_dict() if stats and output.finish_reason else None,
        }

    def whole(self, results: Sequence[RequestOutput]) -> Json:
        """The answer without streaming."""
        choices = [
            {
                "index": (index := self._index(i, output)),
                **self._content(index, result, output),
                **self._ending(index, output),
                **self._of_prompt(result, output),
            }
            for i, result in enumerate(results)
            for output in result.outputs
        ]
        answer = {**self._head, "object": self.kind, "choices": choices}
        of_engine = metrics_of(results) | weights_of(results[0].outputs[0])
        return {**answer, "usage": self._usage(results), **of_engine}

    def _usage(self, results: Sequence[RequestOutput]) -> Json:
        return usage_of(results)

    def chunks(self, prompt_index: int, result: RequestOutput) -> Iterator[Json]:
        """Chunks with the new part of `result`."""
        for output in result.outputs:
            index = self._index(prompt_index, output)
            has_new = output.text_diff or (self._top_logprobs is not None and output.token_ids_diff)
            if index in self._finished or not (has_new or output.finish_reason):
                continue
            delta = self._delta(index, result, output)
            if delta is None:
                continue
            self._started.add(index)
            if output.finish_reason:
                self._finished.add(index)
            choice = {"index": index, **delta, **self._ending(index, output)}
            yield self._chunk([choice]) | weights_of(output)

    def events(self, prompt_index: int, result: RequestOutput, counts: Json | None = None) -> bytes:
        """The same chunks as server-sent events, with the token counts so far if they are given."""
        encode = large_event if self.starts_slowly(prompt_index, result) else event
        if counts is not None:
            chunks = self.chunks(prompt_index, result)
            return b"".join(encode(chunk | {"usage": counts}) for chunk in chunks)
        if len(result.outputs) == 1 and not result.outputs[0].finish_reason:
            output = result.outputs[0]
            found = self._text_events.get(self._index(prompt_index, output))
            if found is not None:  # the common case
                return found.with_text(text) if (text := output.text_diff) else b""
        events = b"".join(map(encode, self.chunks(prompt_index, result)))
        if self.has_text_only:
            for output in result.outputs:
                self._keep_text_event(self._index(prompt_index, output), result, output.index)
        return events

    def _keep_text_event(self, index: int, result: RequestOutput, sample: int) -> None:
        if index in self._started and index not in self._text_events:
            with_mark = CompletionOutput(sample, text=TextEvent.MARK)
            choice = {"index": index, **(self._delta(index, result, with_mark) or {})}
            chunk = self._chunk([choice | self._ending(index, with_mark)])
            self._text_events[index] = TextEvent(chunk)

    def _of_prompt(self, result: RequestOutput, output: CompletionOutput) -> Json:
        """`prompt_logprobs` as vLLM writes them: for each token None or
        `{token id: {logprob, rank, decoded_token}}`. Only the prompt's first choice has them."""
        if self._prompt_logprobs is None:
            return {}
        if output.index:
            return {"prompt_logprobs": None}
        entries = [
            None
            if known is None
            else {
                str(token): {
                    "logprob": number_of(each),
                    "rank": each.rank,
                    "decoded_token": self._token_text(token, position),
                }
                for token, each in known.items()
            }
            for position, known in enumerate(output.prompt_logprobs)
        ]
        return {"prompt_logprobs": entries}

    def begun(self, results: Sequence[RequestOutput]) -> bytes:
        """The events before the first chunk."""
        return b""

    def ended(self, results: Sequence[RequestOutput]) -> bytes:
        """The events after the last chunk of a sample: with `include_usage` one of it."""
        if not self.chunk_usage:
            return DONE
        of_engine = metrics_of(results) | weights_of(results[0].outputs[0])
        return event({**self._chunk([]), "usage": self._usage(results), **of_engine}) + DONE

    def failed(self, refusal: RequestRefused) -> bytes:
        """The event that ends a stream whose request has failed."""
        return event(refusal.body)

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_kind, "choices": choices, **self.chunk_usage}

    def _index(self, prompt_index: int, output: CompletionOutput) -> int:
        return prompt_index * self._num_samples + output.index

    def _token_text(self, token_id: int, offset: int) -> str:
        """A token's text at character `offset` of the output. A decoder may drop a leading space:
        after the start, it is the second half of the text of two such tokens."""
        key = token_id, bool(offset)
        found = self._texts.get(key)
        if found is None:
            text = self._tokenizer.decode(
                [token_id] * (2 if offset else 1),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            found = self._texts[key] = text[len(text) // 2 :] if offset else text
        return found

    def _all_logprobs(self, output: CompletionOutput) -> Json | None:
        if self._top_logprobs is None:
            return None
        return self._logprobs(output.token_ids, output.logprobs, output.text_offsets)

    def _new_logprobs(self, output: CompletionOutput) -> Json | None:
        if self._top_logprobs is None:
            return None
        return self._logprobs(output.token_ids_diff, output.logprobs_diff, output.text_offsets_diff)

    @abstractmethod
    def _logprobs(self, token_ids: list[int], logprobs: Logprobs, offsets: list[int]) -> Json:
        """Those of some tokens, in the route's form."""

    def _best(self, logprobs: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
        """The requested number of most probable tokens."""
        ranked = sorted(logprobs.items(), key=lambda item: item[1].logprob, reverse=True)
        return ranked[: self._top_logprobs]


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def _content(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json:
        return {"text": output.text, "logprobs": self._all_logprobs(output)}

    def _delta(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json | None:
        return {"text": output.text_diff, "logprobs": self._new_logprobs(output)}

    def _logprobs(self, token_ids: list[int], logprobs: Logprobs, offsets: list[int]) -> Json:
        return {
            "tokens": list(map(self._token_text, token_ids, offsets)),
            "token_logprobs": [
                None if at is None else number_of(at[token])
                for token, at in zip(token_ids, logprobs, strict=True)
            ],
            "top_logprobs": list(map(self._top, token_ids, logprobs, offsets)),
            "text_offset": offsets,
        }

    def _top(self, chosen: int, logprobs: Mapping[int, Logprob] | None, offset: int) -> Json | None:
        """Log probabilities of the best tokens and the chosen one, by text. Of tokens with the same
        text the most probable one counts."""
        if logprobs is None:
            return None
        top: Json = {}
        for token, logprob in [*self._best(logprobs), (chosen, logprobs[chosen])]:
            top.setdefault(self._token_text(token, offset), number_of(logprob))
        return top


def number_of(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST_LOGPROB)


# Completions with `echo`: the text and the log probabilities begin with the prompt's.


class EchoAnswer(CompletionAnswer):
    """prompt_only: max_tokens is 0, so the output is left out. is_cut: the tokens are a part of
    the prompt."""

    def __init__(
        self, *arguments: Any, prompt_only: bool, is_cut: bool, skip_special_tokens: bool
    ) -> None:
        super().__init__(*arguments)
        self._prompt_only = prompt_only
        self._is_cut = is_cut
        self._skip_special_tokens = skip_special_tokens

    def is_slow(self, results: Sequence[RequestOutput]) -> bool:
        return True

    def starts_slowly(self, prompt_index: int, result: RequestOutput) -> bool:
        indices = {self._index(prompt_index, output) for output in result.outputs}
        return self._top_logprobs is not None and not indices <= self._started

    @property
    def has_text_only(self) -> bool:
        return super().has_text_only and not self._prompt_only

    def _content(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json:
        text, logprobs = self._prompt(result, output)
        if self._prompt_only:
            return {"text": text, "logprobs": logprobs}
        own = super()._content(index, result, output)
        return {"text": text + own["text"], "logprobs": _joined(logprobs, own["logprobs"], text)}

    def _delta(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json | None:
        if index not in self._started:
            # The prompt's log probabilities come with the first sample, and other samples may be
            # earlier. Nothing of them has been sent before.
            is_known = output.prompt_logprobs or result.outputs[0].finish_reason
            if self._top_logprobs is not None and not is_known:
                return None
            return self._content(index, result, output)
        if self._prompt_only:
            return {"text": "", "logprobs": None}
        own = super()._delta(index, result, output)
        assert own is not None
        return own | {"logprobs": _joined(None, own["logprobs"], self._text(result))}

    def _text(self, result: RequestOutput) -> str:
        """The prompt as it was given, or the text of its tokens."""
        if result.prompt is not None and not self._is_cut:
            return result.prompt
        return self._tokenizer.decode(
            result.prompt_token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def _prompt(self, result: RequestOutput, output: CompletionOutput) -> tuple[str, Json | None]:
        text, token_ids = self._text(result), result.prompt_token_ids
        if self._top_logprobs is None:
            return text, None
        # A request that was cancelled in its prompt has none.
        known = output.prompt_logprobs or [None] * len(token_ids)
        return text, self._logprobs(token_ids, known, self._offsets(token_ids))

    def _offsets(self, token_ids: list[int]) -> list[int]:
        """The character at which each token's text begins."""
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, skip_special_tokens=self._skip_special_tokens
        )
        offsets, length = [], 0
        for token in token_ids:
            offsets.append(length)
            length += len(detokenizer.feed([token]))
        return offsets


def _joined(prompt: Json | None, own: Json | None, text: str) -> Json | None:
    """text: the prompt's, after which the output's offsets begin."""
    if own is None:
        return prompt
    own = own | {"text_offset": [offset + len(text) for offset in own["text_offset"]]}
    return own if prompt is None else {name: prompt[name] + own[name] for name in own}


def completion_answer(
    body: CompletionRequest, model: str, tokenizer: Tokenizer, params: SamplingParams
) -> CompletionAnswer:
    # `echo` asks the engine for the prompt's logprobs; an answer has vLLM's field only on request.
    own_field = body.prompt_logprobs
    arguments = model, tokenizer, params.n, params.logprobs, own_field
    if not body.echo:
        return CompletionAnswer(*arguments)
    return EchoAnswer(
        *arguments,
        prompt_only=body.max_tokens == 0,
        is_cut=body.truncate_prompt_tokens is not None,
        skip_special_tokens=params.skip_special_tokens,
    )
