"""tllm-bench's throughput, latency and compare commands, with an engine whose tokens and times are
known."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.bench_command import ngram, ran, run, write_yaml
from tests.cli.fake_llm import FAILING_TOKEN, WRONG_DRAFT_LEN, FakeLLM
from tllm_spec.cli.bench import main

pytestmark = pytest.mark.usefixtures("fake_llm")

COMMANDS = [
    "throughput",
    "latency",
    "compare",
    "break-even",
    "prepare-dataset text",
    "prepare-dataset token-norm-dist",
    "prepare-dataset token-unif-dist",
]


@pytest.mark.parametrize("command", [*COMMANDS, "prepare-dataset", "adaptive-replay"])
def test_the_help_of_a_command_needs_no_model(command: str) -> None:
    for arguments in (
        [*command.split(), "--help"],
        ["-m", "zoo:llama", *command.split(), "--help"],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0 and result.output.startswith(f"Usage: main {command} "), (
            result.output
        )


def test_the_list_of_commands_has_whole_sentences() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    commands = " ".join(output.partition("Commands:")[2].split())
    assert "..." not in commands
    assert "compare Run the same requests through several YAML files of LLM arguments." in commands


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("options", ["", "--no_such_option 1", "--model_path zoo:llama"])
def test_a_missing_model_is_reported_before_other_mistakes(command: str, options: str) -> None:
    before, after = (options.split(), []) if "model" in options else ([], options.split())
    result = CliRunner().invoke(main, [*before, *command.split(), *after])
    assert (result.exit_code, FakeLLM.made) == (2, [])
    lines = result.output.splitlines()
    assert lines[0] == "Usage: main [OPTIONS] COMMAND [ARGS]..."
    place = f"It stands before the command: tllm-bench -m MODEL {command}"
    assert lines[-1] == f"Error: Missing option '--model' / '-m'. {place}"


def test_throughput_runs_the_warm_up_and_every_request_greedily_without_eos(dataset: Path) -> None:
    result = ran("throughput", "--dataset", dataset)
    (llm,) = FakeLLM.made
    assert len(llm.sampling) == 2 + 4 and llm.is_shut_down and not llm.num_streamed
    assert all(
        params.is_greedy and params.ignore_eos and params.max_tokens == 6 for params in llm.sampling
    )
    assert "== PERFORMANCE ==" in result.output and "STREAMING" not in result.output


def test_latency_streams_one_request_at_a_time_in_a_batch_of_one(dataset: Path) -> None:
    result = ran("latency", "--dataset", dataset, "--warmup", 0)
    (llm,) = FakeLLM.made
    assert llm.num_streamed == 4 and llm.args.max_batch_size == llm.max_under_way == 1
    assert "== STREAMING ==" in result.output


@pytest.mark.parametrize(("concurrency", "most"), [(-1, 4), (0, 4), (2, 2), (1, 1)])
def test_the_number_of_requests_in_flight_is_limited(
    dataset: Path, concurrency: int, most: int
) -> None:
    ran("throughput", "--dataset", dataset, "--concurrency", concurrency)
    assert FakeLLM.made[0].max_under_way == most


def test_options_reach_the_engine_and_the_yaml_file_takes_precedence(
    dataset: Path, tmp_path: Path
) -> None:
    text = "max_num_tokens: 512\nkv_cache_config: {enable_block_reuse: false}"
    flags = "--max_num_tokens 256 --max_batch_size 4 --max_seq_len 100 --max_input_len 50"
    more = "--enable_chunked_context --scheduler_policy max_utilization"
    more += " --kv_cache_free_gpu_mem_fraction 0.5"
    yaml = write_yaml(tmp_path, "x", text)
    ran("throughput", "--dataset", dataset, "--config", yaml, *flags.split(), *more.split())
    args = FakeLLM.made[0].args
    assert (args.max_num_tokens, args.max_batch_size, args.max_seq_len, args.max_input_len) == (
        512,
        4,
        100,
        50,
    )
    assert (
        args.kv_cache_config.free_gpu_memory_fraction == 0.5
        and not args.kv_cache_config.enable_block_reuse
    )
    assert args.enable_chunked_prefill
    assert args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION"


def test_memory_given_under_llms_own_name_is_not_that_of_an_engine_alone(dataset: Path) -> None:
    flags = "--kv_cache_config.free_gpu_memory_fraction", 0.25
    ran("throughput", "--dataset", dataset, *flags)
    assert FakeLLM.made[0].args.kv_cache_config.free_gpu_memory_fraction == 0.25


def test_sampler_options_replace_greedy_decoding_and_honour_eos(
    dataset: Path, tmp_path: Path
) -> None:
    sampler = write_yaml(tmp_path, "sampler", "{temperature: 0.8, top_p: 0.9}")
    ran("throughput", "--dataset", dataset, "--sampler_options", sampler, "--target_output_len", 3)
    params = FakeLLM.made[0].sampling[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.8, 0.9, 3)
    assert not params.ignore_eos and params.seed == 3, "the seed of a request is its task_id"


@pytest.mark.parametrize("number", ["5", "null"])
def test_sampler_options_cannot_set_max_tokens(dataset: Path, tmp_path: Path, number: str) -> None:
    sampler = write_yaml(tmp_path, "sampler", f"{{temperature: 0.8, max_tokens: {number}}}")
    result = run("throughput", "--dataset", dataset, "--sampler_options", sampler)
    assert (result.exit_code, FakeLLM.made) == (1, [])
    assert "max_tokens = " in result.output and "output_tokens of the data set" in result.output


def test_a_key_named_self_is_an_unknown_option(dataset: Path, tmp_path: Path) -> None:
    yaml = write_yaml(tmp_path, "x", "self: 1")
    for option in ("--config", "--sampler_options"):
        result = run("throughput", "--dataset", dataset, option, yaml)
        assert result.exit_code == 1 and "self = 1 is not a known option" in result.output


def test_min_tokens_is_compared_with_each_requests_own_length(
    dataset: Path, tmp_path: Path
) -> None:
    sampler = write_yaml(tmp_path, "sampler", "min_tokens: 40")
    options = ["--dataset", dataset, "--sampler_options", sampler]
    ran("throughput", *options, "--target_output_len", 64)
    assert FakeLLM.made[0].sampling[0].min_tokens == 40
    assert "min_tokens = 40 exceeds max_tokens = 6" in run("throughput", *options).output


@pytest.mark.parametrize("command", ["throughput", "latency", "compare"])
def test_an_output_that_does_not_fit_the_model_is_refused_before_anything_runs(
    dataset: Path, tmp_path: Path, command: str
) -> None:
    configs = [write_yaml(tmp_path, "plain", "{}")] if command == "compare" else []
    with dataset.open("a") as file:
        file.write('{"task_id": 7, "input_ids": [1, 2, 3, 4], "output_tokens": 6}\n')
    options = [command, *configs, "--dataset", dataset, "--warmup", 0, "--max_seq_len"]
    result = run(*options, 9)
    assert result.exit_code == 1 and not FakeLLM.calls
    assert (
        "task_id 7 is refused: its 4 prompt tokens and 6 output tokens exceed max_seq_len = 9"
        in result.output
    )
    ran(*options, 10)


def test_an_output_after_a_text_prompt_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"task_id": 7, "prompt": "four", "output_tokens": 6}\n')
    result = run("throughput", "--dataset", path, "--max_seq_len", 9)
    assert result.exit_code == 1
    assert "task_id 7 is refused: its 4 prompt tokens and 6 output tokens" in result.output
    ran("throughput", "--dataset", path, "--max_seq_len", 10)


def test_truncating_the_prompt_leaves_room_for_the_output(dataset: Path, tmp_path: Path) -> None:
    sampler = write_yaml(tmp_path, "sampler", "truncate_prompt_tokens: 2")
    options = ["--dataset", dataset, "--max_seq_len", 8]
    assert run("throughput", *options).exit_code == 1
    ran("throughput", *options, "--sampler_options", sampler)


def test_an_eos_id_ends_outputs(dataset: Path) -> None:
    ran("throughput", "--dataset", dataset, "--eos_id", 7)
    params = FakeLLM.made[0].sampling[0]
    assert params.end_id == 7 and not params.ignore_eos


def test_the_json_files_have_the_report_the_texts_and_the_requests(
    dataset: Path, tmp_path: Path
) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("report", "output", "request")}
    files = [str(part) for name, path in paths.items() for part in (f"--{name}_json", path)]
    ran("latency", "--dataset", dataset, "--config", ngram(tmp_path), "--num_requests", 3, *files)
    report, outputs, requests = (json.loads(path.read_text()) for path in paths.values())
    stats = report["decoding_stats"]
    assert (stats["mode"], stats["acceptance_length"], stats["draft_acceptance_rate"]) == (
        "NGram",
        2.5,
        0.5,
    )
    assert stats["per_position_acceptance"] == [1, 0.5, 0]
    assert report["request_info"]["num_requests"] == len(outputs) == len(requests) == 3
    assert outputs[0]["outputs"][0]["token_ids"] == list(range(6))
    assert (
        requests[0]["decoding_stats"]["num_drafted_tokens"] == 6 and requests[0]["ttft_ms"] == 500
    )


@pytest.mark.parametrize(("options", "expected"), [([], None), (["--streaming"], 500)])
def test_only_streamed_requests_have_a_time_to_first_token(
    dataset: Path, tmp_path: Path, options: list[str], expected: float | None
) -> None:
    path = tmp_path / "requests.json"
    ran("throughput", "--dataset", dataset, "--request_json", path, *options)
    records = json.loads(path.read_text())
    assert {(each["ttft_ms"], each["latency_ms"]) for each in records} == {(expected, 2000)}


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_the_iteration_log_has_every_round_after_the_warm_up(
    dataset: Path, tmp_path: Path, command: str
) -> None:
    log = tmp_path / "log.jsonl"
    ran(command, "--dataset", dataset, "--warmup", 2, "--iteration_log", log)
    rounds = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["iter"] for each in rounds] == [3, 4, 5, 6]


def test_without_an_iteration_log_no_statistics_are_collected(dataset: Path) -> None:
    ran("throughput", "--dataset", dataset)
    assert not FakeLLM.made[0].args.enable_iter_perf_stats


def test_draft_lengths_in_the_report_exclude_the_warm_up(dataset: Path, tmp_path: Path) -> None:
    text = "speculative_config: {decoding_type: NGram, max_draft_len: 3, adaptive: {}}"
    config, report = write_yaml(tmp_path, "adaptive", text), tmp_path / "report.json"
    ran("throughput", "--dataset", dataset, "--config", config, "--report_json", report)
    section = json.loads(report.read_text())["draft_lens"]
    assert section["draft_len_3"]["rounds"] == 4, "without the two warm-up requests"
    assert (
        section["draft_len_3"]["acceptance_length"] == 2
        and section["draft_len_3"]["round_ms"] is None
    )


def test_a_failed_request_ends_the_benchmark_with_its_message(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"task_id": 9, "input_ids": [{FAILING_TOKEN}], "output_tokens": 6}}\n')
    result = run("throughput", "--dataset", path, "--warmup", 0)
    assert result.exit_code == 1
    assert "1 of 1 requests failed; the first, task_id 9: the prompt is too long" in result.output


def test_a_mistake_in_the_yaml_is_one_sentence(dataset: Path, tmp_path: Path) -> None:
    result = run(
        "throughput",
        "--dataset",
        dataset,
        "--config",
        write_yaml(tmp_path, "x", "max_bach_size: 3"),
    )
    assert result.exit_code == 1 and "did you mean max_batch_size" in result.output
    assert "Traceback" not in result.output


def test_compare_alternates_the_engines_and_reverses_their_order_every_second_run(
    dataset: Path, tmp_path: Path
) -> None:
    configs = [write_yaml(tmp_path, "plain", "{}"), ngram(tmp_path)]
    result = ran(
        "compare", *configs, "--dataset", dataset, "--num_requests", 1, "--repeat", 2, "--warmup", 1
    )
    plain, drafted = FakeLLM.made
    assert FakeLLM.calls == [plain, drafted, drafted, plain, plain, drafted]
    assert plain.args.kv_cache_config.free_gpu_memory_fraction == 0.45, "the two share the memory"
    rows = [
        line.split() for line in result.output.splitlines() if line.startswith(("plain", "ngram"))
    ]
    assert [row[0] for row in rows] == ["plain", "ngram"]
    assert rows[0][4:] == ["1.00x", "2000.0", "-", "-", "-"] and rows[1][6:] == [
        "2.50",
        "0.50",
        "1.00",
        "0.50",
        "0.00",
    ]
    assert "the same 1 texts" in result.output


def test_compare_reports_the_position_of_each_difference_and_fails(
    dataset: Path, tmp_path: Path
) -> None:
    configs = [write_yaml(tmp_path, "plain", "{}"), ngram(tmp_path, "wrong", WRONG_DRAFT_LEN)]
    report = tmp_path / "report.json"
    result = run(
        "compare", *configs, "--dataset", dataset, "--num_requests", 2, "--report_json", report
    )
    assert result.exit_code == 1
    sentence = "output token 2 is -1, the baseline has 2"
    assert (
        f"wrong, concurrency 1, task_id 0: {sentence}" in result.output
        and f"wrong, concurrency 1, task_id 1: {sentence}" in result.output
    )
    assert len(json.loads(report.read_text())["differences"]) == 2
    ran("compare", *configs, "--dataset", dataset, "--allow_differences")


@pytest.mark.parametrize(
    ("repeat", "concurrency", "sentence"),
    [
        (1, "1", "No texts were compared: plain ran once. A second file or --repeat 2"),
        (1, "1,2", "No texts were compared: plain ran once at each concurrency. A second file or"),
        (2, "1", "plain gave the same 2 texts in every run."),
        (2, "1,2", "plain gave the same 2 texts in every run at each concurrency."),
    ],
)
def test_compare_says_of_one_configuration_whether_its_own_runs_were_compared(
    dataset: Path, tmp_path: Path, repeat: int, concurrency: str, sentence: str
) -> None:
    options = ["--dataset", dataset, "--num_requests", 2, "--repeat", repeat]
    plain = write_yaml(tmp_path, "plain", "{}")
    result = run("compare", plain, *options, "--concurrency", concurrency)
    assert (result.exit_code, result.output.splitlines()[-1].find(sentence)) == (0, 0)


def test_compare_prints_the_requested_number_of_texts(dataset: Path, tmp_path: Path) -> None:
    result = run(
        "compare", write_yaml(tmp_path, "plain", "{}"), "--dataset", dataset, "--show_text", 2
    )
    assert result.output.count("prompt of 3 tokens") == 2 and result.output.count("generated") == 2


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    dataset: Path, tmp_path: Path
) -> None:
    result = run(
        "throughput", "--dataset", dataset, "--report_json", tmp_path / "no" / "report.json"
    )
    assert (result.exit_code, FakeLLM.made) == (2, [])
    assert "Folder" in result.output and "does not exist" in result.output


def test_a_yaml_file_that_names_another_model_is_refused(dataset: Path, tmp_path: Path) -> None:
    other = write_yaml(tmp_path, "other", "model: zoo:llama-draft")
    result = run("throughput", "--dataset", dataset, "--config", other)
    assert (result.exit_code, FakeLLM.made) == (1, [])
    assert "model = 'zoo:llama-draft'" in result.output


def test_compare_says_how_close_another_model_is(dataset: Path, tmp_path: Path) -> None:
    """Its texts may differ; those of one model may not."""
    plain, wrong = write_yaml(tmp_path, "plain", "{}"), ngram(tmp_path, "wrong", WRONG_DRAFT_LEN)
    options = ["--dataset", dataset, "--num_requests", 2, "--with_model", "zoo:llama-draft"]
    report = tmp_path / "report.json"
    result = ran("compare", plain, ngram(tmp_path), *options, "--report_json", report)
    models = [llm.args.model for llm in FakeLLM.made]
    assert models == ["zoo:llama", "zoo:llama", "zoo:llama-draft", "zoo:llama-draft"]
    assert FakeLLM.made[0].args.kv_cache_config.free_gpu_memory_fraction == 0.9 / 4
    found = json.loads(report.read_text())
    assert [row["configuration"] for row in found["configurations"]] == [
        *("plain", "ngram", "plain (zoo:llama-draft)", "ngram (zoo:llama-draft)")
    ]
    assert [row["configuration"] for row in found["models"]] == ["plain", "plain (zoo:llama-draft)"]
    assert "equal tokens" in result.output and "100.0%" in result.output
    assert "the same 2 texts in every run with each model." in result.output
    assert run("compare", plain, wrong, *options).exit_code == 1
    result = run("compare", plain, "--dataset", dataset, "--with_model", "zoo:no")
    assert result.exit_code == 1 and "model 'zoo:no' is neither" in result.output


# Options of trtllm-bench: those without a counterpart are refused, the others keep their meaning.


def test_harmless_values_are_accepted(dataset: Path) -> None:
    options = "--tp 1 --pp 1 --ep 1 --beam_width 1 --backend pytorch --kv-cache-dtype auto"
    ran("throughput", "--dataset", dataset, *options.split())
    (llm,) = FakeLLM.made
    assert len(llm.sampling) == 2 + 4 and llm.is_shut_down


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--pp 2", "pipeline_parallel_size = 2 is refused"),
        ("--engine_dir x", "no compiled engines"),
        ("--modality image", "only text is served"),
        ("--medusa_choices x", "Medusa is not served"),
        ("--target_input_len 128", "prompts have those of the data set"),
    ],
)
@pytest.mark.parametrize("command", ["throughput", "latency", "compare"])
def test_other_values_are_refused_with_the_reason(
    dataset: Path, tmp_path: Path, command: str, option: str, reason: str
) -> None:
    configs = [write_yaml(tmp_path, "plain", "{}")] if command == "compare" else []
    result = run(command, *configs, "--dataset", dataset, *option.split())
    assert (result.exit_code, FakeLLM.made) == (1, [])
    assert reason in result.output


def test_refused_options_and_mistakes_in_the_yaml_are_in_one_message(
    dataset: Path, tmp_path: Path
) -> None:
    config = write_yaml(tmp_path, "x", "max_bach_size: 3")
    result = run("throughput", "--dataset", dataset, "--engine_dir", "x", "--config", config)
    assert "--engine_dir" in result.output and "did you mean max_batch_size" in result.output


def test_options_of_the_group_are_accepted_or_refused_too(dataset: Path) -> None:
    for options, exit_code in ((["-w", "/tmp"], 0), (["--revision", "v2"], 1)):
        arguments = ["-m", "zoo:llama", *options, "throughput", "--dataset", str(dataset)]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == exit_code, result.output
    assert "nothing is downloaded" in result.output


def test_latency_takes_no_concurrency_but_one(dataset: Path) -> None:
    ran("latency", "--dataset", dataset, "--concurrency", 1)
    assert FakeLLM.made[0].max_under_way == 1
    result = run("latency", "--dataset", dataset, "--concurrency", 4)
    assert result.exit_code == 2 and "one request after another" in result.output


def test_w_is_the_number_of_warm_up_requests(dataset: Path) -> None:
    ran("throughput", "--dataset", dataset, "-w", 3)
    assert len(FakeLLM.made[0].sampling) == 3 + 4


def test_options_may_be_spelled_with_dashes(dataset: Path) -> None:
    ran("throughput", "--dataset", dataset, "--max-batch-size", 8)
    assert FakeLLM.made[0].args.max_batch_size == 8
