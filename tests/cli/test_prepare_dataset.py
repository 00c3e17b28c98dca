"""`tllm-bench prepare-dataset` from its command line."""

import json
from pathlib import Path

import pytest

from tests.cli.bench_command import run


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
    assert run("throughput", "--dataset", path).exit_code == 0
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
    result = run("prepare-dataset", "--random-seed", 3, "token-norm-dist", *lengths)
    assert result.exit_code == 0, result.output
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
    result = run("prepare-dataset", "--random-seed", 3, "token-unif-dist", *UNIFORM)
    assert result.exit_code == 0, result.output
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
    assert run("prepare-dataset", "--task-id", -1, "token-unif-dist", *UNIFORM).exit_code == 0
    result = run("prepare-dataset", "--task-id", 2, "token-unif-dist", *UNIFORM)
    assert result.exit_code == 1 and "accepted: None or -1" in result.output
