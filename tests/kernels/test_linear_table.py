"""The table of GEMM algorithms: classes of rows, and the file on disk."""

import logging
import stat
from pathlib import Path

import pytest

from tllm_spec.kernels.gemm.tuned_linear import (
    read_table,
    rows_class,
    table_path,
    write_table,
)

KEY = "32x4096x6144 bfloat16"
SLOW = "48x4096x6144 bfloat16"
ALGORITHM = bytes(range(64))


def test_a_class_of_rows_ends_at_a_power_of_two_or_halfway_to_the_next() -> None:
    ends = sorted({rows_class(rows) for rows in range(1, 8193)})
    assert ends[:8] == [16, 24, 32, 48, 64, 96, 128, 192] and ends[-2:] == [6144, 8192]
    for rows in range(1, 2000):
        assert rows_class(rows) == next(end for end in ends if end >= rows)


def test_a_table_is_read_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    write_table(path, {KEY: ALGORITHM, SLOW: None})
    # Of the second torch's choice is as fast.
    assert read_table(path, 64) == {KEY: ALGORITHM, SLOW: None}
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"format": 2, "choi',
        "[]",
        '{"format": 2}',
        '{"format": 1, "choices": {}}',
        '{"format": 2, "choices": {"a": "zz"}}',
        '{"format": 2, "choices": {"a": 5}}',
        '{"format": 2, "choices": {"a": "00ff"}}',
        "\udcff",
    ],
    ids=["empty", "cut", "list", "no choices", "format", "no hex", "number", "length", "no text"],
)
def test_a_damaged_file_is_logged_and_replaced(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert read_table(path, 64) == {}
    assert str(path) in caplog.text
    write_table(path, {KEY: ALGORITHM})
    assert read_table(path, 64)[KEY] == ALGORITHM


def test_without_a_file_the_table_is_empty_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_table(tmp_path / "table.json", 64) == {}
    assert not caplog.records


def test_a_file_that_cannot_be_written_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    write_table(tmp_path / "file" / "table.json", {})
    assert "measures again" in caplog.text


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    write_table(path, {KEY: ALGORITHM})

    def write_some(path: Path, content: bytes) -> int:
        path.write_text("some")
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", write_some)
    write_table(path, {SLOW: ALGORITHM})
    assert read_table(path, 64) == {KEY: ALGORITHM}
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_the_file_is_named_by_device_and_versions(tmp_path: Path) -> None:
    path = table_path(tmp_path, "NVIDIA H200 / x", 130100, "2.11.0+cu130")
    assert path == tmp_path / "linear-NVIDIA_H200_x-cublasLt130100-torch2.11.0+cu130.json"


def test_the_file_has_the_default_permissions(tmp_path: Path) -> None:
    """Users of a machine may share the folder; a temporary file is private to its owner."""
    (tmp_path / "other").touch()
    write_table(tmp_path / "table.json", {})
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert len(modes) == 1
