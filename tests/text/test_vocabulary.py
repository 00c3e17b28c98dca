"""Comparing vocabularies: byte-level BPE and SentencePiece-like ones, special tokens, and tokens
that one side lacks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tests.text.test_tokenizer import byte_level, sentencepiece_like
from tllm_spec.text.tokenizer import Tokenizer, load_tokenizer
from tllm_spec.text.vocabulary import SharedTokens, have_same_ids, shared_tokens


def tokenizer_of(
    names: Sequence[str], special: Sequence[str] = (), added: Sequence[str] = (), **roles: str
) -> Tokenizer:
    """Its ids are the places in `names`. roles: the names of `eos` and the like."""
    ids = {name: i for i, name in enumerate(names)}
    of_added = {ids[name]: SimpleNamespace(special=name in special) for name in [*special, *added]}
    own: dict[str, Any] = {f"{role}_token_id": ids[name] for role, name in roles.items()}
    return cast(
        Tokenizer, SimpleNamespace(get_vocab=lambda: ids, added_tokens_decoder=of_added, **own)
    )


def shared_by(target: Tokenizer, draft: Tokenizer, draft_size: int = 1 << 20) -> SharedTokens:
    return shared_tokens(target, draft, 1 << 20, draft_size)


def test_vocabularies_are_compared_up_to_the_shorter_one() -> None:
    longer = load_tokenizer("zoo:llama")
    longer.add_tokens(["<extra>"])  # type: ignore[attr-defined]  # transformers' own
    assert have_same_ids(byte_level(), longer) and have_same_ids(longer, byte_level())
    assert not have_same_ids(byte_level(), sentencepiece_like())


def test_other_names_of_added_tokens_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Chat models rename tokens that their base model reserves."""
    draft = Mock(wraps=byte_level(), added_tokens_decoder=byte_level().added_tokens_decoder)  # type: ignore[attr-defined]  # transformers' own
    vocabulary = dict(byte_level().get_vocab())
    vocabulary["<|im_end|>"] = vocabulary.pop("<|endoftext|>")
    draft.get_vocab = lambda: vocabulary
    assert have_same_ids(byte_level(), draft) and have_same_ids(draft, byte_level())
    assert "1 of 2048 ids differ (id 1 is '<|endoftext|>' in the target and '<|im_end|>' in" in (
        caplog.text
    )


def test_a_vocabulary_without_tokens_differs_from_none() -> None:
    assert have_same_ids(byte_level(), Mock(get_vocab=dict))


def test_byte_level_and_sentencepiece_tokens_of_the_same_bytes_are_one() -> None:
    target = tokenizer_of(["Ġ", "Ġa", "Ċ", "Ã©", "é", "ing", "cd"])
    draft = tokenizer_of(["▁", "<0x0A>", "▁a", "<0xE9>", "é", "ing", "<unk>"], unk="<unk>")
    found = shared_by(target, draft)
    # "é" is the byte E9 of a character in the first vocabulary, and the whole letter in the second.
    assert found.draft_ids == {0: 0, 1: 2, 2: 1, 3: 4, 4: 3, 5: 5}
    assert found.target_ids == {own: other for other, own in found.draft_ids.items()}
    assert found.unknown == 6
    assert shared_by(draft, target).draft_ids == found.target_ids


def test_a_byte_token_is_what_texts_do_not_have_and_is_read_as_the_letter() -> None:
    target = tokenizer_of(["<0x41>", "A", "▁", "<0x42>"])
    found = shared_by(target, tokenizer_of(["Ġ", "A", "B"]))
    assert found.draft_ids == {0: 1, 1: 1, 2: 0, 3: 2}
    assert found.target_ids == {1: 1, 0: 2, 2: 3}
    found = shared_by(tokenizer_of(["Ġ", "A", "B"]), target)
    assert found.draft_ids == {0: 2, 1: 1, 2: 3}


def test_special_tokens_are_found_by_name_and_else_by_role_but_never_by_text() -> None:
    names = ["<s>", "<|im_end|>", "<tool>", "Ġ", "a", "<|x|>"]
    target = tokenizer_of(names, names[:2], ["<tool>"], bos="<s>", eos="<|im_end|>")
    names = ["</s>", "<s>", "▁", "<|x|>", "<tool>", "a"]
    draft = tokenizer_of(names, ["</s>", "<|x|>", "<tool>"], eos="</s>")
    assert shared_by(target, draft).draft_ids == {1: 0, 2: 4, 3: 2, 4: 5}
    assert [*shared_by(target, draft).target_ids.values()][:2] == [1, 2]


def test_without_an_unknown_token_others_are_read_as_a_space() -> None:
    names = ["Ġ", "a", "b"]
    assert shared_by(tokenizer_of(names), tokenizer_of(["b", "Ġ"])).unknown == 1
    draft = tokenizer_of(["b", "a", "<unk>"], unk="<unk>")
    assert shared_by(tokenizer_of(names), draft, draft_size=2).unknown == 0


def test_ids_that_the_models_do_not_have_are_left_out() -> None:
    names = ["Ġ", "a", "b", "c"]
    assert shared_tokens(tokenizer_of(names), tokenizer_of(names), 3, 2).draft_ids == {0: 0, 1: 1}


def test_less_than_half_of_the_smaller_vocabulary_is_refused_with_the_figure() -> None:
    target, draft = tokenizer_of(["Ġ", *"abcdefg"]), tokenizer_of(["a", "b", "x", "y", "z"])
    sentence = (
        "shares 2 tokens with the target's, 40.0% of the smaller vocabulary, which has 5; at least "
        "50% are needed"
    )
    for pair in ((target, draft), (draft, target)):
        with pytest.raises(ValueError, match=sentence):
            shared_by(*pair)
    assert len(shared_by(target, tokenizer_of(["a", "b", "x", "y"])).target_ids) == 2


def test_a_byte_level_and_a_sentencepiece_tokenizer_of_transformers_share_bytes_and_words() -> None:
    target = byte_level()
    found = shared_by(target, sentencepiece_like())
    names = {" a": "▁a", " the": "▁the", "ing": "ing", " ": "▁", "\n": "<0x0A>"}
    for text, name in names.items():
        [token] = target.encode(text)
        assert found.draft_ids[token] == sentencepiece_like().get_vocab()[name]


def test_a_token_that_the_draft_lacks_is_read_as_its_longest_end_and_never_drafted() -> None:
    target = tokenizer_of(["Ġ", "Ġtokens", "x", "<|x|>"], ["<|x|>"])
    draft = tokenizer_of(["▁", "s", "kens", "ens", "x", "|>"])
    found = shared_by(target, draft)
    assert found.draft_ids == {0: 0, 1: 2, 2: 4} and found.target_ids == {0: 0, 4: 2}
