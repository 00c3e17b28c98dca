"""Statistics of single rounds: under TensorRT-LLM's names for `LLM.get_stats()`, and as lines of
the log."""

import logging
from collections import deque
from typing import Any

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.rounds.round_outcome import RoundOutcome
from tllm_spec.executor.scheduler import Scheduler

logger = logging.getLogger(__name__)


class IterationStats:
    """The rounds since the last `take`, at most `max_len` of them. Used by the executor's thread
    only."""

    def __init__(self, max_len: int, scheduler: Scheduler, cache: PagedCache) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._rounds: deque[dict[str, Any]] = deque(maxlen=max_len)
        self._num_rounds = 0
        self._num_preemptions = 0

    def add(self, batch: ScheduledBatch, outcome: RoundOutcome) -> None:
        """A round that the host has read, before its finished requests are removed. `iterLatencyMS`
        is None for the first round after idle time."""
        finished = [
            request for request in batch.requests() if request.is_finished and request.slot >= 0
        ]
        stats: dict[str, Any] = {
            "iter": self._num_rounds,
            "iterLatencyMS": None if outcome.seconds is None else outcome.seconds * 1e3,
            "numActiveRequests": len(self._scheduler.running),
            "numQueuedRequests": len(self._scheduler.waiting),
            "numCompletedRequests": len(finished),
            "numNewActiveRequests": len(batch.joining),
            "kvCacheStats": self._kv_cache_stats(),
            "inflightBatchingStats": self._batching_stats(batch, outcome),
        }
        if batch.draft_len:
            stats["specDecodingStats"] = _speculation_stats(outcome)
        self._rounds.append(stats)
        self._num_rounds += 1
        self._num_preemptions = self._scheduler.num_preemptions

    def take(self) -> list[dict[str, Any]]:
        """The rounds, oldest first. They are forgotten then."""
        rounds = list(self._rounds)
        self._rounds.clear()
        return rounds

    def _kv_cache_stats(self) -> dict[str, Any]:
        """Blocks since the start. Cached blocks that no request holds are free."""
        state = self._cache.state()
        num_looked_up = state["reused_pages"] + state["missed_pages"]
        return {
            "maxNumBlocks": state["num_pages"],
            "freeNumBlocks": state["num_pages"] - state["used"],
            "usedNumBlocks": state["used"],
            "tokensPerBlock": state["page_size"],
            "reusedBlocks": state["reused_pages"],
            "missedBlocks": state["missed_pages"],
            "cacheHitRate": state["reused_pages"] / num_looked_up if num_looked_up else 0.0,
        }

    def _batching_stats(self, batch: ScheduledBatch, outcome: RoundOutcome) -> dict[str, Any]:
        return {
            "numScheduledRequests": len(batch.requests()),
            "numContextRequests": len(batch.context_requests),
            "numGenRequests": len(batch.generation_requests),
            "numPausedRequests": self._scheduler.num_preemptions - self._num_preemptions,
            "avgNumDecodedTokensPerIter": (
                outcome.num_tokens / outcome.num_requests if outcome.num_requests else 0.0
            ),
        }


class RoundLog:
    """One line for each round (`print_iter_log`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_rounds = 0

    def add(self, batch: ScheduledBatch, outcome: RoundOutcome) -> None:
        """A round that the host has read, before its finished requests are removed."""
        logger.info(
            "round %d: %s ms, %d running, %d waiting, %d prefilling, %d generating "
            "%d tokens, draft length %d, %d of %d drafts accepted",
            self._num_rounds,
            "-" if outcome.seconds is None else f"{outcome.seconds * 1e3:.2f}",
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            len(batch.context_requests),
            len(batch.generation_requests),
            outcome.num_tokens,
            batch.draft_len,
            sum(outcome.num_accepted),
            outcome.num_drafted,
        )
        self._num_rounds += 1


def _speculation_stats(outcome: RoundOutcome) -> dict[str, Any]:
    """Counts the drafts of requests that wanted any, without padding."""
    num_requests, num_accepted = len(outcome.num_accepted), sum(outcome.num_accepted)
    return {
        "numDraftTokens": outcome.num_drafted,
        "numAcceptedTokens": num_accepted,
        "numRequestsWithDraftTokens": num_requests,
        "acceptanceLength": 1 + num_accepted / num_requests if num_requests else 0.0,
    }
