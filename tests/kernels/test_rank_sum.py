"""The sum over ranks in one kernel, which writes lines into the other ranks' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device, only_with_the_compiler
from tests.kernels.process_ranks import run_at_once
from tllm_spec.kernels.parallel.rank_sum import (
    BLOCK_WORDS,
    DTYPES,
    WORD_BYTES,
    RankLines,
    rank_sum,
    rank_sum_reference,
    serves,
)

BLOCKS = 4
CAPACITY = BLOCKS * BLOCK_WORDS


def memory_of(ranks: int, device: str = "cpu") -> list[torch.Tensor]:
    """The memory of each rank, `[2, ranks, CAPACITY]`."""
    shape = (2, ranks, CAPACITY)
    memory = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(ranks)]
    assert memory[0].nbytes == RankLines.num_bytes(ranks, CAPACITY)
    return memory


def lines_of(rank: int, memory: list[torch.Tensor]) -> RankLines:
    device = memory[0].device
    addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
    return RankLines(rank, addresses, torch.zeros(BLOCKS, dtype=torch.int32, device=device))


def words_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF


def parts_of(ranks: int, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Sixteenths of small integers, so that no sum is rounded, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(-40, 40, (ranks, size), generator=generator) / 16
    return list(parts.to(dtype))


def assert_ranks_at_once_agree(
    ranks: int, sizes: Sequence[int], sum_of: Callable[[int], Callable[[torch.Tensor], object]]
) -> None:
    """Sums of these sizes by processes that share memory. sum_of: a rank's way to sum in place."""
    found = torch.zeros(ranks, len(sizes), max(sizes)).share_memory_()
    parts = [parts_of(ranks, size, torch.float32, size + n) for n, size in enumerate(sizes)]

    def run(rank: int) -> None:
        add = sum_of(rank)
        for number, size in enumerate(sizes):
            values = parts[number][rank].clone()
            add(values)
            found[rank, number, :size] = values

    run_at_once(ranks, run)
    for number, size in enumerate(sizes):
        expected = rank_sum_reference(parts[number])
        assert all(torch.equal(found[rank, number, :size], expected) for rank in range(ranks))


@on_each_kernel_device
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rank", "ranks", "programs"), [(0, 2, 256), (1, 2, 2), (2, 3, 1)])
def test_a_rank_adds_the_lines_of_the_others_and_writes_them_its_own(
    device: str,
    dtype: torch.dtype,
    rank: int,
    ranks: int,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others' lines are there before; three sums of different sizes follow each other."""
    monkeypatch.setattr("tllm_spec.kernels.parallel.rank_sum.PROGRAMS", programs)
    memory = memory_of(ranks, device)
    lines = lines_of(rank, memory)
    for number, num_words in enumerate((BLOCK_WORDS + 7, 2, 3 * BLOCK_WORDS), 1):
        parts = parts_of(ranks, num_words * WORD_BYTES // dtype.itemsize, dtype, number)
        residual = None if number == 2 else parts_of(1, len(parts[0]), dtype, 9)[0]
        expected = rank_sum_reference(parts, residual)
        counts = lines.counts.cpu().repeat_interleave(BLOCK_WORDS)[:num_words].long() + 1
        sent = [counts << 32 | words_of(part) for part in parts]
        for block in range(0, num_words, BLOCK_WORDS):
            buffer, here = int(counts[block]) & 1, slice(block, block + BLOCK_WORDS)
            for other in set(range(ranks)) - {rank}:
                memory[rank][buffer, other, :num_words][here] = sent[other][here].to(device)
        values, total = parts[rank].to(device), None if residual is None else residual.to(device)
        assert serves(values, CAPACITY)
        rank_sum(lines, values, total)
        assert torch.equal((values if total is None else total).cpu(), expected)
        for block in range(0, num_words, BLOCK_WORDS):
            buffer, here = int(counts[block]) & 1, slice(block, block + BLOCK_WORDS)
            for other in set(range(ranks)) - {rank}:
                written = memory[other][buffer, rank, :num_words][here].cpu()
                assert torch.equal(written, sent[rank][here])
    assert lines.counts.tolist() == [3, 2, 1, 0]


@pytest.mark.skipif(not INTERPRETED, reason="the ranks are processes that share memory")
@pytest.mark.parametrize("programs", [256, 3])
def test_interpreted_ranks_that_run_at_once_agree_on_every_sum(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for the other in between, so that one is often a sum ahead."""
    monkeypatch.setattr("tllm_spec.kernels.parallel.rank_sum.PROGRAMS", programs)
    ranks, num_sums = 2, 12
    memory = [each.share_memory_() for each in memory_of(ranks)]
    sizes = [CAPACITY if number % 3 else BLOCK_WORDS - 3 for number in range(num_sums)]
    assert_ranks_at_once_agree(ranks, sizes, lambda rank: partial(rank_sum, lines_of(rank, memory)))


@on_each_kernel_device
def test_interpreted_what_lines_cannot_hold_is_not_served(device: str) -> None:
    values = torch.zeros(CAPACITY + 1, device=device)
    assert serves(values[:CAPACITY], CAPACITY) and not serves(values, CAPACITY)
    assert not serves(values[:0], CAPACITY) and not serves(values[:CAPACITY:2], CAPACITY)
    assert not serves(values[:8].half(), CAPACITY) and not serves(values[:3].bfloat16(), CAPACITY)


@on_each_kernel_device
def test_interpreted_what_does_not_fit_is_not_written_past_the_memory(device: str) -> None:
    memory = memory_of(2, device)
    lines, values = lines_of(0, memory), torch.zeros(CAPACITY + 2, device=device)
    for add_to in (None, values):
        with pytest.raises(AssertionError):
            rank_sum(lines, values, add_to)
    for unlike in (values[:8], values[:4].bfloat16()):
        with pytest.raises(AssertionError):
            rank_sum(lines, values[:4], unlike)
    assert not lines.counts.any() and not any(each.any() for each in memory)


@pytest.mark.thinned
@only_with_the_compiler
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_compiles_for_hopper_and_moves_16_bytes_at_a_time(packed: bool) -> None:
    from tllm_spec.kernels.parallel.rank_sum import rank_sum_kernel

    types = {"values": "*i32", "output": "*i32", "addresses": "*i64", "counts": "*i32"}
    constants = {"CAPACITY": CAPACITY, "RANK": 0, "RANKS": 2, "SLOTS": 2, "BLOCK": BLOCK_WORDS}
    constants |= {"ADDS": True, "PACKED": packed, "PDL": True}
    compiled = compiled_for_hopper(
        rank_sum_kernel, types, constants, divisible=("num_words",), num_warps=4
    )
    code = compiled.asm["ptx"]
    assert "st.global.v2.b64" in code and "ld.volatile.global.v2.b64" in code
