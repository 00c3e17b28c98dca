"""`/metrics`, read by Prometheus' own parser, and `/server_info`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.fake_llm import make_output
from tests.server.fake_llm import FAILING_PROMPT, FAILURES, MODEL, STATE, STATS, FakeLLM
from tests.server.http_answers import CHAT, wait_for
from tllm_spec import __version__
from tllm_spec.outputs import RequestMetrics, RequestOutput
from tllm_spec.server import app as server_app
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.histograms import HISTOGRAMS, Histograms, perf_record
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
        ("tllm_spec_lora_requests_info", "2", "a,b", "c"): 1,
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


# `/perf_metrics` has TensorRT-LLM's timings of finished requests; `/health_generate` runs the
# engine.


@pytest.fixture
def perf_metrics_client(llm: FakeLLM) -> Iterator[TestClient]:
    with TestClient(OpenAIServer(llm, MODEL).app()) as perf_metrics_client:
        yield perf_metrics_client


def complete(perf_metrics_client: TestClient, **body: Any) -> int:
    return perf_metrics_client.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a", **body}
    ).status_code


def test_every_finished_request_has_its_times_and_draft_counts(
    perf_metrics_client: TestClient,
) -> None:
    complete(perf_metrics_client)
    complete(perf_metrics_client, stream=True)
    perf_metrics_client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT})
    records = perf_metrics_client.get("/perf_metrics").json()
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


def test_reading_the_records_removes_them(perf_metrics_client: TestClient) -> None:
    complete(perf_metrics_client, prompt=["a", "b"])
    assert len(perf_metrics_client.get("/perf_metrics").json()) == 2
    assert perf_metrics_client.get("/perf_metrics").json() == []


def test_failed_requests_have_no_record(perf_metrics_client: TestClient) -> None:
    assert complete(perf_metrics_client, prompt=FAILING_PROMPT) == 500
    assert perf_metrics_client.get("/perf_metrics").json() == []


def test_a_request_without_drafts_has_no_draft_counts() -> None:
    output = RequestOutput(7, None, [1], [], RequestMetrics(1.0, 2.0, 3.0, 4.0), finished=True)
    times = {"arrival_time": 1.0, "first_scheduled_time": 2.0}
    times |= {"first_token_time": 3.0, "last_token_time": 4.0}
    expected = {"request_id": 7, "perf_metrics": {"timing_metrics": times}}
    assert perf_record(output) == expected


def test_only_the_latest_records_are_kept(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    monkeypatch.setattr(server_app, "MAX_RECORDS", 3)
    with TestClient(OpenAIServer(llm, MODEL).app()) as perf_metrics_client:
        for _ in range(5):
            complete(perf_metrics_client)
        kept = [record["request_id"] for record in perf_metrics_client.get("/perf_metrics").json()]
    assert kept == [2, 3, 4]


def test_health_generate_runs_one_token_through_the_engine(
    perf_metrics_client: TestClient, llm: FakeLLM
) -> None:
    assert perf_metrics_client.get("/health_generate").status_code == 200
    (params,) = llm.sampling
    assert params.max_tokens == 1
    wait_for(lambda: not llm.running)
    assert perf_metrics_client.get("/perf_metrics").json() == [], (
        "the probe is not a user's request"
    )


def test_health_generate_reports_an_engine_that_fails_or_has_ended(
    perf_metrics_client: TestClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILURES, "hi", "the logits are not numbers")
    assert perf_metrics_client.get("/health_generate").status_code == 500
    llm.is_healthy = False
    assert perf_metrics_client.get("/health_generate").status_code == 503


# `/iteration_stats` has TensorRT-LLM's JSON list of statistics, one entry for each round.


ROUND = {"iter": 0, "iterLatencyMS": 1.5, "numActiveRequests": 2}


@pytest.fixture
def iteration_stats_llm() -> FakeLLM:
    return FakeLLM(enable_iter_perf_stats=True)


@pytest.fixture
def iteration_stats_client(iteration_stats_llm: FakeLLM) -> Iterator[TestClient]:
    with TestClient(OpenAIServer(iteration_stats_llm, MODEL).app()) as iteration_stats_client:
        yield iteration_stats_client


def test_the_rounds_since_the_last_call_are_listed(
    iteration_stats_client: TestClient, iteration_stats_llm: FakeLLM
) -> None:
    iteration_stats_llm.rounds = [ROUND]
    assert iteration_stats_client.get("/iteration_stats").json() == [ROUND]
    assert iteration_stats_client.get("/iteration_stats").json() == []


def test_without_the_option_the_answer_names_it(
    iteration_stats_client: TestClient, iteration_stats_llm: FakeLLM
) -> None:
    iteration_stats_llm.args = FakeLLM().args
    response = iteration_stats_client.get("/iteration_stats")
    assert response.status_code == 404
    assert "enable_iter_perf_stats = false" in response.json()["error"]["message"]


def test_an_engine_that_has_ended_is_answered_with_503(
    iteration_stats_client: TestClient, iteration_stats_llm: FakeLLM
) -> None:
    iteration_stats_llm.is_healthy = False
    assert iteration_stats_client.get("/iteration_stats").status_code == 503
