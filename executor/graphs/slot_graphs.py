"""Work on slots as CUDA graphs: one for each padded batch size, draft shape and way of sampling.

A graph reads the numbers of its slots from one buffer and everything else from the slot state."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar

import torch

from tllm_spec.config.draft_shape import MAX_BUDGETS, DraftShape, chain_of
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.device.transfer import DeviceSpan, ResultRing, to_device
from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.graph_memsets import memsets_as_kernels
from tllm_spec.progress import progress

# Captures work as CUDA graphs that share one memory pool.
#
# They never run at the same time, and the replay of one may overwrite the results of another.


Result = TypeVar("Result")


@dataclass(frozen=True)
class Captured(Generic[Result]):
    """A graph, and the tensors that its replays write their results to."""

    graph: torch.cuda.CUDAGraph
    result: Result


class GraphPool:
    """Memory that the graphs of an engine share. Capture the work that needs the most memory first:
    the rest then fits into it. `agree`: makes a number the same on all ranks."""

    def __init__(self, device: torch.device, agree: Callable[[int], int] = int) -> None:
        self._device = device
        self.agree = agree
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Callable[[], Result]) -> Captured[Result]:
        """Raises torch.cuda.OutOfMemoryError."""
        if self._stream is None:
            # One stream for all: torch keeps what a warm-up allocates for the stream it ran on.
            self._stream = torch.cuda.Stream(self._device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()  # compiles kernels and lets libraries allocate, which a capture must not
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = work()
        if nvrtc.is_installed():
            memsets_as_kernels(graph.raw_cuda_graph())
        graph.instantiate()
        self._pool = graph.pool()
        self._graphs.append(graph)
        return Captured(graph, result)

    def release(self) -> None:
        """No graph can be replayed afterwards."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        while self._graphs:
            self._graphs.pop().reset()


def _row_seconds(
    replay: Callable[[], None], number: int, before: Callable[[], None] | None
) -> float:
    """The device's time of so many replays in a row; `before` is called before each."""
    span = DeviceSpan()
    for _ in range(number):
        if before is not None:
            before()
        replay()
    span.end()
    return span.seconds()


logger = logging.getLogger(__name__)

TIMED_SECONDS = 0.03  # of replays in a row, once to warm up and once to be timed
Other = TypeVar("Other")


