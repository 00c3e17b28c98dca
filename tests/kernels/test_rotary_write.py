"""Norm, rotation and KV write: the kernel against its reference, and both against the formulas in
float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.interpreter import (
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
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
        self.norm = HeadWeights(weight.to(device, case.dtype), EPS) if case.norm else None

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
        """q and k equal the formula, v is not changed, and exactly the slots of the rows have k and
        v."""
        case, before = self.case, self.qkv.clone()
        rotated, sizes = self.expected()
        unread = [tensor.clone() for tensor in self.tensors()[1:]]
        self.run(write)
        assert all(torch.equal(*pair) for pair in zip(self.tensors()[1:], unread, strict=True))
        self.check(rotated, sizes)
        assert torch.equal(self.qkv[:, -case.kv_heads :], before[:, -case.kv_heads :])

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
    captured.run(rotary_write)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(rotary_write)
    for seed in (1, 2):
        other = Problem(CASES[name], "cuda", seed)
        for mine, new in zip(captured.tensors(), other.tensors(), strict=True):
            mine.copy_(new)
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
