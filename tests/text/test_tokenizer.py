"""Incremental detokenization with a byte-level (the zoo's) and a SentencePiece-like tokenizer."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from tests.random_examples import examples
from tllm_spec.text.tokenizer import (
    MAX_PENDING_TOKENS,
    REPLACEMENT,
    IncrementalDetokenizer,
    Tokenizer,
    load_tokenizer,
)
from tllm_spec.zoo.registry import resolve_model

VOCAB_SIZE = 2048
SPECIAL = 1  # of the byte-level tokenizer


@cache
def byte_level() -> Tokenizer:
    return load_tokenizer("zoo:llama")


@cache
def sentencepiece_like() -> Tokenizer:
    """Words with "▁" for spaces, and one token for each other byte. Decoding drops a leading
    space."""
    words = ["<s>", "▁a", "▁the", "ing", "é", "▁"]
    vocab = {
        token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


class BytesTokenizer:
    """A user's tokenizer whose tokens are any bytes; empty tokens are like skipped special tokens.

    each_byte: an unfinished character becomes one replacement for each byte, not one in all."""

    eos_token_id = chat_template = None

    def __init__(self, tokens: list[bytes], *, each_byte: bool = False) -> None:
        self._tokens = tokens
        self._each_byte = each_byte

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        joined = b"".join(self._tokens[token] for token in token_ids)
        if not self._each_byte:
            return joined.decode(errors="replace")
        return "".join(
            REPLACEMENT if "\udc80" <= c <= "\udcff" else c
            for c in joined.decode(errors="surrogateescape")
        )


class CountingTokenizer:
    """Records the length of everything that is decoded."""

    eos_token_id = chat_template = None

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.lengths: list[int] = []

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        self.lengths.append(len(token_ids))
        return str(self._inner.decode(token_ids, **options))


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, runs: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.feed(run) for run in runs), detokenizer.flush()]


def in_groups(token_ids: list[int], width: int) -> list[list[int]]:
    return [token_ids[start : start + width] for start in range(0, len(token_ids), width)]


def any_groups(token_ids: list[int], data: st.DataObject) -> list[list[int]]:
    borders = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    return [token_ids[a:b] for a, b in zip([0, *borders], [*borders, len(token_ids)], strict=True)]


@examples(200)
@given(text=st.text(alphabet="ab 1\n.é漢😀\N{REPLACEMENT CHARACTER}", max_size=30), data=st.data())
def test_pieces_are_whole_characters_and_join_to_the_text_in_any_grouping(
    text: str, data: st.DataObject
) -> None:
    token_ids = byte_level().encode(text)
    pieces = pieces_of(byte_level(), any_groups(token_ids, data))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@examples(200)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=MAX_PENDING_TOKENS))
def test_pieces_of_random_tokens_join_to_the_tokenizers_text(token_ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(), [[i] for i in token_ids])) == text_of(
        byte_level(), token_ids
    )


@examples(100)
@given(
    st.lists(
        st.sampled_from([[0], [1], [2], [3], [4], [5], [6 + 0xE2, 6 + 0x82, 6 + 0xAC]]), max_size=12
    )
)
def test_pieces_keep_spaces_and_byte_characters_of_a_sentencepiece_tokenizer(
    words: list[list[int]],
) -> None:
    token_ids = [i for word in words for i in word]
    assert "".join(pieces_of(sentencepiece_like(), [[i] for i in token_ids])) == text_of(
        sentencepiece_like(), token_ids
    )


def test_a_character_of_several_tokens_is_returned_with_its_last_token() -> None:
    token_ids = byte_level().encode("😀")
    assert len(token_ids) == 4
    assert pieces_of(byte_level(), [[i] for i in token_ids]) == ["", "", "", "😀", ""]


def test_an_unfinished_character_at_the_end_is_flushed_as_a_replacement() -> None:
    token_ids = byte_level().encode("x😀")[:-1]
    assert "".join(pieces_of(byte_level(), [token_ids])) == f"x{REPLACEMENT}"


def test_text_before_an_unfinished_character_does_not_wait_for_it() -> None:
    first_byte = byte_level().encode("😀")[0]
    assert pieces_of(byte_level(), [[*byte_level().encode("done"), first_byte]])[0] == "done"


def test_invalid_bytes_are_returned_while_they_go_on() -> None:
    continuation = byte_level().encode("😀")[1]
    pieces = pieces_of(byte_level(), [[continuation]] * (3 * MAX_PENDING_TOKENS))
    assert "".join(pieces[:-1]).count(REPLACEMENT) >= 2 * MAX_PENDING_TOKENS
    assert "".join(pieces) == REPLACEMENT * (3 * MAX_PENDING_TOKENS)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("num_invalid", range(MAX_PENDING_TOKENS - 6, MAX_PENDING_TOKENS + 6))
@pytest.mark.parametrize("width", [1, 2, 4, 8, 50])
def test_a_character_after_many_invalid_bytes_is_returned_whole(
    num_invalid: int, width: int
) -> None:
    token_ids = byte_level().encode("😀")[1:2] * num_invalid + byte_level().encode("😀漢!")
    assert (
        "".join(pieces_of(byte_level(), in_groups(token_ids, width)))
        == REPLACEMENT * num_invalid + "😀漢!"
    )


def test_tokens_without_text_do_not_end_the_wait_for_a_character() -> None:
    first, *rest = byte_level().encode("😀")
    token_ids = [first, *[SPECIAL] * 3 * MAX_PENDING_TOKENS, *rest]
    assert "".join(pieces_of(byte_level(), in_groups(token_ids, 1))) == "😀"


def test_a_space_after_a_special_token_is_kept() -> None:
    token_ids = [0, 5, 1]
    for width in (1, 2, 3):
        assert "".join(pieces_of(sentencepiece_like(), in_groups(token_ids, width))) == " a"


BYTES = [bytes([byte]) for byte in (*"a€😀".encode(), 0xFF)]
# Tokens that begin or end inside characters, as byte-level tokenizers have for many scripts.
MIXED = [*BYTES, b"\xac b\xe2\x82", b"a\xe2", REPLACEMENT.encode(), b"", b" "]


def texts(tokens: list[int], *characters: list[int]) -> st.SearchStrategy[list[int]]:
    """Single tokens, long runs of one token, and whole characters."""
    single = st.sampled_from(tokens).map(lambda token: [token])
    run = st.tuples(st.sampled_from(tokens), st.integers(24, 40)).map(lambda run: [run[0]] * run[1])
    words = st.lists(st.one_of(single, run, st.sampled_from(characters)), max_size=24)
    return words.map(lambda words: [token for word in words for token in word])


@examples(400)
@given(
    token_ids=texts(list(range(len(MIXED))), [1, 2, 3], [4, 5, 6, 7]),
    each_byte=st.booleans(),
    data=st.data(),
)
def test_the_text_is_the_tokenizers_for_any_grouping_of_the_tokens(
    token_ids: list[int], each_byte: bool, data: st.DataObject
) -> None:
    tokenizer = BytesTokenizer(MIXED, each_byte=each_byte)
    for groups in (in_groups(token_ids, 1), any_groups(token_ids, data), [token_ids]):
        assert "".join(pieces_of(tokenizer, groups)) == text_of(tokenizer, token_ids)


@examples(400)
@given(
    token_ids=texts(
        [0, 1, 2, 5, 6 + 0xF0, 6 + 0x9F, 6 + 0xFF, 6 + 0x41],
        [6 + byte for byte in "€".encode()],
        [6 + byte for byte in "😀".encode()],
    ),
    data=st.data(),
)
def test_the_text_of_a_byte_fallback_decoder_does_not_depend_on_the_grouping(
    token_ids: list[int], data: st.DataObject
) -> None:
    """With an invalid byte, such a decoder replaces all adjacent bytes, also those that were
    returned before."""
    one_by_one = "".join(pieces_of(sentencepiece_like(), in_groups(token_ids, 1)))
    for groups in (any_groups(token_ids, data), [token_ids]):
        assert "".join(pieces_of(sentencepiece_like(), groups)) == one_by_one


def test_a_special_token_inside_a_character_is_not_context_of_the_bytes_after_it() -> None:
    first, *rest = (6 + byte for byte in "😀".encode())
    special, invalid = 0, 6 + 0x9F
    token_ids = [first, special, *rest, invalid]
    groups = [[first], [special, *rest], [invalid]]
    assert "".join(pieces_of(sentencepiece_like(), groups)) == "".join(
        pieces_of(sentencepiece_like(), in_groups(token_ids, 1))
    )


def test_ordinary_text_is_decoded_about_once_per_group() -> None:
    token_ids = byte_level().encode("The quick brown fox jumps over 13 lazy dogs. " * 40)
    for width, decodes_a_group in ((1, 2), (4, 2), (len(token_ids), 3)):
        tokenizer = CountingTokenizer(byte_level())
        groups = in_groups(token_ids, width)
        pieces_of(tokenizer, groups)
        assert len(tokenizer.lengths) <= decodes_a_group * len(groups) + 3


@pytest.mark.parametrize(
    "token_ids",
    [
        [MIXED.index(b"\xff")] * 500,
        [MIXED.index(b"")] * 500,
        [MIXED.index(b"a"), *[MIXED.index(b"")] * 500],
        [MIXED.index(b"a\xe2")] * 500,
        [MIXED.index(b"\xac b\xe2\x82")] * 500,
    ],
)
def test_the_cost_of_a_step_does_not_grow_with_the_text(token_ids: list[int]) -> None:
    tokenizer = CountingTokenizer(BytesTokenizer(MIXED))
    pieces = pieces_of(tokenizer, in_groups(token_ids, 1))
    assert "".join(pieces) == text_of(tokenizer, token_ids)
    tokenizer.lengths.pop()  # of `text_of`
    assert max(tokenizer.lengths) <= MAX_PENDING_TOKENS
    assert len(tokenizer.lengths) <= 3 * len(token_ids)


def test_a_long_group_that_ends_inside_a_character_leaves_it_for_the_next_group() -> None:
    token_ids = byte_level().encode("ab" * 3 * MAX_PENDING_TOKENS + "😀")
    assert len(token_ids) > MAX_PENDING_TOKENS + 1
    pieces = pieces_of(byte_level(), [token_ids[:-1], token_ids[-1:]])
    assert REPLACEMENT not in "".join(pieces) and pieces[1] == "😀"


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    assert pieces_of(byte_level(), [[1], byte_level().encode("hi"), [2]]) == ["", "hi", "", ""]
    assert (
        IncrementalDetokenizer(byte_level(), skip_special_tokens=False).feed([1]) == "<|endoftext|>"
    )


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"a": 1}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"model_max_length": "x"}'),
        ("tokenizer.json", "a bad regex"),
        ("tokenizer.json", "a negative id"),
    ],
)
def test_files_that_transformers_cannot_read_are_one_sentence(
    file: str, change: str, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(resolve_model("zoo:llama") / name, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    if change == "a bad regex":
        split = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": True}
        change = json.dumps(tokenizer | {"pre_tokenizer": split})
    elif change == "a negative id":
        tokenizer["model"]["vocab"]["a"] = -1
        change = json.dumps(tokenizer)
    (tmp_path / file).write_text(change)
    with pytest.raises(ValueError, match=f"^no tokenizer can be loaded from {tmp_path}: .*$"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path.name}: it has no config.json and no token"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no-such-folder"):
        load_tokenizer(tmp_path / "no-such-folder")


def test_a_model_config_that_transformers_refuses_is_one_sentence(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 193, "num_attention_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^no tokenizer.*hidden size \(193\).*$"):
        load_tokenizer(tmp_path)


def test_a_model_type_that_transformers_does_not_know_keeps_its_tokenizer(tmp_path: Path) -> None:
    """Kimi K2 has DeepSeek's architecture under a name of its own, and its tokenizer as code."""
    rope = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0}
    config = {"model_type": "kimi_k2", "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {"auto_map": {"AutoTokenizer": ["own_code.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(ValueError, match=r"it has no tokenizer.json; .* custom code"):
        load_tokenizer(tmp_path)
    shutil.copy(resolve_model("zoo:llama") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).get_vocab() == byte_level().get_vocab()


def test_a_text_longer_than_the_tokenizers_own_limit_is_no_warning(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = load_tokenizer("zoo:llama")
    assert len(tokenizer.encode("a b " * tokenizer.model_max_length)) > tokenizer.model_max_length
    assert "indexing errors" not in capfd.readouterr().err + caplog.text
