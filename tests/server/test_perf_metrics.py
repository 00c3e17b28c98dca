"""`/perf_metrics` has TensorRT-LLM's timings of finished requests; `/health_generate` runs the
engine."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.fake_llm import FAILING_PROMPT, FAILURES, MODEL, STATS, FakeLLM
from tests.server.http_answers import CHAT, wait_for
from tllm_spec.outputs import RequestMetrics, RequestOutput
from tllm_spec.server import app as server_app
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.histograms import perf_record


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def client(llm: FakeLLM) -> Iterator[TestClient]:
    with TestClient(OpenAIServer(llm, MODEL).app()) as client:
        yield client


def complete(client: TestClient, **body: Any) -> int:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "a", **body}).status_code


def test_every_finished_request_has_its_times_and_draft_counts(client: TestClient) -> None:
    complete(client)
    complete(client, stream=True)
    client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT})
    records = client.get("/perf_metrics").json()
    assert [record["request_id"] for record in records] == [0, 1, 2]
    for record in records:
        times = record["perf_metrics"]["timing_metrics"]
        assert 0 < times["arrival_time"] <= times["first_scheduled_time"]
        assert times["first_scheduled_time"] <= times["first_token_time"]
        assert times["first_token_time"] <= times["last_token_time"]
        assert record["perf_metrics"]["speculative_decoding"] == {
            "acceptance_rate": STATS.draft_acceptance_rate,
            "total_accepted_draft_tokens": STATS.num_accepted_tokens,
            "total_draft_tokens": STATS.num_drafted_tokens,
        }


def test_reading_the_records_removes_them(client: TestClient) -> None:
    complete(client, prompt=["a", "b"])
    assert len(client.get("/perf_metrics").json()) == 2
    assert client.get("/perf_metrics").json() == []


def test_failed_requests_have_no_record(client: TestClient) -> None:
    assert complete(client, prompt=FAILING_PROMPT) == 500
    assert client.get("/perf_metrics").json() == []


def test_a_request_without_drafts_has_no_draft_counts() -> None:
    output = RequestOutput(7, None, [1], [], RequestMetrics(1.0, 2.0, 3.0, 4.0), finished=True)
    times = {"arrival_time": 1.0, "first_scheduled_time": 2.0}
    times |= {"first_token_time": 3.0, "last_token_time": 4.0}
    expected = {"request_id": 7, "perf_metrics": {"timing_metrics": times}}
    assert perf_record(output) == expected


def test_only_the_latest_records_are_kept(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    monkeypatch.setattr(server_app, "MAX_RECORDS", 3)
    with TestClient(OpenAIServer(llm, MODEL).app()) as client:
        for _ in range(5):
            complete(client)
        kept = [record["request_id"] for record in client.get("/perf_metrics").json()]
    assert kept == [2, 3, 4]


def test_health_generate_runs_one_token_through_the_engine(
    client: TestClient, llm: FakeLLM
) -> None:
    assert client.get("/health_generate").status_code == 200
    (params,) = llm.sampling
    assert params.max_tokens == 1
    wait_for(lambda: not llm.running)
    assert client.get("/perf_metrics").json() == [], "the probe is not a user's request"


def test_health_generate_reports_an_engine_that_fails_or_has_ended(
    client: TestClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILURES, "hi", "the logits are not numbers")
    assert client.get("/health_generate").status_code == 500
    llm.is_healthy = False
    assert client.get("/health_generate").status_code == 503
