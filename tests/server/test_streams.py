"""The bytes of streamed answers: fast ways give what the plain ones would."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake_llm import MODEL, STATS, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import wait_for
from tests.server.raw_client import completion, connect, until_closed
from tllm_spec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tllm_spec.server.answers import Answer, CompletionAnswer, TextEvent, event
from tllm_spec.server.chat_answer import ChatAnswer
from tllm_spec.server.options import ServerOptions
from tllm_spec.text.tokenizer import load_tokenizer

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
