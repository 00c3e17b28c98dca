"""The bytes of streamed answers: fast ways give what the plain ones would."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.random_examples import examples
from tests.server.fake_llm import MODEL, STATS, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, wait_for
from tests.server.raw_client import completion, connect, until_closed
from tests.text.test_tokenizer import byte_level, sentencepiece_like
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request import Response
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.llm import LLM
from tllm_spec.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.answers import Answer, CompletionAnswer, TextEvent, event
from tllm_spec.server.chat_answer import ChatAnswer
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.replicas import Replicas
from tllm_spec.text.stop_strings import StopStringChecker
from tllm_spec.text.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer, load_tokenizer

PIECES = ("a", "", '"\\', "\n\r\t\0", "é😀\u2028", TextEvent.MARK, "end")


def growing(num_samples: int) -> Iterator[RequestOutput]:
    """An output after each update; the samples end one after the other."""
    outputs = [CompletionOutput(index) for index in range(num_samples)]
    result = RequestOutput(1, "p", [1, 2], outputs, RequestMetrics(0.0))
    for turn, piece in enumerate(PIECES * 2):
        for output in outputs:
            output.start_next_diff()
        output = outputs[turn * num_samples // (2 * len(PIECES))]
        output.text += piece
        output.token_ids.append(turn)
        if (turn + 1) * num_samples % (2 * len(PIECES)) < num_samples:
            output.finish_reason, output.speculative_decoding = "stop", STATS
        yield result


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_the_events_of_a_stream_are_those_of_its_chunks(
    kind: type[Answer], num_samples: int
) -> None:
    arguments = "m", load_tokenizer("zoo:llama"), num_samples, None
    fast, plain = kind(*arguments), kind(*arguments)
    plain._head = fast._head
    found = []
    for result in growing(num_samples):
        found.append(fast.events(3, result))
        assert found[-1] == b"".join(map(event, plain.chunks(3, result)))
    assert sum(map(bool, found)) > len(PIECES)


def text_of(events: bytes) -> str:
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    llm = FakeLLM()
    with hosted(llm) as url, connect(("127.0.0.1", httpx.URL(url).port or 0)) as connection:
        request = completion("a", stream=True, max_tokens=100)
        connection.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
        assert text_of(body) == llm.answer(0)


def test_a_client_that_reads_late_gets_the_whole_stream_in_order() -> None:
    llm = FakeLLM()
    text = "".join(f"{number} " for number in range(4000))
    llm.answer = lambda index: text
    options = ServerOptions(shutdown_timeout=5)
    with hosted(llm, options) as url:
        body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 100_000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            wait_for(lambda: not llm.running)  # the engine has made all of it
            assert text_of(response.read()) == text


# The longest sequence that an engine can run: default of max_tokens, refusals, `/v1/models`.


OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_batch_size": 4,
    "guided_decoding_backend": None,
}
DRAFTED = {
    "decoding_type": "Draft_Target",
    "max_draft_len": 3,
    "speculative_model": "zoo:llama-draft",
}


class Served(NamedTuple):
    url: str
    llm: LLM
    log: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": MODEL, **body})

    def refusal(self, **body: Any) -> Any:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 400
        return answer.json()["error"]

    @property
    def model_len(self) -> int:
        return int(httpx.get(f"{self.url}/v1/models").json()["data"][0]["max_model_len"])


def served(caplog: pytest.LogCaptureFixture, **options: Any) -> Iterator[Served]:
    caplog.set_level(logging.INFO)
    with LLM("zoo:llama", **OPTIONS | options) as llm:
        engine: Any = llm
        with hosted(engine) as url:
            yield Served(url, llm, caplog.text)


@pytest.mark.thinned
@pytest.mark.parametrize("speculation", [None, DRAFTED], ids=["plain", "drafted"])
def test_a_cache_below_the_context_is_the_length_that_is_served_everywhere(
    caplog: pytest.LogCaptureFixture, speculation: dict[str, Any] | None
) -> None:
    cache = {"max_tokens": 128}
    for small in served(caplog, kv_cache_config=cache, speculative_config=speculation):
        longest = small.llm.max_seq_len
        assert 100 < longest < 128
        assert small.model_len == longest
        assert small.post("/tokenize", prompt="a").json()["max_model_len"] == longest
        assert f"a request may have {longest} tokens" in small.log
        for path, body in (
            ("/v1/chat/completions", {"messages": CHAT}),
            ("/v1/responses", {"input": "hello"}),
            ("/v1/completions", {"prompt": [5] * (longest - 1)}),
        ):
            assert small.post(path, **body, temperature=0).status_code == 200, path
        full = {"prompt": [5] * (longest - 9), "ignore_eos": True}
        usage = small.post("/v1/completions", **full).json()["usage"]
        assert usage["completion_tokens"] == 9
        for body in ({"prompt": [5] * longest}, {"prompt": [5], "max_tokens": longest + 1}):
            assert small.refusal(**body)["code"] == "context_length_exceeded"


def test_max_num_tokens_is_told_where_it_limits_prompts(caplog: pytest.LogCaptureFixture) -> None:
    for narrow in served(caplog, max_num_tokens=64):
        assert narrow.model_len == 64
        assert "a prompt may have 64 tokens, which is max_num_tokens" in narrow.log
        error = narrow.refusal(prompt=[5] * 65)
        assert error["code"] == "context_length_exceeded"
        assert "max_num_tokens without enable_chunked_prefill" in error["message"]
        longer = narrow.post("/v1/completions", prompt=[5] * 64, max_tokens=9, ignore_eos=True)
        assert longer.json()["usage"]["total_tokens"] == 73


def test_chunked_prefill_serves_the_whole_context(caplog: pytest.LogCaptureFixture) -> None:
    for chunked in served(caplog, max_num_tokens=64, enable_chunked_prefill=True):
        assert chunked.model_len == chunked.llm.max_seq_len == 2048
        assert "a prompt may have" not in chunked.log and "a request may have" not in chunked.log
        assert chunked.post("/v1/completions", prompt=[5] * 65, max_tokens=1).status_code == 200


def test_a_cache_without_room_for_two_tokens_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"no room for a request: .* raise kv_cache_config.max_t"):
        cache = {"max_tokens": 4, "tokens_per_block": 4}
        LLM("zoo:llama", **OPTIONS, kv_cache_config=cache, speculative_config=DRAFTED)


def test_the_engine_with_the_smallest_cache_limits_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(is_running=False)
    monkeypatch.setattr("tllm_spec.server.replicas.EngineClient", lambda *arguments: ended)
    args, paths = LlmArgs.from_kwargs("zoo:llama"), [str(tmp_path / "a")]
    replicas = Replicas(args, load_tokenizer("zoo:llama"), paths, None)
    connection: Any = None
    first = RequestLimits(512, (), 300, 0, None)
    for number, length in enumerate((300, 200, 250)):
        asyncio.run(replicas._use(number, connection, replace(first, max_seq_len=length)))
    assert replicas.max_seq_len == 200
    with pytest.raises(ValueError, match="maximum context length is 200 tokens"):
        replicas.check_length([5] * 200)


# Tokens, text offsets and log probabilities: the same streamed or whole, and consistent with the
# text.


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


@examples(200)
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


@examples(200)
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
