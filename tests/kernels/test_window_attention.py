"""Window attention against the formula in float64: the plain-torch reference here, the kernels
under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.window_problem import TOLERANCE, Case, Problem
from tllm_spec.kernels.attention.kv_codes import CODES, KVScales
from tllm_spec.kernels.attention.rotary_write import plain_write_kv
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.attention.window_attention import WindowCall, window_attention
from tllm_spec.kernels.attention.window_splits import (
    MAX_LONG_SPLITS,
    MAX_PARTIAL_ROWS,
    MAX_SPLITS,
    MIN_KEYS_PER_LONG_SPLIT,
    MIN_KEYS_PER_SPLIT,
    Splits,
    WindowWorkspace,
    is_wide,
    warps_of,
)
from tllm_spec.kernels.dispatch import has_kernels

BF16 = torch.bfloat16
CASES = {
    "lengths about a page": Case((1, 32, 33), 1, 4, 128, 32),
    "window as long as the request": Case((3, 15, 16, 17, 49), 3, 3, 80, 16, spare_pages=2),
    "one-token pages": Case((5, 6, 140), 5, 1, 16, 1, kv_heads=3),
    "padding": Case((8, 70), 8, 4, 32, 16, padding=(1, 7, 10**9)),
    "more rows than a tile": Case((9, 40), 8, 9, 16, 16, kv_heads=1),
    "splits": Case((1, 300, 64, 1029), 1, 3, 32, 16, num_programs=32, spare_pages=3),
    "splits of windows": Case(
        (5, 700), 5, 4, 16, 32, kv_heads=1, padding=(1, 10**9), num_programs=16
    ),
    "most splits empty": Case(
        (8, 130), 8, 1, 96, 128, kv_heads=1, num_programs=999, spare_pages=16
    ),
    "splits and two tiles": Case((200,), 8, 9, 80, 16, kv_heads=1, num_programs=12, spare_pages=60),
    "only the long one is split": Case((300, 5000, 1), 1, 2, 16, 32, kv_heads=1, spare_pages=2),
    "long ones of eight heads": Case((300, 5000), 2, 8, 16, 32, kv_heads=1, spare_pages=2),
    "splits of wide windows": Case(
        (40, 700), 16, 4, 16, 32, kv_heads=1, num_programs=24, spare_pages=2
    ),
    "bfloat16": Case((1, 17, 90), 1, 4, 128, 16, dtype=torch.bfloat16),
    "bfloat16, splits": Case(
        (3, 600), 3, 2, 64, 32, padding=(2,), num_programs=32, dtype=torch.bfloat16
    ),
    "bfloat16, heads of 96": Case(
        (3, 600), 3, 2, 96, 32, padding=(2,), num_programs=32, dtype=torch.bfloat16
    ),
    "bfloat16, heads of 512": Case((3, 300), 3, 2, 512, 32, num_programs=32, dtype=torch.bfloat16),
    "bfloat16, heads of 512 in a full tile": Case((9, 70), 8, 8, 512, 16, kv_heads=1, dtype=BF16),
    "float16": Case((8, 33), 8, 4, 32, 1, num_programs=64, spare_pages=500, dtype=torch.float16),
    "a sliding window": Case((1, 16, 17, 40, 48), 1, 3, 16, 4, span=KeySpan(16, slides=True)),
    "windows longer than the sliding window": Case(
        (16, 31), 16, 8, 16, 16, kv_heads=1, span=KeySpan(5, slides=True)
    ),
    "splits of a sliding window": Case(
        (5, 702, 1030),
        5,
        4,
        16,
        32,
        kv_heads=1,
        padding=(1, 10**9),
        num_programs=24,
        span=KeySpan(600, slides=True),
    ),
    "chunks": Case((1, 16, 17, 40, 48), 1, 3, 16, 4, span=KeySpan(16, slides=False)),
    "windows over a border of chunks": Case(
        (8, 12, 19, 23, 50), 8, 2, 16, 4, span=KeySpan(15, slides=False)
    ),
    "a window over several chunks": Case(
        (16, 31), 16, 8, 16, 16, kv_heads=1, span=KeySpan(5, slides=False)
    ),
    "splits of a chunk": Case(
        (5, 702, 1030),
        5,
        4,
        16,
        32,
        kv_heads=1,
        padding=(1, 10**9),
        num_programs=24,
        span=KeySpan(700, slides=False),
    ),
    "sinks": Case((3, 16, 17, 40), 3, 3, 80, 16, has_sinks=True),
    "sinks of splits": Case(
        (5, 700), 5, 4, 16, 32, padding=(1, 10**9), num_programs=24, has_sinks=True
    ),
    "sinks of a sliding window": Case(
        (16, 31, 90), 4, 3, 16, 16, span=KeySpan(18, slides=True), dtype=BF16, has_sinks=True
    ),
    "sinks and codes": Case(
        (5, 300), 5, 4, 24, 32, padding=(2,), scales=KVScales(0.013, 0.021), has_sinks=True
    ),
    "splits of codes": Case(
        (5, 600), 5, 4, 24, 32, padding=(2,), num_programs=16, scales=KVScales(0.013, 0.021)
    ),
}
# A part of a window has as many splits.
SAME_SPLITS = ("window as long as the request", "more rows than a tile", "splits of wide windows")
SAME_SPLITS += ("windows longer than the sliding window", "sinks", "sinks of a sliding window")
SAME_SPLITS += ("splits of codes",)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_the_formula(name: str) -> None:
    problem = Problem(CASES[name])
    problem.check(problem.attend_plainly())


@on_each_kernel_device
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_formula_and_its_reference(name: str, device: str) -> None:
    assert has_kernels(torch.device(device))
    problem = Problem(CASES[name], device)
    output, tolerance = problem.attend(), TOLERANCE[CASES[name].dtype]
    problem.check(output)
    real = len(problem.kv)  # all padding rows write to the same page
    expected = problem.attend_plainly()[:real]
    torch.testing.assert_close(output[:real], expected, rtol=tolerance, atol=tolerance)


QUERIES = ("splits", "bfloat16, heads of 512", "a sliding window", "splits of codes")


@on_each_kernel_device
@pytest.mark.parametrize("name", QUERIES)
def test_queries_alone_attend_to_what_the_pool_has(name: str, device: str) -> None:
    """The pool has the windows' keys after a call with them."""
    problem = Problem(CASES[name], device)
    problem.rotate(normed=True)
    heads, rows = problem.num_heads, len(problem.kv) * problem.case.window
    assert problem.norm is not None
    queries = problem.qkv.flatten(0, 1)[:, :heads].contiguous()
    expected = problem.attend().flatten(0, 1)[:rows]
    layer = problem.layer.clone()
    norm = replace(problem.norm, weight=problem.norm.weight[:heads].contiguous())
    call = WindowCall(
        *(queries, problem.cos_sin, problem.layer, problem.tables, problem.scale),
        *(problem.workspace(), norm, problem.case.scales),
        writes=False,
    )
    for attend in (window_attention, window_attention.reference):
        found = attend(replace(call, qkv=queries.clone()))[:rows]
        tolerance = 10 * TOLERANCE[problem.case.dtype]
        torch.testing.assert_close(found, expected.view_as(found), rtol=tolerance, atol=tolerance)
    assert torch.equal(problem.layer.view(torch.uint8), layer.view(torch.uint8))


