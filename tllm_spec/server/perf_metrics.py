"""`/perf_metrics`: the timings of finished requests, under TensorRT-LLM's names."""

from collections import deque
from typing import Any

from tllm_spec.outputs import RequestOutput

MAX_REQUESTS = 1000


class PerfMetrics:
    """The records of the latest MAX_REQUESTS finished requests that have not been read yet."""

    def __init__(self) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_REQUESTS)

    def add(self, output: RequestOutput) -> None:
        """Records a finished request."""
        metrics, stats = output.metrics, output.speculative_decoding
        record: dict[str, Any] = {
            "timing_metrics": {  # seconds of a monotonic clock
                "arrival_time": metrics.arrival_time,
                "first_scheduled_time": metrics.first_scheduled_time,
                "first_token_time": metrics.first_token_time,
                "last_token_time": metrics.finished_time,
            }
        }
        if stats is not None and stats.num_drafted_tokens:
            record["speculative_decoding"] = {
                "acceptance_rate": stats.draft_acceptance_rate,
                "total_accepted_draft_tokens": stats.num_accepted_tokens,
                "total_draft_tokens": stats.num_drafted_tokens,
            }
        self._records.append({"request_id": output.request_id, "perf_metrics": record})

    def take(self) -> list[dict[str, Any]]:
        """The records, oldest first. They are removed, as in TensorRT-LLM."""
        taken = list(self._records)
        self._records.clear()
        return taken
