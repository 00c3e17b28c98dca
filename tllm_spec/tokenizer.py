"""Tokens and text: loading a tokenizer, comparing two vocabularies, text of a growing list of
tokens.

It knows nothing of requests; stop strings are in `tllm_spec.stop_strings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from tllm_spec.zoo.registry import resolve_model

CHARACTER_TOKENS = 4  # of one character, at most
UNFINISHED_CHARS = (
    3  # as which decoders may write a character that lacks its end: one for each of its bytes
)
# So many tokens without a whole character at their end are no wait for one: bytes that are no
# characters, or tokens of which each ends inside a character. Behind the latest of them nothing
# depends on those before.
MAX_PENDING_TOKENS = 32
DECISIVE_TOKENS = 16
REPLACEMENT = (
    "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no (complete) character
)


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


def load_tokenizer(model: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a local folder or of a zoo model. Raises ValueError when there is none."""
    from transformers import (
        AutoTokenizer,
    )  # heavy: imported only where a tokenizer is really wanted

    folder = resolve_model(os.fspath(model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer can be loaded from {folder}: {error}") from error
    return cast(Tokenizer, tokenizer)


def check_text(text: str, name: str = "prompt") -> None:
    """Raises ValueError for half a character (a lone surrogate), which JSON and Python can write
    and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"{name}: character {error.start} is {half}, one half of a surrogate pair; Unicode "
            "text is needed"
        ) from None


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises ValueError with the first differences when an id does not stand for the same token in
    both.

    Ids beyond the shorter vocabulary are not compared: either side may have more (added or padding)
    tokens."""
    target_tokens = {token_id: token for token, token_id in target.get_vocab().items()}
    draft_tokens = {token_id: token for token, token_id in draft.get_vocab().items()}
    shared = range(min(max(target_tokens), max(draft_tokens)) + 1)
    different = [i for i in shared if target_tokens.get(i) != draft_tokens.get(i)]
    if different:
        examples = "; ".join(
            f"id {i} is {target_tokens.get(i)!r} in the target and {draft_tokens.get(i)!r} in the "
            "draft"
            for i in different[:3]
        )
        raise ValueError(
            f"the draft model's tokenizer is not the target's: {len(different)} of {len(shared)} "
            "ids differ "
            f"({examples}); use a draft model that was trained with the target's tokenizer"
        )


class IncrementalDetokenizer:
    """Text of a token list that grows, in pieces that never change later; each step costs O(new
    tokens).

    Decoders are not additive (a character may span tokens, a leading space may be dropped), so a
    piece is what new tokens add to the text of the tokens before them. An unfinished character
    waits for its rest. All pieces and the last `flush` together are the same text however the
    tokens are grouped, and the tokenizer's own text of all tokens, unless bytes that are no
    characters make its decoder take back text of tokens before them, as byte-fallback decoders do.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[
            int
        ] = []  # tokens that go before the new ones, then those with unfinished text
        self._num_returned = 0  # characters of the window's text that have been returned
        self._textless: dict[int, bool] = {}  # what is known of tokens that added no text

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is complete after `token_ids`, without what earlier calls have returned."""
        if not token_ids:
            return ""
        text = self._decode([*self._window, *token_ids])
        new = text[self._num_returned :]
        if len(token_ids) > 1 and (not new or REPLACEMENT in new):
            # What is returned of such text, and when, depends on each token: they are fed one by
            # one then, while most tokens are in a half of ordinary text, which comes to the same at
            # once.
            middle = len(token_ids) // 2
            return self.feed(token_ids[:middle]) + self.feed(token_ids[middle:])
        if not new.rstrip(REPLACEMENT) and self._is_textless(token_ids[0]):
            return ""
        self._window += token_ids
        return self._take(text)

    def flush(self) -> str:
        """The text that still waits: an unfinished character, as U+FFFD."""
        piece = self._decode(self._window)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _take(self, text: str) -> str:
        """What is complete of the window's text and was not returned. The window is then as short
        as it may be."""
        num_complete = len(text.rstrip(REPLACEMENT))
        is_long = len(self._window) >= MAX_PENDING_TOKENS
        if is_long:
            num_complete = max(num_complete, len(text) - UNFINISHED_CHARS)
        piece = text[self._num_returned : num_complete]
        self._num_returned = max(self._num_returned, num_complete)
        if piece and num_complete == len(text):
            self._keep_last_character()
        elif is_long:
            waiting = text[self._num_returned :]
            self._window = self._window[-DECISIVE_TOKENS:]
            self._num_returned = len(self._decode(self._window)) - len(waiting)
        return piece

    def _keep_last_character(self) -> None:
        """All of the window was returned. Its last tokens that are text by themselves go before the
        next ones: always the same tokens, however they came."""
        tokens: list[int] = []
        text = ""
        for token in reversed(self._window):
            tokens.insert(0, token)
            text = self._decode(tokens)
            if len(tokens) == CHARACTER_TOKENS or (text and not text.startswith(REPLACEMENT)):
                break
            if self._is_textless(token):
                del tokens[0]
        self._window, self._num_returned = tokens, len(text)

    def _is_textless(self, token: int) -> bool:
        """Whether it is skipped, as special tokens are. Asked for two of it: one may be a space,
        which decoders drop where a text begins."""
        if token not in self._textless:
            self._textless[token] = not self._decode([token, token])
        return self._textless[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
