"""Data sets of tllm-bench: read, checked, generated and written."""

import asyncio
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.bench_command import ran, run
from tests.server.fake_llm import FAILING_PROMPT, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import SECONDS
from tests.training.traffic import SAMPLING, counted
from tllm_spec.bench.dataset import (
    ANSWER_TOKENS,
    BenchRequest,
    normal_lengths,
    read_dataset,
    synthetic_requests,
    text_requests,
    uniform_lengths,
    write_dataset,
)
from tllm_spec.bench.runner import sampling_for
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
from tllm_spec.recording.traffic_folder import TrafficFolder
from tllm_spec.text.chat_prompt import Conversation


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_token_ids_take_precedence_over_a_prompt_and_blank_lines_are_skipped(
    tmp_path: Path,
) -> None:
    path = write_lines(
        tmp_path,
        '{"task_id": 0, "prompt": "hello", "output_tokens": 8}',
        "",
        '{"task_id": 1, "prompt": "hello", "input_ids": [5, 6], "output_tokens": 9}',
    )
    assert read_dataset(path) == [BenchRequest(0, "hello", 8), BenchRequest(1, [5, 6], 9)]


def test_messages_end_themselves_and_need_neither_number_nor_length(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"messages": messages}, {"task_id": 7, "messages": messages, "output_tokens": 3}]
    found = read_dataset(write_lines(tmp_path, *map(json.dumps, lines)))
    prompt = Conversation(messages)
    assert found == [
        BenchRequest(0, prompt, ANSWER_TOKENS, ends_itself=True),
        BenchRequest(7, prompt, 3, ends_itself=True),
    ]
    assert [params.ignore_eos for params in sampling_for(found)] == [False, False]
    assert sampling_for(found, eos_id=5)[0].end_id == 5


