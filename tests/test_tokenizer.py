"""Text of growing token lists, with a byte-level tokenizer (the zoo's) and a SentencePiece-like one."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from tllm_spec.tokenizer import (
    MAX_PENDING_TOKENS,
    REPLACEMENT,
    IncrementalDetokenizer,
    Tokenizer,
    check_same_vocabulary,
    load_tokenizer,
)

VOCAB_SIZE = 2048


@cache
def byte_level() -> Tokenizer:
    return load_tokenizer("zoo:llama")


@cache
def sentencepiece_like() -> Tokenizer:
    """Words with "▁" for spaces, one token a byte for everything else, a leading space that is dropped."""
    words = ["<s>", "▁a", "▁the", "ing", "é", "▁"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Tokenizer, runs: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.feed(run) for run in runs), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab 1\n.é漢😀\N{REPLACEMENT CHARACTER}", max_size=30), data=st.data())
def test_pieces_of_any_text_in_any_runs_are_whole_characters_and_join_to_the_text(
    text: str, data: st.DataObject
) -> None:
    token_ids = byte_level().encode(text)
    borders = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    runs = [token_ids[a:b] for a, b in zip([0, *borders], [*borders, len(token_ids)], strict=True)]
    pieces = pieces_of(byte_level(), runs)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=MAX_PENDING_TOKENS))
def test_pieces_of_random_tokens_join_to_the_tokenizers_own_text(token_ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(), [[i] for i in token_ids])) == text_of(byte_level(), token_ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([[0], [1], [2], [3], [4], [5], [6 + 0xE2, 6 + 0x82, 6 + 0xAC]]), max_size=12))
def test_pieces_keep_spaces_and_byte_characters_of_a_sentencepiece_tokenizer(words: list[list[int]]) -> None:
    token_ids = [i for word in words for i in word]
    assert "".join(pieces_of(sentencepiece_like(), [[i] for i in token_ids])) == text_of(
        sentencepiece_like(), token_ids
    )


def test_a_character_of_several_tokens_comes_out_with_its_last_token() -> None:
    token_ids = byte_level().encode("😀")
    assert len(token_ids) == 4
    assert pieces_of(byte_level(), [[i] for i in token_ids]) == ["", "", "", "😀", ""]


def test_an_unfinished_character_at_the_end_is_flushed_as_a_replacement() -> None:
    token_ids = byte_level().encode("x😀")[:-1]
    assert "".join(pieces_of(byte_level(), [token_ids])) == f"x{REPLACEMENT}"


def test_text_before_an_unfinished_character_does_not_wait_for_it() -> None:
    first_byte = byte_level().encode("😀")[0]
    assert pieces_of(byte_level(), [[*byte_level().encode("done"), first_byte]])[0] == "done"


def test_endless_invalid_bytes_do_not_wait_for_ever() -> None:
    continuation = byte_level().encode("😀")[1]
    pieces = pieces_of(byte_level(), [[continuation]] * (3 * MAX_PENDING_TOKENS))
    assert "".join(pieces[:-1]).count(REPLACEMENT) >= 2 * MAX_PENDING_TOKENS
    assert "".join(pieces) == REPLACEMENT * (3 * MAX_PENDING_TOKENS)


def test_a_long_run_that_ends_inside_a_character_leaves_it_for_the_next() -> None:
    token_ids = byte_level().encode("ab" * 3 * MAX_PENDING_TOKENS + "😀")
    assert len(token_ids) > MAX_PENDING_TOKENS + 1
    pieces = pieces_of(byte_level(), [token_ids[:-1], token_ids[-1:]])
    assert REPLACEMENT not in "".join(pieces) and pieces[1] == "😀"


def test_special_tokens_are_left_out_unless_wanted() -> None:
    assert pieces_of(byte_level(), [[1], byte_level().encode("hi"), [2]]) == ["", "hi", "", ""]
    assert IncrementalDetokenizer(byte_level(), skip_special_tokens=False).feed([1]) == "<|endoftext|>"


def test_vocabularies_are_the_same_up_to_the_shorter_one() -> None:
    longer = load_tokenizer("zoo:llama")
    longer.add_tokens(["<extra>"])
    check_same_vocabulary(byte_level(), longer)
    check_same_vocabulary(longer, byte_level())


def test_different_vocabularies_are_refused_with_the_first_differences() -> None:
    with pytest.raises(
        ValueError, match=r"of 262 ids differ \(id 0 is '<\|begin\|>' in the target and '<s>'"
    ):
        check_same_vocabulary(byte_level(), sentencepiece_like())


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=tmp_path.name):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no-such-folder"):
        load_tokenizer(tmp_path / "no-such-folder")
