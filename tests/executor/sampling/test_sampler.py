"""A window's row must get what the same position gets alone: the sampler is tested without a model,
on given logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.distributed.thread_ranks import RANKS, ThreadGroup
from tllm_spec.config.draft_shape import DraftShapes, chain_of
from tllm_spec.distributed.communicator import Communicator, VocabShard
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.resources.interface import SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.sampling.row_group import RowGroup, RowPositions, SamplingState
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.sharded_sampler import ShardedDraftSampling, sampler_of
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.outputs import Logprob
from tllm_spec.sampling_params import SamplingParams

VOCAB = 24
DRAFT_LEN = 4
CPU = torch.device("cpu")


def push(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[sum(tokens[-2:]) % VOCAB] += 1.0
    return logits


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9},
    "filters": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.5,
    },
    "greedy_penalties": {"presence_penalty": 2.0, "frequency_penalty": 1.0},
    "bias": {
        "temperature": 1.0,
        "logit_bias": {3: 1.0, 5: -3.0},
        "bad_token_ids": [[7], [2, 9], [3, 3]],
    },
    "min_tokens": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": [1, 2, 3, 4, 5]},
    "processor": {"temperature": 1.0, "logits_processor": push},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
}


class Bench:
    """A sampler whose logits are a function of the tokens before a position, so that any row can be
    looked up."""

    def __init__(self, ways: list[str], *, rejection: bool = False) -> None:
        slots = SeqSlotManager(len(ways))
        state = SamplingState(slots, VOCAB, CPU)
        self.slots = SlotState(slots, DraftShapes.chains(DRAFT_LEN), CPU)
        self.sampler = sampler_of(None, self.slots, state, rejection=rejection)
        self.requests = [self._start(slots, way) for way in ways]
        self.found: list[dict[int, list[dict[int, Logprob]]]] = []

    def _start(self, slots: SeqSlotManager, way: str) -> LlmRequest:
        params = SamplingParams(**WAYS[way])
        rules = DecodingRules.from_params(params, vocab_size=VOCAB, end_ids=(), encode=None)
        number = list(WAYS).index(way)
        request = LlmRequest(
            number, [number, 7, 3, number], rules, seed=100 + number, max_tokens=999
        )
        slots.acquire(request)
        self.sampler.start(request)
        return request

    def logits(self, tokens: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(tokens[-3:])) % 2**31)
        return 2 * torch.randn(VOCAB, generator=generator)

    def context(self) -> None:
        """Samples every request's first token."""
        for request in self.requests:
            request.context_chunk = request.num_tokens
            self.slots.kv_lens[request.slot] = request.num_tokens
        logits = torch.stack([self.logits(request.tokens) for request in self.requests])
        tails, logprobs = (
            torch.tensor([request.tokens[-1] for request in self.requests]),
            LogprobRows(),
        )
        group = self.sampler.groups.get(self.requests, 1)
        at = RowPositions(self.slots.kv_lens.index_select(0, group.slots), 0)
        sampled = self.sampler.sample(group, logits, at, None, logprobs)
        self.slots.start_generation(group.slots, tails, sampled.new_tokens[:, 0])
        self._append(sampled, logprobs)
        for request in self.requests:
            request.state, request.kv_len = RequestState.GENERATION, request.num_tokens - 1

    def window(self, drafts: list[list[int]]) -> list[int]:
        """One round with drafts of any length up to DRAFT_LEN; returns how many tokens each request
        emitted."""
        rows = []
        for request, own in zip(self.requests, drafts, strict=True):
            padded = own + [0] * (DRAFT_LEN - len(own))
            request.py_num_draft_tokens = len(own)
            self.slots.window[request.slot, 1:] = torch.tensor(padded)
            self.slots.num_drafts[request.slot] = len(own)
            rows += [
                self.logits(request.tokens + padded[:position]) for position in range(DRAFT_LEN + 1)
            ]
        return self._windows(DRAFT_LEN + 1, torch.stack(rows))

    def plain(self) -> list[int]:
        return self._windows(
            1, torch.stack([self.logits(request.tokens) for request in self.requests])
        )

    def _windows(self, width: int, logits: torch.Tensor) -> list[int]:
        group, logprobs = self.sampler.groups.get(self.requests, width), LogprobRows()
        kv_lens = self.slots.kv_lens.index_select(0, group.slots)
        at = RowPositions(kv_lens, 1)
        return self._append(self.sampler.sample(group, logits, at, None, logprobs), logprobs)

    def _append(self, sampled: SampledTokens, logprobs: LogprobRows) -> list[int]:
        self.found.append(logprobs.per_request(logprobs.tensors))
        rows = zip(self.requests, sampled.new_tokens, sampled.new_lens, strict=True)
        for request, tokens, length in rows:
            request.tokens += tokens[:length].tolist()
        return sampled.new_lens.tolist()


def texts(bench: Bench) -> list[list[int]]:
    return [request.tokens for request in bench.requests]


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, list[int]]:
    """40 tokens of every way, each alone and one at a time."""
    found = {}
    for way in WAYS:
        bench = Bench([way])
        bench.context()
        for _ in range(60):
            bench.plain()
        found[way] = bench.requests[0].tokens
    return found


