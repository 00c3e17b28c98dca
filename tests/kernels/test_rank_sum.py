"""Sums over ranks in one kernel, in one and in two steps, and the exchange of offered tokens."""

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
    rank_best,
    rank_best_reference,
    rank_sum,
    rank_sum_reference,
    serves,
)
from tllm_spec.kernels.parallel.two_shot_sum import PART_WORDS, RankParts, two_shot_sum

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


RANKS = 3
NUM_ROWS = (5, 200)  # one and two blocks


def offers_of(num_rows: int) -> torch.Tensor:
    """`[R, RANKS, 2]` of columns in the order of the ranks, with ties, infinities, and offers of
    rows with a NaN or without a number."""
    generator = torch.Generator().manual_seed(num_rows)
    values = torch.randint(-2, 3, (num_rows, RANKS), generator=generator).float()
    columns = torch.arange(RANKS) * 1000 + torch.randint(
        0, 1000, (num_rows, RANKS), generator=generator
    )
    values[1], columns[1] = -torch.inf, -1
    values[2], columns[2, 1] = torch.inf, -1  # the rank's row has a NaN
    values[3, 0], columns[3, 0] = -torch.inf, -1
    return torch.stack((values.view(torch.int32), columns.int()), 2)


@on_each_kernel_device
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_the_best_offer_of_the_others_lines_and_the_own_ones_is_chosen(
    device: str, num_rows: int
) -> None:
    memory, offers = memory_of(RANKS, device), offers_of(num_rows)
    lines, num_words = lines_of(1, memory), 2 * num_rows
    for other in (0, 2):  # the first exchange is in the second buffer
        sent = offers[:, other].flatten().long() & 0xFFFFFFFF | 1 << 32
        memory[1][1, other, :num_words] = sent.to(device)
    found = rank_best(lines, offers[:, 1].contiguous().to(device))
    expected = rank_best_reference(offers)
    assert torch.equal(found.cpu(), expected) and expected[1] == expected[2] == -1 < expected[3]
    own = offers[:, 1].flatten().long() & 0xFFFFFFFF | 1 << 32
    assert all(torch.equal(memory[other][1, 1, :num_words].cpu(), own) for other in (0, 2))


@pytest.mark.skipif(not INTERPRETED, reason="the ranks are processes that share memory")
def test_interpreted_exchanges_and_sums_use_the_same_lines_in_turn() -> None:
    memory = [each.share_memory_() for each in memory_of(RANKS)]
    parts, offers = parts_of(RANKS, 300, torch.float32, 1), offers_of(NUM_ROWS[0])
    found = torch.zeros(RANKS, 2, dtype=torch.bool).share_memory_()

    def run(rank: int) -> None:
        lines = lines_of(rank, memory)
        for _ in range(3):
            values = parts[rank].clone()
            rank_sum(lines, values)
            tokens = rank_best(lines, offers[:, rank].contiguous())
        found[rank, 0] = torch.equal(values, rank_sum_reference(parts))
        found[rank, 1] = torch.equal(tokens, rank_best_reference(offers))

    run_at_once(RANKS, run)
    assert found.all()


CHUNKS = 2


