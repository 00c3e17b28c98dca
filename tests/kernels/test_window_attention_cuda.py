"""The CUDA kernel of window attention: layouts of launches and compilation; on a CUDA device
(`-m gpu`) its results against the formula in float64 and the plain-torch reference."""

import ctypes
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.window_problem import TOLERANCE, Case, Problem
from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.attention import window_attention_cuda as module
from tllm_spec.kernels.attention.kv_codes import CODES, KVScales
from tllm_spec.kernels.attention.window_attention_cuda import (
    PROCESSOR_BYTES,
    RESERVED_BYTES,
    Layout,
    Source,
    WindowSizes,
    layout_of,
    programs_of,
    serves,
    shared_bytes,
)
from tllm_spec.kernels.attention.window_splits import (
    MAX_LONG_SPLITS,
    MAX_PARTIAL_ROWS,
    MIN_KEYS_PER_LONG_SPLIT,
)

PROCESSORS = 132
OF_8B = WindowSizes(batch=1, window=4, group=4, kv_heads=8, head_dim=128, max_len=2560)


def layout(windows: WindowSizes, max_partial_rows: int = MAX_PARTIAL_ROWS) -> Layout:
    found = layout_of(windows, PROCESSORS, max_partial_rows)
    assert found is not None
    return found


def all_windows() -> list[WindowSizes]:
    sizes = itertools.product(
        (1, 3, 8, 17, 64, 200),
        (1, 4, 8, 16),
        (1, 2, 4, 7, 8),
        (1, 2, 8),
        (64, 128),
        (64, 4096),
        (False, True),
    )
    return [
        windows
        for windows in itertools.starmap(WindowSizes, sizes)
        if windows.window * windows.group <= 32
    ]


def test_every_layout_fits_a_multiprocessor_and_its_rings_hold_the_sums() -> None:
    for windows in all_windows():
        found = layout(windows)
        cluster = found.splits if found.in_clusters else 1
        program = found.program
        shared = shared_bytes(windows, cluster, program.warps, program.depth)
        assert (shared + RESERVED_BYTES) * program.ctas <= PROCESSOR_BYTES
        ring = program.depth * windows.tile_bytes  # of a warp
        assert ring >= 4 * 16 * windows.row_tiles * (windows.head_dim + 8)
        registers = 128 if windows.row_tiles == 1 else 256
        assert program.ctas * program.warps * 32 * registers <= 65536
        assert program in programs_of(windows)
        # The bits of a tree are stored where the warps' highest scores come later.
        assert 8 * windows.window <= 4 * program.warps * 16 * windows.row_tiles


def test_clusters_are_as_large_as_fit_on_the_device_at_once() -> None:
    splits = {batch: layout(replace(OF_8B, batch=batch)).splits for batch in (1, 2, 3, 4, 8, 9, 16)}
    assert splits == {1: 8, 2: 4, 3: 4, 4: 2, 8: 2, 9: 1, 16: 1}
    assert layout(replace(OF_8B, max_len=200)).splits == 4  # more would have no keys


def test_many_tiles_leave_as_few_cta_slots_empty_as_possible() -> None:
    ctas = {
        batch: layout(replace(OF_8B, batch=batch)).program.ctas
        for batch in (17, 32, 48, 64, 72, 128)
    }
    assert ctas == {17: 2, 32: 2, 48: 3, 64: 4, 72: 3, 128: 4}
    assert layout(replace(OF_8B, batch=64, window=8)).program.ctas == 2  # twice the registers


def test_with_many_tiles_only_long_requests_are_split_if_the_workspace_has_room() -> None:
    many = replace(OF_8B, batch=64)
    assert layout(replace(many, max_len=2 * MIN_KEYS_PER_LONG_SPLIT)).in_clusters
    longer = layout(replace(many, max_len=2 * MIN_KEYS_PER_LONG_SPLIT + 1))
    assert not longer.in_clusters and longer.splits == 2
    assert layout(replace(many, max_len=1 << 17)).splits == MAX_LONG_SPLITS
    num_rows = 64 * 4 * 32
    assert layout(replace(many, max_len=1 << 17), 3 * num_rows).splits == 3
    assert layout(replace(many, max_len=1 << 17), num_rows).in_clusters


