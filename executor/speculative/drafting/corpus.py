"""A file of texts that drafts are copied from, for every request."""

import json
from collections.abc import Iterator
from pathlib import Path

from tllm_spec.config.option_checks import check_text
from tllm_spec.config.text_search import CorpusFile
from tllm_spec.text.tokenizer import Tokenizer


def read_corpus(
    corpus: CorpusFile | None, tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """The tokens of each text; None has no texts. Raises ValueError if the file is missing or has
    anything else, no text, or too many tokens."""
    if corpus is None:
        return []
    name, found, number = f"external_corpus_path = {corpus.path!r}", list[list[int]](), 0
    for line, tokens in _texts(name, corpus.path, tokenizer):
        outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"{name}: line {line} has the token id {outside}; ids are 0 to {vocab_size - 1}"
            )
        found.append(tokens)
        number += len(tokens)
        if number > corpus.max_tokens:
            raise ValueError(
                f"{name} has more tokens than external_corpus_max_tokens = {corpus.max_tokens}"
            )
    if not number:
        raise ValueError(f"{name} has no text")
    return found


def _texts(name: str, path: str, tokenizer: Tokenizer | None) -> Iterator[tuple[int, list[int]]]:
    """The number of each line, and its tokens."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _tokens(f"{name}: line {number}", line, tokenizer)


def _tokens(name: str, line: str, tokenizer: Tokenizer | None) -> list[int]:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if isinstance(text, list) and all(type(token) is int for token in text):
        return text
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a JSON string, or a list of token ids")
    if tokenizer is None:
        raise ValueError(f"{name} is text, which skip_tokenizer_init leaves without a tokenizer")
    check_text(text, name)
    return tokenizer.encode(text, add_special_tokens=False)
