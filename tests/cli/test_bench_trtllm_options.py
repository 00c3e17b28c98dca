"""Options of trtllm-bench: those without a counterpart are refused, the others keep their
meaning."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.bench_command import run, write_yaml
from tests.cli.fake_llm import FakeLLM
from tllm_spec.cli.bench import main

pytestmark = pytest.mark.usefixtures("fake_llm")


def test_harmless_values_are_accepted(dataset: Path) -> None:
    options = "--tp 1 --pp 1 --ep 1 --beam_width 1 --backend pytorch --kv-cache-dtype auto"
    result = run("throughput", "--dataset", dataset, *options.split())
    assert result.exit_code == 0, result.output


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
    assert run("latency", "--dataset", dataset, "--concurrency", 1).exit_code == 0
    assert FakeLLM.made[0].max_under_way == 1
    result = run("latency", "--dataset", dataset, "--concurrency", 4)
    assert result.exit_code == 2 and "one request after another" in result.output


def test_w_is_the_number_of_warm_up_requests(dataset: Path) -> None:
    assert run("throughput", "--dataset", dataset, "-w", 3).exit_code == 0
    assert len(FakeLLM.made[0].sampling) == 3 + 4


def test_options_may_be_spelled_with_dashes(dataset: Path) -> None:
    assert run("throughput", "--dataset", dataset, "--max-batch-size", 8).exit_code == 0
    assert FakeLLM.made[0].args.max_batch_size == 8
