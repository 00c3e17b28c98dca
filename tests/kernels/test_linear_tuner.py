"""The table of GEMM algorithms and its file, and the search for the fastest with a fake library and
a fake clock. test_tuned_linear.py runs it on a device."""

import logging
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from tllm_spec.kernels.gemm import tuned_linear as linear_tuner
from tllm_spec.kernels.gemm.cublas_lt import Sizes
from tllm_spec.kernels.gemm.tuned_linear import (
    GemmGroup,
    LinearTable,
    Search,
    key_of,
    read_table,
    rows_class,
    table_path,
    tune_missing,
    write_table,
)

KEY = "32x4096x6144 bfloat16"
SLOW = "48x4096x6144 bfloat16"
ALGORITHM = bytes(range(64))


def test_a_class_of_rows_ends_at_a_power_of_two_or_halfway_and_in_steps_of_64_up_to_512() -> None:
    ends = sorted({rows_class(rows) for rows in range(1, 8193)})
    assert ends[:8] == [16, 24, 32, 48, 64, 96, 128, 192] and ends[-2:] == [6144, 8192]
    assert ends[8:14] == [256, 320, 384, 448, 512, 768]
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


NO_LIBRARY: Any = None
WEIGHTS = [torch.zeros(48, 64) for _ in range(2)]
# Microseconds of proposals and variants.
TIMES = {
    b"slow": 50.0,
    b"middle": 40.0,
    b"best": 30.0,
    b"slow+": 60.0,
    b"middle+": 20.0,
    b"best+": 35.0,
}


class FakePlan:
    """A split of K makes a variant, clusters do not. Algorithms in `refused` fail when they run."""

    refused: frozenset[bytes] = frozenset()

    def __init__(self, lt: object, sizes: Sizes) -> None:
        self.sizes = sizes

    def algorithms(self, most: int) -> list[bytes]:
        return [b"slow", b"middle", b"best"]

    def variant(self, algorithm: bytes, splits: int, cluster: tuple[int, int]) -> bytes | None:
        return {1: None, 2: algorithm + b"+"}[splits]

    def run(self, algorithm: bytes, x: object, weight: object, output: object) -> bytes:
        if algorithm in self.refused:
            raise RuntimeError("cublasLtMatmul: cublasStatus_t 15")
        return algorithm


class Clocked:
    """Records what is timed; torch takes `torch_time`."""

    def __init__(self) -> None:
        self.torch_time = 25.0
        self.timed: list[bytes | None] = []

    def __call__(self, search: Search, calls: list[Any]) -> list[float]:
        ran = [call(WEIGHTS[0]) for call in calls]
        self.timed += [what if isinstance(what, bytes) else None for what in ran]
        return [TIMES[what] if isinstance(what, bytes) else self.torch_time for what in ran]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    clocked = Clocked()
    monkeypatch.setattr(linear_tuner, "Plan", FakePlan)
    monkeypatch.setattr(linear_tuner, "HEAT", 50)
    monkeypatch.setattr(Search, "microseconds", lambda search, calls: clocked(search, calls))
    return clocked


def key(rows: int, *, adds: bool = False) -> Any:
    return key_of(Sizes(rows, 64, 48, 64, 48, torch.float32, adds=adds))


def fastest(rows: int) -> bytes | None:
    table = LinearTable()
    tune_missing(table, NO_LIBRARY, [GemmGroup(WEIGHTS, False)], [rows])
    return table[key(rows)]


@pytest.mark.parametrize(
    ("rows", "torch_time", "expected"),
    [
        (64, 25.0, b"middle+"),
        (64, 20.1, None),
        (64, 19.0, None),
        (1024, 50.0, b"best"),
        (1024, 29.0, None),
    ],
)
def test_the_fastest_proposal_or_variant_is_chosen_if_it_beats_torch(
    rows: int, torch_time: float, expected: bytes | None, clocked: Clocked
) -> None:
    clocked.torch_time = torch_time
    assert fastest(rows) == expected


def test_an_algorithm_that_fails_when_it_runs_is_not_chosen(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePlan, "refused", frozenset({b"middle+", b"slow"}))
    clocked.torch_time = 31.0
    assert fastest(64) == b"best"
    monkeypatch.setattr(FakePlan, "refused", frozenset(TIMES))
    assert fastest(64) is None


def test_only_variants_of_the_fastest_proposals_are_tried(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tuner, "VARIED", 1)
    assert fastest(64) is None
    assert b"best+" in clocked.timed and b"middle+" not in clocked.timed


def test_finalists_and_torch_are_timed_alternately(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tuner, "FINALISTS", 2)
    fastest(64)
    assert clocked.timed[-15:] == [None, b"middle+", b"best"] * 5


def test_each_form_is_measured_once_per_class_of_rows_largest_first(clocked: Clocked) -> None:
    groups = [GemmGroup(WEIGHTS, False), GemmGroup(WEIGHTS, True)]
    table = LinearTable()
    assert tune_missing(table, NO_LIBRARY, groups, [1, 8, 12, 9, 40, 36, 300]) == 6
    found = {str(key(rows, adds=adds)) for rows in (16, 48, 320) for adds in (False, True)}
    assert table.keys() == found
    assert [name.split("x")[0] for name in table] == ["320", "320", "48", "48", "16", "16"]
    assert tune_missing(table, NO_LIBRARY, groups, [48, 13, 65]) == 2  # of 65 to 96 rows


def test_the_largest_number_of_rows_is_measured_for_its_class(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Sizes] = []
    monkeypatch.setattr(
        linear_tuner, "Plan", lambda lt, sizes: (planned.append(sizes), FakePlan(lt, sizes))[1]
    )
    tune_missing(LinearTable(), NO_LIBRARY, [GemmGroup(WEIGHTS, True)], [33, 40, 36])
    assert planned == [Sizes(40, 64, 48, 64, 48, torch.float32, adds=True)]


def test_logits_of_a_whole_prompt_are_not_measured(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tuner, "MAX_OUTPUT_BYTES", 100 * 48 * 4)
    table = LinearTable()
    assert tune_missing(table, NO_LIBRARY, [GemmGroup(WEIGHTS, False)], [100, 200]) == 1
    assert key(100) in table and key(200) not in table


def test_weights_are_used_round_robin(monkeypatch: pytest.MonkeyPatch, clocked: Clocked) -> None:
    seen: list[int] = []
    search = Search(NO_LIBRARY, GemmGroup(WEIGHTS, False).sizes(16), WEIGHTS)
    monkeypatch.setattr(search, "_torch", lambda weight: seen.append(weight.data_ptr()))
    search.heat(0.0)
    search.heat(0.0)
    search.heat(0.0)
    first, second = (weight.data_ptr() for weight in WEIGHTS)
    assert seen == [first, second, first]
