"""Tokens and text: loads a tokenizer, detokenizes a growing list of tokens. Stop strings are in
`tllm_spec.text.stop_strings`, comparing two vocabularies in `tllm_spec.text.vocabulary`."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tllm_spec.progress import progress
from tllm_spec.zoo.registry import is_gguf, resolve_model

if TYPE_CHECKING:
    from tllm_spec.config.llm_args import LlmArgs

logger = logging.getLogger(__name__)

MAX_TEMPLATE_CHARS = 1 << 20
LONG_TEXT = "sequence-length-is-longer-than-the-specified-maximum"  # a warning of transformers
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
MAX_REASON = 1000  # characters of another library's message
CHARACTER_TOKENS = 4  # tokens of one character, at most
# Replacement characters that decoders may write for an unfinished character: one for each byte.
UNFINISHED_CHARS = 3
# If this many tokens do not end in a whole character, waiting for more is useless: they are invalid
# bytes, or each of them ends inside a character. Only the last DECISIVE_TOKENS of them can then
# influence later text.
MAX_PENDING_TOKENS = 32
DECISIVE_TOKENS = 16
# What decoders write for bytes that are not a complete character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

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


def tokenizer_of(args: LlmArgs) -> Tokenizer | None:
    """The tokenizer that the arguments name or have; None: they want none."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None or isinstance(args.tokenizer, str):
        return load_tokenizer(args.tokenizer or args.model)
    return cast(Tokenizer, args.tokenizer)


