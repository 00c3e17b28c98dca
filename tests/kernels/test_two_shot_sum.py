"""The sum over ranks in two steps of one kernel: each rank adds a part, and sends its sum."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device, only_with_the_compiler
from tests.kernels.test_rank_sum import assert_ranks_at_once_agree, parts_of
from tllm_spec.kernels.parallel.rank_sum import DTYPES, WORD_BYTES, rank_sum_reference
from tllm_spec.kernels.parallel.two_shot_sum import PART_WORDS, RankParts, two_shot_sum

CHUNKS = 2


def memory_of(ranks: int, device: str = "cpu") -> list[torch.Tensor]:
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
    memory = memory_of(ranks, device)
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
    memory = [each.share_memory_() for each in memory_of(ranks)]
    capacity = view_of(0, memory).capacity
    sizes = [capacity if number % 3 else PART_WORDS + 4 for number in range(num_sums)]
    assert_ranks_at_once_agree(
        ranks, sizes, lambda rank: partial(two_shot_sum, view_of(rank, memory))
    )


@on_each_kernel_device
def test_interpreted_what_parts_cannot_hold_is_not_written_past_the_memory(device: str) -> None:
    memory = memory_of(2, device)
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
