"""Completions with `echo`: the text and the log probabilities begin with the prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.protocol import CompletionRequest
from tllm_spec.server.responses import CompletionAnswer, Json, number_of
from tllm_spec.text.tokenizer import IncrementalDetokenizer, Tokenizer


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
        offsets = self._offsets(token_ids)
        # A request that was cancelled in its prompt has none.
        known = output.prompt_logprobs or [None] * len(token_ids)
        return text, {
            "tokens": list(map(self._token_text, token_ids, offsets)),
            "token_logprobs": [
                None if at is None else number_of(at[token])
                for token, at in zip(token_ids, known, strict=True)
            ],
            "top_logprobs": [
                None if at is None else self._top(token, at, offset)
                for token, at, offset in zip(token_ids, known, offsets, strict=True)
            ],
            "text_offset": offsets,
        }

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
