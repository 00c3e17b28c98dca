"""Makes requests of prompts and parameters: reads, checks and tokenises them, draws seeds.

It knows the model by its limits only, so it works in any process."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from numbers import Integral
from typing import Any, NamedTuple

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.neighbours import Ignored
from tllm_spec.config.option_checks import check_text, refusals, shown
from tllm_spec.executor.request import DecodingRules, LlmRequest, StopOptions, samples_of
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.grammar.thinking_budget import TextRules
from tllm_spec.grammars import ReasoningRules, end_ids_of
from tllm_spec.request_errors import ContextLengthExceeded, RequestError
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from tllm_spec.text.chat_prompt import ChatPrompts, Conversation
from tllm_spec.text.stop_strings import look_for_stops
from tllm_spec.text.tokenizer import Tokenizer

# Text, token ids, {"prompt": text} or {"prompt_token_ids": token ids}, or a conversation.
Prompt = str | Sequence[int] | Mapping[str, Any] | Conversation
Params = SamplingParams | Mapping[str, Any] | None
NewStates = Callable[[GrammarSource | None, int], Sequence[TextRules | None]]


@dataclass(frozen=True)
class Submission:
    """A prompt's requests, one for each of the n samples, with consecutive ids. source: what their
    text must follow."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    requests: list[LlmRequest]
    source: GrammarSource | None

    def handle(self, tokenizer: Tokenizer | None, cancel: Callable[[], None]) -> RequestHandle:
        first_id = self.requests[0].request_id
        return RequestHandle(first_id, self.prompt, self.token_ids, self.params, tokenizer, cancel)


class PromptLimit(NamedTuple):
    """Tokens that a prompt may have by an option, and which option that is."""

    num_tokens: int
    option: str


def longest_prompt(args: LlmArgs) -> PromptLimit | None:
    """None: only the longest sequence limits prompts."""
    found = []
    if args.max_input_len is not None:
        found.append(PromptLimit(args.max_input_len, "max_input_len"))
    if not args.enable_chunked_prefill:
        option = "max_num_tokens without enable_chunked_prefill"
        found.append(PromptLimit(args.max_num_tokens, option))
    return min(found, default=None)


def max_model_len(args: LlmArgs, max_seq_len: int) -> int:
    """The length that clients may plan with, under vLLM's name: each prompt that is shorter is
    served."""
    longest = longest_prompt(args)
    return max_seq_len if longest is None else min(max_seq_len, longest.num_tokens)