def load_tokenizer(model: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a local folder, a GGUF file or a zoo model. Raises ValueError when there is
    none, and for files that transformers cannot read."""
    folder = resolve_model(os.fspath(model))
    try:
        with progress("start", 1) as bar:
            bar.begin("tokenizer")
            tokenizer = _of_gguf(folder) or _of_transformers(folder)
        tokenizer.chat_template = tokenizer.chat_template or _template_of_processor(folder)
        # Its own length is no limit here, and it would warn of index errors that cannot occur.
        tokenizer.deprecation_warnings[LONG_TEXT] = True
        tokenizer.decode(tokenizer.encode("a"))  # some mistakes show with the first text only
    except Exception as error:  # of several libraries; some raise `Exception` itself
        reason = " ".join(str(error).split())[:MAX_REASON]
        names = () if is_gguf(folder) else ("config.json", "tokenizer.json")
        if missing := [name for name in names if not (folder / name).is_file()]:
            reason = f"it has no {' and no '.join(missing)}; transformers says: {reason}"
        elif not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"no tokenizer can be loaded from {folder}: {reason}") from error
    end = tokenizer.eos_token_id
    if end is not None and type(end) is not int:
        raise ValueError(f"no tokenizer can be loaded from {folder}: its end token is {end!r}")
    if len(str(tokenizer.chat_template)) > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"no tokenizer can be loaded from {folder}: its chat template has more than "
            f"{MAX_TEMPLATE_CHARS} characters"
        )
    return cast(Tokenizer, tokenizer)


def _of_gguf(model: Path) -> Any:
    """None for a folder, and for a GGUF file whose kind of tokenizer is left to transformers."""
    if not is_gguf(model):
        return None
    from tllm_spec.text.gguf_tokenizer import gguf_tokenizer  # heavy

    return gguf_tokenizer(model)


def _of_transformers(model: Path) -> Any:
    from transformers import AutoTokenizer  # heavy

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": model.parent,
        "gguf_file": model.name,
    }
    if not is_gguf(model):
        source = {"pretrained_model_name_or_path": model, "config": _plain_config(model)}
    return AutoTokenizer.from_pretrained(trust_remote_code=False, local_files_only=True, **source)


def _template_of_processor(folder: Path) -> Any:
    """The chat template of the file in which folders of models that also see images may have it.
    transformers reads it with the processor of images, and not with the tokenizer."""
    file = folder / "chat_template.json"
    return json.loads(file.read_bytes())["chat_template"] if file.is_file() else None


def _plain_config(folder: Path) -> Any:
    """What AutoTokenizer reads of a model's configuration when the tokenizer names its own class:
    the model's type and name. Without it the configuration's class is imported, and with that
    torch's compiler, which takes longer than importing torch. None: let AutoTokenizer load it."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    try:
        model = json.loads((folder / "config.json").read_bytes())
        model_type = model["model_type"]
        if model_type in CONFIG_MAPPING:
            tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
            if "auto_map" in tokenizer or not tokenizer["tokenizer_class"]:
                return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    config: Any = PretrainedConfig(name_or_path=str(folder))
    config.model_type = model_type
    if "model_name" in model:
        config.model_name = model["model_name"]
    return config


def has_vocabulary(folder: Path) -> bool:
    """Whether a model's folder has a file that a tokenizer could be made from, or is a GGUF file,
    which has a vocabulary inside."""
    return is_gguf(folder) or any(next(folder.glob(pattern), None) for pattern in VOCABULARY_FILES)


def decoder_of(
    tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> Callable[[Sequence[int]], str]:
    """The tokenizer's `decode`. Of transformers' own class it is the one in Rust that is inside,
    because the wrapper takes six times as long."""
    if hasattr(tokenizer, "backend_tokenizer"):
        from transformers import PreTrainedTokenizerFast as Fast

        kind: Any = type(tokenizer)
        if issubclass(kind, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
            decode = tokenizer.backend_tokenizer.decode
            return partial(decode, skip_special_tokens=skip_special_tokens)
    return partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def bytes_of_token(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """What a token of a byte-level vocabulary, or a byte token such as `<0xE6>`, writes. None for
    other tokens."""
    name: str = cast(Any, tokenizer).convert_ids_to_tokens(token_id)
    if found := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(found[1])
    table = byte_of_character()
    return bytes(map(table.__getitem__, name)) if table.keys() >= set(name) else None


@cache
def byte_of_character() -> dict[str, int]:
    """A byte-level vocabulary writes each byte as a character: its own, or one above 255."""
    from tokenizers.pre_tokenizers import ByteLevel  # heavy

    letters = sorted(ByteLevel.alphabet())
    own = [letter for letter in letters if ord(letter) < 256]
    rest = sorted(set(range(256)) - set(map(ord, own)))
    return {each: ord(each) for each in own} | dict(zip(letters[len(own) :], rest, strict=True))


class IncrementalDetokenizer:
    """Detokenizes a growing list of tokens. Pieces never change later, and each step costs O(new
    tokens).

    Decoding is not additive: a character may span tokens, and a leading space may be dropped. So a
    piece is what new tokens add to the text of the tokens before them, and an unfinished character
    waits for its rest. All pieces and the last `flush` together do not depend on how the tokens are
    grouped. They are the tokenizer's text of all tokens, except where a byte-fallback decoder
    changes earlier text because of later invalid bytes.

    `tokenizers.decoders.DecodeStream` does not serve: it takes only tokenizers in Rust, keeps
    invalid bytes back for ever, and raises where a byte-fallback decoder changes earlier text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._decode = decoder_of(tokenizer, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []  # context for new tokens, then tokens with unfinished text
        self._num_returned = 0  # characters of the window's text that have been returned
        self._textless: dict[int, bool] = {}  # by token: whether decoding skips it

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is complete after `token_ids`, without what earlier calls have returned."""
        if not token_ids:
            return ""
        text = self._decode([*self._window, *token_ids])
        new = text[self._num_returned :]
        if len(token_ids) > 1 and (not new or REPLACEMENT in new):
            # Such text must be fed token by token, or the pieces would depend on the grouping.
            # Halves of ordinary text need not, so halving is cheaper than a loop.
            middle = len(token_ids) // 2
            return self.feed(token_ids[:middle]) + self.feed(token_ids[middle:])
        if not new.rstrip(REPLACEMENT) and self._is_textless(token_ids[0]):
            return ""
        self._window += token_ids
        return self._take(text)

    def flush(self) -> str:
        """The remaining text: an unfinished character, as U+FFFD."""
        piece = self._decode(self._window)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _take(self, text: str) -> str:
        """The complete part of the window's text that was not returned. Shortens the window as far
        as possible."""
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
        """After all of the window was returned: keeps its last tokens that are text by themselves
        as the context of the next ones. Which these are does not depend on the grouping."""
        tokens: list[int] = []
        text = ""
        for token in reversed(self._window):
            tokens.insert(0, token)
            text = self._decode(tokens)
            if text and not text.startswith(REPLACEMENT):
                break
            if self._is_textless(token):
                del tokens[0]
            elif len(tokens) == CHARACTER_TOKENS:
                break
        self._window, self._num_returned = tokens, len(text)

    def _is_textless(self, token: int) -> bool:
        """Whether decoding skips the token, as it skips special tokens. Two copies are
        decoded, because one may be a space, which decoders drop at the beginning of a text."""
        if token not in self._textless:
            self._textless[token] = not self._decode([token, token])
        return self._textless[token]
