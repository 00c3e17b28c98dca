"""Two ranks, each with half of the columns of the logits, choose the tokens of one rank that has
them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.thread_ranks import RANKS, ThreadGroup
from tests.executor.sampling.test_sampler import CPU, DRAFT_LEN, VOCAB, Bench
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.distributed.communicator import Communicator, VocabShard
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.sampling.row_group import RowGroup, RowPositions
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.sharded_sampler import ShardedDraftSampling, sampler_of
from tllm_spec.grammar.grammar_state import GrammarState

HALF = VOCAB // RANKS
WAYS = ["greedy", "temperature", "temperature"]


def bench_of(ways: list[str], shard: VocabShard | None) -> Bench:
    bench = Bench(ways)
    if shard is not None:
        state = bench.sampler.state
        sampler = sampler_of(shard, bench.slots, state, rejection=False)
        for request in bench.requests:
            sampler.start(request)
        bench.sampler = sampler
    return bench


def on_ranks(work: Callable[[VocabShard], torch.Tensor]) -> tuple[list[torch.Tensor], ThreadGroup]:
    """Each rank's result."""
    group = ThreadGroup()

    def run(rank: Communicator) -> torch.Tensor:
        return work(VocabShard(rank, rank.mapping.rank * HALF, HALF))

    return group.run(run), group


def logits_of_windows(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return 2 * torch.randn(num_rows, VOCAB, generator=generator)


def windows(bench: Bench, group: RowGroup, logits: torch.Tensor) -> torch.Tensor:
    kv_lens = bench.slots.kv_lens.index_select(0, group.slots)
    bench.slots.window[:, 1:] = 3
    bench.slots.num_drafts[:] = DRAFT_LEN
    sampled = bench.sampler.sample(group, logits, RowPositions(kv_lens, 1), None, LogprobRows())
    return torch.cat((sampled.new_tokens, sampled.new_lens.unsqueeze(1)), 1)


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize("ways", [["greedy", "greedy"], ["temperature"], WAYS, ["filters", *WAYS]])
def test_two_ranks_choose_the_tokens_of_one(ways: list[str], by_slots: bool) -> None:
    """`by_slots`: as a CUDA graph does, which reads the parameters on the device."""
    filtered = "filters" in ways
    logits = logits_of_windows(len(ways) * (DRAFT_LEN + 1))

    def run(shard: VocabShard | None) -> torch.Tensor:
        bench = bench_of(ways, shard)
        groups, requests = bench.sampler.groups, bench.requests
        if by_slots:
            slots = torch.tensor([request.slot for request in requests])
            sampled = filtered if shard is not None else True
            group = groups.of_slots(slots, DRAFT_LEN + 1, sampled=sampled)
        else:
            group = groups.get(requests, DRAFT_LEN + 1)
        own = logits if shard is None else logits[:, shard.first : shard.first + HALF]
        return windows(bench, group, own.contiguous())

    expected = run(None)
    found, group = on_ranks(run)
    assert all(torch.equal(each, expected) for each in found)
    of_pairs, of_logits = RANKS * 8 * len(logits), VOCAB * 4 * len(logits)
    assert group.num_bytes == (of_logits if filtered else of_pairs)


class RandomMasks(GrammarState):
    """Allows about half of the tokens, others in each row."""

    def __init__(self) -> None:
        pass

    def read(self, tokens: list[int], prompt_len: int) -> None:
        pass

    def fill(self, tokens: object, parents: object, bitmask: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(7)
        bitmask.random_(0, 1 << 31, generator=generator)


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize("ways", [["greedy", "greedy"], WAYS, ["filters", *WAYS]])
def test_two_ranks_mask_their_halves_as_one_masks_all(ways: list[str], by_slots: bool) -> None:
    num_rows = len(ways) * (DRAFT_LEN + 1)
    logits = logits_of_windows(num_rows)

    def run(shard: VocabShard | None) -> torch.Tensor:
        bench = bench_of(ways, shard)
        groups, requests, masks = bench.sampler.groups, bench.requests, bench.sampler.grammar_masks
        requests[0].grammar = RandomMasks()
        own = logits if shard is None else logits[:, shard.first : shard.first + HALF]
        own = own.clone()
        masks.begin(ScheduledBatch(generation_requests=requests, shape=chain_of(DRAFT_LEN)))
        if not by_slots:
            return windows(bench, groups.get(requests, DRAFT_LEN + 1), own)
        slots = torch.tensor([request.slot for request in requests])
        sampled = "filters" in ways if shard is not None else True
        group = groups.of_slots(slots, DRAFT_LEN + 1, sampled=sampled)
        masks.make_room(num_rows)
        masks.send(requests, DRAFT_LEN + 1, num_rows)
        masks.apply_sent(own, group)
        return windows(bench, group, own)

    expected = run(None)
    found, _ = on_ranks(run)
    assert all(torch.equal(each, expected) for each in found)


def test_a_graph_of_best_tokens_serves_sampled_requests_without_filters() -> None:
    shard = VocabShard(ThreadGroup().rank(0), 0, HALF)
    bench = bench_of(["greedy", "temperature", "filters", "penalties"], shard)
    assert [request.graph_samples for request in bench.requests] == [False, False, True, None]
    whole = bench_of(["greedy", "temperature"], None)
    assert [request.graph_samples for request in whole.requests] == [False, True]


@pytest.mark.parametrize("mode", ["coupled", "greedy", "independent"])
@pytest.mark.parametrize("ways", [["greedy"], WAYS, ["filters", *WAYS]])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_two_ranks_draw_the_drafts_of_one(mode: str, ways: list[str], is_reduced: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    token_map = torch.randperm(VOCAB, generator=generator)[:HALF].sort().values
    width = HALF if is_reduced else VOCAB
    logits = torch.randn(len(ways), width, generator=generator)

    def run(shard: VocabShard | None) -> torch.Tensor:
        bench = bench_of(ways, None)
        sampler: Sampler = bench.sampler
        used = token_map if is_reduced else None
        drawing, own = DraftSampling(sampler, mode, used), logits
        if shard is not None:
            size = width // RANKS
            first = size * shard.communicator.mapping.rank
            part = VocabShard(shard.communicator, first, size)
            drawing = ShardedDraftSampling(part, sampler, mode, used)
            own = logits[:, first : first + size].contiguous()
        group = sampler.groups.get(bench.requests, DRAFT_LEN + 1)
        first_positions = torch.full((len(ways),), 9, device=CPU)
        return drawing.choose(group, 1, own, first_positions)[0]

    expected = run(None)
    found, _ = on_ranks(run)
    assert all(torch.equal(each, expected) for each in found)