class Intake:
    """Thread-safe. Its request ids begin at 1. states_of: makes a grammar's states for a
    prompt's requests; without it the engine's process makes them."""

    def __init__(
        self,
        args: LlmArgs,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        states_of: NewStates = lambda source, number: [None] * number,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids_of(limits, tokenizer)
        self._longest = longest_prompt(args)
        self._states_of = states_of
        self.reasoning = ReasoningRules(args, tokenizer, limits.vocab_size)
        self._num_ranks = args.tensor_parallel_size
        self._records = args.record_traffic is not None
        self._args = args
        self._lock = threading.Lock()
        self._ids = count(1)
        self._limits = limits
        self.limit_sequences(limits.max_seq_len)

    def limit_sequences(self, max_seq_len: int) -> None:
        """For an engine that runs shorter sequences than the first: tokens of prompt and output."""
        longest = min(max_seq_len, self._limits.max_seq_len)
        self._limits = replace(self._limits, max_seq_len=longest)
        own = longest if self._longest is None else self._longest.num_tokens
        self._max_tokens = min(longest - 1, own)  # of a prompt

    def submission(
        self, inputs: Prompt, params: Params, options: RequestOptions = DEFAULT_OPTIONS
    ) -> Submission:
        """Raises ValueError for a prompt or parameters that the model cannot serve."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams() if params is None else SamplingParams.from_dict(params)
        if options.store and not self._records:
            raise ValueError("store = True: nothing is stored without record_traffic")
        if self._num_ranks > 1 and params.logits_processors:
            raise ValueError(
                "logits_processor is a function of this process, and tensor_parallel_size = "
                f"{self._num_ranks} has other processes that would need it; use logit_bias, "
                "bad or guided_decoding"
            )
        prompt, token_ids = self._read(inputs, params)
        rules = self._rules(params)
        source: GrammarSource | None = None
        grammars: Sequence[TextRules | None] = [None] * params.n
        asks = params.guided_decoding, params.thinking_token_budget, params.logits_processor
        if asks != (None, None, None):
            source = self.reasoning.source_of(params, token_ids)
            grammars = self._states_of(source, params.n)
        with self._lock:
            ids = [next(self._ids) for _ in range(params.n)]
        room, longest = self._limits.max_seq_len - len(token_ids), self._limits.max_draft_len
        wanted = params.speculation
        limit = longest if wanted.max_draft_len is None else min(longest, wanted.max_draft_len)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests = samples_of(
            *(token_ids, rules, ids),
            [_sample_seed(seed, index) for index in range(params.n)],
            grammars,
            max_draft_len=longest,
            pause_patience=self._limits.pause_patience,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            draft_limit=limit if wanted.enabled else 0,
            **vars(options),
        )
        if params.stop_strings:
            assert self._tokenizer is not None
            keeps, skips = params.include_stop_str_in_output, params.skip_special_tokens
            stop = StopOptions(params.stop_strings, keeps, skips)
            sections = self.reasoning.sections.of(source)
            look_for_stops(requests, self._tokenizer, stop, sections)
        return Submission(prompt, token_ids, params, requests, source)

    def token_ids(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
        """Raises ValueError as `submission` does for a prompt."""
        return self._read(prompt, SamplingParams(add_special_tokens=add_special_tokens))[1]

    def _rules(self, params: SamplingParams) -> DecodingRules:
        """The parameters, checked against the model."""
        tokenizer = self._tokenizer
        if params.stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        for word in params.stop_strings:
            check_text(word, "stop")
        mode = params.logprobs_mode or self._args.logprobs_mode
        if params.logprobs is not None and (problem := self._args.why_no_logprobs(mode)):
            raise ValueError(problem)
        encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
        return DecodingRules.from_params(
            params,
            vocab_size=self._limits.vocab_size,
            end_ids=self._end_ids,
            encode=encode,
            logprobs_mode=mode,
        )

    def _read(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt's text, if it was given as text, and its tokens, truncated as `params` say.

        Raises ValueError for what is not a prompt, is too long or is outside the vocabulary."""
        text, plain = None, _plain(prompt)
        if isinstance(plain, Conversation):
            token_ids = self._chat_prompts.token_ids(plain)
        elif isinstance(plain, str):
            check_text(plain)
            if self._tokenizer is None:
                raise ValueError(
                    "a text prompt needs a tokenizer; give token ids, or drop skip_tokenizer_init"
                )
            if params.truncate_prompt_tokens is None:
                self.check_length(plain)
            special = params.add_special_tokens
            text, token_ids = plain, self._tokenizer.encode(plain, add_special_tokens=special)
        else:
            token_ids = _token_ids(plain)
        if params.truncate_prompt_tokens is not None:
            del token_ids[: -params.truncate_prompt_tokens]
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if not 0 <= min(token_ids) <= max(token_ids) < self._limits.vocab_size:
            raise ValueError(
                "the prompt has token ids outside the vocabulary, which has ids 0 to "
                f"{self._limits.vocab_size - 1}"
            )
        self.check_length(token_ids)
        return text, token_ids

    def check_length(self, text: str | Sequence[int]) -> None:
        """Raises ValueError for a text that has too many tokens whatever they are. Tokenizing it
        would take long. For token ids, too."""
        if not isinstance(text, str):
            if len(text) > self._max_tokens:
                raise self._too_long(f"{len(text)} tokens")
            return
        if len(text) <= self._max_tokens:
            return  # the common case, which needs no look at the vocabulary
        if self._longest_token and len(text) > self._max_tokens * self._longest_token:
            raise self._too_long(f"{len(text)} characters")

    @cached_property
    def _chat_prompts(self) -> ChatPrompts:
        if self._tokenizer is None:
            raise ValueError("a conversation needs a tokenizer; drop skip_tokenizer_init")
        return ChatPrompts(self._tokenizer, self.check_length, allow_control_tokens=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters that one token may stand for, at most: vocabularies write each byte of a token
        as one or more. 0 if unknown: the tokenizer has an unknown token, or no vocabulary."""
        tokenizer: Any = self._tokenizer
        if getattr(tokenizer, "unk_token", None) is not None or not hasattr(tokenizer, "get_vocab"):
            return 0
        return max(map(len, tokenizer.get_vocab()), default=0)

    def _too_long(self, length: str) -> ContextLengthExceeded:
        # Clients such as litellm recognise this error by its first words.
        reason = "since an output needs one"
        if self._longest is not None and self._max_tokens < self._limits.max_seq_len - 1:
            reason = f"which is {self._longest.option}"
        return ContextLengthExceeded(
            f"this model's maximum context length is {self._limits.max_seq_len} tokens, and the "
            f"prompt has {length}; at most {self._max_tokens} are accepted, {reason}"
        )


def is_single(inputs: object) -> bool:
    """Whether `inputs` is one prompt, or not a prompt at all. Otherwise it is a list of prompts."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        return True
    return bool(inputs) and isinstance(inputs[0], Integral)


def _plain(prompt: Prompt) -> object:
    """The text or the token ids of a prompt that may be a mapping."""
    if not isinstance(prompt, Mapping):
        return prompt
    unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
    if media := sorted(str(key) for key in unknown if "multi" in str(key) or "mm_" in str(key)):
        raise ValueError(f"{', '.join(media)} of a prompt is refused: only text models are served")
    if unknown or len(prompt) != 1:
        raise ValueError(
            f"a prompt mapping has either 'prompt' or 'prompt_token_ids', not {sorted(prompt)}"
        )
    ((kind, value),) = prompt.items()
    if isinstance(value, str) != (kind == "prompt"):
        wanted = "text" if kind == "prompt" else "a list of token ids"
        raise ValueError(f"{kind} = {shown(value)}: {wanted} is needed")
    return value


def _token_ids(prompt: object) -> list[int]:
    """A copy of a prompt's token ids, which may be NumPy's integers."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise ValueError(
            f"prompt = {shown(prompt)}: text, a list of token ids, or one of them as "
            "{'prompt': ...} or {'prompt_token_ids': ...} is needed"
        )
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
        raise ValueError(f"prompt_token_ids = {shown(prompt)} must be integers")
    return [int(token) for token in prompt]


def _sample_seed(seed: int, index: int) -> int:
    """The seed of the index-th sample of a request: the first keeps the request's own. The factor,
    from the golden ratio, spreads small indices over 64 bits."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


def refuse_not_served(
    arguments: Mapping[str, Any], known: Ignored, function: str = "generate"
) -> None:
    """Raises TypeError for an unknown argument, and ValueError for one that is not served and has a
    value. A list of None, one for each prompt, counts as None."""
    if unknown := arguments.keys() - known.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")
    given = {
        name: value
        for name, value in arguments.items()
        if not isinstance(value, (list, tuple)) or any(each is not None for each in value)
    }
    if refused := refusals(given, known):
        raise ValueError("\n".join(refused.values()))


@contextmanager
def mistakes_as_request_errors() -> Iterator[None]:
    """A ValueError becomes a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(str(error)) from error


def one_each(name: str, value: Any, number: int) -> list[Any]:
    """The same value for all prompts, or the caller's list of them."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{name} has {len(value)} entries for {number} prompts")
    return list(value)
