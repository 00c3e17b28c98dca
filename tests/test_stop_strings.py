"""Stop strings: the same cut for any division of the text into tokens, and nothing shown too early."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tllm_spec.stop_strings import StopStringChecker, StopStringMatcher, StreamedText
from tllm_spec.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("zoo:llama")


def checker(stops: list[str], *, include_stop: bool = False) -> StopStringChecker:
    return StopStringChecker(IncrementalDetokenizer(tokenizer()), stops, include_stop=include_stop)


def first_match(stops: list[str], pieces: list[str]) -> tuple[int, int, str] | None:
    matcher = StopStringMatcher(stops)
    return next((found for piece in pieces if (found := matcher.feed(piece))), None)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(WORDS, min_size=1, max_size=3),
    width=st.integers(1, 30),
)
@example(text="ab", stops=["b", "ab"], width=2)
def test_a_stop_is_found_at_the_same_place_for_any_division_of_the_text(
    text: str, stops: list[str], width: int
) -> None:
    expected = min(
        ((end, end - len(stop), stop) for stop in stops for end in range(31) if text[:end].endswith(stop)),
        default=None,
    )
    assert first_match(stops, [text[i : i + width] for i in range(0, len(text), width)]) == expected


def test_a_stop_that_was_let_pass_is_not_found_again() -> None:
    matcher = StopStringMatcher(["b", "never"])
    assert [bool(matcher.feed(piece)) for piece in ("a", "b", "c", "b")] == [False, True, False, True]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abc", max_size=30), stops=st.lists(WORDS, min_size=1, max_size=3))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    for character in text:
        matcher.feed(character)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    assert matcher.num_held() == max(len(each) for each in beginnings if text.endswith(each))


def test_a_stop_across_token_borders_cuts_text_and_tokens_where_it_begins() -> None:
    token_ids = tokenizer().encode("total = 1\n\ndef main():")
    check = checker(["\n\ndef"])
    matches = [check.feed(token) for token in token_ids]
    (match,) = [each for each in matches if each is not None]
    assert (match.stop, match.text) == ("\n\ndef", "total = 1")
    assert tokenizer().decode(token_ids[: match.num_tokens]) == "total = 1"


def test_an_included_stop_keeps_its_tokens() -> None:
    token_ids = tokenizer().encode("one two three")
    check = checker(["two"], include_stop=True)
    (match,) = [each for each in map(check.feed, token_ids) if each is not None]
    assert match.text == "one two"
    assert tokenizer().decode(token_ids[: match.num_tokens]) == "one two"


def test_a_token_that_only_begins_before_the_stop_is_kept() -> None:
    token_ids = tokenizer().encode("return value")
    check = checker(["turn"])
    match = check.feed(token_ids[0])
    assert match is not None
    assert (match.text, match.num_tokens) == ("re", 1)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abc é😀", max_size=40), stops=st.lists(WORDS, max_size=2), run=st.integers(1, 5)
)
def test_a_reader_never_sees_more_than_the_final_text(text: str, stops: list[str], run: int) -> None:
    token_ids = tokenizer().encode(text)
    check = checker(stops)
    reader, seen, final = StreamedText(IncrementalDetokenizer(tokenizer()), stops), "", None
    for start in range(0, len(token_ids), run):
        matches = [check.feed(token) for token in token_ids[start : start + run]]
        final = next((match.text for match in matches if match), None)
        if final is not None:
            break
        seen += reader.feed(token_ids[start : start + run])
    assert seen + reader.finish(final) == (text if final is None else final)


@pytest.mark.parametrize("stops", [[], ["zebra"]])
def test_without_a_beginning_of_a_stop_nothing_is_held_back(stops: list[str]) -> None:
    reader = StreamedText(IncrementalDetokenizer(tokenizer()), stops)
    assert reader.feed(tokenizer().encode("plain text")) == "plain text"
    assert reader.finish() == ""