def test_unsupported_and_slower_shapes_use_the_triton_kernel() -> None:
    refused = [
        replace(OF_8B, window=17, group=1),
        replace(OF_8B, window=9),  # 36 rows
        replace(OF_8B, kv_heads=2, max_len=8192),  # 16 CTAs for long requests
    ]
    assert [layout_of(windows, PROCESSORS, MAX_PARTIAL_ROWS) for windows in refused] == [None] * 3
    assert (
        layout_of(replace(OF_8B, kv_heads=2, max_len=4096), PROCESSORS, MAX_PARTIAL_ROWS)
        is not None
    )
    problem = Problem(Case((20,), 1, 1, 128, 16, dtype=torch.bfloat16))
    assert not serves(problem.qkv, problem.cos_sin, None, problem.layer)  # on a CPU


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16, "in_tree": True, "has_codes": True},
        {"dtype": torch.float16, "has_codes": True},
        {"dtype": torch.bfloat16, "in_tree": True, "has_sinks": True},
        {"dtype": torch.bfloat16, "has_codes": True, "has_sinks": True},
    ],
    ids=[
        "bfloat16",
        "float16",
        "tree over codes",
        "codes and float16",
        "tree with sinks",
        "codes with sinks",
    ],
)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(("window", "head_dim"), [(4, 128), (8, 64)])
@pytest.mark.usefixtures("own_cache")
def test_the_source_compiles(
    window: int, head_dim: int, batch: int, architecture: str, variant: dict[str, Any]
) -> None:
    has_codes = variant.get("has_codes", False)
    sizes = {"window": window, "head_dim": head_dim, "has_codes": has_codes}
    windows = replace(OF_8B, batch=batch, **sizes)
    source = Source(**{"in_tree": False} | variant, head_dim=head_dim, row_tiles=windows.row_tiles)
    macros = source.macros(layout(windows).program)
    assert nvrtc.compile_source("window_attention.cu", architecture, macros).startswith(b"\x7fELF")


def test_the_kernels_argument_has_the_same_fields_in_python_and_cuda() -> None:
    source = Path(module.__file__).with_name("window_stream.cuh").read_text(encoding="utf-8")
    (declared,) = re.findall(r"struct Windows {\n(.*?)\n\n", source, re.DOTALL)
    types = {"i64": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}
    fields = []
    for line in declared.splitlines():
        found = re.match(r" *(?:const )?(\w+) ([^;]*);", line)
        assert found is not None
        for name in found[2].split(","):
            is_address = "*" in name
            fields.append((name.strip(" *"), ctypes.c_void_p if is_address else types[found[1]]))
    assert fields == list(module._Arguments._fields_)


