"""Generation rounds as CUDA graphs: one for each padded batch size, draft length and way of sampling, so that a round
is one launch and lengths of drafts can change from round to round.

A graph reads which slots take part from one buffer and everything else from the slots' own state. It does not know what
a round does, nor requests.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import monotonic

import torch
from tqdm import tqdm

from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.graph_pool import Captured, GraphPool, replay_seconds
from tllm_spec.executor.result_ring import ResultRing
from tllm_spec.executor.transfer import to_device

logger = logging.getLogger(__name__)

TIMED_SECONDS = 0.03  # of replays in a row, once to warm up and once to be timed


@dataclass(frozen=True, order=True)
class GraphKey:
    """`sampled`: some request has a temperature; otherwise the graph takes the best tokens only."""

    batch_size: int
    draft_len: int
    sampled: bool

    @property
    def num_tokens(self) -> int:
        return self.batch_size * (1 + self.draft_len)


_Captured = Captured[SampledTokens | None]


@dataclass(frozen=True)
class SpecRuntimeState:
    """A tier: what the rounds of one draft length run on. All other buffers are the slots' and serve every tier, so to
    switch tiers is to look up another of these between two rounds."""

    draft_len: int
    graphs: dict[tuple[int, bool], _Captured]
    """By padded batch size and way of sampling."""


class CudaGraphs:
    """`generate(slot_ids, draft_len, sampled)` is one round for the slots `[B]` on the device, or a part of one whose
    results are in the slots. Without `pads` a batch between two captured sizes has no graph."""

    def __init__(
        self,
        generate: Callable[[torch.Tensor, int, bool], SampledTokens | None],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool = True,
        pool: GraphPool | None = None,
    ) -> None:
        self._generate = generate
        self._pads = pads
        self._dummy_slot = dummy_slot
        self._device = device
        self.tiers: dict[int, SpecRuntimeState] = {}
        self._sizes: tuple[int, ...] = ()
        self._slot_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._sent: list[int] = []  # what the first of them are
        self._pool = pool or GraphPool(device)
        self._ring: ResultRing | None = None

    def beside(self, generate: Callable[[torch.Tensor, int, bool], SampledTokens | None]) -> "CudaGraphs":
        """Graphs of something else for the same slots, to be captured next."""
        return CudaGraphs(generate, self._dummy_slot, self._device, pads=self._pads, pool=self._pool)

    def capture(self, keys: Iterable[GraphKey], before: Callable[[GraphKey], None] | None = None) -> None:
        """Largest first. `before` is called with each key, to bring about what its first runs read.

        Raises ValueError when the memory does not suffice.
        """
        wanted = sorted(keys, reverse=True)
        self._sizes = tuple(sorted({key.batch_size for key in wanted}))
        self._slot_ids = torch.full((max(self._sizes, default=0),), self._dummy_slot, device=self._device)
        self._sent = []
        self._ring = self._make_ring(wanted)
        start, (free, _) = monotonic(), torch.cuda.mem_get_info(self._device)
        for key in tqdm(wanted, desc="CUDA graphs", unit="graph"):
            try:
                if before is not None:
                    before(key)
                tier = self.tiers.setdefault(key.draft_len, SpecRuntimeState(key.draft_len, {}))
                tier.graphs[key.batch_size, key.sampled] = self._capture(key)
            except torch.cuda.OutOfMemoryError as error:
                raise ValueError(
                    f"out of memory while the CUDA graph of {key.batch_size} requests with {key.draft_len} drafts was "
                    "captured; lower cuda_graph_config.max_batch_size, max_draft_len or "
                    "kv_cache_config.free_gpu_memory_fraction, or set cuda_graph_config to null"
                ) from error
        self._count_results()
        torch.cuda.empty_cache()
        used = free - torch.cuda.mem_get_info(self._device)[0]
        logger.info("%d CUDA graphs took %.1f s and %d MiB", len(wanted), monotonic() - start, used >> 20)

    def replay(self, slots: list[int], draft_len: int, sampled: bool) -> SampledTokens | None:
        """The round of these slots, or None when no graph fits. The result is overwritten by the next replay."""
        captured = self._run(slots, draft_len, sampled)
        if captured is None:
            return None
        result, number = captured.result, len(slots)
        assert result is not None
        tokens, lens = result.new_tokens, result.new_lens
        if number < len(lens):
            tokens, lens = tokens[:number], lens[:number]
        to_host = None if self._ring is None else self._ring.sent(number, 1 + draft_len)
        return SampledTokens(tokens, lens, to_host)

    def run(self, slots: list[int], draft_len: int, sampled: bool) -> bool:
        """Replays what leaves its results in the slots; False when no graph fits."""
        captured = self._run(slots, draft_len, sampled)
        assert captured is None or captured.result is None, "these results would be counted as nobody's"
        return captured is not None

    def result(self, key: GraphKey) -> SampledTokens:
        """Where every replay of the graph writes its results, padding included. Another replay may overwrite them."""
        captured = self._find(key)
        assert captured is not None and captured.result is not None
        return captured.result

    def _run(self, slots: list[int], draft_len: int, sampled: bool) -> _Captured | None:
        size = next((size for size in self._sizes if size >= len(slots)), 0)
        captured = self._find(GraphKey(size, draft_len, sampled))
        if captured is None or not (self._pads or size == len(slots)):
            return None
        self._send(slots + [self._dummy_slot] * (size - len(slots)))
        captured.graph.replay()
        return captured

    def __contains__(self, key: GraphKey) -> bool:
        return self._find(key) is not None

    def seconds(
        self, key: GraphKey, slots: list[int] | None = None, renew: Callable[[], None] | None = None
    ) -> float:
        """Of a replay in a long row of them. slots: of the round; None: nothing but dummies. `renew` is called before
        each replay. No round may be in flight: its results would be overwritten."""
        captured = self._find(key)
        assert captured is not None
        self._send(slots if slots is not None else [self._dummy_slot] * key.batch_size)
        try:
            return replay_seconds(captured.graph, TIMED_SECONDS, renew)
        finally:
            self._count_results()

    def _send(self, padded: list[int]) -> None:
        """Whose round the next replay is. Graphs only read it, so the same slots are sent once."""
        if padded != self._sent:
            self._slot_ids[: len(padded)].copy_(to_device(padded, self._device))
            self._sent = padded

    def _find(self, key: GraphKey) -> _Captured | None:
        tier = self.tiers.get(key.draft_len)
        return tier.graphs.get((key.batch_size, key.sampled)) if tier is not None else None

    def _capture(self, key: GraphKey) -> _Captured:
        return self._pool.capture(partial(self._generate_and_send, key))

    def _generate_and_send(self, key: GraphKey) -> SampledTokens | None:
        result = self._generate(self._slot_ids[: key.batch_size], key.draft_len, key.sampled)
        if self._ring is not None and result is not None:
            self._ring.send(result.new_lens, result.new_tokens)
        return result

    def _make_ring(self, keys: list[GraphKey]) -> ResultRing | None:
        if not keys or not ResultRing.serves(self._device):
            return None
        return ResultRing(max(key.batch_size + key.num_tokens for key in keys), self._device)

    def _count_results(self) -> None:
        """Behind runs that nobody asked results of."""
        if self._ring is not None:
            self._ring.count_again()


def graph_keys(sizes: Iterable[int], draft_lens: Callable[[int], set[int]]) -> list[GraphKey]:
    """Every combination that can occur: a graph of n requests serves all batches above the next smaller size."""
    keys: list[GraphKey] = []
    below = 0
    for size in sorted(sizes):
        lengths = set().union(*(draft_lens(batch_size) for batch_size in range(below + 1, size + 1)))
        keys += [GraphKey(size, length, sampled) for length in sorted(lengths) for sampled in (False, True)]
        below = size
    return keys
