"""`/metrics`, read by Prometheus' own parser, and `/server_info`."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_llm import STATE, STATS, FakeLLM
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.metrics import EngineMetrics


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def client(llm: FakeLLM) -> Iterator[TestClient]:
    with TestClient(OpenAIServer(llm, "fake").app()) as client:
        yield client


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics"])
def test_metrics_have_every_figure_of_the_engines_state(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200 and response.headers["content-type"].startswith(
        "text/plain; version="
    )
    assert samples(response.text) == {
        ("trtllm_num_requests_running",): 3,
        ("trtllm_num_requests_waiting",): 4,
        ("tllm_spec_draft_len",): 2,
        ("tllm_spec_preemptions_total",): 5,
        ("tllm_spec_prompt_tokens_total",): 40,
        ("tllm_spec_prefix_hit_tokens_total",): 10,
        ("tllm_spec_generated_tokens_total",): 11,
        ("tllm_spec_draft_len_changes_total",): 15,
        ("tllm_spec_draft_len_switches_total",): 16,
        ("trtllm_request_success_total", "stop"): 7,
        ("trtllm_request_success_total", "length"): 0,
        ("tllm_spec_request_failure_total", "cancelled"): 8,
        ("trtllm_spec_decode_num_draft_tokens_total",): STATS.num_drafted_tokens,
        ("trtllm_spec_decode_num_accepted_tokens_total",): STATS.num_accepted_tokens,
        ("trtllm_spec_decode_drafted_tokens_total", "0"): 2,
        ("trtllm_spec_decode_drafted_tokens_total", "1"): 2,
        ("trtllm_spec_decode_accepted_tokens_total", "0"): 2,
        ("trtllm_spec_decode_accepted_tokens_total", "1"): 1,
        ("trtllm_spec_decode_acceptance_length",): 2.5,
        ("tllm_spec_rounds_total", "2"): 12,
        ("tllm_spec_request_rounds_total", "2"): 13,
        ("tllm_spec_emitted_tokens_total", "2"): 14,
        ("tllm_spec_round_seconds_total", "2"): 1.5,
        ("tllm_spec_kv_cache_pages", "free"): 1,
        ("tllm_spec_kv_cache_pages", "used"): 6,
        ("tllm_spec_kv_cache_pages", "cached"): 3,
        ("trtllm_kv_cache_utilization",): 0.6,
        ("trtllm_kv_cache_hit_rate",): 0.25,
    }


def test_the_engines_state_is_read_once_for_each_scrape() -> None:
    calls: list[int] = []

    def info() -> dict[str, object]:
        calls.append(1)
        return {"internal_states": [STATE]}

    metrics = EngineMetrics(info)
    assert not calls
    metrics.text()
    metrics.text()
    assert len(calls) == 2


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_the_engines_state_and_the_served_name(
    client: TestClient, path: str
) -> None:
    info = client.get(path).json()
    assert (info["served_model_name"], info["version"]) == ("fake", "9")
    assert info["internal_states"][0]["speculative_num_steps"] == 2


@pytest.mark.parametrize("path", ["/server_info", "/metrics"])
def test_a_dead_engine_is_answered_with_503_and_its_reason(
    client: TestClient, llm: FakeLLM, path: str
) -> None:
    llm.is_healthy = False
    response = client.get(path)
    assert response.status_code == 503
    assert "the executor has died: no more" in response.json()["error"]["message"]