@dataclass(frozen=True, order=True)
class GraphKey:
    """What a graph is captured for. `sampled`: some request has a temperature; otherwise the graph
    takes the best tokens only. `adapted`: some request has a LoRA adapter."""

    batch_size: int
    shape: DraftShape
    sampled: bool
    adapted: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the windows."""
        return self.shape.num_rows(self.batch_size)

    @property
    def row_counts(self) -> set[int]:
        """Rows of each forward of such a round: the windows, what was emitted, each draft step."""
        shape = self.shape
        each = {self.batch_size * n for n in (1, shape.path, shape.num_beams)}
        return each | {self.num_tokens}


class SlotGraphs(Generic[Result]):
    """CUDA graphs by key. `work(slot_ids, shape, sampled)` takes slot numbers `[B]` on the device.
    Without `pads` a batch between two captured sizes has no graph. All other buffers belong to the
    slots and serve every shape, so switching shapes between two rounds is one look-up."""

    def __init__(
        self,
        work: Callable[[torch.Tensor, DraftShape, bool], Result],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool = True,
        pool: GraphPool | None = None,
    ) -> None:
        self._work = work
        self._pads = pads
        self._dummy_slot = dummy_slot
        self._device = device
        self.captured: dict[GraphKey, Captured[Result]] = {}
        self._sizes: tuple[int, ...] = ()
        self._slot_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._sent: list[int] = []  # what the first of them hold
        self._pool = pool or GraphPool(device)

    def for_same_slots(
        self, work: Callable[[torch.Tensor, DraftShape, bool], Other]
    ) -> "SlotGraphs[Other]":
        """Graphs of other work with the same dummy slot, padding and memory, to be captured
        next."""
        return SlotGraphs(work, self._dummy_slot, self._device, pads=self._pads, pool=self._pool)

    def capture(
        self, keys: Iterable[GraphKey], before: Callable[[GraphKey], None] | None = None
    ) -> None:
        """Captures the largest first. `before` is called with each key, to prepare what the work
        reads when it is captured.

        Raises ValueError when the memory does not suffice.
        """
        wanted = sorted(keys, reverse=True)
        if not wanted:
            return
        self._sizes = tuple(sorted({key.batch_size for key in wanted}))
        self._slot_ids = torch.full(
            (max(self._sizes, default=0),), self._dummy_slot, device=self._device
        )
        self._sent = []
        start, (free, _) = monotonic(), torch.cuda.mem_get_info(self._device)
        with progress("CUDA graphs", len(wanted), "graphs", every=5) as bar:
            for key in wanted:
                self._capture(key, before)
                bar.advance()
        torch.cuda.empty_cache()
        used = free - torch.cuda.mem_get_info(self._device)[0]
        logger.info(
            "%d CUDA graphs took %.1f s and %d MiB", len(wanted), monotonic() - start, used >> 20
        )

    def _capture(self, key: GraphKey, before: Callable[[GraphKey], None] | None) -> None:
        try:
            if before is not None:
                before(key)
            self.captured[key] = self._pool.capture(partial(self._run_work, key))
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"out of memory while the CUDA graph of {key.batch_size} requests with "
                f"{key.shape.num_nodes} drafts was captured; lower "
                "cuda_graph_config.max_batch_size, max_draft_len or "
                "kv_cache_config.free_gpu_memory_fraction, or set cuda_graph_config to null"
            ) from error

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.captured

    def padded(self, batch_size: int) -> int:
        """The batch size of the graphs that serve so many requests; 0: there are none."""
        size = next((size for size in self._sizes if size >= batch_size), 0)
        return size if self._pads or size == batch_size else 0

    def seconds(
        self, key: GraphKey, slots: list[int] | None = None, renew: Callable[[], None] | None = None
    ) -> float:
        """The device's time of one replay, in a long row of them, and of `renew`, which is called
        before each. slots: those that take part; None: the dummy slot only. No round may be in
        flight: its results would be overwritten."""
        replay = self.ready(key, slots)
        number = self._pool.agree(max(1, round(TIMED_SECONDS / _row_seconds(replay, 1, renew))))
        # The device's clock is lower after a pause than under load, so one row warms it up.
        _row_seconds(replay, number, renew)
        return _row_seconds(replay, number, renew) / number

    def ready(self, key: GraphKey, slots: list[int] | None = None) -> Callable[[], None]:
        """A function that replays the graph of a key for these slots."""
        self._send(slots if slots is not None else [self._dummy_slot] * key.batch_size)
        return self.captured[key].graph.replay

    def run(
        self, slots: list[int], shape: DraftShape, sampled: bool, adapted: bool = False
    ) -> Captured[Result] | None:
        """Replays the work for these slots, or None when no graph fits. Its result, of the padded
        batch, may be overwritten by any other replay."""
        size = self.padded(len(slots))
        captured = self.captured.get(GraphKey(size, shape, sampled, adapted))
        if captured is None:
            return None
        self._send(slots + [self._dummy_slot] * (size - len(slots)))
        captured.graph.replay()
        return captured

    def _send(self, padded: list[int]) -> None:
        """Sets the slots of the next replay. Graphs only read them, so slots that are there already
        are not sent again."""
        if padded != self._sent:
            self._slot_ids[: len(padded)].copy_(to_device(padded, self._device))
            self._sent = padded

    def _run_work(self, key: GraphKey) -> Result:
        """The work that is captured."""
        return self._work(self._slot_ids[: key.batch_size], key.shape, key.sampled)


def graph_keys(
    sizes: Iterable[int],
    tiers: Callable[[int], set[int]],
    shape_of: Callable[[int], DraftShape] = chain_of,
) -> list[GraphKey]:
    """Every combination that can occur: a graph of n requests serves all batches above the next
    smaller size."""
    keys: list[GraphKey] = []
    below = 0
    for size in sorted(sizes):
        served = set().union(*(tiers(batch_size) for batch_size in range(below + 1, size + 1)))
        keys += [
            GraphKey(size, shape_of(tier), sampled)
            for tier in sorted(served)
            for sampled in (False, True)
        ]
        below = size
    return keys


# Generation rounds as CUDA graphs: a round is one launch, and the draft length can change from
# round to round. The last kernel of a graph sends the results to the host.


Work = Callable[[torch.Tensor, DraftShape, bool], SampledTokens]


class CudaGraphs(SlotGraphs[SampledTokens]):
    """Rounds of generation windows as CUDA graphs. Each graph is one round of its slots."""

    _ring: ResultRing | None = None

    def for_same_results(self, work: Work) -> "CudaGraphs":
        """Graphs of another part of the round, with the same results ring; to be captured next."""
        graphs = CudaGraphs(work, self._dummy_slot, self._device, pads=self._pads, pool=self._pool)
        graphs._ring = self._ring
        return graphs

    def capture(
        self, keys: Iterable[GraphKey], before: Callable[[GraphKey], None] | None = None
    ) -> None:
        wanted = list(keys)
        if self._ring is None:
            self._ring = self._make_ring(wanted)
        super().capture(wanted, before)
        self._count_results()

    def replay(
        self, slots: list[int], shape: DraftShape, sampled: bool, adapted: bool = False
    ) -> SampledTokens | None:
        """The round of these slots, or None when no graph fits. The next replay of these graphs
        overwrites the result."""
        captured = self.run(slots, shape, sampled, adapted)
        if captured is None:
            return None
        result, number = captured.result, len(slots)
        tokens, lens = result.new_tokens, result.new_lens
        if number < len(lens):
            tokens, lens = tokens[:number], lens[:number]
        to_host = None if self._ring is None else self._ring.sent(number, result.num_columns)
        ranks, num_drafts = (
            None if each is None else each[:number] for each in (result.ranks, result.num_drafts)
        )
        return SampledTokens(tokens, lens, ranks=ranks, num_drafts=num_drafts, to_host=to_host)

    def seconds(
        self, key: GraphKey, slots: list[int] | None = None, renew: Callable[[], None] | None = None
    ) -> float:
        try:
            return super().seconds(key, slots, renew)
        finally:
            self._count_results()

    def _run_work(self, key: GraphKey) -> SampledTokens:
        result = super()._run_work(key)
        if self._ring is not None:
            self._ring.send(result.new_lens, result.columns())
        return result

    def _make_ring(self, keys: list[GraphKey]) -> ResultRing | None:
        if not keys or not ResultRing.serves(self._device):
            return None
        # Tokens, and with trees of several shapes as many ranks, or what budgets would bring.
        number = max(key.batch_size for key in keys)
        path = max(key.shape.path for key in keys)
        capacity = number * (2 + path + max(path, MAX_BUDGETS))
        return ResultRing(capacity, self._device)

    def _count_results(self) -> None:
        """Called after replays whose results are not read."""
        if self._ring is not None:
            self._ring.count_again()


# The CUDA graphs of rounds of generation windows: of whole rounds, or of forwards and tails.


@dataclass(frozen=True)
class WindowGraphs:
    """`forwards` are the same for every way of sampling. `whole` is empty where no round is one
    graph, `tails` where none has two."""

    whole: CudaGraphs
    forwards: SlotGraphs[torch.Tensor]
    tails: CudaGraphs

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.whole or key in self.tails

    def hold(self, num_requests: int, shape: DraftShape) -> bool:
        """Whether there are graphs for a round of so many requests with drafts of this shape."""
        return GraphKey(self.forwards.padded(num_requests), shape, False) in self.forwards

    def seconds(
        self, key: GraphKey, slots: list[int] | None = None, renew: Callable[[], None] | None = None
    ) -> float:
        """As `SlotGraphs.seconds`, for a round."""
        if key in self.whole:
            return self.whole.seconds(key, slots, renew)
        forward = self.forwards.ready(replace(key, sampled=False), slots)

        def before() -> None:
            if renew is not None:
                renew()
            forward()

        return self.tails.seconds(key, slots, before)


# How long work takes that no graph holds, as it would in a round: launched and done.


TIMED_RUNS = 4  # the first may compile
TIMED_KV_LEN = 512  # the KV length that attention is planned for


def eager_seconds(run: Callable[[], torch.Tensor]) -> float:
    """The fastest of a few runs, each until its result is on the host: other work on the machine
    only adds time."""
    times = []
    for _ in range(TIMED_RUNS):
        start = perf_counter()
        run().tolist()
        times.append(perf_counter() - start)
    return min(times)
