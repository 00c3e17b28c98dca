"""Data sets of tllm-bench: read, checked, generated and written."""

import io
import json
from pathlib import Path

import pytest

from tests.cli.bench_command import run
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
