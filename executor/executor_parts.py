"""The parts of an executor, and what they tell of it between two rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tllm_spec.executor.draft_watch import DraftWatch
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.scheduler import Scheduler
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.totals import IterationStats, RoundLog, Totals
from tllm_spec.executor.traffic_recorder import TrafficRecorder


@dataclass
class ExecutorParts:
    """What `build.py` puts together."""

    queue: RequestQueue
    scheduler: Scheduler
    kv: KVCacheManager
    resources: list[ResourceManager]  # called in this order
    slots: SlotState
    runner: RoundRunner
    drafter: Drafter
    sampler: Sampler
    controller: AdaptiveController  # of the draft length
    # The tier (see `DraftShapes`) of a round with a number of generating requests.
    tier_for: Callable[[int], int]
    # The requests whose code or drafts caused the latest exception; None: not known.
    blame: Callable[[], list[LlmRequest] | None]
    draft_watch: DraftWatch
    max_in_flight: int = 0  # rounds that are launched before the oldest is read: 1 with overlap
    # Whether a round may be launched before the round before is read.
    overlaps: bool = True
    cpu_threads: int | None = None  # of torch in the executor's thread; None: torch's own number
    stream_interval: int = 1
    iteration_stats: IterationStats | None = None  # with enable_iter_perf_stats
    round_log: RoundLog | None = None  # with print_iter_log, on rank 0
    draft_weights: DraftWeights | None = None  # None: they cannot be replaced
    recorder: TrafficRecorder | None = None  # with record_traffic, on rank 0
    ranks: Sequence[Mapping[str, Any]] = ()  # all of them, as `state` shows them


def state_of(parts: ExecutorParts, totals: Totals) -> dict[str, Any]:
    """Queues, totals, cache and draft lengths as plain values."""
    queues, controller, slots = parts.scheduler, parts.controller, parts.slots
    shape = slots.shapes.of(controller.tier_for(max(1, totals.latest_batch_size)))
    own: dict[str, Any] = {}
    if (weights := parts.draft_weights) is not None:
        own["draft_weights"] = weights.state()
    if parts.recorder is not None:
        own["lost_records"] = parts.recorder.num_lost
    return {
        "num_requests_running": len(queues.running),
        "num_requests_waiting": len(queues.waiting),
        "num_preemptions": queues.num_preemptions,
        "draft_len": shape.depth,
        "draft_shape": {
            "name": shape.name,
            "depth": shape.depth,
            "drafts": shape.num_nodes,
            "topk": shape.topk,
        },
        "draft_warning": parts.draft_watch.warning,
        "kv_cache": parts.kv.state(),
        "totals": totals.state([*queues.running, *queues.waiting]),
        "controller": controller.state(),
        "ranks": list(parts.ranks),
        **parts.drafter.state(),
        **own,
    }
