"""`tllm-bench serve` against our own server, over an LLM with known answers."""

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.server.fake_llm import FAILING_PROMPT, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import SECONDS
from tllm_spec.bench.serve_load import (
    Load,
    Sent,
    ServeRun,
    Target,
    acceptance_length,
    events,
    parse_goals,
    serve_report,
)
from tllm_spec.cli.bench import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    with hosted(llm) as url:
        yield f"{url}/v1"


def run(url: str, *options: object) -> Result:
    arguments = ["serve", "--base_url", url, "--quiet", *map(str, options)]
    return CliRunner().invoke(main, arguments)


def test_a_sweep_reports_every_load(url: str, llm: FakeLLM, dataset: Path, tmp_path: Path) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    llm.prompts.clear()
    result = run(
        url,
        *("--dataset", dataset, "--concurrency", "1,2", "--goodput", "e2el:60000"),
        *("--report_json", report, "--plot", plot),
    )
    assert result.exit_code == 0, result.output
    loads = json.loads(report.read_text())["loads"]
    assert [load["load"] for load in loads] == ["concurrency 1", "concurrency 2"]
    assert len(llm.prompts) == 1 + 2 * 4 and llm.sampling[-1].temperature == 0
    for load in loads:
        assert (load["requests"], load["failed"]) == (4, 0)
        assert load["ttft_ms"]["p50"] <= load["e2el_ms"]["p50"]
        assert load["output_throughput_tok_s"] * load["elapsed_s"] == pytest.approx(24)
        assert load["total_throughput_tok_s"] * load["elapsed_s"] == pytest.approx(36)
        assert load["goodput_req_s"] == load["request_throughput_req_s"]
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("sampling", "temperature", "shown"),
    [
        ("{}", 0, "0"),
        ('{"temperature": 0.5}', 0.5, "0.5"),
        ('{"temperature": null}', 1, "server's"),
    ],
)
def test_text_is_greedy_unless_a_temperature_is_given_and_the_table_shows_it(
    url: str, llm: FakeLLM, dataset: Path, sampling: str, temperature: float, shown: str
) -> None:
    llm.sampling.clear()
    result = run(url, "--dataset", dataset, "--num_requests", 1, "--sampling", sampling)
    assert {params.temperature for params in llm.sampling} == {temperature}
    header, *_, row = (re.split(r"  +", line.strip()) for line in result.output.splitlines())
    assert dict(zip(header, row, strict=False))["temperature"] == shown


def test_reports_of_other_servers_are_drawn_too(url: str, dataset: Path, tmp_path: Path) -> None:
    report, plot = tmp_path / "plain.json", tmp_path / "both.svg"
    assert run(url, "--dataset", dataset, "--report_json", report).exit_code == 0
    assert json.loads(report.read_text())["label"] == "plain"
    again = ["--dataset", dataset, "--plot_reports", report]
    result = run(url, *again, "--label", "eagle", "--plot", plot)
    assert result.exit_code == 0, result.output
    assert re.findall(r"<!-- (plain|eagle) -->", plot.read_text()) == ["plain", "eagle"]
    result = run(url, *again, "--label", "plain", "--plot", plot)
    assert result.exit_code == 1 and "label = 'plain'" in result.output
    result = run(url, *again)
    assert result.exit_code == 1 and "plot_reports is refused without --plot" in result.output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"label": "x", "loads": [{"load": 1}]}'])
def test_a_file_that_is_no_report_is_refused_before_the_load(
    url: str, llm: FakeLLM, dataset: Path, tmp_path: Path, text: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)
    llm.prompts.clear()
    result = run(url, "--dataset", dataset, "--plot", tmp_path / "x.png", "--plot_reports", other)
    assert result.exit_code == 1 and "is no --report_json file of tllm-bench serve" in result.output
    assert not llm.prompts


def test_requests_arrive_at_the_rate(url: str, dataset: Path) -> None:
    result = run(url, "--dataset", dataset, "--request_rate", "200", "--burstiness", "0.5")
    assert result.exit_code == 0 and "200 requests/s" in result.output


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_between_arrivals_have_the_rates_mean_and_the_burstiness_variance(
    burstiness: float,
) -> None:
    times = Load(request_rate=4.0, burstiness=burstiness).start_times(20_000)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_events_come_one_by_one_where_the_end_of_the_connection_is_that_of_the_answer() -> None:
    async def run() -> list[Any]:
        has_first = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"number": 1}\n\ndata: {"num')
            await has_first.wait()
            writer.write(b'ber": 2}\n\ndata: [DONE]\n\n')
            writer.close()

        found = []
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async for _, data in events(Target(f"http://{host}:{port}/v1"), "/v1/completions", {}):
                found.append(data)
                has_first.set()
        return found

    assert asyncio.run(asyncio.wait_for(run(), SECONDS)) == [{"number": 1}, {"number": 2}]


def test_a_failed_request_is_counted_and_ends_with_status_1(url: str, tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    lines = [{"task_id": 0, "prompt": text, "output_tokens": 3} for text in ("a", FAILING_PROMPT)]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(url, "--dataset", dataset)
    assert result.exit_code == 1 and "1 requests have failed" in result.output
    assert "the logits are not numbers" in result.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--goodput", "ttft"], "NAME:MILLISECONDS"),
        (["--goodput", "x:5"], "NAME of ttft, tpot, e2el"),
        (["--sampling", "[1]"], "a JSON object is needed"),
        (["--concurrency", "1,x"], "integers above 0"),
        (["--concurrency", "1.5"], "integers above 0"),
    ],
)
def test_mistakes_are_named(url: str, dataset: Path, options: list[str], sentence: str) -> None:
    result = run(url, "--dataset", dataset, *options)
    assert result.exit_code in (1, 2) and sentence in result.output


def test_no_server_is_a_sentence(dataset: Path) -> None:
    result = run("http://127.0.0.1:9/v1", "--dataset", dataset)
    assert result.exit_code == 1 and "base_url = 'http://127.0.0.1:9/v1'" in result.output
    assert "Traceback" not in result.output


def test_the_figures_follow_from_the_arrivals() -> None:
    sent = Sent(10.0, [10.5, 10.6, 10.9], num_prompt_tokens=7, num_tokens=5)
    slow = Sent(10.0, [12.0, 14.0], num_prompt_tokens=7, num_tokens=2)
    report: Any = serve_report(
        ServeRun(Load(concurrency=1), [sent, slow], 4.0), parse_goals(["ttft:600"]), None
    )
    assert report["ttft_ms"]["minimum"] == pytest.approx(500)
    assert report["tpot_ms"]["minimum"] == pytest.approx(100)
    assert report["itl_ms"]["maximum"] == pytest.approx(2000)
    assert report["goodput_req_s"] == 0.25 and report["output_throughput_tok_s"] == 7 / 4


def test_the_acceptance_length_is_that_of_the_run() -> None:
    ours = 'tllm_spec_request_rounds_total{{draft_len="2"}} {}\n'
    ours += 'tllm_spec_emitted_tokens_total{{draft_len="2"}} {}\n'
    assert acceptance_length(ours.format(10, 10), ours.format(14, 20)) == 2.5
    theirs = 'vllm:spec_decode_num_drafts_total{{m="x"}} {}\n'
    theirs += 'vllm:spec_decode_num_accepted_tokens_total{{m="x"}} {}\n'
    assert acceptance_length(theirs.format(0, 0), theirs.format(4, 6)) == 2.5
    assert acceptance_length("", "") is None
