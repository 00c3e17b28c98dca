"""`/metrics`, read by Prometheus' own parser, and `/server_info`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.fake_llm import make_output
from tests.server.fake_llm import STATE, STATS, FakeLLM
from tllm_spec import __version__
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.histograms import HISTOGRAMS, Histograms
from tllm_spec.server.metrics import EngineMetrics
from tllm_spec.server.options import ServerOptions


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
    found = samples(response.text)
    without_histograms = {
        key: value for key, value in found.items() if not key[0].startswith(tuple(HISTOGRAMS))
    }
    assert without_histograms == {
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
        ("tllm_spec_request_failure_total", "error"): 0,
        ("tllm_spec_request_failure_total", "timeout"): 0,
        ("tllm_spec_info", __version__): 1,
        ("tllm_spec_kv_cache_info", "10", "32"): 1,
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


def test_each_sample_has_the_name_of_its_replica_where_there_are_others() -> None:
    states = [STATE | {"engine": number} for number in range(2)]
    info = {"internal_states": states}
    metrics = EngineMetrics(lambda: info, Histograms(), "fake", replica="r1")
    samples = [line for line in metrics.text().decode().splitlines() if line[0] != "#"]
    assert samples and all('replica="r1"' in line for line in samples)
    assert any('engine="1"' in line and line.startswith("vllm:") for line in samples)


def test_the_engines_state_is_read_once_for_each_scrape() -> None:
    calls: list[int] = []

    def info() -> dict[str, object]:
        calls.append(1)
        return {"internal_states": [STATE]}

    metrics = EngineMetrics(info, Histograms())
    assert not calls
    metrics.text()
    metrics.text()
    assert len(calls) == 2


def test_server_info_has_the_engines_state_and_the_served_name(client: TestClient) -> None:
    info = client.get("/server_info").json()
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


DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"


def test_the_document_lists_every_metric_and_no_other(llm: FakeLLM) -> None:
    options = ServerOptions(vllm_metrics=True)
    with TestClient(OpenAIServer(llm, "fake", options).app()) as client:
        text = client.get("/metrics").text
    documented = set(re.findall(r"`((?:trtllm|tllm_spec|vllm:)\w+)`", DOCUMENT.read_text("utf-8")))
    assert documented == set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_finished_requests_are_in_the_histograms(client: TestClient) -> None:
    for stream in (False, True):
        body = {"model": "fake", "prompt": "a b", "max_tokens": 5, "stream": stream}
        assert client.post("/v1/completions", json=body).status_code == 200
    found = samples(client.get("/metrics").text)
    assert found["tllm_spec_request_generation_tokens_bucket", "5.0"] == 2
    assert found["tllm_spec_request_generation_tokens_bucket", "2.0"] == 0
    assert found[("tllm_spec_request_generation_tokens_sum",)] == 10
    assert found["tllm_spec_request_acceptance_length_bucket", "2.5"] == 2
    assert found[("trtllm_e2e_request_latency_seconds_count",)] == 2
    assert found[("trtllm_time_to_first_token_seconds_count",)] == 1, "only of the streamed one"


@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_has_no_time_to_first_token(client: TestClient, n: int) -> None:
    body = {"model": "fake", "prompt": "a b", "max_tokens": 5, "n": n}
    assert client.post("/v1/completions", json=body).status_code == 200
    found = samples(client.get("/metrics").text)
    assert found[("trtllm_time_to_first_token_seconds_count",)] == 0
    assert found[("trtllm_time_per_output_token_seconds_count",)] == 0
    assert found[("trtllm_e2e_request_latency_seconds_count",)] == 1


@pytest.mark.parametrize(
    ("is_streamed", "num_tokens", "expected"),
    [
        (True, 4, (1, 1)),
        (True, 1, (1, 0)),
        (False, 4, (0, 0)),  # with stop strings a front gets tokens one by one, and keeps them
    ],
)
def test_times_of_tokens_are_of_streamed_requests_only(
    is_streamed: bool, num_tokens: int, expected: tuple[int, int]
) -> None:
    histograms = Histograms()
    histograms.add(make_output(3, num_tokens), is_streamed)
    found = histograms.read()
    names = ("trtllm_time_to_first_token_seconds", "trtllm_time_per_output_token_seconds")
    assert tuple(sum(found[name].counts) for name in names) == expected


def test_fronts_share_their_histograms_and_outlive_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = make_output(3, 4)
    for process in (1, 2):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        histograms = Histograms(tmp_path)
        histograms.add(output, is_streamed=False)
    tokens = histograms.read()["tllm_spec_request_prompt_tokens"]
    assert (sum(tokens.counts), tokens.sum) == (2, 6)


def test_a_front_has_its_histograms_without_their_file(tmp_path: Path) -> None:
    histograms = Histograms(tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    histograms.add(make_output(3, 4), is_streamed=False)
    assert histograms.read()["tllm_spec_request_prompt_tokens"].sum == 3


def test_vllms_names_have_the_same_values() -> None:
    with TestClient(OpenAIServer(FakeLLM(), "m", ServerOptions(vllm_metrics=True)).app()) as client:
        found = samples(client.get("/metrics").text)
    assert found["vllm:num_requests_running", "m"] == 3
    assert found["vllm:request_success_total", "stop", "m"] == 7
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "m", "1"] == 1
    assert found["vllm:e2e_request_latency_seconds_count", "m"] == 0


def test_the_grafana_dashboard_asks_for_documented_metrics_only() -> None:
    text = DOCUMENT.with_name("grafana.json").read_text("utf-8")
    expressions = [
        target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]
    ]
    asked = set(re.findall(r"\b(?:trtllm|tllm_spec)_\w+", " ".join(expressions)))
    documented = DOCUMENT.read_text("utf-8")
    assert len(asked) > 12
    assert not [name for name in asked if f"`{name.removesuffix('_bucket')}`" not in documented]
