"""Keys, values and latents: their rotation and write, the moves of accepted paths, and widened
codes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tllm_spec.kernels.attention.kv_codes import CODES, widen_pages
from tllm_spec.kernels.attention.latent_write import LatentNorm, latent_write
from tllm_spec.kernels.attention.move_kv import move_kv
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.dispatch import has_kernels

Write = Callable[..., None]
EPS, MAX_POSITIONS = 1e-5, 50


@dataclass(frozen=True)
class Case:
    """`padding`: rows of graph padding, which are all written to slot 0 of page 0."""

    num_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    norm: bool = False
    padding: int = 0
    dtype: torch.dtype = torch.float32
    norms_values: bool = False


CASES = {
    "one row of an 8B Llama": Case(1, 32, 8, 128, 32, dtype=torch.bfloat16),
    "window, norm": Case(5, 16, 4, 128, 16, norm=True, dtype=torch.bfloat16),
    "odd": Case(7, 5, 3, 6, 1),
    "odd, norm": Case(6, 9, 3, 80, 4, norm=True),
    "head of two": Case(3, 1, 1, 2, 8, norm=True),
    "one kv head": Case(4, 7, 1, 24, 4),
    "more heads than a block": Case(2, 20, 20, 192, 2, norm=True),
    "padding": Case(4, 6, 2, 16, 4, padding=3),
    "float16": Case(9, 6, 2, 96, 16, dtype=torch.float16),
    "float16, norm": Case(3, 6, 2, 64, 16, norm=True, dtype=torch.float16),
    "nothing": Case(0, 4, 2, 16, 4),
    "norm of values": Case(6, 9, 3, 80, 4, norm=True, norms_values=True),
    "bfloat16, norm of values": Case(
        5, 8, 2, 512, 16, norm=True, dtype=torch.bfloat16, norms_values=True
    ),
}
on_each_case = pytest.mark.parametrize("name", CASES)


class Problem:
    """Random rows at random positions, and a pool of NaN."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 0) -> None:
        self.case, generator = case, torch.Generator().manual_seed(seed)
        rows, half = case.num_rows + case.padding, case.head_dim // 2
        total = case.heads + 2 * case.kv_heads
        self.qkv = torch.randn(rows, total, case.head_dim, generator=generator).to(
            device, case.dtype
        )
        angles = torch.rand(MAX_POSITIONS, half, generator=generator) * 7
        cos, sin = angles.cos() * 1.1, angles.sin() * 1.1  # YaRN has such a factor
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)[:, :, None]
        positions = torch.randint(0, MAX_POSITIONS, (rows,), generator=generator)
        positions[-1:] = MAX_POSITIONS - 1
        self.rotary = Rotary(table.to(device, case.dtype), positions.to(device))
        pages = case.num_rows // case.page_size + 3
        free = torch.randperm((pages - 1) * case.page_size, generator=generator) + case.page_size
        slots = torch.cat((free[: case.num_rows], torch.zeros(case.padding, dtype=torch.int64)))
        self.kv_slots = slots.to(device)
        shape = (2, pages, case.page_size, case.kv_heads, case.head_dim)
        self.layer = torch.full(shape, torch.nan, dtype=case.dtype, device=device)
        weight = torch.rand(case.heads + case.kv_heads, case.head_dim, generator=generator) + 0.5
        own = weight.to(device, case.dtype), EPS, case.norms_values
        self.norm = HeadWeights(*own) if case.norm else None

    def run(self, write: Write) -> None:
        write(self.qkv, self.rotary, self.kv_slots, self.layer, self.norm)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        weight = () if self.norm is None else (self.norm.weight,)
        return self.qkv, self.rotary.table, self.rotary.positions, self.kv_slots, *weight

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k after norm and rotation, and the sums of the absolute values of their two terms,
        `[T, Hq + Hkv, D]` float64."""
        case, half = self.case, self.case.head_dim // 2
        heads = self.qkv[:, : case.heads + case.kv_heads].cpu().double()
        if self.norm is not None:
            mean_square = heads.square().mean(-1, keepdim=True)
            heads = heads / (mean_square + EPS).sqrt() * self.norm.weight.cpu().double()
        rows = self.rotary.table.cpu().double()[self.rotary.positions.cpu(), :, :, :]
        cos, sin = rows[:, 0, :, half:], rows[:, 1, :, half:]
        low, high = heads[..., :half], heads[..., half:]
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        sizes = torch.cat(
            ((low * cos).abs() + (high * sin).abs(), (high * cos).abs() + (low * sin).abs()), -1
        )
        return rotated, sizes

    def run_and_check(self, write: Write) -> None:
        """q and k equal the formula, v is not changed without a norm, and exactly the slots of the
        rows have k and v."""
        case, before = self.case, self.qkv.clone()
        rotated, sizes = self.expected()
        unread = [tensor.clone() for tensor in self.tensors()[1:]]
        self.run(write)
        assert all(torch.equal(*pair) for pair in zip(self.tensors()[1:], unread, strict=True))
        self.check(rotated, sizes)
        values = before[:, -case.kv_heads :]
        if not case.norms_values:
            assert torch.equal(self.qkv[:, -case.kv_heads :], values)
            return
        wide = values.double()
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
        found = self.qkv[:, -case.kv_heads :].double()
        torch.testing.assert_close(found, wide, rtol=ROUNDING[case.dtype] + 1e-6, atol=1e-7)

    def check(self, rotated: torch.Tensor, sizes: torch.Tensor) -> None:
        case = self.case
        error = (self.qkv[:, : -case.kv_heads].cpu().double() - rotated).abs()
        # One rounding of the result, plus the error of the float32 arithmetic before it.
        allowed = ROUNDING[case.dtype] * rotated.abs() + 6e-7 * sizes + 1e-7
        assert (error <= allowed).all(), (error / allowed).max()
        kv = self.qkv[:, case.heads :].view(-1, 2, case.kv_heads, case.head_dim)
        wanted = torch.full_like(self.layer, torch.nan)
        for row, slot in enumerate(self.kv_slots.tolist()[: case.num_rows]):
            wanted[:, slot // case.page_size, slot % case.page_size] = kv[row]
        assert torch.equal(self.layer[:, 1:].nan_to_num(99), wanted[:, 1:].nan_to_num(99))
        written = self.layer[:, 0].isfinite().view(2, case.page_size, -1).all(-1)
        assert written.sum() == (2 if case.padding else 0)


@on_each_case
def test_the_reference_equals_the_formula(name: str) -> None:
    Problem(CASES[name]).run_and_check(rotary_write.reference)


@pytest.mark.interpreted("name", "odd, norm", "norm of values")
@on_each_kernel_device
@on_each_case
def test_the_kernel_equals_the_formula(name: str, device: str) -> None:
    assert has_kernels(torch.device(device))
    Problem(CASES[name], device).run_and_check(rotary_write)


@on_each_kernel_device
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.num_rows])
def test_the_kernel_equals_its_reference_up_to_one_rounding(name: str, device: str) -> None:
    mine, reference = Problem(CASES[name], device), Problem(CASES[name], device)
    mine.run(rotary_write)
    reference.run(rotary_write.reference)
    check_like_the_reference(mine.qkv, reference.qkv)


@on_each_kernel_device
def test_position_zero_without_a_norm_changes_no_bit(device: str) -> None:
    problem = Problem(replace(CASES["odd"], dtype=torch.bfloat16), device)
    rotary = problem.rotary
    rotary.positions.zero_()
    rotary.table[0, 0], rotary.table[0, 1] = 1, 0
    before = problem.qkv.clone()
    problem.run(rotary_write)
    assert torch.equal(problem.qkv, before)


@on_each_kernel_device
def test_a_nan_stays_in_its_head_and_row(device: str) -> None:
    problem = Problem(CASES["odd, norm"], device)
    problem.qkv[2, 10, 3] = problem.qkv[4, 13, 0] = torch.nan  # a key and a value
    problem.run(rotary_write)
    nan_heads = problem.qkv.isnan().any(-1).nonzero().tolist()
    assert nan_heads == [[2, 10], [4, 13]]


@only_outside_the_interpreter
def test_a_tensor_on_the_cpu_runs_the_reference() -> None:
    mine, reference = Problem(CASES["odd, norm"]), Problem(CASES["odd, norm"])
    mine.run(rotary_write)
    reference.run(rotary_write.reference)
    assert torch.equal(mine.qkv, reference.qkv) and torch.equal(
        mine.layer.isnan(), reference.layer.isnan()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window, norm", "one row of an 8B Llama", "float16"])
def test_a_captured_launch_can_be_replayed_with_other_rows_positions_and_slots(name: str) -> None:
    captured = Problem(CASES[name], "cuda")
    graph, _ = captured_graph(lambda: captured.run(rotary_write))
    for seed in (1, 2):
        other = Problem(CASES[name], "cuda", seed)
        copy_all(captured.tensors(), other.tensors())
        captured.layer.fill_(torch.nan)
        wanted = captured.expected()
        graph.replay()
        captured.check(*wanted)


@pytest.mark.gpu
def test_a_pool_may_have_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free device memory")
    problem = Problem(CASES["window, norm"], "cuda")
    small, first = problem.layer, 2**31 // problem.layer[0, 0].numel()
    pool = torch.empty(
        (2, first + small.shape[1], *small.shape[2:]), dtype=small.dtype, device="cuda"
    )
    pool[:, first:] = torch.nan
    wanted, slots = problem.expected(), problem.kv_slots
    rotary_write(problem.qkv, problem.rotary, slots + first * small.shape[2], pool, problem.norm)
    problem.layer = pool[:, first:]
    problem.check(*wanted)


SIZE, ROPE, NOPE, ROWS = 48, 16, 20, 7


class LatentProblem:
    """Random rows; `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: str, heads: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.latent = random(ROWS, 5 + SIZE + ROPE)[:, 5:]  # rows of a wider projection
        self.q = random(ROWS, heads, NOPE + ROPE)
        angles = torch.rand(32, 1, ROPE // 2, generator=generator) * 6
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        positions = torch.randint(32, (ROWS,), generator=generator).to(device)
        self.rotary = Rotary(table.to(device, dtype).contiguous(), positions)
        self.slots = torch.randperm(40, generator=generator)[:ROWS].to(device)
        self.layer = random(10, 4, SIZE + ROPE)
        self.norm = LatentNorm(random(SIZE) + 1, 1e-6)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 200])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, heads: int, device: str) -> None:
    one, other = (LatentProblem(dtype, device, heads) for _ in range(2))
    latent_write(one.latent, one.q, one.rotary, one.slots, one.layer, one.norm)
    latent_write.reference(
        other.latent, other.q, other.rotary, other.slots, other.layer, other.norm
    )
    check_like_the_reference(one.layer, other.layer)
    check_like_the_reference(one.q, other.q)
    assert torch.equal(one.latent, other.latent)


@on_each_kernel_device
def test_without_queries_only_the_pool_is_written(device: str) -> None:
    one, other = (LatentProblem(torch.float32, device) for _ in range(2))
    latent_write(one.latent, None, one.rotary, one.slots, one.layer, one.norm)
    latent_write.reference(
        other.latent, other.q, other.rotary, other.slots, other.layer, other.norm
    )
    check_like_the_reference(one.layer, other.layer)


@only_outside_the_interpreter
def test_the_reference_norms_the_latent_rotates_the_key_and_leaves_other_slots_alone() -> None:
    problem = LatentProblem(torch.float32, "cpu")
    before, row = problem.layer.clone(), 2
    latent, key = problem.latent[row].split((SIZE, ROPE))
    latent_write.reference(
        *(problem.latent, None, problem.rotary, problem.slots, problem.layer, problem.norm)
    )
    flat = problem.layer.view(-1, SIZE + ROPE)
    entry = flat[problem.slots[row]]
    normed = latent / (latent.square().mean() + 1e-6).sqrt() * problem.norm.weight
    torch.testing.assert_close(entry[:SIZE], normed)
    cos, sin = problem.rotary.cos_sin[row, :, 0]
    pairs = torch.complex(*key.view(2, -1))
    turned = pairs * torch.complex(cos, sin)[ROPE // 2 :]
    torch.testing.assert_close(entry[SIZE:], torch.cat((turned.real, turned.imag)))
    others = torch.ones(len(flat), dtype=torch.bool)
    others[problem.slots] = False
    assert torch.equal(flat[others], before.view_as(flat)[others])


PAGE_SIZE = 4


def problem(
    batch: int, layers: int, width: int, dtype: torch.dtype, depth: int, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request has pages of its own; page 0 is the dummy page."""
    generator = torch.Generator().manual_seed(batch + width + depth)
    pages = -(-(2 * PAGE_SIZE + window) // PAGE_SIZE)
    planes = torch.randint(-99, 99, (layers, batch * pages + 1, PAGE_SIZE, width))
    tables = (torch.randperm(batch * pages, generator=generator) + 1).view(batch, pages)
    first = torch.randint(0, 2 * PAGE_SIZE, (batch,), generator=generator)
    rows, lens = torch.zeros(batch, depth + 1, dtype=torch.int64), torch.ones(batch)
    for request in range(batch):
        number = int(torch.randint(0, depth + 1, (1,), generator=generator))
        path = torch.randperm(window - 1, generator=generator)[:number].sort().values + 1
        if request % 3 == 2:
            path = torch.arange(1, number + 1)
        rows[request, 1 : number + 1] = path
        rows[request, number + 1 :] = rows[request, number]
        lens[request] = number + 1
    return planes.to(dtype), tables.to(torch.int32), first, rows, lens.to(torch.int64)


def moved_slowly(
    planes: torch.Tensor,
    tables: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> torch.Tensor:
    result = planes.clone()
    for request, (start, number) in enumerate(zip(first.tolist(), lens.tolist(), strict=True)):
        for to_row, from_row in enumerate(rows[request, :number].tolist()):
            to_index, from_index = start + to_row, start + from_row
            to_page, from_page = (
                int(tables[request, index // PAGE_SIZE]) for index in (to_index, from_index)
            )
            result[:, to_page, to_index % PAGE_SIZE] = planes[:, from_page, from_index % PAGE_SIZE]
    return result


@pytest.mark.parametrize(("depth", "window"), [(0, 1), (3, 6), (6, 64)])
def test_the_path_is_copied_to_the_front_and_nothing_else(depth: int, window: int) -> None:
    planes, *where = problem(7, 3, 2, torch.float32, depth, window)
    expected = moved_slowly(planes, *where)
    assert (depth == 0) == torch.equal(expected, planes)
    move_kv.reference(planes, *where)
    assert torch.equal(planes, expected)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("depth", "window"), [(0, 1), (3, 6), (6, 64)])
@pytest.mark.parametrize("width", [4, 96])
def test_the_kernel_moves_what_the_reference_moves(
    device: str, dtype: torch.dtype, depth: int, window: int, width: int
) -> None:
    planes, *where = problem(5, 2, width, dtype, depth, window)
    there = planes.to(device, copy=True)
    move_kv(there, *(each.to(device) for each in where))
    expected = moved_slowly(planes.view(torch.uint8), *where)
    assert torch.equal(there.cpu().view(torch.uint8), expected)


@on_each_kernel_device
@pytest.mark.skipif(INTERPRETED, reason="too slow there")
def test_the_kernel_moves_real_sizes(device: str) -> None:
    planes, *where = problem(64, 64, 1024, torch.bfloat16, 6, 64)
    there = planes.to(device, copy=True)
    move_kv(there, *(each.to(device) for each in where))
    assert torch.equal(there.cpu(), moved_slowly(planes, *where))


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [None, 3])
def test_the_kernel_equals_the_reference_of_widened_pages(
    count: int | None, dtype: torch.dtype, device: str
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(CODES).float().nan_to_num(nan=1.0)
    layer = codes[torch.randint(256, (2, 9, 4, 3, 20))].to(device, CODES)
    pages = torch.tensor([8, 1, 5, 5, 0], dtype=torch.int32, device=device)
    number = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    out = torch.full((2, 7, 4, 3, 20), 7.0, dtype=dtype, device=device)
    expected = out.clone()
    widen_pages(layer, pages, number, out)
    widen_pages.reference(layer, pages, number, expected)
    assert torch.equal(out, expected)
    used = len(pages) if count is None else count
    assert torch.equal(out[:, :used].float(), layer[:, pages[:used]].float())
    assert (out[:, used:] == 7).all()
