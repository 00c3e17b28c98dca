"""Stop strings: found at the same position for any tokenization, and never shown in part."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.random_examples import examples
from tllm_spec.text.stop_strings import StopStringChecker, StopStringMatcher, StreamedText
from tllm_spec.text.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("zoo:llama")


def checker(stops: list[str], *, include_stop: bool = False) -> StopStringChecker:
    return StopStringChecker(IncrementalDetokenizer(tokenizer()), stops, include_stop=include_stop)


def first_match(stops: list[str], pieces: list[str]) -> tuple[int, int, str] | None:
    matcher = StopStringMatcher(stops)
    return next((found for piece in pieces if (found := matcher.feed(piece))), None)


@examples(300)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(WORDS, min_size=1, max_size=3),
    width=st.integers(1, 30),
)
@example(text="ab", stops=["b", "ab"], width=2)
def test_a_stop_is_found_at_the_same_position_for_any_split_of_the_text(
    text: str, stops: list[str], width: int
) -> None:
    expected = min(
        (
            (end, end - len(stop), stop)
            for stop in stops
            for end in range(31)
            if text[:end].endswith(stop)
        ),
        default=None,
    )
    assert first_match(stops, [text[i : i + width] for i in range(0, len(text), width)]) == expected


def test_a_stop_that_was_found_is_not_found_again() -> None:
    matcher = StopStringMatcher(["b", "never"])
    assert [bool(matcher.feed(piece)) for piece in ("a", "b", "c", "b")] == [
        False,
        True,
        False,
        True,
    ]


@examples(300)
@given(text=st.text(alphabet="abc", max_size=30), stops=st.lists(WORDS, min_size=1, max_size=3))
def test_the_longest_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    for character in text:
        matcher.feed(character)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    assert matcher.num_held() == max(len(each) for each in beginnings if text.endswith(each))


def test_a_stop_across_tokens_cuts_text_and_tokens_where_it_begins() -> None:
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


@pytest.mark.parametrize("include", [False, True])
def test_invalid_bytes_belong_before_the_token_with_which_they_are_shown(include: bool) -> None:
    broken = tokenizer().encode("😀")[:1]
    check = checker(["stop"], include_stop=include)
    matches = [
        check.feed(token)
        for token in [*tokenizer().encode("x"), *broken, *tokenizer().encode("stop")]
    ]
    (match,) = [each for each in matches if each is not None]
    assert match.text == "x\ufffd" + include * "stop"
    assert match.num_tokens == 2 + include * len(tokenizer().encode("stop"))


@examples(300)
@given(
    text=st.text(alphabet="abc é😀", max_size=40),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), max_size=2),
    run=st.integers(1, 5),
    include=st.booleans(),
)
@example(text="ab", stops=["b"], run=1, include=False)
@example(text="a😀", stops=["😀"], run=1, include=False)
def test_a_reader_never_sees_more_than_the_final_text_and_tokens(
    text: str, stops: list[str], run: int, include: bool
) -> None:
    token_ids = tokenizer().encode(text)
    check = checker(stops, include_stop=include)
    reader, seen, num_seen, match = (
        StreamedText(IncrementalDetokenizer(tokenizer()), stops),
        "",
        0,
        None,
    )
    for start in range(0, len(token_ids), run):
        tokens = token_ids[start : start + run]
        match = next(filter(None, map(check.feed, tokens)), None)
        if match is not None:
            break
        seen += reader.feed(tokens)
        num_seen = reader.num_shown
    rest = reader.finish(tokens, match.text) if match else reader.finish([])
    assert seen + rest == (match.text if match else text)
    assert num_seen <= (match.num_tokens if match else len(token_ids))


def test_a_token_is_shown_when_its_text_begins() -> None:
    reader = StreamedText(IncrementalDetokenizer(tokenizer()), ["\n\nQ"])
    token_ids = tokenizer().encode("a\n\nb")
    shown = [(reader.feed([token]), reader.num_shown) for token in token_ids]
    assert shown[0] == ("a", 1)
    assert shown[-1] == ("\n\nb", len(token_ids))
    assert all(each == ("", 1) for each in shown[1:-1])


@pytest.mark.parametrize("stops", [[], ["zebra"]])
def test_nothing_is_held_back_without_a_beginning_of_a_stop(stops: list[str]) -> None:
    reader = StreamedText(IncrementalDetokenizer(tokenizer()), stops)
    token_ids = tokenizer().encode("plain text")
    assert reader.feed(token_ids) == "plain text"
    assert reader.num_shown == len(token_ids)
    assert reader.finish([]) == ""


def test_without_stops_tokens_of_an_unfinished_character_are_shown() -> None:
    reader = StreamedText(IncrementalDetokenizer(tokenizer()))
    assert reader.feed(tokenizer().encode("😀")[:3]) == ""
    assert reader.num_shown == 3