def test_recorded_traffic_is_a_data_set_whose_outputs_are_as_long(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    records = [counted(first, 5, 6 + first) for first in range(3)]
    ending = records[2].model_copy(update={"sampling": SAMPLING | {"end_ids": [0]}})
    TrafficFolder(tmp_path).append([each.to_line() for each in [*records[:2], ending]])
    found = read_dataset(tmp_path)
    assert [each.prompt for each in found] == [record.prompt for record in records]
    assert [each.output_tokens for each in found] == [6, 7, 8]
    assert [each.ends_itself for each in found] == [False, False, True]
    assert [params.ignore_eos for params in sampling_for(found)] == [True, True, False]
    assert [each.prompt for each in read_dataset(tmp_path, 1)] == [records[2].prompt]
    with pytest.raises(ValueError, match="has 3 recorded requests, and num_requests is 4"):
        read_dataset(tmp_path, 4)


def test_only_the_first_requests_are_read_when_a_number_is_given(tmp_path: Path) -> None:
    line = '{"task_id": 0, "input_ids": [1], "output_tokens": 8}'
    path = write_lines(tmp_path, line, line, "broken, but never reached")
    assert len(read_dataset(path, 2)) == 2
    with pytest.raises(ValueError, match="has 3 requests, but num_requests is 4"):
        read_dataset(path, 4)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is needed"),
        ('{"task_id": 0, "input_ids": [1]}', "output_tokens = None"),
        ('{"task_id": 0, "input_ids": [1], "output_tokens": 0}', "output_tokens = 0"),
        ('{"task_id": 0, "input_ids": [1], "output_tokens": true}', "output_tokens = True"),
        ('{"task_id": "a", "input_ids": [1], "output_tokens": 1}', "task_id = .a."),
        ('{"task_id": 0, "output_tokens": 1}', "input_ids .* or messages is needed"),
        ('{"task_id": 0, "prompt": "", "output_tokens": 1}', "input_ids .* or messages is needed"),
        ('{"messages": [], "output_tokens": 1}', "messages"),
        ('{"messages": [{"content": "a"}]}', "messages"),
        ('{"task_id": 0, "input_ids": [], "output_tokens": 1}', "input_ids"),
        ('{"task_id": 0, "input_ids": [-1], "output_tokens": 1}', "input_ids"),
        (
            '{"task_id": 0, "prompt": "x", "output_tokens": 1, "media_paths": []}',
            "media_paths = .* is refused: only text is served",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    good = '{"task_id": 0, "input_ids": [1], "output_tokens": 8}'
    with pytest.raises(ValueError, match=f"data.jsonl, line 2: .*{complaint}"):
        read_dataset(write_lines(tmp_path, good, line))


def test_a_file_that_is_not_utf_8_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"task_id": 0, "prompt": "caf\xe9", "output_tokens": 8}\n')
    with pytest.raises(ValueError, match=r"cannot read .*data.jsonl: 'utf-8' codec"):
        read_dataset(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no request"):
        read_dataset(write_lines(tmp_path))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    requests = [BenchRequest(0, "hello\nworld", 8), BenchRequest(1, [5, 6], 9)]
    text = io.StringIO()
    write_dataset(requests, text)
    assert read_dataset(write_lines(tmp_path, text.getvalue())) == requests


def test_normal_lengths_follow_the_distribution_and_the_seed() -> None:
    inputs, outputs = normal_lengths(100, 10), normal_lengths(20, 0)
    requests = list(synthetic_requests(200, inputs, outputs, vocab_size=50, seed=1))
    lengths = [len(request.prompt) for request in requests]
    assert (
        97 < sum(lengths) / 200 < 103
        and 7 < (sum((n - 100) ** 2 for n in lengths) / 200) ** 0.5 < 13
    )
    assert {request.output_tokens for request in requests} == {20}
    assert {token for request in requests for token in request.prompt} == set(range(50))
    assert requests == list(synthetic_requests(200, inputs, outputs, vocab_size=50, seed=1))
    assert requests != list(synthetic_requests(200, inputs, outputs, vocab_size=50, seed=2))


def test_uniform_lengths_have_both_bounds_and_nothing_outside() -> None:
    inputs, outputs = uniform_lengths(3, 6), uniform_lengths(9, 9)
    requests = list(synthetic_requests(200, inputs, outputs, vocab_size=50, seed=1))
    assert {len(request.prompt) for request in requests} == {3, 4, 5, 6}
    assert {request.output_tokens for request in requests} == {9}


def test_a_drawn_length_is_never_below_one() -> None:
    short = normal_lengths(1, 5)
    requests = synthetic_requests(50, short, short, vocab_size=4, seed=0)
    assert min(min(len(request.prompt), request.output_tokens) for request in requests) == 1


def test_text_prompts_start_at_a_line_and_have_exactly_the_requested_length(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(f"{number:04d}\n" for number in range(100)))
    (tmp_path / "short.txt").write_text("tiny\n")
    files = sorted(tmp_path.iterdir())
    requests = list(
        text_requests(files, encode, num_requests=12, input_len=300, output_len=3, seed=0)
    )
    prompts = ["".join(map(chr, request.prompt)) for request in requests]
    assert all(
        len(prompt) == 300 and prompt[:4].isdigit() and prompt[4] == "\n" for prompt in prompts
    )
    assert len(set(prompts)) > 1
    assert [request.task_id for request in requests] == list(range(12))


def test_it_is_an_error_when_no_file_is_as_long_as_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("tiny\n")
    with pytest.raises(ValueError, match="none of the 1 files has 40 tokens"):
        list(text_requests(list(tmp_path.iterdir()), encode, 1, input_len=40, output_len=3, seed=0))


# `tllm-bench prepare-dataset` from its command line.


@pytest.mark.usefixtures("fake_llm")
def test_prepare_dataset_writes_what_the_other_commands_read(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "code.py").write_text("def add(left, right):\n    return left + right\n" * 20)
    (folder / "notes.md").write_text("words " * 200)
    path = tmp_path / "made.jsonl"
    lengths = ["--num_requests", "3", "--input_len", "16", "--output_len", "5"]
    made = run(
        "prepare-dataset", "--output", path, "text", "--folder", folder, "--glob", "*.py", *lengths
    )
    assert made.exit_code == 0, made.output
    ran("throughput", "--dataset", path)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(entry["input_ids"]) for entry in entries] == [16] * 3


def test_random_token_ids_stay_within_the_vocabulary() -> None:
    lengths = [
        "--num-requests",
        "4",
        "--input-mean",
        "500",
        "--output-mean",
        "8",
        "--output-stdev",
        "2",
    ]
    result = ran("prepare-dataset", "--random-seed", 3, "token-norm-dist", *lengths)
    tokens = [
        token for line in result.output.splitlines() for token in json.loads(line)["input_ids"]
    ]
    assert len(tokens) == 2000 and 0 <= min(tokens) < 20 and 2000 < max(tokens) < 2048
    assert (
        run("prepare-dataset", "--random-seed", 3, "token-norm-dist", *lengths).output
        == result.output
    )


def test_text_prompts_need_exactly_one_source() -> None:
    lengths = ["--num_requests", "3", "--input_len", "16", "--output_len", "5"]
    result = run("prepare-dataset", "text", *lengths)
    assert result.exit_code == 1 and "either --folder FOLDER or --heldout" in result.output


BOUNDS = {"input-min": 3, "input-max": 5, "output-min": 7, "output-max": 7}
UNIFORM = ["--num-requests=20", *(f"--{name}={value}" for name, value in BOUNDS.items())]


def test_uniform_lengths_are_within_their_bounds_and_repeat_with_the_seed() -> None:
    result = ran("prepare-dataset", "--random-seed", 3, "token-unif-dist", *UNIFORM)
    entries = [json.loads(line) for line in result.output.splitlines()]
    assert {len(entry["input_ids"]) for entry in entries} == {3, 4, 5}
    assert [entry["output_tokens"] for entry in entries] == [7] * 20
    again = run("prepare-dataset", "--random-seed", 3, "token-unif-dist", *UNIFORM)
    assert again.output == result.output


def test_a_uniform_distribution_with_its_bounds_exchanged_is_refused() -> None:
    options = [*UNIFORM, "--input-max=2"]
    result = run("prepare-dataset", "token-unif-dist", *options)
    assert result.exit_code == 1 and "--input-min 3 exceeds --input-max 2" in result.output


def test_a_data_set_that_would_be_downloaded_is_refused_with_the_reason() -> None:
    options = ["--dataset-name", "x", "--dataset-split", "test", "--num-requests", 3]
    result = run("prepare-dataset", "real-dataset", *options)
    assert result.exit_code == 1
    assert "data sets are not downloaded" in result.output and "text --folder" in result.output


def test_lora_task_ids_are_refused_unless_they_mean_none() -> None:
    ran("prepare-dataset", "--task-id", -1, "token-unif-dist", *UNIFORM)
    result = run("prepare-dataset", "--task-id", 2, "token-unif-dist", *UNIFORM)
    assert result.exit_code == 1 and "accepted: None or -1" in result.output


# `tllm-bench serve` against our own server, over an LLM with known answers.


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    with hosted(llm) as url:
        yield f"{url}/v1"


def bench_serve_run(url: str, *options: object) -> Result:
    arguments = ["serve", "--base_url", url, "--quiet", *map(str, options)]
    return CliRunner().invoke(main, arguments)


def test_a_sweep_reports_every_load(url: str, llm: FakeLLM, dataset: Path, tmp_path: Path) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    llm.prompts.clear()
    result = bench_serve_run(
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
    result = bench_serve_run(url, "--dataset", dataset, "--num_requests", 1, "--sampling", sampling)
    assert {params.temperature for params in llm.sampling} == {temperature}
    header, *_, row = (re.split(r"  +", line.strip()) for line in result.output.splitlines())
    assert dict(zip(header, row, strict=False))["temperature"] == shown


def test_reports_of_other_servers_are_drawn_too(url: str, dataset: Path, tmp_path: Path) -> None:
    report, plot = tmp_path / "plain.json", tmp_path / "both.svg"
    assert bench_serve_run(url, "--dataset", dataset, "--report_json", report).exit_code == 0
    assert json.loads(report.read_text())["label"] == "plain"
    again = ["--dataset", dataset, "--plot_reports", report]
    result = bench_serve_run(url, *again, "--label", "eagle", "--plot", plot)
    assert result.exit_code == 0, result.output
    assert re.findall(r"<!-- (plain|eagle) -->", plot.read_text()) == ["plain", "eagle"]
    result = bench_serve_run(url, *again, "--label", "plain", "--plot", plot)
    assert result.exit_code == 1 and "label = 'plain'" in result.output
    result = bench_serve_run(url, *again)
    assert result.exit_code == 1 and "plot_reports is refused without --plot" in result.output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"label": "x", "loads": [{"load": 1}]}'])
def test_a_file_that_is_no_report_is_refused_before_the_load(
    url: str, llm: FakeLLM, dataset: Path, tmp_path: Path, text: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)
    llm.prompts.clear()
    result = bench_serve_run(
        url, "--dataset", dataset, "--plot", tmp_path / "x.png", "--plot_reports", other
    )
    assert result.exit_code == 1 and "is no --report_json file of tllm-bench serve" in result.output
    assert not llm.prompts


def test_requests_arrive_at_the_rate(url: str, dataset: Path) -> None:
    result = bench_serve_run(
        url, "--dataset", dataset, "--request_rate", "200", "--burstiness", "0.5"
    )
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
    async def bench_serve_run() -> list[Any]:
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

    assert asyncio.run(asyncio.wait_for(bench_serve_run(), SECONDS)) == [
        {"number": 1},
        {"number": 2},
    ]


def test_a_failed_request_is_counted_and_ends_with_status_1(url: str, tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    lines = [{"task_id": 0, "prompt": text, "output_tokens": 3} for text in ("a", FAILING_PROMPT)]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = bench_serve_run(url, "--dataset", dataset)
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
    result = bench_serve_run(url, "--dataset", dataset, *options)
    assert result.exit_code in (1, 2) and sentence in result.output


def test_no_server_is_a_sentence(dataset: Path) -> None:
    result = bench_serve_run("http://127.0.0.1:9/v1", "--dataset", dataset)
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