SCALES = KVScales(0.013, 0.021)
BF16 = torch.bfloat16
CASES = {
    "lengths about a block": Case((1, 15, 16, 17, 33), 1, 4, 128, 16, dtype=torch.bfloat16),
    "window as long as the request": Case(
        (4, 5, 19, 20, 21, 300), 4, 4, 128, 32, spare_pages=2, dtype=torch.bfloat16
    ),
    "two tiles of rows": Case((8, 9, 70, 629), 8, 4, 128, 32, spare_pages=2, dtype=torch.bfloat16),
    "a group of seven": Case((4, 130, 515), 4, 7, 128, 64, dtype=torch.bfloat16),
    "sixteen tokens, heads of 64": Case((16, 31, 33, 400), 16, 2, 64, 16, dtype=torch.bfloat16),
    "padding": Case((5, 300), 4, 4, 128, 32, padding=(1, 3, 10**9), dtype=torch.bfloat16),
    "float16": Case((3, 64, 257), 3, 4, 64, 128, dtype=torch.float16),
    "codes": Case((15, 16, 33, 300), 4, 4, 128, 16, dtype=torch.bfloat16, scales=SCALES),
    "codes, two tiles of rows": Case(
        (8, 40, 129), 8, 4, 64, 32, dtype=torch.bfloat16, scales=SCALES
    ),
    "codes and float16": Case((3, 64, 257), 3, 4, 128, 64, dtype=torch.float16, scales=SCALES),
    "codes and padding": Case(
        (5, 300), 4, 7, 64, 32, padding=(1, 3, 10**9), dtype=torch.float16, scales=SCALES
    ),
    "sinks": Case((4, 15, 17, 300), 4, 8, 64, 16, dtype=BF16, has_sinks=True),
    "sinks and codes": Case(
        (5, 300), 3, 4, 64, 32, padding=(1, 10**9), dtype=BF16, scales=SCALES, has_sinks=True
    ),
}
# For the two KV heads of a case: clusters of 8, 2 and 1 CTAs, and the layout for many tiles.
on_devices_of_all_sizes = pytest.mark.parametrize("num_processors", [132, 30, 14, 1])


class CudaProblem(Problem):
    """Laid out as on a device of `num_processors` multiprocessors."""

    def __init__(self, case: Case, num_processors: int, seed: int = 0) -> None:
        super().__init__(case, "cuda", seed)
        self.own_workspace = replace(super().workspace(), num_processors=num_processors)
        assert serves(self.qkv, self.cos_sin, None, self.layer)

    def attend(self, workspace: object = None) -> torch.Tensor:
        return super().attend(self.own_workspace)


@pytest.mark.gpu
@on_devices_of_all_sizes
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("name", CASES)
def test_norm_rotation_kv_writes_and_attention_equal_the_reference(
    name: str, normed: bool, num_processors: int
) -> None:
    problem, reference = CudaProblem(CASES[name], num_processors), Problem(CASES[name], "cuda")
    for each in (problem, reference):
        each.rotate(normed=normed)
    output, expected = problem.attend(), reference.attend_plainly()
    real, tolerance = len(problem.kv), TOLERANCE[CASES[name].dtype]
    assert output.isfinite().all()
    torch.testing.assert_close(
        output[:real], expected[:real], rtol=2 * tolerance, atol=2 * tolerance
    )
    pool, written = reference.layer[:, 1:], problem.layer[:, 1:]  # page 0 is padding's
    if problem.layer.dtype == CODES:  # a key that was rounded differently may have the next code
        written, pool, tolerance = written.float(), pool.float(), 1 / 7
        assert (written != pool).logical_and(~pool.isnan()).sum() <= 0.02 * pool.numel()
    torch.testing.assert_close(written, pool, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.gpu
@on_devices_of_all_sizes
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_formula(name: str, num_processors: int) -> None:
    problem = CudaProblem(CASES[name], num_processors)
    problem.check(problem.attend())


@pytest.mark.gpu
@on_devices_of_all_sizes
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].window > 1])
def test_a_row_has_the_same_bits_wherever_its_window_begins(name: str, num_processors: int) -> None:
    """So drafts, which make windows longer, do not change the order of a row's sums. With other
    lengths a longer window might have one split less."""
    own = CASES[name]
    lengths = tuple(max(own.window, length) for length in (7, 17, 40, 305))
    case = replace(own, padding=(), kv_lens=lengths)
    expected = CudaProblem(case, num_processors).attend()
    for count in range(1, case.window):
        problem = CudaProblem(case, num_processors)
        problem.keep_last([count] * len(case.kv_lens))
        found = problem.attend()[0]
        assert torch.equal(found, expected[:, case.window - count :].flatten(0, 1))