def two_shot_memory_of(ranks: int, device: str = "cpu") -> list[torch.Tensor]:
    """The memory of each rank, int32."""
    num_bytes = RankParts.num_bytes(ranks, CHUNKS)
    return [torch.zeros(num_bytes // 4, dtype=torch.int32, device=device) for _ in range(ranks)]


def split(memory: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and sums `[2, CHUNKS, ranks, PART_WORDS]`, and their flags `[2, CHUNKS, ranks]`."""
    num_words = 2 * CHUNKS * ranks * PART_WORDS
    words, flags = memory[:num_words], memory[num_words:]
    return words.view(2, CHUNKS, ranks, PART_WORDS), flags.view(2, CHUNKS, ranks)


def view_of(rank: int, memory: list[torch.Tensor]) -> RankParts:
    device = memory[0].device
    addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
    return RankParts(rank, addresses, torch.zeros(CHUNKS, dtype=torch.int32, device=device))


def chunks_of(values: torch.Tensor, ranks: int) -> torch.Tensor:
    """Words `[CHUNKS, ranks, PART_WORDS]`, with zeros at the end."""
    words = torch.zeros(CHUNKS * ranks * PART_WORDS, dtype=torch.int32)
    words[: values.nbytes // WORD_BYTES] = values.view(torch.int32)
    return words.view(CHUNKS, ranks, PART_WORDS)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rank", "ranks", "programs"), [(0, 2, 256), (1, 3, 1)])
def test_a_rank_sends_values_adds_its_part_and_sends_the_sum(
    device: str,
    dtype: torch.dtype,
    rank: int,
    ranks: int,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others send is there before; three sums of different sizes follow each other."""
    monkeypatch.setattr("tllm_spec.kernels.parallel.two_shot_sum.PROGRAMS", programs)
    memory = two_shot_memory_of(ranks, device)
    view = view_of(rank, memory)
    others = sorted(set(range(ranks)) - {rank})
    for number, num_words in enumerate((view.capacity - 6, 2, PART_WORDS + 8), 1):
        parts = parts_of(ranks, num_words * WORD_BYTES // dtype.itemsize, dtype, number)
        residual = None if number == 2 else parts_of(1, len(parts[0]), dtype, 9)[0]
        expected = rank_sum_reference(parts, residual)
        sent = torch.stack([chunks_of(part, ranks) for part in parts])
        sums = chunks_of(rank_sum_reference(parts), ranks)
        words, flags = split(memory[rank], ranks)
        expected_flags = view.counts.cpu() + (torch.arange(CHUNKS) * ranks * PART_WORDS < num_words)
        for other in others:
            words[0, :, other] = sent[other, :, rank].to(device)
            words[1, :, other] = sums[:, other].to(device)
            flags[:, :, other] = expected_flags.to(device)
        values, total = parts[rank].to(device), None if residual is None else residual.to(device)
        two_shot_sum(view, values, total)
        found = (values if total is None else total).cpu()
        assert torch.equal(found, expected)
        assert torch.equal(view.counts.cpu(), expected_flags)
        is_sent = chunks_of(torch.ones(num_words, dtype=torch.int32), ranks) > 0
        for other in others:
            written, raised = (each.cpu() for each in split(memory[other], ranks))
            here = is_sent[:, other]
            assert torch.equal(written[0, :, rank][here], sent[rank, :, other][here])
            assert torch.equal(
                written[1, :, rank][is_sent[:, rank]], sums[:, rank][is_sent[:, rank]]
            )
            assert torch.equal(raised[:, :, rank], expected_flags.expand(2, -1))


@pytest.mark.skipif(not INTERPRETED, reason="the ranks are processes that share memory")
@pytest.mark.parametrize(("ranks", "programs"), [(2, 1), (3, 256)])
def test_interpreted_ranks_that_run_at_once_agree_on_every_two_shot_sum(
    ranks: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for the others in between."""
    monkeypatch.setattr("tllm_spec.kernels.parallel.two_shot_sum.PROGRAMS", programs)
    num_sums = 9
    memory = [each.share_memory_() for each in two_shot_memory_of(ranks)]
    capacity = view_of(0, memory).capacity
    sizes = [capacity if number % 3 else PART_WORDS + 4 for number in range(num_sums)]
    assert_ranks_at_once_agree(
        ranks, sizes, lambda rank: partial(two_shot_sum, view_of(rank, memory))
    )


@on_each_kernel_device
def test_interpreted_what_parts_cannot_hold_is_not_written_past_the_memory(device: str) -> None:
    memory = two_shot_memory_of(2, device)
    view = view_of(0, memory)
    with pytest.raises(AssertionError):
        two_shot_sum(view, torch.zeros(view.capacity + 1, device=device))
    assert not view.counts.any() and not any(each.any() for each in memory)


@only_with_the_compiler
def test_the_kernel_compiles_for_hopper_and_orders_flags_after_16_byte_stores() -> None:
    from tllm_spec.kernels.parallel.two_shot_sum import two_shot_sum_kernel

    types = {"values": "*i32", "output": "*i32", "addresses": "*i64", "counts": "*i32"}
    ranks = 8
    constants = {"CHUNKS": CHUNKS, "RANK": 0, "RANKS": ranks, "SLOTS": ranks, "PART": PART_WORDS}
    constants |= {"ADDS": True, "PACKED": True, "FENCES": True, "PDL": True}
    compiled = compiled_for_hopper(
        two_shot_sum_kernel, types, constants, divisible=("num_words",), num_warps=4
    )
    code = compiled.asm["ptx"]
    # Values, sums and outputs of all ranks, and this rank's own output.
    assert code.count("st.global.v4.b32") == 3 * ranks + 1
    assert code.count("fence.acq_rel.sys") == 2 and "ld.acquire.sys.global.b32" in code
