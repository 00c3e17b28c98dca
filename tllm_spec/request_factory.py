"""Makes the executor's requests of a prompt and its parameters: the same requests in every process
that serves the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import DraftCounters, LlmRequest
from tllm_spec.executor.speculative.draft_length.request_pause import RequestPause
from tllm_spec.grammar_state import GrammarState
from tllm_spec.models.config import ModelConfig
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.stop_strings import StopStringChecker
from tllm_spec.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True)
class RequestSpec:
    """A prompt to complete, `params.n` times. `request_ids`: one for each sample; `seed`: of the
    first."""

    request_ids: Sequence[int]
    token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    streaming: bool = False
    priority: float = 0.5

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and mappings, for another process. Raises ValueError for
        parameters that are code."""
        if self.params.logits_processors:
            raise ValueError("logits_processor is code, which other processes do not get")
        given = {
            each.name: getattr(self.params, each.name)
            for each in fields(self.params)
            if getattr(self.params, each.name) is not None
        }
        if "guided_decoding" in given:
            raise ValueError("guided_decoding is not served with several ranks yet")
        given["speculation"] = asdict(self.params.speculation)
        return {
            "request_ids": list(self.request_ids),
            "token_ids": list(self.token_ids),
            "params": given,
            "seed": self.seed,
            "streaming": self.streaming,
            "priority": self.priority,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RequestSpec:
        return cls(**{**plain, "params": SamplingParams.from_dict(plain["params"])})


class RequestFactory:
    """For one model. `max_draft_len` and `new_pause` are the executor's."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        max_seq_len: int,
        max_draft_len: int,
        new_pause: Callable[[], RequestPause],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = config.vocab_size
        self.end_ids = config.eos_token_ids or _end_of(tokenizer)
        self._max_seq_len = max_seq_len
        self._max_draft_len = max_draft_len
        self._new_pause = new_pause

    def rules(self, params: SamplingParams) -> DecodingRules:
        """The parameters, checked against the model. Raises ValueError."""
        tokenizer = self._tokenizer
        if params.stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
        return DecodingRules.from_params(
            params, vocab_size=self._vocab_size, end_ids=self.end_ids, encode=encode
        )

    def make(
        self, spec: RequestSpec, rules: DecodingRules, grammars: Sequence[GrammarState | None]
    ) -> list[LlmRequest]:
        """One request for each sample. `rules`: those of the spec's parameters; `grammars`: one
        for each sample."""
        room, params = self._max_seq_len - len(spec.token_ids), spec.params
        limit, wanted = self._max_draft_len, params.speculation
        if wanted.max_draft_len is not None:
            limit = min(limit, wanted.max_draft_len)
        return [
            LlmRequest(
                request_id=request_id,
                tokens=list(spec.token_ids),
                rules=rules,
                seed=_sample_seed(spec.seed, index),
                index=index,
                arrival=request_id,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                draft_limit=limit if wanted.enabled else 0,
                counters=DraftCounters(self._max_draft_len),
                draft_pause=self._new_pause(),
                stop_checker=self._stop_checker(params),
                grammar=grammar,
                streaming=spec.streaming,
                priority=spec.priority,
            )
            for index, (request_id, grammar) in enumerate(
                zip(spec.request_ids, grammars, strict=True)
            )
        ]

    def make_from_plain(self, plain: Mapping[str, Any]) -> list[LlmRequest]:
        """The same requests, of what `RequestSpec.to_plain` returned in another process."""
        spec = RequestSpec.from_plain(plain)
        return self.make(spec, self.rules(spec.params), [None] * len(spec.request_ids))

    def _stop_checker(self, params: SamplingParams) -> StopStringChecker | None:
        if not params.stop_strings:
            return None
        assert self._tokenizer is not None
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        return StopStringChecker(
            detokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output
        )


def _end_of(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    return () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _sample_seed(seed: int, index: int) -> int:
    """The seed of the index-th sample of a request: the first keeps the request's own. The factor,
    from the golden ratio, spreads small indices over 64 bits."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed
