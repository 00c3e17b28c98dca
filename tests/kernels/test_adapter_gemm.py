"""Low-rank adapters: the kernels against the reference, and a row's bits in any batch."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph
from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm import adapter_gemm
from tllm_spec.kernels.gemm.adapter_gemm import (
    MAX_INPUTS,
    AdapterWeights,
    output_blocks,
    padded_rank,
    shrink,
    sorted_by_slot,
    with_adapters,
)
from tllm_spec.kernels.gemm.norms import NormWeight, silu_and_mul
from tllm_spec.kernels.gemm.small_m_gemm import plain_small_m_gemm, small_m_gemm, takes

SIZES, INPUTS, RANKS = (96, 40, 136), 592, (20, 0, 7)
NUM_SLOTS = 3


def problem(
    device: str, dtype: torch.dtype, inputs: int = INPUTS, seed: int = 0
) -> tuple[AdapterWeights, torch.Tensor, torch.Tensor]:
    """The weights, and 200 rows of x and of the total. Slot 1 has all ranks, slot 2 none."""
    generator, step = torch.Generator().manual_seed(seed), padded_rank(max(RANKS))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    a = normal(NUM_SLOTS, len(SIZES) * step, inputs).mul_(inputs**-0.5)
    b, ranks = normal(NUM_SLOTS, sum(SIZES), step), torch.zeros(NUM_SLOTS, len(SIZES))
    ranks[0], ranks[1] = torch.tensor(RANKS), step
    for slot, part in product(range(NUM_SLOTS), range(len(SIZES))):
        rank = int(ranks[slot, part])
        a[slot, part * step + rank : part * step + padded_rank(rank)] = 0
    blocks = output_blocks(SIZES, torch.device(device))
    weights = AdapterWeights(a, b, ranks.to(device, torch.int32), blocks, SIZES)
    return weights, normal(200, inputs), normal(200, sum(SIZES))


def slots_of(num_rows: int, device: str) -> torch.Tensor:
    """Those of neighbours differ at places that are no multiples of a program's rows."""
    return torch.tensor([(row // 3) % 4 - 1 for row in range(num_rows)]).to(device, torch.int32)


def added(
    weights: AdapterWeights, x: torch.Tensor, slots: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    result = total.clone()
    return with_adapters(x, weights, by_slot(weights, slots), lambda: result)


def by_slot(weights: AdapterWeights, slots: torch.Tensor) -> ExpertRows:
    number = len(weights.ranks) * max(weights.share_a, weights.share_b)
    return sorted_by_slot(slots, number)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 40, 200])
def test_the_kernels_add_what_the_reference_adds(
    num_rows: int, dtype: torch.dtype, device: str
) -> None:
    weights, x, total = problem(device, dtype)
    x, total, slots = x[:num_rows], total[:num_rows], slots_of(num_rows, device)
    slots[0] = 0
    expected = total.clone()
    with_adapters.reference(x, weights, by_slot(weights, slots), lambda: expected)
    found, rounding = added(weights, x, slots, total), torch.finfo(dtype).eps
    # The sums of A x may round to a neighbour.
    torch.testing.assert_close(found, expected, rtol=2 * rounding, atol=256 * rounding)
    none = (slots < 0) | (slots == 2)
    assert torch.equal(found[none], total[none])
    assert torch.equal(found[:, 96:136][slots == 0], total[:, 96:136][slots == 0])
    assert ((found != total)[:, 136:].float().mean(1)[~none] > 0.5).all()


@on_each_kernel_device
def test_a_total_in_float32_is_not_rounded_to_the_type_of_x(device: str) -> None:
    weights, x, total = problem(device, torch.bfloat16)
    x, total, slots = x[:7], total[:7].float(), slots_of(7, device)
    expected = with_adapters.reference(x, weights, by_slot(weights, slots), total.clone)
    found = added(weights, x, slots, total)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
    assert torch.equal(found[slots < 0], total[slots < 0])
    assert not torch.equal(found, found.bfloat16().float())


@on_each_kernel_device
def test_the_chunks_of_wide_inputs_are_added(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x, total = problem(device, torch.float32)
    x, total, slots = x[:7], total[:7], slots_of(7, device)
    expected = added(weights, x, slots, total)
    monkeypatch.setattr(adapter_gemm, "CHUNK", 256)
    monkeypatch.setattr(adapter_gemm, "STEP_BYTES", 512)
    assert weights.num_chunks == 3
    found = added(weights, x, slots, total)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    alone = added(weights, x[4:5], slots[4:5], total[4:5])
    assert torch.equal(alone, found[4:5]) and not torch.equal(found, total)


@on_each_kernel_device
def test_a_rows_bits_depend_on_no_other_row_and_on_no_number_of_rows(device: str) -> None:
    weights, x, total = problem(device, torch.float16)
    slots = slots_of(80, device)
    whole = added(weights, x[:80], slots, total[:80])
    for rows in ([79], [5, 3, 4], [17, 0, 8, 7, 6, *range(20, 60)]):
        own = torch.tensor(rows, device=device)
        assert torch.equal(added(weights, x[own], slots[own], total[own]), whole[own])


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("num_rows", [40, 3])
def test_swiglu_follows_the_expand_and_rows_without_an_adapter_have_the_bits_of_none(
    num_rows: int, num_parts: int, dtype: torch.dtype, device: str
) -> None:
    """A fused tensor of the checkpoint has gates and ups in one part."""
    weights, x, gate_up = problem(device, dtype)
    inner, ranks = sum(SIZES) // 2, weights.ranks[:, :num_parts].contiguous()
    a = weights.a[:, : num_parts * weights.step].contiguous()
    sizes = (inner,) * 2 if num_parts == 2 else (2 * inner,)
    weights = AdapterWeights(a, weights.b, ranks, output_blocks(sizes, a.device), sizes)
    x, gate_up, slots = x[:num_rows], gate_up[:num_rows], slots_of(num_rows, device)
    by_slots, plain = by_slot(weights, slots), silu_and_mul(gate_up)
    found, expected = (
        add(x, weights, by_slots, gate_up.clone, gated=True)
        for add in (with_adapters, with_adapters.reference)
    )
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=4 * rounding, atol=4096 * rounding)
    none = (slots < 0) | (slots == 2)
    assert torch.equal(found[none], plain[none])
    assert ((found != plain).float().mean(1)[~none] > 0.5).all()


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_few_rows_are_shrunk_as_by_the_reference_whatever_the_other_rows_are(
    normed: bool, dtype: torch.dtype, device: str
) -> None:
    weights, x, _ = problem(device, dtype)
    slots = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    x, norm = x[:4], NormWeight(x[9].contiguous(), 1e-5) if normed else None
    used = torch.zeros(4, len(SIZES), weights.step, dtype=torch.bool, device=device)
    for row, slot in enumerate(slots.tolist()):
        for part, rank in enumerate(weights.ranks[slot].tolist() if slot >= 0 else ()):
            used[row, part, : padded_rank(rank)] = True
    used = used.flatten(1)
    found, expected = (
        run(x, weights, by_slot(weights, slots), norm).sums.where(used, 0)
        for run in (shrink, shrink.reference)
    )
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=4 * rounding, atol=16 * rounding)
    assert (found != 0).any(1).tolist() == [True, False, True, False]
    alone = shrink(x[2:3], weights, by_slot(weights, slots[2:3]), norm)
    assert torch.equal(alone.sums.where(used[2:3], 0), found[2:3])


@on_each_kernel_device
@pytest.mark.parametrize("shared", ["a", "b"])
def test_neighbouring_slots_may_share_a_matrix(shared: str, device: str) -> None:
    """Slots 2 n and 2 n + 1 do, and have one rank."""
    weights, x, total = problem(device, torch.float32)
    x, total, slots = x[:9], total[:9], slots_of(9, device)
    pairs = torch.where(slots < 0, slots, 2 * slots + torch.arange(9, device=device) % 2).int()
    a, b = weights.a, weights.b.repeat_interleave(2, 0)
    if shared == "b":
        a, b = weights.a.repeat_interleave(2, 0), weights.b
    strided = torch.empty(len(b), b.shape[1] + 3, b.shape[2], device=device)[:, 3:].copy_(b)
    numbers = {f"share_{shared}": 2}
    own = AdapterWeights(a, strided, weights.ranks, weights.blocks, SIZES, **numbers)
    assert torch.equal(added(own, x, pairs, total), added(weights, x, slots, total))


@on_each_kernel_device
def test_no_rows_launch_nothing(device: str) -> None:
    weights, x, total = problem(device, torch.float32)
    before, rows = total.clone(), by_slot(weights, slots_of(3, device))
    with_adapters(x[:0], weights, rows, lambda: total[:0])
    assert torch.equal(total, before)


def test_a_gemm_expands_up_to_four_parts_of_inputs_that_one_program_can_shrink() -> None:
    def weights(inputs: int, *sizes: int, **shares: int) -> AdapterWeights:
        a = torch.empty(2, 16 * len(sizes), inputs, device="meta")
        b = torch.empty(2, sum(sizes), 16, device="meta")
        return AdapterWeights(a, b, torch.empty(2, len(sizes)), a, sizes, **shares)

    assert takes(weights(MAX_INPUTS, 8, 8, 8, 8))
    assert not takes(weights(MAX_INPUTS, 8, 8, 8, 8, 8))
    assert not takes(weights(2 * MAX_INPUTS, 8))
    assert not takes(weights(64, 8, share_a=2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("normed", "gated", "adds"),
    [(False, False, False), (True, False, False), (False, False, True), (True, True, False)],
)
def test_the_gemm_of_few_rows_expands(
    normed: bool, gated: bool, adds: bool, dtype: torch.dtype
) -> None:
    weights, x, total = problem("cuda", dtype, inputs=640)
    base = torch.randn(sum(SIZES), 640, device="cuda").to(dtype) / 25
    norm = NormWeight(x[9].contiguous(), 1e-5) if normed else None
    if gated:
        sizes = (sum(SIZES) // 2,) * 2
        weights = AdapterWeights(
            weights.a[:, : 2 * weights.step].contiguous(),
            weights.b,
            weights.ranks[:, :2].contiguous(),
            output_blocks(sizes, x.device),
            sizes,
        )
    slots = torch.tensor([0, -1, 1, 2, 1, 0, -1, 1], dtype=torch.int32, device="cuda")

    def run(
        gemm: Callable[..., torch.Tensor], rows: slice, is_adapted: bool = True
    ) -> torch.Tensor:
        own = None
        if is_adapted:
            own = shrink(x[rows], weights, by_slot(weights, slots[rows]), norm)
        add_to = total[rows].clone() if adds else None
        return gemm(x[rows], base, norm=norm, gated=gated, add_to=add_to, adapters=own)

    whole = run(small_m_gemm, slice(8))
    expected, rounding = run(plain_small_m_gemm, slice(8)), torch.finfo(dtype).eps
    error = (whole - expected).float().norm() / expected.float().norm()
    assert error < 2 * rounding
    none, plain = slots < 0, run(small_m_gemm, slice(8), False)
    none[3] = True  # its slot has no rank
    assert torch.equal(whole[none], plain[none])
    assert ((whole != plain).float().mean(1)[~none] > 0.4).all()
    for rows in (slice(2, 3), slice(4, 7)):
        assert torch.equal(run(small_m_gemm, rows), whole[rows])


@pytest.mark.gpu
def test_a_captured_graph_reads_slots_and_matrices_of_its_replay() -> None:
    weights, x, total = problem("cuda", torch.bfloat16)
    slots = slots_of(200, "cuda")
    graph, found = captured_graph(lambda: added(weights, x, slots, total))
    slots.copy_(slots.roll(7))
    weights.ranks[2] = weights.step
    expected = added(weights, x, slots, total)
    graph.replay()
    assert torch.equal(found, expected)
