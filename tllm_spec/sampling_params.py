"""How one request is to be decoded, named as in TensorRT-LLM and checked once, when it is made.

It knows no model: what depends on a vocabulary or a sequence length is checked where the request is
taken in."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tllm_spec.option_checks import NotServed, refuse_not_served, shown, unknown_option

if TYPE_CHECKING:
    from torch import Tensor

    # (tokens before this position, logits [V]) -> logits [V]; called for every position, draft
    # positions too. An exception fails the request; behind drafts, which may be wrong, it only ends
    # the request's speculation.
    LogitsProcessor = Callable[[list[int], Tensor], Tensor]

# Dividing logits by less would overflow; there the best token has all of the probability anyway.
GREEDY_BELOW_TEMPERATURE = 1e-5
LARGEST = sys.float_info.max
# The largest penalty and temperature. Larger ones would change nothing more, but float32 may not
# hold them, times a token's count and divided by the lowest temperature: infinity times 0 is not a
# number.
LARGEST_FACTOR = 1e20

NO_BEAMS = "there is no beam search"
NO_LOGITS = "logits are not returned; logprobs are"

# "Off" is an option's neutral value and its default in TensorRT-LLM, trtllm-serve and vLLM, which
# may differ.
NOT_SERVED: Mapping[str, NotServed] = {
    "additional_model_outputs": NotServed((None, []), NO_LOGITS),
    "apply_batched_logits_processor": NotServed((False,), "use logits_processor"),
    "beam_search_diversity_rate": NotServed((None, 0.0, 0), NO_BEAMS),
    "beam_width_array": NotServed((None,), NO_BEAMS),
    "early_stopping": NotServed((None, False, 1), NO_BEAMS),
    "embedding_bias": NotServed((None,), "use logit_bias, a mapping of token ids"),
    "exclude_input_from_output": NotServed((True,), "the prompt is in RequestOutput.prompt"),
    "guided_decoding": NotServed((None,), "guided decoding is not served yet"),
    "length_penalty": NotServed((None, 0.0, 0, 1.0, 1), NO_BEAMS),
    "lookahead_config": NotServed((None,), "speculation is chosen by LLM's speculative_config"),
    "no_repeat_ngram_size": NotServed(
        (None, 0, 1 << 30), "use repetition_penalty or bad_token_ids"
    ),
    "prompt_ignore_length": NotServed((None, 0), "penalties count the whole prompt"),
    "return_context_logits": NotServed((False,), NO_LOGITS),
    "return_encoder_output": NotServed((False,), "there are no encoders"),
    "return_generation_logits": NotServed((False,), NO_LOGITS),
    "return_perf_metrics": NotServed((False,), "times are always in RequestOutput.metrics"),
    "top_p_decay": NotServed((None, 1.0, 1), "top_p is constant"),
    "top_p_min": NotServed((None, 0.0, 0, 1e-6), "top_p is constant"),
    "top_p_reset_ids": NotServed((None,), "top_p is constant"),
    "use_beam_search": NotServed((False,), NO_BEAMS),
}


MAX_SAMPLES = 16384  # each is a request of its own, and all are made before the first runs

# Lowest and highest value of each integer option.
INTEGERS: Mapping[str, tuple[int, float]] = {
    "end_id": (-1, math.inf),  # -1 as in TensorRT-LLM: no token ends the text
    "pad_id": (-1, math.inf),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, MAX_SAMPLES),
    "best_of": (1, MAX_SAMPLES),
    "top_k": (0, math.inf),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, math.inf),
    "prompt_logprobs": (0, math.inf),
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
    "use_beam_search",
    "detokenize",
    "add_special_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, kw_only=True)
class SpeculationParams:
    """Speculation of one request: not at all, or with fewer drafts than the round's draft
    length."""

    max_draft_len: int | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.max_draft_len is not None:
            _check_integer("speculation.max_draft_len", self.max_draft_len)
        _check_bool("speculation.enabled", self.enabled)


AnyClass = TypeVar("AnyClass", bound=type)


def _explains_refusals(cls: AnyClass) -> AnyClass:
    """The constructor of a dataclass knows TensorRT-LLM's options that are not served, too: "off"
    is taken, everything else is a ValueError with the reason."""
    plain: Any = cls
    make, known = plain.__init__, {each.name for each in fields(plain)}

    @wraps(make)
    def init(self: Any, /, **options: Any) -> None:
        refuse_not_served(options, NOT_SERVED)
        for name, value in options.items():
            if name not in known and name not in NOT_SERVED:
                raise ValueError(unknown_option(name, value, known))
        make(self, **{name: value for name, value in options.items() if name in known})

    plain.__init__ = init
    return cls


@_explains_refusals
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and output options of one request.

    Unset `temperature`, `top_k`, `top_p` and `min_p` mean greedy decoding; so does any one of
    temperature 0, top_k 1, top_p 0 and min_p 1. `top_k` 0 is off. An unset `seed` is drawn for the
    request; the samples of `n` > 1 differ. `max_tokens` None means "up to the model's length".
    `logprobs` k returns the k best tokens beside the chosen one. `logit_bias` maps token ids to
    what is added to their logits. Presence and frequency penalties are not held to OpenAI's -2 to
    2: TensorRT-LLM takes any value, and here any is taken after which float32 logits are numbers.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    min_tokens: int = 0

    bad: str | Sequence[str] | None = None
    bad_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    def __post_init__(self) -> None:
        self._replace_null_and_mapping()
        for name, (low, high) in INTEGERS.items():
            if (value := getattr(self, name)) is not None:
                _check_integer(name, value, low, high)
        for name, (lowest, highest) in NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                _check_number(name, value, lowest, highest)
        for name in BOOLS:
            _check_bool(name, getattr(self, name))
        self._check_words()
        self._check_together()

    def _replace_null_and_mapping(self) -> None:
        """None stands for an option's default, as in TensorRT-LLM; only `max_tokens` gives it a
        meaning."""
        for each in fields(self):
            if (
                getattr(self, each.name) is None
                and each.default is not MISSING
                and each.name != "max_tokens"
            ):
                object.__setattr__(self, each.name, each.default)
        object.__setattr__(self, "speculation", _speculation_from(self.speculation))

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}"
            )
        if self.best_of not in (None, self.n):
            raise ValueError(
                f"best_of = {self.best_of} is refused: all n = {self.n} samples are returned"
            )
        if self.use_beam_search:
            raise ValueError(f"use_beam_search = True is refused: {NO_BEAMS}")
        if not self.spaces_between_special_tokens:
            raise ValueError(
                "spaces_between_special_tokens = False is refused: the tokenizer decides on spaces"
            )

    def _check_words(self) -> None:
        for name in ("bad", "stop"):
            words = _as_tuple(getattr(self, name))
            if not all(isinstance(word, str) and word for word in words):
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: a non-empty string or a list of them is "
                    "needed"
                )
        _check_list("bad_token_ids", self.bad_token_ids)
        for word in self.bad_token_ids or ():
            if not isinstance(word, int):
                _check_list("an entry of bad_token_ids", word, or_none=False)
        if not all(self.bad_sequences):
            raise ValueError(f"bad_token_ids = {self.bad_token_ids!r} has an empty sequence")
        for token_id in (token for word in self.bad_sequences for token in word):
            _check_integer("a token id of bad_token_ids", token_id)
        _check_list("stop_token_ids", self.stop_token_ids)
        for token_id in self.stop_token_ids or ():
            _check_integer("a token id of stop_token_ids", token_id)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias = {shown(self.logit_bias)}: a mapping of token ids is needed"
            )
        for token_id, bias in (self.logit_bias or {}).items():
            _check_integer("a token id of logit_bias", token_id)
            _check_number(f"logit_bias[{token_id}]", bias, -math.inf, math.inf)
        for processor in self.logits_processors:
            if not callable(processor):
                raise ValueError(f"logits_processor = {processor!r} is not callable")

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
        """Whether every token is the best one of the (penalised, biased) logits."""
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
    def logits_processors(self) -> tuple[LogitsProcessor, ...]:
        """`logits_processor` as a tuple, in the order of their calls."""
        return _as_tuple(self.logits_processor)


def _speculation_from(value: object) -> SpeculationParams:
    if value is None or isinstance(value, SpeculationParams):
        return value or SpeculationParams()
    known = [each.name for each in fields(SpeculationParams)]
    if not isinstance(value, Mapping):
        raise ValueError(f"speculation = {value!r}: a mapping with {' and '.join(known)} is needed")
    for name in value.keys() - set(known):
        raise ValueError(unknown_option(f"speculation.{name}", value[name], known))
    return SpeculationParams(**value)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _check_list(name: str, value: object, *, or_none: bool = True) -> None:
    if not (or_none and value is None) and (
        not isinstance(value, Sequence) or isinstance(value, (str, bytes))
    ):
        raise ValueError(f"{name} = {shown(value)}: a list of token ids is needed")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: True or False is needed")


def _check_integer(name: str, value: object, low: int = 0, high: float = math.inf) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: an integer is needed")
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is out of range: {_range(low, high)}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: a number is needed")
    if not (
        low <= value <= high and -LARGEST <= value <= LARGEST
    ):  # integers have no limit of their own
        raise ValueError(f"{name} = {value} is out of range: {_range(low, high)}")


def _range(low: float, high: float) -> str:
    if math.isinf(low):
        return "a finite number is needed"
    return f"at least {low} is needed" if math.isinf(high) else f"{low} to {high} is accepted"
