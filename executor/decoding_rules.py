"""A request's sampling parameters as the executor uses them: checked against the vocabulary, with
words turned into tokens. It knows nothing of the request's progress."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from tllm_spec.config.option_checks import check_text
from tllm_spec.logits_processor import LogitsEdit
from tllm_spec.sampling_params import SamplingParams


@dataclass(frozen=True)
class DecodingRules:
    """How one request is sampled and ends. Values that mean off: temperature 0 (greedy), top_k 0,
    top_p 1, min_p 0, repetition 1, presence and frequency 0, logprobs None. What every round asks
    for is cached."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    min_tokens: int
    end_ids: frozenset[int]  # stop without a stop_reason; empty with ignore_eos
    stop_token_ids: frozenset[int]
    token_bias: dict[int, float]  # logit bias, and -inf for bad words of one token
    bad_sequences: tuple[tuple[int, ...], ...]  # bad words of several tokens
    edits: tuple[LogitsEdit, ...]  # the user's logits processors
    logprobs: int | None
    prompt_logprobs: int | None

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition != 1 or self.presence or self.frequency)

    @cached_property
    def is_simple(self) -> bool:
        """Only temperature and filters lie between logits and token, and no log probabilities are
        asked for."""
        return not (
            self.has_penalties
            or self.min_tokens
            or self.token_bias
            or self.needs_host_edits
            or self.logprobs is not None
        )

    @cached_property
    def graph_samples(self) -> bool | None:
        """Whether its CUDA graph must sample (False: greedy). None: no graph can follow its
        rules."""
        return not self.is_greedy if self.is_simple else None

    @cached_property
    def needs_host_edits(self) -> bool:
        return bool(self.edits or self.bad_sequences)

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        end_ids: Iterable[int],
        encode: Callable[[str], list[int]] | None,
    ) -> "DecodingRules":
        """Raises ValueError for token ids outside the vocabulary, for words without a tokenizer,
        and for words with lone surrogates."""
        sequences = list(params.bad_sequences)
        for word in params.bad_strings:
            if encode is None:
                raise ValueError(f"bad = {word!r} needs a tokenizer; use bad_token_ids")
            check_text(word, "bad")
            spelled = {tuple(encode(word)), tuple(encode(" " + word))}
            # Tokens that a tokenizer has and the model lacks cannot be chosen anyway.
            sequences += [each for each in spelled if max(each, default=0) < vocab_size]
        bias = {token: float(value) for token, value in (params.logit_bias or {}).items()}
        stop_token_ids = frozenset(params.stop_token_ids or ())
        own_end = () if params.end_id is None else (params.end_id,) if params.end_id >= 0 else ()
        _check_vocabulary("end_id", own_end, vocab_size)
        end = frozenset(end_ids if params.end_id is None else own_end)
        _check_vocabulary("logit_bias", bias, vocab_size)
        _check_vocabulary("stop_token_ids", stop_token_ids, vocab_size)
        _check_vocabulary(
            "bad_token_ids", (token for sequence in sequences for token in sequence), vocab_size
        )
        bias |= {sequence[0]: float("-inf") for sequence in sequences if len(sequence) == 1}
        if len(bias) == vocab_size and max(bias.values()) == float("-inf"):
            raise ValueError("bad_token_ids and bad exclude every token of the vocabulary")
        return cls(
            temperature=params.effective_temperature,
            top_k=min(params.top_k or 0, vocab_size),
            top_p=1.0 if params.top_p is None else float(params.top_p),
            min_p=float(params.min_p or 0),
            repetition=float(params.repetition_penalty),
            presence=float(params.presence_penalty),
            frequency=float(params.frequency_penalty),
            min_tokens=params.min_tokens,
            end_ids=frozenset() if params.ignore_eos else end,
            stop_token_ids=stop_token_ids,
            token_bias=bias,
            bad_sequences=tuple(sorted(sequence for sequence in sequences if len(sequence) > 1)),
            edits=tuple(map(LogitsEdit.of, params.logits_processors)),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )


def _check_vocabulary(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} names token id {token}; the model has ids 0 to {vocab_size - 1}"
            )


def rules_of_sample(rules: DecodingRules, index: int) -> DecodingRules:
    """The rules of a prompt's index-th sample. The first one brings the log probabilities of the
    prompt, which are the same for all."""
    return rules if index == 0 else replace(rules, prompt_logprobs=None)
