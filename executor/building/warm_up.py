"""Runs rounds with contexts before the first request, so that kernels which are compiled or loaded
when they first run do not delay it.

The requests of these rounds are dummies: they use the dummy slot and leave nothing."""

import logging
from collections.abc import Iterable
from itertools import count, product
from time import monotonic

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

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
        for num_rows in SHORT_ROWS:
            if num_rows < self._max_num_tokens:
                self._round(num_rows, GraphKey(0, longest, False))
        for key, length in product(chosen, WINDOW_LENS):
            self._round(min(CHUNK_ROWS, self._max_num_tokens - key.num_tokens), key, length)
        logger.info("rounds that warm up took %.1f s", monotonic() - start)

    def _round(self, num_rows: int, key: GraphKey, window_len: int = 1) -> None:
        """Waits for the round's results. window_len: tokens of each request with a window, as the
        host sees it; the device's slot is empty."""
        if num_rows <= 0:
            return
        chunk_len = min(CHUNK_LEN, self._max_len)
        chunks = [chunk_len] * (num_rows // chunk_len) + [num_rows % chunk_len]
        batch = ScheduledBatch(
            [self._context(length, key) for length in chunks if length],
            [self._generating(min(window_len, self._max_len), key) for _ in range(key.batch_size)],
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

    def _context(self, length: int, key: GraphKey) -> LlmRequest:
        request = self._request(length, key)
        request.state, request.context_chunk = RequestState.CONTEXT, length
        return request

    def _generating(self, length: int, key: GraphKey) -> LlmRequest:
        request = self._request(length, key)
        request.state, request.py_draft_tokens = RequestState.GENERATION, [0] * key.draft_len
        return request

    def _request(self, length: int, key: GraphKey) -> LlmRequest:
        rules = DecodingRules.from_params(
            SamplingParams(temperature=float(key.sampled)), vocab_size=1, end_ids=(), encode=None
        )
        request = LlmRequest(
            next(self._ids), [0] * length, rules, seed=0, draft_limit=key.draft_len
        )
        request.slot = self._dummy_slot
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
