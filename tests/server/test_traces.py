"""OpenTelemetry spans of requests: moments, tokens, acceptance, failures and the client's trace."""

import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.server.fake_llm import FAILING_PROMPT, MODEL, SLOW_PROMPT, STATS, FakeLLM
from tests.server.http_answers import CHAT, wait_for
from tllm_spec.cli import serve
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.traces import Traces

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class Traced:
    """A server whose spans are read with `spans`, which closes it."""

    def __init__(
        self, options: ServerOptions | None = None, exporter: InMemorySpanExporter | None = None
    ) -> None:
        self._exporter = exporter or InMemorySpanExporter()
        traces = Traces(self._exporter)
        server = OpenAIServer(FakeLLM(), MODEL, options, traces=traces)
        self.client = TestClient(server.app())
        self.client.__enter__()
        self._is_open = True

    def complete(self, headers: dict[str, str] | None = None, **body: Any) -> int:
        body = {"model": MODEL, "prompt": "a b c", **body}
        return self.client.post("/v1/completions", json=body, headers=headers).status_code

    def spans(self) -> list[Any]:
        self.close()
        return list(self._exporter.get_finished_spans())

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.client.__exit__(None, None, None)


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.close()


def test_a_span_has_the_moments_tokens_and_acceptance_of_a_request(traced: Traced) -> None:
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": 4, "stream": True}
    headers = {"x-request-id": "mine"}
    with traced.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.read()
    (span,) = traced.spans()
    assert (span.name, span.kind) == (f"text_completion {MODEL}", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    given = span.attributes
    assert given["gen_ai.operation.name"] == "text_completion"
    assert given["gen_ai.request.model"] == MODEL and given["gen_ai.request.id"] == "mine"
    assert given["gen_ai.response.finish_reasons"] == ("length",)
    assert given["gen_ai.usage.input_tokens"] == 3
    assert given["gen_ai.usage.output_tokens"] == 4
    assert given["gen_ai.usage.cache_read.input_tokens"] == 1
    assert given["tllm_spec.num_rounds"] == STATS.rounds
    assert given["tllm_spec.acceptance_length"] == STATS.acceptance_length
    assert given["tllm_spec.draft_acceptance_rate"] == STATS.draft_acceptance_rate
    assert [event.name for event in span.events] == ["scheduled", "first_token"]
    moments = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert all(earlier <= later for earlier, later in pairwise(moments))
    first = (span.events[1].timestamp - span.start_time) / 1e9
    assert given["gen_ai.latency.time_to_first_token"] == pytest.approx(first, abs=1e-5)
    whole = (span.end_time - span.start_time) / 1e9
    assert given["gen_ai.latency.e2e"] == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_has_no_first_token(traced: Traced, n: int) -> None:
    body = {"model": MODEL, "messages": CHAT, "n": n}
    assert traced.client.post("/v1/chat/completions", json=body).status_code == 200
    (span,) = traced.spans()
    assert span.name == f"chat {MODEL}"
    assert [event.name for event in span.events] == ["scheduled"]
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_a_stream_of_several_choices_has_a_first_token(traced: Traced) -> None:
    assert traced.complete(stream=True, n=2) == 200
    (span,) = traced.spans()
    scheduled, first = span.events
    assert (scheduled.name, first.name) == ("scheduled", "first_token")
    assert span.start_time <= first.timestamp <= span.end_time
    assert span.attributes["gen_ai.latency.time_to_first_token"] >= 0


def test_a_span_continues_the_clients_trace(traced: Traced) -> None:
    assert traced.complete({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}) == 200
    (span,) = traced.spans()
    assert f"{span.context.trace_id:x}" == "ab" * 16 and f"{span.parent.span_id:x}" == "cd" * 8


def test_each_prompt_has_a_span_and_a_refused_body_none(traced: Traced) -> None:
    assert traced.complete(prompt=["a", "b"]) == 200
    assert traced.complete(max_tokens=-1) == 400
    assert len(traced.spans()) == 2


def test_a_failed_request_has_the_reason(traced: Traced) -> None:
    assert traced.complete(prompt=FAILING_PROMPT) == 500
    (span,) = traced.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "the logits are not numbers"


def test_a_request_out_of_time_has_a_span() -> None:
    traced = Traced(ServerOptions(request_timeout=0.05))
    assert traced.complete(prompt=SLOW_PROMPT) == 504
    (span,) = traced.spans()
    assert span.status.status_code is StatusCode.ERROR


def test_a_collector_that_does_not_answer_delays_the_end_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            assert answers.wait(60)
            return super().export(spans)

    monkeypatch.setattr("tllm_spec.server.traces.CLOSE_SECONDS", 0.05)
    exporter = Stuck()
    traced = Traced(exporter=exporter)
    assert traced.complete() == 200
    assert traced.spans() == [], "the server has ended"
    answers.set()
    wait_for(lambda: len(exporter.get_finished_spans()) == 1)


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [
        ("localhost:4317", "otlp_traces_endpoint = 'localhost:4317': a URL is needed"),
        ("http://x/v1/traces", "pip install 'tllm_spec[otel]'"),
    ],
)
def test_an_endpoint_that_cannot_be_used_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    result = CliRunner().invoke(serve.main, ["zoo:llama", "--otlp_traces_endpoint", endpoint])
    assert result.exit_code == 1 and sentence in result.output
