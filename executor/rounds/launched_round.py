"""A round that was launched on the device, and the way to its results."""

from dataclasses import dataclass

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import DeviceSpan, ToHost
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.outputs import Logprob


@dataclass(frozen=True)
class LaunchedRound:
    """A round that runs on the device, until `wait`."""

    batch: ScheduledBatch
    ended_contexts: list[LlmRequest]
    num_drafts: list[int]  # really proposed as far as the host knows, per generating request
    to_host: ToHost
    logprob_rows: LogprobRows
    # When the results were on the host, by perf_counter; None: not before they are waited for.
    ended_at: float | None
    # What the device does after sending the results; None: nothing.
    post_send: DeviceSpan | None

    def wait(self) -> tuple[list[list[int]], dict[int, list[dict[int, Logprob]]]]:
        """Waits for the device. A row for every ended context, then every generating request: how
        many tokens are new, then the tokens. And log probabilities by request id."""
        table, *logprobs = self.to_host.wait()
        return table.tolist(), self.logprob_rows.per_request(logprobs)