@pytest.mark.gpu
def test_cos_sin_and_weights_of_another_type_use_the_triton_kernel() -> None:
    problem = CudaProblem(CASES["padding"], 132)
    wide = problem.cos_sin.float()
    assert not serves(problem.qkv, wide, None, problem.layer)
    assert not serves(problem.qkv, problem.cos_sin, wide, problem.layer)
    problem.cos_sin = wide
    problem.check(problem.attend())


@pytest.mark.gpu
def test_long_requests_are_split_in_a_batch_with_short_ones() -> None:
    case = Case((5000, 2, 300, 4099, 9000), 2, 4, 128, 64, kv_heads=1, dtype=torch.bfloat16)
    problem = CudaProblem(case, num_processors=1)
    windows = replace(
        OF_8B, batch=5, window=2, kv_heads=1, max_len=problem.tables.block_tables.shape[1] * 64
    )
    found = layout_of(windows, 1, MAX_PARTIAL_ROWS)
    assert found is not None and found.splits == 4 and not found.in_clusters
    problem.check(problem.attend())


@pytest.mark.gpu
@on_devices_of_all_sizes
def test_keys_of_padding_rows_are_masked_and_older_keys_at_their_positions_are_not(
    num_processors: int,
) -> None:
    case = Case((5, 6, 140, 300), 5, 3, 128, 16, dtype=torch.bfloat16)
    problem = CudaProblem(case, num_processors)
    problem.pad([0, 3, 5, 2])  # a window of padding only attends to the pool
    problem.check_real_rows(problem.attend())


@pytest.mark.gpu
@on_devices_of_all_sizes
def test_nan_in_one_request_does_not_reach_the_others(num_processors: int) -> None:
    problem = CudaProblem(Case((70, 70, 270), 2, 2, 128, 16, dtype=torch.bfloat16), num_processors)
    before = problem.attend()
    problem.layer[:, problem.tables.block_tables[1, 1].item()] = torch.nan
    after = problem.attend()
    assert after[1].isnan().all()
    assert torch.equal(after[::2], before[::2])


@pytest.mark.gpu
@on_devices_of_all_sizes
@pytest.mark.parametrize("name", ["window as long as the request", "two tiles of rows"])
def test_a_captured_launch_can_be_replayed_with_other_lengths_tables_and_rows(
    name: str, num_processors: int
) -> None:
    case = CASES[name]
    captured = CudaProblem(case, num_processors)
    graph, output = captured_graph(lambda: captured.attend())
    for seed in (1, 2):
        kv_lens = case.kv_lens[seed:] + case.kv_lens[:seed]
        other = CudaProblem(replace(case, kv_lens=kv_lens), num_processors, seed)
        copy_all(captured.inputs(), other.inputs())
        graph.replay()
        other.check(output)


ROW_COUNTS = {
    "one tile of rows": (Case((4, 16, 33, 70, 300), 4, 4, 128, 16, dtype=torch.bfloat16), 3),
    "two tiles of rows": (Case((8, 300, 90), 8, 4, 128, 32, dtype=torch.bfloat16), 5),
    "heads of 64": (Case((9, 700, 40), 7, 2, 64, 64, dtype=torch.float16), 4),
    "codes": (Case((5, 500, 60), 4, 4, 128, 16, dtype=torch.float16, scales=SCALES), 3),
    "splits": (Case((5000, 9, 4500), 4, 4, 128, 64, kv_heads=1, dtype=torch.bfloat16), 3),
}


@pytest.mark.gpu
@on_devices_of_all_sizes
@pytest.mark.parametrize("name", ROW_COUNTS)
def test_requests_with_different_numbers_of_rows_equal_the_formula(
    name: str, num_processors: int
) -> None:
    case, step = ROW_COUNTS[name]
    problem = CudaProblem(case, num_processors)
    counts = [1 + step * request % case.window for request in range(len(case.kv_lens))]
    problem.keep_last(counts)
    problem.check_last(problem.attend(), counts)
