"""The steps before the first round, in the order in which build.py calls them: GEMMs are tuned,
CUDA graphs captured, kernels warmed up, and rounds timed."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from time import monotonic

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShapes
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.engine.memory_plan import TorchModel
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import GraphKey, GraphPool
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import (
    MeasuredRoundTimes,
    RoundTimes,
    read_table,
)
from tllm_spec.models.linear import tune_linears
from tllm_spec.progress import progress
from tllm_spec.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Batch sizes whose rounds are timed where there are no graphs; others are interpolated.
EAGER_SIZES = (1, 2, 4, 8, 16)


def graph_sizes(plan: BuildPlan, runner: RoundRunner) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs; none where there can be no graphs."""
    if not plan.graph_sizes or plan.device.type != "cuda":
        return ()
    if not runner.engine.attention.supports_graphs:
        logger.warning(
            "no CUDA graphs: attn_backend %s needs lengths on the host", plan.args.attn_backend
        )
        return ()
    return plan.graph_sizes


def tune_gemms(plan: BuildPlan, models: Sequence[TorchModel], keys: Sequence[GraphKey]) -> None:
    """Tunes the models' GEMMs for the numbers of rows that rounds have."""
    if plan.device.type == "cuda":
        plan.begin("GEMMs")
    if plan.args.deterministic:
        return
    # Rows of all windows, one row per request, full chunks of contexts, and a short prompt.
    row_counts = {rows for key in keys for rows in key.row_counts}
    row_counts |= {plan.args.max_num_tokens, plan.args.max_num_tokens // 8}
    tune_linears(models, row_counts, plan.device, plan.communicator)


def capture_graphs(plan: BuildPlan, runner: RoundRunner, keys: list[GraphKey]) -> None:
    """Captures the graphs of contexts, and those of the rounds in `keys`."""
    if plan.device.type == "cuda":
        plan.begin("CUDA graphs")
    pool = GraphPool(plan.device, plan.communicator.minimum)
    plan.communicator.before_close(pool.release)
    # First, since the graphs of contexts need the most memory.
    runner.capture_contexts(plan.context_rows, pool)
    if keys:
        assert plan.args.cuda_graph_config is not None
        pads = plan.args.cuda_graph_config.enable_padding
        logger.info("capturing the CUDA graphs of %d kinds of rounds", len(keys))
        runner.capture_graphs(keys, pads=pads, pool=pool)


def warm_up(plan: BuildPlan, runner: RoundRunner, keys: Sequence[GraphKey]) -> None:
    """Runs rounds of dummy requests, which compile and load the kernels of a GPU."""
    if plan.device.type == "cuda":
        rows, dummy_slot = plan.args.max_num_tokens, plan.slots.dummy_slot
        WarmUp(runner, dummy_slot, max_num_tokens=rows, max_len=plan.max_seq_len).run(keys)


def time_rounds(plan: BuildPlan, runner: RoundRunner, sizes: Sequence[int]) -> RoundTimes | None:
    """How long rounds take with each draft length that the controller may ask for; None if it does
    not compare times. sizes: batch sizes of CUDA graphs. Where an option names a file, the times
    are read from it, or written there if there is none. Raises ValueError for another file."""
    controller, given = plan.controller(), plan.spec.round_times_path if plan.spec else None
    if not controller.compares_times:
        return None
    file = None if given is None else Path(given)
    is_first = plan.mapping.rank == 0
    content = file.read_bytes() if file is not None and is_first and file.is_file() else b""
    if content := plan.communicator.broadcast(content):
        try:
            return read_table(content, plan.shapes, controller.tiers)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"speculative_config.round_times_path = {given!r}: {error}") from None
    times = _measured(plan, runner, controller, sizes)
    if file is not None and is_first:
        file.write_text(json.dumps(times.to_json(plan.shapes), indent=1))
    return times


