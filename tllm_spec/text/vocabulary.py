"""Compares the vocabularies of two tokenizers: whether an id is the same token in both, and which
tokens both have, as bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tllm_spec.text.tokenizer import Tokenizer, byte_of_character

logger = logging.getLogger(__name__)

MIN_SHARE = 0.5
# How the two kinds of vocabularies write a space.
BYTE_LEVEL_SPACE, SENTENCEPIECE_SPACE = "Ġ", "▁"
ROLES = ("bos", "eos")

Key = bytes | str | tuple[str]
"""Bytes that a token writes, the name of an added token, or a special token's role."""


@dataclass(frozen=True)
class SharedTokens:
    """draft_ids: by the target's id, the draft's id that it is read as: the same token, or else its
    longest end. target_ids: by the draft's id, the target's id of the same token, one to one;
    special tokens come first, the others in the order of the target's ids. unknown: the draft's id
    that all other tokens are read as."""

    draft_ids: dict[int, int]
    target_ids: dict[int, int]
    unknown: int


def have_same_ids(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether an id is the same token in both.

    Ids beyond the shorter vocabulary are not compared: either side may have added or padding
    tokens. Other names of added tokens, as chat models have, are a warning: the text does not
    depend on drafts."""
    target_tokens = {token_id: token for token, token_id in target.get_vocab().items()}
    draft_tokens = {token_id: token for token, token_id in draft.get_vocab().items()}
    shared = range(min(max(target_tokens, default=-1), max(draft_tokens, default=-1)) + 1)
    different = [i for i in shared if target_tokens.get(i) != draft_tokens.get(i)]
    if not different:
        return True
    if not _added(target).keys() | _added(draft).keys() >= set(different):
        return False
    examples = "; ".join(
        f"id {i} is {target_tokens.get(i)!r} in the target and {draft_tokens.get(i)!r} in the draft"
        for i in different[:3]
    )
    logger.warning(
        "the draft model's tokenizer has other names for added tokens than the target's: "
        "%d of %d ids differ (%s); drafts of these tokens may be rejected more often",
        *(len(different), len(shared), examples),
    )
    return True


def shared_tokens(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
) -> SharedTokens:
    """The tokens of both that write the same bytes, and special tokens of the same name or role.
    The sizes are those of the models' vocabularies; ids above are left out. Raises ValueError if
    the shared tokens are less than MIN_SHARE of the smaller vocabulary."""
    ours, theirs = _keys(target, target_size), dict(_keys(draft, draft_size))
    draft_ids = {own: theirs[key] for key, own in ours if key in theirs}
    target_ids = {other: own for own, other in draft_ids.items()}
    smaller = min(len({own for _, own in ours}), len(set(theirs.values())))
    share = len(target_ids) / max(smaller, 1)
    if share < MIN_SHARE:
        raise ValueError(
            f"the draft model's tokenizer shares {len(target_ids)} tokens with the target's, "
            f"{share:.1%} of the smaller vocabulary, which has {smaller}; at least "
            f"{MIN_SHARE:.0%} are needed"
        )
    unknown = getattr(draft, "unk_token_id", None)
    if unknown is None or unknown >= draft_size:
        unknown = theirs.get(b" ", 0)
    lacking = ((key, own) for key, own in ours if own not in draft_ids and isinstance(key, bytes))
    ends = {own: _longest_end(text, theirs) for text, own in lacking}
    read_as = draft_ids | {own: end for own, end in ends.items() if end is not None}
    return SharedTokens(read_as, target_ids, unknown)


def token_bytes(tokenizer: Tokenizer, size: int) -> dict[int, bytes]:
    """The bytes that tokens with ids below `size` write, without special tokens."""
    special = {i for i, name in _added(tokenizer).items() if name.special}
    keys = _keys(tokenizer, size)
    return {i: key for key, i in keys if isinstance(key, bytes) and i not in special}


def _longest_end(text: bytes, tokens: Mapping[Key, int]) -> int | None:
    """The token of the longest end of a text, on which what follows depends most."""
    ends = (text[start:] for start in range(1, len(text)))
    return next((tokens[end] for end in ends if end in tokens), None)


def _keys(tokenizer: Tokenizer, size: int) -> list[tuple[Key, int]]:
    """What a token may be found by, and its id below `size`. Of equal keys the last one is the
    token that texts have: a byte token such as `<0x41>` comes before the letter."""
    added = _added(tokenizer)
    names = sorted((i, name) for name, i in tokenizer.get_vocab().items() if i < size)
    own = {name for i, name in names if i not in added}
    is_byte_level = BYTE_LEVEL_SPACE in own and SENTENCEPIECE_SPACE not in own
    roles = ((role, getattr(tokenizer, f"{role}_token_id", None)) for role in ROLES)
    found: list[tuple[Key, int]] = [((role,), i) for role, i in roles if i is not None and i < size]
    found += [(name, i) for i, name in names if i in added]
    texts = [(i, name) for i, name in names if not (i in added and added[i].special)]
    if is_byte_level:
        table = byte_of_character()
        for i, name in texts:
            is_text = i not in added and table.keys() >= set(name)
            found.append((bytes(map(table.__getitem__, name)) if is_text else _utf8(name), i))
        return found
    bytes_of = {i: re.fullmatch("<0x([0-9A-F]{2})>", name) for i, name in texts}
    found += [(bytes.fromhex(each[1]), i) for i, each in bytes_of.items() if each]
    words = ((i, name.replace(SENTENCEPIECE_SPACE, " ")) for i, name in texts if not bytes_of[i])
    return found + [(_utf8(word), i) for i, word in words]


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _added(tokenizer: Tokenizer) -> dict[int, Any]:
    """The special tokens, and others that were added to the vocabulary, by id."""
    return getattr(tokenizer, "added_tokens_decoder", {})


# OpenAI's Harmony format, which gpt-oss reads and writes: the tokens between the parts of
# messages, and messages as its chat template takes them. chat_formats/harmony.py reads answers.
#
# A message is `<|start|>HEADER<|message|>CONTENT<|end|>`. The header has the role, maybe `
# to=RECIPIENT`, and after `<|channel|>` the channel: `analysis` for reasoning, `commentary` for
# calls, `final` for the answer. `<|return|>` ends the last message, `<|call|>` a call.


NAMES = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"
)  # fmt: skip
# An answer ends with one of them. Some folders do not list the second as an end token.
ENDS = ("<|return|>", "<|call|>")


def harmony_tokens(tokenizer: Any) -> Mapping[int, str]:
    """The names of NAMES by token id; empty if the tokenizer does not have all of them as special
    tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {
        token_id: str(token)
        for token_id, token in added.items()
        if token.special and str(token) in NAMES
    }
    return found if len(found) == len(NAMES) else {}


def harmony_ends(tokenizer: Any) -> list[int]:
    """Tokens that end an answer."""
    return [token_id for token_id, name in harmony_tokens(tokenizer).items() if name in ENDS]


def harmony_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The template has `thinking` for reasoning, needs a text as content, and takes only one of the
    two next to a call."""
    content, thinking = message.get("content") or "", message.get("reasoning_content")
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    plain["content"] = content
    if thinking:
        plain["thinking"] = thinking
        if content and message.get("tool_calls"):
            plain |= {"thinking": f"{thinking}\n{content}", "content": ""}
    return plain
