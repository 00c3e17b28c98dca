"""Tokens, text offsets and log probabilities: the same streamed or whole, and consistent with the
text."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.text.test_tokenizer import byte_level, sentencepiece_like
from tllm_spec.executor.request import Response
from tllm_spec.outputs import Logprob
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.answers import Answer, CompletionAnswer
from tllm_spec.server.chat_answer import ChatAnswer
from tllm_spec.text.stop_strings import StopStringChecker
from tllm_spec.text.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer

Json = dict[str, Any]
EURO = [6 + 0xE2, 6 + 0x82, 6 + 0xAC]  # of the SentencePiece-like tokenizer: one token a byte


def handle_of(tokenizer: Tokenizer, stops: list[str], num_best: int = 0) -> RequestHandle:
    params = SamplingParams(stop=stops, logprobs=num_best)
    return RequestHandle(1, None, [5], params, tokenizer, lambda: None)


def responses(
    tokenizer: Tokenizer, token_ids: list[int], stops: list[str], run: int
) -> list[Response]:
    """As the executor sends them: `run` tokens at a time, up to and including the last token of the
    first stop string."""
    checker = StopStringChecker(IncrementalDetokenizer(tokenizer), stops, include_stop=False)
    matches = map(checker.feed, token_ids)
    num_tokens, match = next(
        ((i + 1, each) for i, each in enumerate(matches) if each), (len(token_ids), None)
    )
    made = []
    for start in range(0, num_tokens, run):
        tokens = token_ids[start : min(start + run, num_tokens)]
        made.append(
            Response(1, tokens, logprobs=[{token: Logprob(-token / 8)} for token in tokens])
        )
    made[-1] = replace(made[-1], finish_reason="stop", stop_match=match)
    return made


def streamed(answer: Answer, handle: RequestHandle, made: list[Response]) -> Json:
    """The chunks' choices, joined."""
    text, joined = "", dict[str, list[Any]]()
    for response in made:
        handle.receive(response)
        next(handle)
        for chunk in answer.chunks(0, handle):
            (choice,) = chunk["choices"]
            text += choice["text"] if "text" in choice else choice["delta"]["content"]
            for name, values in choice["logprobs"].items():
                joined.setdefault(name, []).extend(values)
    return {"text": text, **joined}


def both_ways(
    kind: type[Answer], tokenizer: Tokenizer, token_ids: list[int], stops: list[str], run: int = 1
) -> tuple[Json, Json]:
    """The choice of the whole answer, and the streamed one."""
    answer, handle = kind("model", tokenizer, 1, 0), handle_of(tokenizer, stops)
    stream = streamed(answer, handle, responses(tokenizer, token_ids, stops, run))
    (choice,) = answer.whole([handle])["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {"text": text, **choice["logprobs"]}, stream


def check_offsets(answer: Json) -> None:
    """Every token that consists of whole characters is in the text at its offset. A stop string may
    cut the last one."""
    text, offsets = answer["text"], answer["text_offset"]
    assert offsets == sorted(offsets) and all(offset <= len(text) for offset in offsets)
    for token, offset in zip(answer["tokens"], offsets, strict=True):
        rest = text[offset : offset + len(token)]
        assert (
            REPLACEMENT in token
            or rest == token
            or (offset == offsets[-1] and token.startswith(rest))
        )


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab 1\n.é漢😀", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), max_size=2),
    run=st.integers(1, 5),
)
@example(text="a\n\nb", stops=["\n\nQ"], run=1)
@example(text="日本 é😀 = 1", stops=[], run=1)
@example(text="aaaa", stops=["aaaa"], run=1)
def test_streamed_offsets_equal_those_of_the_whole_answer(
    text: str, stops: list[str], run: int
) -> None:
    token_ids = byte_level().encode(text)
    whole, stream = both_ways(CompletionAnswer, byte_level(), token_ids, stops, run)
    assert stream == whole
    check_offsets(whole)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.sampled_from([[1], [2], [3], [4], EURO]), min_size=1, max_size=12),
    stops=st.lists(st.sampled_from([" a", "the", "€ ", "éing"]), max_size=1),
    run=st.integers(1, 5),
)
@example(words=[[2], [1], EURO, [2], [3]], stops=[], run=1)
def test_offsets_of_sentencepiece_tokens_agree_with_the_spaces_of_the_text(
    words: list[list[int]], stops: list[str], run: int
) -> None:
    token_ids = [token for word in words for token in word]
    whole, stream = both_ways(CompletionAnswer, sentencepiece_like(), token_ids, stops, run)
    assert stream == whole
    check_offsets(whole)


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_sentencepiece_tokens_join_to_the_text(kind: type[Answer]) -> None:
    whole, stream = both_ways(kind, sentencepiece_like(), [2, 1, 3, 2], [])
    tokens = (
        whole["tokens"]
        if kind is CompletionAnswer
        else [each["token"] for each in whole["content"]]
    )
    assert tokens == ["the", " a", "ing", " the"]
    assert "".join(tokens) == whole["text"]
    assert stream == whole


def test_a_special_token_has_an_offset_although_the_text_leaves_it_out() -> None:
    token_ids = [*byte_level().encode("a"), 1, *byte_level().encode("b")]
    whole, stream = both_ways(CompletionAnswer, byte_level(), token_ids, [])
    assert (whole["text"], whole["tokens"]) == ("ab", ["a", "<|endoftext|>", "b"])
    assert whole["text_offset"] == stream["text_offset"] == [0, 1, 1]


def best_of_one_token(
    kind: type[Answer], chosen: int, logprobs: dict[int, float], num_best: int
) -> Json:
    """The answer to a request for the `num_best` most probable tokens."""
    handle = handle_of(sentencepiece_like(), [], num_best)
    at = {token: Logprob(value) for token, value in logprobs.items()}
    handle.receive(Response(1, [chosen], logprobs=[at], finish_reason="length"))
    answer = kind("model", sentencepiece_like(), 1, num_best)
    logprobs_of: Json = answer.whole([handle.result(timeout=1)])["choices"][0]["logprobs"]
    return logprobs_of


@pytest.mark.parametrize(
    ("num_best", "best"), [(0, {}), (1, {"the": -0.5}), (2, {"the": -0.5, "é": -1.0})]
)
def test_top_logprobs_of_a_completion_include_the_sampled_token(
    num_best: int, best: dict[str, float]
) -> None:
    answer = best_of_one_token(CompletionAnswer, 3, {2: -0.5, 4: -1.0, 3: -7.0}, num_best)
    assert answer["top_logprobs"] == [{**best, "ing": -7.0}]


def test_a_sampled_token_among_the_best_is_listed_once() -> None:
    answer = best_of_one_token(CompletionAnswer, 2, {2: -0.5, 4: -1.0, 3: -7.0}, 2)
    assert answer["top_logprobs"] == [{"the": -0.5, "é": -1.0}]


def test_top_logprobs_of_a_chat_have_the_requested_number() -> None:
    answer = best_of_one_token(ChatAnswer, 3, {2: -0.5, 4: -1.0, 3: -7.0}, 2)
    assert [each["token"] for each in answer["content"][0]["top_logprobs"]] == ["the", "é"]


def test_of_two_tokens_with_the_same_text_the_more_probable_one_is_listed() -> None:
    token, letter = 1, 6 + ord("a")  # "▁a" at the start of a text, and the byte "a"
    assert best_of_one_token(CompletionAnswer, letter, {letter: -3.0, token: -0.5, 2: -1.0}, 3)[
        "top_logprobs"
    ] == [{"a": -0.5, "the": -1.0}]