@pytest.mark.interpreted("norms", "q and k", "values, too")
@pytest.mark.thinned
@on_each_kernel_device
@pytest.mark.parametrize("norms", ["nothing", "q and k", "values, too"])
@pytest.mark.parametrize("name", CASES)
def test_norm_rotation_and_kv_writes_equal_the_reference(
    name: str, norms: str, device: str
) -> None:
    problem, reference = Problem(CASES[name], device), Problem(CASES[name], device)
    for each in (problem, reference):
        each.rotate(normed=norms != "nothing", norms_values=norms == "values, too")
    output, expected = problem.attend(), reference.attend_plainly()
    rounding = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[problem.case.dtype]
    if problem.layer.dtype == CODES:  # a key that was rounded differently may have the next code
        rounding = 1 / 7
    real = len(problem.case.kv_lens)
    torch.testing.assert_close(output[:real], expected[:real], rtol=3 * rounding, atol=3 * rounding)
    written = problem.tables.kv_slots[: real * problem.case.window]
    for mine, its in zip(problem.layer.flatten(1, 2), reference.layer.flatten(1, 2), strict=True):
        own = mine[written].float(), its[written].float()
        torch.testing.assert_close(*own, rtol=rounding, atol=rounding)
        assert problem.layer.dtype != CODES or (own[0] != own[1]).sum() <= 0.01 * own[0].numel()