def _measured(
    plan: BuildPlan, runner: RoundRunner, controller: AdaptiveController, sizes: Sequence[int]
) -> MeasuredRoundTimes:
    plan.begin("round times")
    longest = plan.shapes.longest
    room = min(plan.slots.max_batch_size, plan.args.max_num_tokens // longest.window)
    timed = [size for size in sizes or EAGER_SIZES if size <= max(room, 1)]
    timer = RoundTimer(runner, plan.shapes, ContextLimits(plan.max_seq_len, 1 + plan.overshoot))
    return timer.measure(controller, timed, is_shown=plan.mapping.rank == 0)


class RoundTimer:
    """Times rounds of dummy requests, with what a draft model drafts for them before. limits: of
    the contexts that these requests have, on a GPU and where there is room for them."""

    def __init__(self, runner: RoundRunner, shapes: DraftShapes, limits: ContextLimits) -> None:
        self._runner, self._shapes, self._limits = runner, shapes, limits

    def measure(
        self, controller: AdaptiveController, sizes: Sequence[int], *, is_shown: bool = True
    ) -> MeasuredRoundTimes:
        """Round times by batch size and tier. With graphs, of the tiers that the controller may ask
        for at a size; without, all of them, since the sizes between are interpolated."""
        has_graphs = self._runner.graphs is not None
        seconds = {}
        with progress("round times", len(sizes), "batch sizes", every=5, is_shown=is_shown) as bar:
            for size in sizes:
                tiers = controller.tiers_at(size) if has_graphs else controller.tiers
                seconds[size] = self._row(size, tiers)
                bar.advance()
        return MeasuredRoundTimes(seconds, has_contexts=has_graphs)

    def _row(self, size: int, tiers: Sequence[int] | set[int]) -> dict[int, float]:
        """Every tier twice, in mirrored order, so that a drifting clock favours none."""
        keys = {tier: GraphKey(size, self._shapes.of(tier), False) for tier in sorted(tiers)}
        first = {tier: self._seconds(key) for tier, key in keys.items()}
        second = {tier: self._seconds(key) for tier, key in reversed(keys.items())}
        row = {tier: (time + second[tier]) / 2 for tier, time in first.items()}
        return row if self._runner.graphs is not None else without_outliers(row, self._shapes)

    def _seconds(self, key: GraphKey) -> float:
        runner = self._runner
        seconds = runner.seconds_with_contexts(key, self._limits)
        if seconds is None:
            seconds = runner.seconds(key)
        return seconds + runner.drafter.seconds_before(key)


def without_outliers(row: Mapping[int, float], shapes: DraftShapes) -> dict[int, float]:
    """Host-timed rounds by tier. Other work on the machine only adds time, and neither fewer drafts
    nor fewer steps ever take longer: a time above that of a larger shape is replaced by it. Copied
    drafts have no steps."""

    def contains(larger: int, tier: int) -> bool:
        one, other = shapes.of(larger), shapes.of(tier)
        if one.is_copied and other.depth and not other.is_copied:
            return False
        return one.depth >= other.depth and one.rows_each >= other.rows_each

    return {tier: min(row[each] for each in row if contains(each, tier)) for tier in row}


# Runs rounds with contexts before the first request, so that kernels which are compiled or loaded
# when they first run do not delay it.
#
# The requests of these rounds are dummies: they use the dummy slot and leave nothing.


CHUNK_ROWS = 2048  # with windows: more than a graph of contexts holds, so one forward has both
CHUNK_LEN = 512  # of each chunk, so that drafts after contexts are of requests of a common length
# Rows of short prompts: GEMMs with FP8 weights and with experts are compiled for each of them.
SHORT_ROWS = (16, 32, 64, 128, 256)
# Lengths of requests with windows: Triton has a kernel for short sequences and one for longer.
WINDOW_LENS = (1, 512)


class WarmUp:
    """Runs rounds before the first request, for a runner whose graphs are captured. max_num_tokens:
    rows of one round; max_len: tokens of a request.

    Raises ValueError when the memory does not suffice.
    """

    def __init__(
        self, runner: RoundRunner, dummy_slot: int, *, max_num_tokens: int, max_len: int
    ) -> None:
        self._runner, self._dummy_slot = runner, dummy_slot
        self._max_num_tokens, self._max_len = max_num_tokens, max_len
        self._ids = count(-1, -1)

    def run(self, keys: Iterable[GraphKey]) -> None:
        """The longest round of contexts, short ones, and contexts together with some of the keys'
        windows."""
        start, chosen = monotonic(), some_of(keys)
        longest = max((key.shape for key in chosen), default=NO_DRAFTS)
        for is_sampled in (False, True):
            self._round(self._max_num_tokens, GraphKey(0, longest, is_sampled))
        kinds = (False,) if self._runner.engine.adapters is None else (False, True)
        for num_rows, adapted in product((*SHORT_ROWS, self._max_num_tokens), kinds):
            if num_rows < self._max_num_tokens + adapted:
                self._round(num_rows, GraphKey(0, longest, False, adapted))
        for key, length in product(chosen, WINDOW_LENS):
            self._round(min(CHUNK_ROWS, self._max_num_tokens - key.num_tokens), key, length)
        logger.info("rounds that warm up took %.1f s", monotonic() - start)

    def _round(self, num_rows: int, key: GraphKey, window_len: int = 1) -> None:
        """Waits for the round's results. window_len: tokens of each request with a window, as the
        host sees it; the device's slot is empty."""
        if num_rows <= 0:
            return
        chunk_len, own_len = min(CHUNK_LEN, self._max_len), min(window_len, self._max_len)
        chunks = [chunk_len] * (num_rows // chunk_len) + [num_rows % chunk_len]
        batch = ScheduledBatch(
            [self._request(length, key, RequestState.CONTEXT) for length in chunks if length],
            [self._request(own_len, key, RequestState.GENERATION) for _ in range(key.batch_size)],
            shape=key.shape if key.batch_size else NO_DRAFTS,
            new_shape=key.shape,
        )
        try:
            self._runner.launch(batch).wait()
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"out of memory in a round of {num_rows} context tokens and {key.batch_size} "
                "generating requests; lower max_num_tokens or "
                "kv_cache_config.free_gpu_memory_fraction"
            ) from error
        self._runner.discard_dummy_round()

    def _request(self, length: int, key: GraphKey, state: RequestState) -> LlmRequest:
        sampled = SamplingParams(temperature=float(key.sampled))
        rules = DecodingRules.from_params(sampled, vocab_size=1, end_ids=(), encode=None)
        depth = key.shape.depth
        request = LlmRequest(next(self._ids), [0] * length, rules, seed=0, draft_limit=depth)
        request.slot, request.state = self._dummy_slot, state
        request.adapter = "none of its rows has it" if key.adapted else None
        if state is RequestState.CONTEXT:
            request.context_chunk = length
        else:
            request.py_draft_tokens = [0] * depth
        return request


def some_of(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Keys of the shortest and the longest draft length with few, some, and as many windows as
    there can be. What is compiled for windows does not depend on their exact number."""
    chosen: set[GraphKey] = set()
    wanted = sorted(keys)
    shapes = [key.shape for key in wanted]
    for shape in {min(shapes), max(shapes)} if wanted else ():
        own = [key for key in wanted if key.shape == shape]
        greedy = [key for key in own if not key.sampled]
        chosen |= {own[-1], greedy[0], greedy[len(greedy) // 2], greedy[-1]}
    return sorted(chosen)
