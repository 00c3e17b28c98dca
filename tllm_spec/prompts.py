"""From what users give as a prompt to checked token ids."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.option_checks import check_text, shown
from tllm_spec.request_errors import ContextLengthExceeded
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.chat_prompt import ChatPrompts, Conversation
from tllm_spec.text.tokenizer import Tokenizer

# Text, token ids, {"prompt": text} or {"prompt_token_ids": token ids}, or a conversation.
Prompt = str | Sequence[int] | Mapping[str, Any] | Conversation


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


class PromptReader:
    """Turns prompts into token ids that fit one model. longest: of the options."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_seq_len: int,
        longest: PromptLimit | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._longest = longest
        self.limit_sequences(max_seq_len)

    def limit_sequences(self, max_seq_len: int) -> None:
        """max_seq_len: tokens of a prompt and its output."""
        self._max_seq_len = max_seq_len
        own = max_seq_len if self._longest is None else self._longest.num_tokens
        self._max_tokens = min(max_seq_len - 1, own)

    def read(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt's text, if it was given as text, and its tokens, truncated as `params` say.

        Raises ValueError for what is not a prompt, is too long or is outside the vocabulary."""
        text, token_ids = self._tokens_of(_plain(prompt), params)
        if params.truncate_prompt_tokens is not None:
            del token_ids[: -params.truncate_prompt_tokens]
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ValueError(
                "the prompt has token ids outside the vocabulary, which has ids 0 to "
                f"{self._vocab_size - 1}"
            )
        self.check_length(token_ids)
        return text, token_ids

    def _tokens_of(self, prompt: object, params: SamplingParams) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Conversation):
            return None, self._chat_prompts.token_ids(prompt)
        if not isinstance(prompt, str):
            return None, _token_ids(prompt)
        check_text(prompt)
        if self._tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer; give token ids, or drop skip_tokenizer_init"
            )
        if params.truncate_prompt_tokens is None:
            self.check_length(prompt)
        special = params.add_special_tokens
        return prompt, self._tokenizer.encode(prompt, add_special_tokens=special)

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
        if self._longest is not None and self._max_tokens < self._max_seq_len - 1:
            reason = f"which is {self._longest.option}"
        return ContextLengthExceeded(
            f"this model's maximum context length is {self._max_seq_len} tokens, and the prompt "
            f"has {length}; at most {self._max_tokens} are accepted, {reason}"
        )


def is_single(inputs: object) -> bool:
    """Whether `inputs` is one prompt, or not a prompt at all. Otherwise it is a list of prompts."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        return True
    return bool(inputs) and isinstance(inputs[0], Integral)


def check_salt(salt: str | None) -> None:
    """Raises ValueError for what is no text. The empty text would look like no salt."""
    if salt is not None:
        if not isinstance(salt, str) or not salt:
            needed = "a text that is not empty, or None is needed"
            raise ValueError(f"cache_salt = {shown(salt)}: {needed}")
        check_text(salt, "cache_salt")


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