@on_each_kernel_device
@pytest.mark.parametrize(
    "span",
    [None, KeySpan(137, slides=False), KeySpan(137, slides=True)],
    ids=["", "chunks", "sliding"],
)
@pytest.mark.parametrize("num_programs", [1, 64])
def test_keys_of_padding_rows_are_masked_and_older_keys_at_their_positions_are_not(
    num_programs: int, span: KeySpan | None, device: str
) -> None:
    case = Case((5, 6, 140, 300), 5, 3, 32, 16, num_programs=num_programs)
    problem = Problem(replace(case, span=span), device)
    problem.pad([0, 3, 5, 2])  # a window of padding only attends to the pool
    problem.check_real_rows(problem.attend())


RAGGED = {
    "rows of their own": (Case((3, 15, 16, 17, 49), 3, 3, 80, 16, spare_pages=2), (1, 3, 2, 1, 3)),
    "one row each": (Case((8, 70), 8, 4, 32, 16), (1, 1)),
    "tiles without rows": (Case((9, 40, 11), 8, 9, 16, 16, kv_heads=1), (1, 8, 4)),
    "splits": (
        Case((8, 700, 300), 8, 9, 80, 16, kv_heads=1, num_programs=24, spare_pages=4),
        (1, 2, 8),
    ),
    "only long ones are split": (
        Case((300, 5000, 4300), 2, 8, 16, 32, kv_heads=1, spare_pages=2),
        (2, 1, 2),
    ),
    "chunks": (
        Case((8, 12, 19, 23, 50), 8, 2, 16, 4, span=KeySpan(15, slides=False)),
        (1, 8, 5, 2, 1),
    ),
    "sliding windows": (
        Case((8, 300, 90, 50), 8, 2, 16, 4, num_programs=24, span=KeySpan(70, slides=True)),
        (1, 8, 5, 2),
    ),
    "bfloat16": (Case((3, 600), 3, 2, 96, 32, num_programs=32, dtype=torch.bfloat16), (3, 1)),
}


@on_each_kernel_device
@pytest.mark.parametrize("name", RAGGED)
def test_requests_with_different_numbers_of_rows_equal_the_formula(name: str, device: str) -> None:
    case, counts = RAGGED[name]
    problem = Problem(case, device)
    problem.keep_last(counts)
    problem.check_last(problem.attend(), counts)
    problem.check_last(problem.attend_plainly(), counts)


