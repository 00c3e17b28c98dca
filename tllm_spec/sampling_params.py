"""How one request is decoded, named as in TensorRT-LLM and checked once, when it is made.

What depends on a vocabulary or a sequence length is checked where the request is taken in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, wraps
from typing import Any, TypeVar

from tllm_spec.config.neighbours import Ignored
from tllm_spec.config.option_checks import (
    LogprobsMode,
    check_bool,
    check_integer,
    check_list,
    check_logprobs_mode,
    check_number,
    check_text,
    refusals,
    shown,
    unknown_options,
)
from tllm_spec.grammar.guided_decoding import GuidedDecodingParams
from tllm_spec.logits_processor import AnyLogitsProcessor, LogitsEdit
from tllm_spec.logits_processor import LogitsProcessor as LogitsProcessor

# Dividing logits by less would overflow; there the best token has all of the probability anyway.
GREEDY_BELOW_TEMPERATURE = 1e-5
# The largest penalty and temperature. With larger ones float32 logits could become infinite: they
# are multiplied with a token's count and divided by the lowest temperature.
LARGEST_FACTOR = 1e20
MAX_SAMPLES = 16384  # each is a request of its own, and all are made before the first runs

# Options of TensorRT-LLM that have no effect here. "Off" is an option's neutral value and its
# default in TensorRT-LLM, trtllm-serve and vLLM, which may differ.
IGNORED: Ignored = {
    "additional_model_outputs": ([],),
    "apply_batched_logits_processor": (False,),
    "beam_search_diversity_rate": (0.0, 0),
    "beam_width_array": (),
    "early_stopping": (False, 1),
    "embedding_bias": (),
    "exclude_input_from_output": (True,),
    "length_penalty": (0.0, 0, 1.0, 1),
    "lookahead_config": (),
    "no_repeat_ngram_size": (0, 1 << 30),
    "prompt_ignore_length": (0,),
    "return_context_logits": (False,),
    "return_encoder_output": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (True, False),
    "top_p_decay": (1.0, 1),
    "top_p_min": (0.0, 0, 1e-06),
    "top_p_reset_ids": (),
    "use_beam_search": (False,),
}
# Lowest and highest value of each integer option.
INTEGERS: Mapping[str, tuple[int, float]] = {
    "end_id": (-1, math.inf),
    "pad_id": (-1, math.inf),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, MAX_SAMPLES),
    "best_of": (1, MAX_SAMPLES),
    "top_k": (0, math.inf),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, math.inf),
    "prompt_logprobs": (0, math.inf),
    "thinking_token_budget": (-1, math.inf),
    "truncate_prompt_tokens": (1, math.inf),
}
NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, LARGEST_FACTOR),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1 / LARGEST_FACTOR, LARGEST_FACTOR),
    "presence_penalty": (-LARGEST_FACTOR, LARGEST_FACTOR),
    "frequency_penalty": (-LARGEST_FACTOR, LARGEST_FACTOR),
}
BOOLS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "add_special_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, kw_only=True)
class SpeculationParams:
    """Speculation of one request."""

    max_draft_len: int | None = None
    """Draft tokens of this request in a round, at most. null: as many as the round has."""
    enabled: bool = True
    """False: this request is decoded without drafts."""

    def __post_init__(self) -> None:
        if self.max_draft_len is not None:
            check_integer("speculation.max_draft_len", self.max_draft_len)
        check_bool("speculation.enabled", self.enabled)


AnyClass = TypeVar("AnyClass", bound=type)


def _explains_refusals(cls: AnyClass) -> AnyClass:
    """Gives a dataclass a constructor that takes the options of IGNORED at their off values, and
    whose ValueError names all options that are refused or unknown or have wrong values."""
    plain: Any = cls
    make: Callable[..., None] = plain.__init__
    known = {each.name for each in fields(plain)}

    @wraps(make)
    def init(self: Any, /, **options: Any) -> None:
        lines = list(refusals(options, IGNORED).values())
        unknown = {
            name: value
            for name, value in options.items()
            if name not in known and name not in IGNORED
        }
        lines += unknown_options(unknown, known)
        try:
            make(self, **{name: value for name, value in options.items() if name in known})
        except ValueError as error:
            lines.append(str(error))
        if lines:
            raise ValueError("\n".join(lines))

    plain.__init__ = init
    return cls


@dataclass(frozen=True)
class ThinkingBudgetLogitsProcessor:
    """TensorRT-LLM's budget of a section of reasoning between these tokens. It is served as
    `thinking_token_budget` is, without a call for each token. None or -1: none."""

    thinking_token_budget: int | None
    reasoning_start_token_ids: Sequence[int]
    reasoning_end_token_ids: Sequence[int]

    def __post_init__(self) -> None:
        check_integer("thinking_token_budget", self.thinking_token_budget or 0, -1)
        for name in ("reasoning_start_token_ids", "reasoning_end_token_ids"):
            ids = getattr(self, name)
            check_list(name, ids, or_none=False)
            for token in ids:
                check_integer(f"a token id of {name}", token)
            if not ids:
                raise ValueError(f"{name} = {ids!r}: at least one token id is needed")


@_explains_refusals
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and output options of one request.

    Decoding is greedy if `temperature`, `top_k`, `top_p` and `min_p` are all unset, and also with
    any of temperature 0, top_k 1, top_p 0 and min_p 1."""

    end_id: int | None = None
    """Token that ends the text. -1: none. null: those of the model and of its tokenizer."""
    pad_id: int | None = None
    """Accepted as in TensorRT-LLM; outputs are never padded."""
    max_tokens: int | None = 32
    """Tokens to generate, at most. null: up to the model's length."""
    min_tokens: int = 0
    """Tokens to generate before the text may end."""

    bad: str | Sequence[str] | None = None
    """Words that must not be generated."""
    bad_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    """Tokens, or sequences of tokens, that must not be generated."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or token in the output."""
    ignore_eos: bool = False
    """The end token does not end the text."""

    n: int = 1
    """Samples of the prompt. With a seed they differ from each other, too."""
    best_of: int | None = None
    """Only `n` is accepted: all samples are returned."""
    use_beam_search: bool = False
    """Only false is accepted."""
    temperature: float | None = None
    """What logits are divided by. 0: greedy. null: 1, or greedy if no other option samples."""
    top_k: int | None = None
    """Sample from this many best tokens. 0 or null: from all."""
    top_p: float | None = None
    """Sample from the best tokens whose probabilities together reach this."""
    min_p: float | None = None
    """Leave out tokens with less than this share of the best token's probability."""
    seed: int | None = None
    """Makes sampling repeatable. null: drawn for the request."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in prompt or output. 1:
    off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token of the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of every token of the output, times its count."""
    logit_bias: Mapping[int, float] | None = None
    """`{token id: value}`, added to logits."""
    logits_processor: AnyLogitsProcessor | Sequence[AnyLogitsProcessor] | None = None
    """A function `(token_ids, logits) -> logits`, one with TensorRT-LLM's five arguments, or a list
    of them."""

    logprobs: bool | int | None = None
    """Return the log probabilities of this many best tokens and of the chosen one. True: 1."""
    prompt_logprobs: bool | int | None = None
    """The same for the prompt's tokens."""
    logprobs_mode: LogprobsMode | None = None
    """What `logprobs` has: log probabilities or logits, of the model itself (`raw_…`) or after all
    that changes what is chosen (`processed_…`). The prompt's are raw. null: `LlmArgs`'."""
    detokenize: bool = True
    """Return text."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to a text prompt."""
    truncate_prompt_tokens: int | None = None
    """Keep this many last tokens of the prompt."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Only true is accepted: the tokenizer decides on spaces."""

    guided_decoding: GuidedDecodingParams | None = None
    """What the text must match: `GuidedDecodingParams(json=..., regex=..., grammar=...,
    json_object=True, structural_tag=... or choice=[...])`, or a mapping of its keys."""
    thinking_token_budget: int | None = None
    """Tokens of a section of reasoning, without its markers; then its end is forced. -1 or null:
    any number. Needs `LlmArgs.reasoning_parser`."""
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    """`{enabled, max_draft_len}`: limits speculation for this request."""

    def __post_init__(self) -> None:
        # None is an option's default, as in TensorRT-LLM; only for `max_tokens` it has a meaning.
        # As `logprobs`, True is 1 and False is None.
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is not MISSING and each.name != "max_tokens":
                object.__setattr__(self, each.name, each.default)
            if isinstance(value, bool) and each.name in ("logprobs", "prompt_logprobs"):
                object.__setattr__(self, each.name, 1 if value else None)
        mistakes = []
        for check, *arguments in self._checks():
            try:
                check(*arguments)
            except ValueError as error:
                mistakes.append(str(error))
        if mistakes := mistakes or list(self._contradictions()):
            raise ValueError("\n".join(mistakes))

    def _checks(self) -> Iterator[tuple[Any, ...]]:
        """Functions that raise ValueError for one mistake, with their arguments."""
        for name, limits in {**INTEGERS, **NUMBERS}.items():
            if (value := getattr(self, name)) is not None:
                yield check_integer if name in INTEGERS else check_number, name, value, *limits
        for name in BOOLS:
            yield check_bool, name, getattr(self, name)
        if self.logprobs_mode is not None:
            yield check_logprobs_mode, self.logprobs_mode
        for name in ("bad", "stop"):
            yield self._check_strings, name
        yield (self._check_bad_token_ids,)
        yield (self._check_stop_token_ids,)
        yield (self._check_logit_bias,)
        for processor in self.logits_processors:
            yield LogitsEdit.of, processor
        yield (self._read_mappings,)

    def _read_mappings(self) -> None:
        """Makes objects of the options that may be mappings."""
        value: Any = self.speculation or {}
        if not isinstance(value, SpeculationParams):
            known = [each.name for each in fields(SpeculationParams)]
            if not isinstance(value, Mapping):
                names = " and ".join(known)
                raise ValueError(f"speculation = {value!r}: a mapping with {names} is needed")
            unknown = {f"speculation.{name}": value[name] for name in value if name not in known}
            if unknown:
                raise ValueError("\n".join(unknown_options(unknown, known)))
            object.__setattr__(self, "speculation", SpeculationParams(**value))
        if self.guided_decoding is not None:
            object.__setattr__(
                self, "guided_decoding", GuidedDecodingParams.of(self.guided_decoding)
            )

    def _contradictions(self) -> Iterator[str]:
        """Mistakes of options whose values are all of the right type."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}"
        if self.best_of not in (None, self.n):
            yield f"best_of = {self.best_of} is refused: all n = {self.n} samples are returned"
        if not self.spaces_between_special_tokens:
            name = "spaces_between_special_tokens"
            yield f"{name} = False is refused: the tokenizer decides on spaces"

    def _check_strings(self, name: str) -> None:
        if not all(isinstance(word, str) and word for word in _as_tuple(getattr(self, name))):
            raise ValueError(
                f"{name} = {getattr(self, name)!r}: a non-empty string or a list of them is needed"
            )

    def _check_bad_token_ids(self) -> None:
        check_list("bad_token_ids", self.bad_token_ids)
        for word in self.bad_token_ids or ():
            if not isinstance(word, int):
                check_list("an entry of bad_token_ids", word, or_none=False)
        if not all(self.bad_sequences):
            raise ValueError(f"bad_token_ids = {self.bad_token_ids!r} has an empty sequence")
        for token_id in (token for word in self.bad_sequences for token in word):
            check_integer("a token id of bad_token_ids", token_id)

    def _check_stop_token_ids(self) -> None:
        check_list("stop_token_ids", self.stop_token_ids)
        for token_id in self.stop_token_ids or ():
            check_integer("a token id of stop_token_ids", token_id)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias = {shown(self.logit_bias)}: a mapping of token ids is needed"
            )
        for token_id, bias in (self.logit_bias or {}).items():
            check_integer("a token id of logit_bias", token_id)
            check_number(f"logit_bias[{token_id}]", bias, -math.inf, math.inf)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from YAML or HTTP. Raises ValueError for options that are unknown or not
        served."""
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ValueError(
                f"sampling_params = {shown(options)}: SamplingParams or a mapping is needed"
            )
        return cls(**options)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether every token is the best one of the (penalized, biased) logits."""
        chosen = (self.temperature, self.top_k, self.top_p, self.min_p)
        if all(value is None for value in chosen):
            return True
        cold = self.temperature is not None and self.temperature < GREEDY_BELOW_TEMPERATURE
        return cold or self.top_k == 1 or self.top_p == 0 or self.min_p == 1

    @property
    def effective_temperature(self) -> float:
        """What logits are divided by; 0 when greedy."""
        if self.is_greedy:
            return 0.0
        return 1.0 if self.temperature is None else float(self.temperature)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return _as_tuple(self.stop)

    @cached_property
    def bad_strings(self) -> tuple[str, ...]:
        """`bad` as a tuple."""
        return _as_tuple(self.bad)

    @cached_property
    def bad_sequences(self) -> tuple[tuple[int, ...], ...]:
        """`bad_token_ids` as a tuple of token sequences; a flat list is a list of single tokens."""
        return tuple(
            (word,) if isinstance(word, int) else tuple(word) for word in self.bad_token_ids or ()
        )

    @cached_property
    def logits_processors(self) -> tuple[AnyLogitsProcessor, ...]:
        """`logits_processor` as a tuple, in the order of their calls, without a budget."""
        own = _as_tuple(self.logits_processor)
        return tuple(each for each in own if not isinstance(each, ThinkingBudgetLogitsProcessor))

    @property
    def thinking_budget(self) -> tuple[int, ThinkingBudgetLogitsProcessor | None] | None:
        """Tokens of a section of reasoning, and what says where sections are; None: any number. A
        processor outranks `thinking_token_budget`."""
        own = _as_tuple(self.logits_processor)
        found = [each for each in own if isinstance(each, ThinkingBudgetLogitsProcessor)]
        processor = found[-1] if found else None
        number = processor.thinking_token_budget if processor else self.thinking_token_budget
        return None if number in (None, -1) else (int(number), processor)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of one request that are not about its text, named as in `LlmRequest`. Raises
    ValueError for a wrong priority or salt. The empty salt would look like none."""

    streaming: bool = False
    """Its result grows while tokens come. Otherwise it arrives whole."""
    priority: float = 0.5
    """0 to 1, higher first with `waiting_queue_policy: priority`."""
    cache_salt: str | None = None
    """Only requests with the same one reuse each other's KV cache and n-grams."""
    client: tuple[str, ...] = ()
    """Who takes turns: a name, or the names of a group and of its member."""
    store: bool | None = None
    """Whether `record_traffic` may record it. null: unless it has a `cache_salt`."""
    scored_from: int = 0
    """The prompt's token at which a given completion begins: `prompt_logprobs` begin there, and are
    those with which it would have been drawn. 0: there is none."""
    adapter: str | None = None
    """The name of its LoRA adapter. null: the target as it is."""

    def __post_init__(self) -> None:
        check_number("priority", self.priority, 0, 1)
        if self.cache_salt is not None:
            if not isinstance(self.cache_salt, str) or not self.cache_salt:
                needed = "a text that is not empty, or None is needed"
                raise ValueError(f"cache_salt = {shown(self.cache_salt)}: {needed}")
            check_text(self.cache_salt, "cache_salt")


DEFAULT_OPTIONS = RequestOptions()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
