"""What the executor has done since its start, as plain numbers: rounds by draft length, requests by
finish reason.

Requests keep their own counters (`DraftCounters`, tokens). They are added up here when a request
ends, or when the state is asked for. It knows no policy and no device."""

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.rounds.round_reader import RoundOutcome
from tllm_spec.executor.scheduler import Scheduler
from tllm_spec.outputs import SpeculativeStats


@dataclass
class DraftLenTotals:
    """Rounds with the same number of drafts in each window, padding included."""

    rounds: int = 0  # with at least one generating request
    request_rounds: int = 0  # a round counts once per generating request
    emitted_tokens: int = 0
    timed_rounds: int = 0  # without context chunks, right after another round
    seconds: float = 0.0  # of timed rounds


class Totals:
    """Counters since the start. Call `add_round` once per round and `add_end` once per request."""

    def __init__(self) -> None:
        self._by_draft_len: dict[int, DraftLenTotals] = {}
        self._by_finish_reason: Counter[str] = Counter()
        # Of the requests that have ended.
        self._prompt_tokens = self._cached_prompt_tokens = self._generated_tokens = 0
        self._speculation = SpeculativeStats()
        self._num_changes = 0
        self._offered_drafts = self._verified_drafts = 0
        self.latest_draft_len: int | None = None
        self.latest_batch_size = 0  # of generating requests

    def add_round(
        self, draft_len: int, num_requests: int, num_emitted: int, seconds: float | None
    ) -> None:
        """num_requests: generating ones; 0 is not counted. num_emitted: tokens that they kept.
        seconds: None for a round whose time is not comparable."""
        if not num_requests:
            return
        if self.latest_draft_len not in (None, draft_len):
            self._num_changes += 1
        self.latest_draft_len, self.latest_batch_size = draft_len, num_requests
        row = self._by_draft_len.setdefault(draft_len, DraftLenTotals())
        row.rounds += 1
        row.request_rounds += num_requests
        row.emitted_tokens += num_emitted
        if seconds is not None:
            row.timed_rounds += 1
            row.seconds += seconds

    def add_drafts(self, num_offered: int, num_verified: int) -> None:
        """Counts the drafts that a round was offered, and those that had a row in it."""
        self._offered_drafts += num_offered
        self._verified_drafts += num_verified

    def decoded(self) -> tuple[int, int]:
        """Rounds, counted once for each request in them, and the tokens that they emitted."""
        rows = self._by_draft_len.values()
        return sum(row.request_rounds for row in rows), sum(row.emitted_tokens for row in rows)

    def add_end(self, request: LlmRequest) -> None:
        assert request.finish_reason is not None
        self._by_finish_reason[request.finish_reason] += 1
        self._prompt_tokens += request.prompt_len
        self._cached_prompt_tokens += request.reported_cached_tokens
        self._generated_tokens += request.num_output_tokens
        self._speculation += request.counters.stats()

    def state(self, unfinished: Sequence[LlmRequest]) -> dict[str, Any]:
        """The totals as plain values. unfinished: the requests that have not ended."""
        num_prompt = sum(each.prompt_len for each in unfinished)
        num_cached = sum(each.reported_cached_tokens for each in unfinished)
        num_generated = sum(each.num_output_tokens for each in unfinished)
        speculation = sum((each.counters.stats() for each in unfinished), self._speculation)
        return {
            "requests_by_finish_reason": dict(self._by_finish_reason),
            "prompt_tokens": self._prompt_tokens + num_prompt,
            "cached_prompt_tokens": self._cached_prompt_tokens + num_cached,
            "generated_tokens": self._generated_tokens + num_generated,
            "speculation": speculation.to_dict(),
            "by_draft_len": {
                str(key): asdict(row) for key, row in sorted(self._by_draft_len.items())
            },
            "offered_drafts": self._offered_drafts,
            "verified_drafts": self._verified_drafts,
            "draft_len_changes": self._num_changes,
            "latest_round": {
                "batch_size": self.latest_batch_size,
                "draft_len": self.latest_draft_len,
            },
        }


# Statistics of single rounds: under TensorRT-LLM's names for `LLM.get_stats()`, and as lines of
# the log.


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
            "inflightBatchingStats": {
                "numScheduledRequests": len(batch.requests()),
                "numContextRequests": len(batch.context_requests),
                "numGenRequests": len(batch.generation_requests),
                "numPausedRequests": self._scheduler.num_preemptions - self._num_preemptions,
                "avgNumDecodedTokensPerIter": _mean(outcome.num_tokens, outcome.num_requests),
            },
        }
        if batch.shape.depth:  # of requests that wanted drafts, without padding
            number, num_accepted = len(outcome.num_accepted), sum(outcome.num_accepted)
            stats["specDecodingStats"] = {
                "numDraftTokens": outcome.num_drafted,
                "numAcceptedTokens": num_accepted,
                "numRequestsWithDraftTokens": number,
                "acceptanceLength": _mean(number + num_accepted, number),
            }
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
            "cacheHitRate": _mean(state["reused_pages"], num_looked_up),
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
            batch.shape.depth,
            sum(outcome.num_accepted),
            outcome.num_drafted,
        )
        self._num_rounds += 1


def _mean(total: int, number: int) -> float:
    return total / number if number else 0.0


# Says once that hardly any draft is accepted, and why that may be.


MIN_DRAFTS = 300  # before anything is said
MIN_RATE = 0.01  # of drafts that are accepted; chance alone reaches less


class DraftWatch:
    """`warning`: what was logged, None before. causes: what may be wrong with this way of drafting,
    as the end of a sentence."""

    def __init__(self, causes: str) -> None:
        self.warning: str | None = None
        self._causes = causes
        self._num_drafted, self._num_accepted = 0, 0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts the drafts of a round, all of its requests together."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        is_useless = self._num_accepted < MIN_RATE * self._num_drafted
        if self.warning is None and is_useless and self._num_drafted >= MIN_DRAFTS:
            self.warning = (
                f"{self._num_accepted} of {self._num_drafted} drafts were accepted, so speculation "
                f"costs time and saves none. Likely causes: {self._causes}"
            )
            logger.warning("%s", self.warning)