@on_each_kernel_device
@pytest.mark.parametrize("name", SAME_SPLITS)
def test_a_row_has_the_same_bits_wherever_its_window_begins(name: str, device: str) -> None:
    """So drafts, which make windows longer, do not change the order of a row's sums."""
    case = replace(CASES[name], padding=())
    expected = Problem(case, device).attend()
    for count in range(1, case.window, 1 + case.window // 8):
        problem = Problem(case, device)
        problem.keep_last([count] * len(case.kv_lens))
        assert torch.equal(problem.attend()[0], expected[:, case.window - count :].flatten(0, 1))


@on_each_kernel_device
def test_nan_in_one_request_does_not_reach_the_others(device: str) -> None:
    case = Case((70, 70, 70), 2, 2, 16, 16, num_programs=12, spare_pages=40)
    problem = Problem(case, device)
    before = problem.attend()
    problem.layer[:, problem.tables.block_tables[1, 1].item()] = torch.nan
    after = problem.attend()
    assert after[1].isnan().all()
    assert torch.equal(after[::2], before[::2])


@on_each_kernel_device
@pytest.mark.parametrize("slides", [False, True], ids=["chunks", "sliding"])
def test_keys_before_those_that_the_first_row_sees_are_never_read(
    slides: bool, device: str
) -> None:
    span = KeySpan(6 if slides else 32, slides=slides)
    case = Case((40, 63), 3, 2, 16, 4, num_programs=12, span=span)
    problem = Problem(case, device)
    for request in range(2):
        problem.layer[:, problem.tables.block_tables[request, :8].long()] = torch.nan
    problem.check(problem.attend())


@on_each_kernel_device
def test_results_of_an_earlier_launch_are_not_read_for_splits_without_keys(device: str) -> None:
    problem = Problem(CASES["splits"], device)
    workspace, width = problem.workspace(), problem.tables.block_tables.shape[1]
    problem.attend(workspace)
    shorter = Problem(replace(problem.case, kv_lens=(1, 18, 64, 3), spare_pages=width - 4), device)
    shorter.check(shorter.attend(workspace))


@on_each_kernel_device
def test_partial_results_are_written_for_real_rows_only(device: str) -> None:
    problem = Problem(CASES["splits"], device)
    workspace, requests, heads = problem.workspace(), len(problem.qkv), problem.num_heads
    num_splits = workspace.splits(
        requests * problem.case.kv_heads, requests * heads, 68 * 16
    ).number  # 68 pages
    assert num_splits > 1
    problem.attend(workspace)
    beyond = requests * heads * num_splits
    last = beyond - num_splits  # the last row's first split, which has keys whatever the length
    assert workspace.log_sums[last].isfinite() and workspace.outputs[last].isfinite().all()
    assert workspace.log_sums[beyond:].isnan().all() and workspace.outputs[beyond:].isnan().all()


def test_writing_kv_changes_only_the_slots_of_the_rows() -> None:
    for head_dim, dtype in ((16, torch.float32), (80, torch.bfloat16)):
        generator = torch.Generator().manual_seed(1)
        fused = torch.randn(5, 9, head_dim, generator=generator).to(dtype)
        kv = fused[:, 3:].view(5, 2, 3, head_dim)  # one projection's rows: queries first
        layer = torch.full((2, 4, 8, 3, head_dim), torch.nan, dtype=dtype)
        expected, slots = layer.clone(), [31, 0, 9, 8, 17]
        for row, slot in enumerate(slots):
            expected[:, slot // 8, slot % 8] = kv[row]
        plain_write_kv(kv, torch.tensor(slots), layer)
        assert torch.equal(layer.nan_to_num(99), expected.nan_to_num(99))


def test_splits_fill_the_device_and_fit_the_workspace() -> None:
    workspace = WindowWorkspace.allocate(16, torch.device("cpu"))
    workspace = replace(workspace, num_programs=396)
    for num_tiles, max_len, number in ((4, 10**6, MAX_SPLITS), (8, 10**6, 396 // 8), (8, 4096, 32)):
        found = workspace.splits(num_tiles, 4 * num_tiles, max_len)
        assert found == Splits(number, MIN_KEYS_PER_SPLIT, are_rare=False, small_programs=False)
    assert workspace.splits(8, 32, 128).number == 1
    assert workspace.splits(128, 16384, 8192).number == MAX_PARTIAL_ROWS // 16384
    assert workspace.splits(2048, 65536, 8192).number == 1  # unsplit rows need no workspace


def test_wide_windows_have_one_wave_of_programs_and_splits_worth_their_partial_results() -> None:
    workspace = WindowWorkspace.allocate(128, torch.device("cpu"))
    workspace = replace(workspace, num_programs=396)  # of an H200
    found = {}
    for batch, window in product((1, 8, 16), (16, 32, 64)):
        tiles = batch * 8 * (4 * window // 64)
        splits = workspace.splits(tiles, batch * 32 * window, 8192, is_wide=True)
        found[batch, window] = splits.number
        assert (tiles * splits.number <= 264 and splits.min_keys == 128) or splits.are_rare
    assert list(found.values()) == [33, 16, 8, 4, 2, 2, 2, 2, 1]  # batch by batch
    assert workspace.splits(16, 1024, 1024, is_wide=True).number == 6  # of more than 128 keys


def test_windows_of_8_tokens_and_tiles_that_are_not_full_have_the_splits_of_narrow_ones() -> None:
    assert not is_wide(8, 64) and not is_wide(16, 32) and is_wide(9, 64)


def test_a_launch_that_fills_the_device_splits_only_long_requests() -> None:
    workspace = replace(WindowWorkspace.allocate(16, torch.device("cpu")), num_programs=396)
    assert workspace.splits(512, 2048, MIN_KEYS_PER_LONG_SPLIT).number == 1
    for num_keys, number in ((3 * MIN_KEYS_PER_LONG_SPLIT, 3), (10**6, MAX_LONG_SPLITS)):
        found = workspace.splits(512, 2048, num_keys)
        assert found == Splits(number, MIN_KEYS_PER_LONG_SPLIT, are_rare=True, small_programs=True)


def test_programs_are_small_if_that_leaves_fewer_slots_of_the_last_wave_empty() -> None:
    workspace = replace(WindowWorkspace.allocate(16, torch.device("cpu")), num_programs=396)
    found = {
        tiles: workspace.splits(tiles, 4 * tiles, 8192).small_programs
        for tiles in (396, 397, 528, 529)
    }
    assert found == {396: False, 397: True, 528: True, 529: False}
    assert not workspace.splits(792, 3168, 8192).small_programs  # two waves of either


def test_warps_and_registers_are_triton_launch_options() -> None:
    workspace = replace(WindowWorkspace.allocate(16, torch.device("cpu")), num_programs=396)
    found = [
        warps_of(workspace.splits(tiles, 4 * tiles, 8192), block_m, 128)
        for tiles, block_m in ((396, 16), (397, 16), (396, 32), (396, 64))
    ]
    assert found == [
        {"num_warps": 4, "maxnreg": 168},
        {"num_warps": 2},
        {"num_warps": 4},
        {"num_warps": 4},
    ]


@on_each_kernel_device
@pytest.mark.parametrize(("kv_len", "num_written"), [(4097, 0), (4098, 2), (6000, 2)])
def test_a_long_request_is_split_only_into_shares_of_the_minimum_length(
    kv_len: int, num_written: int, device: str
) -> None:
    problem = Problem(Case((kv_len, 1), 1, 2, 16, 32, kv_heads=1, spare_pages=99), device)
    workspace = problem.workspace()
    problem.check(problem.attend(workspace))
    num_splits = workspace.splits(2, 4, problem.tables.block_tables.shape[1] * 32).number
    written = workspace.log_sums[: 2 * 2 * num_splits].view(2, 2, num_splits).isfinite().sum(-1)
    # Requests that are not split write no partial results.
    assert num_splits == MAX_LONG_SPLITS and written.tolist() == [[num_written] * 2, [0, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "window as long as the request",
        "splits of windows",
        "bfloat16, splits",
        "windows over a border of chunks",
        "splits of a chunk",
        "splits of a sliding window",
    ],
)
def test_a_captured_launch_can_be_replayed_with_other_lengths_tables_and_rows(name: str) -> None:
    case = CASES[name]
    captured, workspace = Problem(case, "cuda"), Problem(case, "cuda").workspace()
    graph, output = captured_graph(lambda: captured.attend(workspace))
    for seed in (1, 2):
        other = Problem(
            replace(case, kv_lens=case.kv_lens[seed:] + case.kv_lens[:seed]), "cuda", seed
        )
        copy_all(captured.inputs(), other.inputs())
        graph.replay()
        other.check(output)


@pytest.mark.gpu
def test_a_pool_may_have_more_than_2_to_the_31_elements() -> None:
    problem = Problem(CASES["bfloat16"], "cuda")
    shape = problem.layer.shape
    first = 2**31 // math.prod(shape[2:])
    pool = torch.empty((2, first + shape[1], *shape[2:]), dtype=problem.layer.dtype, device="cuda")
    pool[:, first:] = torch.nan
    kv_slots = torch.arange(first * shape[2], pool.shape[1] * shape[2], device="cuda")
    plain_write_kv(problem.layer.view(2, -1, *shape[3:]).transpose(0, 1), kv_slots, pool)
    tables, lens, slots = problem.inputs()[2:5]
    problem.layer, problem.tables = (
        pool,
        replace(
            problem.tables,
            block_tables=tables + first,
            kv_lens=lens,
            kv_slots=slots + first * shape[2],
        ),
    )
    problem.check(problem.attend())
