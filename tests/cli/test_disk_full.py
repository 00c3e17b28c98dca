"""Reports and data sets on a full disk. `/dev/full` refuses every byte, as such a disk does."""

from pathlib import Path

import pytest

from tests.cli.bench_command import ngram, run

FULL = Path("/dev/full")
pytestmark = [
    pytest.mark.skipif(not FULL.exists(), reason=f"needs {FULL}"),
    pytest.mark.usefixtures("fake_llm"),
]
SENTENCE = f"Error: '{FULL}' was not written: No space left on device"
FILES = ("report_json", "output_json", "request_json", "iteration_log")


@pytest.mark.parametrize("name", FILES)
def test_a_report_that_cannot_be_written_is_an_error_after_the_results(
    dataset: Path, name: str
) -> None:
    result = run("throughput", "--dataset", dataset, f"--{name}", FULL)
    assert result.exit_code == 1
    assert result.output.rstrip().endswith(SENTENCE)
    assert "== ENGINE ==" in result.output, "results of a long run are on the console at least"


@pytest.mark.parametrize("name", ["report_json", "plot"])
def test_a_comparison_that_cannot_be_written_is_an_error(
    dataset: Path, tmp_path: Path, name: str
) -> None:
    full = tmp_path / "full.png"
    full.symlink_to(FULL)
    result = run("compare", ngram(tmp_path), "--dataset", dataset, f"--{name}", full)
    sentence = SENTENCE.replace(str(FULL), str(full))
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, sentence)


def test_a_data_set_that_cannot_be_written_is_an_error() -> None:
    lengths = ("--input-mean", 4, "--output-mean", 2, "--num-requests", 3)
    result = run("prepare-dataset", "--output", FULL, "token-norm-dist", *lengths)
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, SENTENCE)