@pytest.mark.parametrize("offset", range(5))
def test_windows_of_right_and_wrong_drafts_in_a_mixed_batch_give_the_plain_texts(
    plain_texts: dict[str, list[int]], offset: int
) -> None:
    bench = Bench(list(WAYS))
    bench.context()
    for number in range(10):
        drafts, expected = [], []
        for index, (way, request) in enumerate(zip(WAYS, bench.requests, strict=True)):
            num_right, num_wrong = divmod((number * 7 + index * 3 + offset) % 25, 5)
            rest = plain_texts[way][request.num_tokens :]
            right, wrong = rest[:num_right], [(token + 1) % VOCAB for token in rest[num_right:]]
            drafts.append((right + wrong[:num_wrong])[:DRAFT_LEN])
            expected.append(num_right + 1)
        assert bench.window(drafts) == expected
    for way, text in zip(WAYS, texts(bench), strict=True):
        assert text == plain_texts[way][: len(text)]


def test_every_way_of_sampling_has_an_effect(plain_texts: dict[str, list[int]]) -> None:
    """Else the test above would not see one that is left out: the same seed and prompt without it
    give another text."""
    for way, text in plain_texts.items():
        if way in ("greedy", "logprobs", "temperature"):
            continue
        bench = Bench([way])
        bench.requests[0].rules = DecodingRules.from_params(
            SamplingParams(temperature=WAYS[way].get("temperature")),
            vocab_size=VOCAB,
            end_ids=(),
            encode=None,
        )
        bench.sampler.start(bench.requests[0])
        bench.context()
        for _ in range(60):
            bench.plain()
        assert bench.requests[0].tokens != text, way


def test_before_min_tokens_no_stop_id_is_chosen_and_after_them_some_are(
    plain_texts: dict[str, list[int]],
) -> None:
    text = plain_texts["min_tokens"][4:]
    assert not set(text[:6]) & {1, 2, 3, 4, 5} and set(text[6:]) & {1, 2, 3, 4, 5}


def test_bad_words_never_appear(plain_texts: dict[str, list[int]]) -> None:
    text = plain_texts["bias"]
    pairs = set(itertools.pairwise(text))
    assert 7 not in text[4:] and (2, 9) not in pairs and (3, 3) not in pairs
    assert {2, 3, 9} <= set(text[4:])


def test_padding_is_not_accepted_even_where_it_happens_to_be_right(
    plain_texts: dict[str, list[int]],
) -> None:
    bench = Bench(["greedy"])
    bench.context()
    while plain_texts["greedy"][bench.requests[0].num_tokens] != 0:
        bench.plain()
    assert bench.window([[]]) == [1] and bench.requests[0].tokens[-1] == 0


def test_logprobs_come_from_the_models_own_logits_for_every_row_of_a_window(
    plain_texts: dict[str, list[int]],
) -> None:
    bench = Bench(["logprobs", "greedy", "penalties"])
    bench.context()
    request = bench.requests[0]
    start = request.num_tokens
    drafts = [plain_texts["logprobs"][start : start + 3], [], []]
    assert bench.window(drafts)[0] == 4
    assert list(bench.found[-1]) == [request.request_id]
    for position, entry in enumerate(bench.found[-1][request.request_id][:4], start):
        raw = bench.logits(request.tokens[:position]).log_softmax(-1)
        token = request.tokens[position]
        assert entry[token].logprob == pytest.approx(float(raw[token]), abs=1e-6)
        assert entry[token].rank == int((raw > raw[token]).sum()) + 1
        assert set(raw.topk(2).indices.tolist()) <= set(entry)


def test_under_rejection_sampling_a_greedy_request_still_takes_the_best_token(
    plain_texts: dict[str, list[int]],
) -> None:
    bench = Bench(["greedy"], rejection=True)
    bench.context()
    start = bench.requests[0].num_tokens
    right = plain_texts["greedy"][start : start + 3]
    assert bench.window([[*right[:2], (right[2] + 1) % VOCAB]]) == [3]
    assert texts(bench)[0] == plain_texts["greedy"][: start + 3]


class RoundedBench(Bench):
    """Logits rounded to bfloat16, and given to the sampler as `dtype`."""

    dtype = torch.float32

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return super().logits(tokens).to(torch.bfloat16).to(self.dtype)


def test_logits_in_the_models_dtype_give_the_tokens_of_their_float32_copies() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        bench = RoundedBench(list(WAYS))
        bench.dtype = dtype
        bench.context()
        for _ in range(30):
            bench.plain()
            bench.window([[1, 2]] * len(WAYS))
        found.append((texts(bench), bench.found))
    assert found[0] == found[1]


# Two ranks, each with half of the columns of the logits, choose the tokens of one rank that has
# them all.


HALF = VOCAB // RANKS
SHARDED_SAMPLER_WAYS = ["greedy", "temperature", "temperature"]


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


@pytest.mark.covering
@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize(
    "ways",
    [
        ["greedy", "greedy"],
        ["temperature"],
        SHARDED_SAMPLER_WAYS,
        ["filters", *SHARDED_SAMPLER_WAYS],
    ],
)
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
    """Allows about half of the tokens, others in each row; the first two rows allow one token."""

    def __init__(self) -> None:
        pass

    def read(self, tokens: list[int], prompt_len: int) -> None:
        pass

    def fill(self, tokens: object, parents: object, bitmask: torch.Tensor) -> Mapping[int, int]:
        generator = torch.Generator().manual_seed(7)
        bitmask.random_(0, 1 << 31, generator=generator)
        return {0: 3, 1: VOCAB - 2}


@pytest.mark.covering
@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize(
    "ways", [["greedy", "greedy"], SHARDED_SAMPLER_WAYS, ["filters", *SHARDED_SAMPLER_WAYS]]
)
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


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["coupled", "greedy", "independent"])
@pytest.mark.parametrize(
    "ways", [["greedy"], SHARDED_SAMPLER_WAYS, ["filters", *SHARDED_SAMPLER_WAYS]]
)
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
