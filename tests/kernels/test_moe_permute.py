"""Assignments sorted by expert, and their blocks."""

from typing import Any

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import on_each_kernel_device, only_with_the_compiler
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.permute import ExpertRows, max_blocks, moe_permute

# Tokens, experts per token, experts, block size, and experts that tokens really take.
CASES = [(1, 8, 64, 16, 64), (5, 2, 8, 4, 8), (33, 4, 60, 16, 60), (64, 8, 128, 16, 128),
         (40, 8, 64, 16, 8), (700, 8, 16, 128, 3), (3, 1, 16, 16, 1), (0, 2, 8, 16, 8),
         (512, 8, 20, 16, 20), (1500, 4, 60, 64, 60)]  # fmt: skip
on_each_case = pytest.mark.parametrize("case", CASES, ids=str)


def chosen(case: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """Different experts for every token, `[T, k]`."""
    num_tokens, top_k, num_experts, _, num_hit = case
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randperm(num_experts, generator=generator)[:num_hit]
    rows = [torch.randperm(num_hit, generator=generator)[:top_k] for _ in range(num_tokens)]
    picks = torch.stack(rows) if rows else torch.empty(0, top_k, dtype=torch.int64)
    return ids[picks % num_hit].to(device, torch.int32)


def check(rows: ExpertRows, experts: torch.Tensor, num_experts: int) -> None:
    flat = experts.flatten().tolist()
    assert rows.order.tolist() == sorted(range(len(flat)), key=lambda a: flat[a])
    ordered = [flat[a] for a in rows.order.tolist()]
    expected = []
    for expert in sorted(set(flat)):
        first, number = ordered.index(expert), ordered.count(expert)
        starts = range(first, first + number, rows.block_rows)
        expected += [[expert, start, first + number] for start in starts]
    number = int(rows.num_blocks)
    assert rows.blocks[:, :number].t().tolist() == expected
    assert number <= rows.blocks.shape[1] == max_blocks(len(flat), num_experts, rows.block_rows)


@on_each_case
def test_the_reference_sorts_stably_and_cuts_blocks(case: tuple[int, ...]) -> None:
    experts = chosen(case)
    check(moe_permute.reference(experts, case[2], case[3]), experts, case[2])


@on_each_kernel_device
@on_each_case
def test_the_kernel_sorts_stably_and_cuts_blocks(case: tuple[int, ...], device: str) -> None:
    assert has_kernels(torch.device(device))
    experts = chosen(case, device)
    check(moe_permute(experts, case[2], case[3]), experts, case[2])


@on_each_kernel_device
@pytest.mark.parametrize("case", CASES[1:5] + CASES[-1:], ids=str)
def test_experts_of_other_ranks_come_last_in_no_block(case: tuple[int, ...], device: str) -> None:
    experts, (first, number) = chosen(case, device), (case[2] // 4, case[2] // 2)
    for permute in (moe_permute, moe_permute.reference):
        rows = permute(experts, number, case[3], first)
        own = experts.flatten() - first
        own = own.where((own >= 0) & (own < number), number).cpu()
        assert torch.equal(rows.order.long().cpu(), own.argsort(stable=True))
        expected = moe_permute.reference(own[own < number].int().view(-1, 1), number, case[3])
        num_blocks = int(rows.num_blocks)
        assert num_blocks == int(expected.num_blocks) > 0
        assert torch.equal(rows.blocks[:, :num_blocks].cpu(), expected.blocks[:, :num_blocks])


@only_with_the_compiler
@pytest.mark.parametrize("first", [None, 4])
def test_the_kernel_compiles_with_and_without_experts_of_other_ranks(first: int | None) -> None:
    from tllm_spec.kernels.experts.permute import moe_permute_kernel

    types = dict.fromkeys(("experts", "order", "blocks", "num_blocks"), "*i32")
    own: dict[str, Any] = {"FIRST": first, "NUMBER": 8, "BINS": 32, "totals": None, "PDL": True}
    sizes = {"BLOCK_ROWS": 16, "BLOCK": 128, "BLOCKS": 64}
    code = compiled_for_hopper(moe_permute_kernel, types, own | sizes, num_warps=1)
    assert "atom" in code.asm["ptx"]


@pytest.mark.gpu
def test_a_captured_graph_sorts_what_is_there_at_replay() -> None:
    case = (64, 8, 128, 16, 128)
    static = chosen(case, "cuda")
    moe_permute(static, 128, 16)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = moe_permute(static, 128, 16)
    for num_hit in (128, 8, 31):
        static.copy_(chosen((*case[:4], num_hit)))
        graph.replay()
        check(rows, static, 128)
