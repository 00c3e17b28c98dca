"""`/iteration_stats` has TensorRT-LLM's JSON list of statistics, one entry for each round."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from tests.server.fake_llm import MODEL, FakeLLM
from tllm_spec.server.app import OpenAIServer

ROUND = {"iter": 0, "iterLatencyMS": 1.5, "numActiveRequests": 2}


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(enable_iter_perf_stats=True)


@pytest.fixture
def client(llm: FakeLLM) -> Iterator[TestClient]:
    with TestClient(OpenAIServer(llm, MODEL).app()) as client:
        yield client


def test_the_rounds_since_the_last_call_are_listed(client: TestClient, llm: FakeLLM) -> None:
    llm.rounds = [ROUND]
    assert client.get("/iteration_stats").json() == [ROUND]
    assert client.get("/iteration_stats").json() == []


def test_without_the_option_the_answer_names_it(client: TestClient, llm: FakeLLM) -> None:
    llm.args = FakeLLM().args
    response = client.get("/iteration_stats")
    assert response.status_code == 404
    assert "enable_iter_perf_stats = false" in response.json()["error"]["message"]


def test_an_engine_that_has_ended_is_answered_with_503(client: TestClient, llm: FakeLLM) -> None:
    llm.is_healthy = False
    assert client.get("/iteration_stats").status_code == 503
