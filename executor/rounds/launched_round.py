"""A round that was given to the device, and the way to its results. It does not know what a round
does."""

from dataclasses import dataclass

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.device_span import DeviceSpan
from tllm_spec.executor.rounds.transfer import ToHost
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.outputs import Logprob


@dataclass(frozen=True)
class LaunchedRound:
    """A round that runs on the device, until `wait`."""

    batch: ScheduledBatch
    ended_contexts: list[LlmRequest]
    num_drafts: list[int]  # really proposed, of each generating request
    num_steps: int  # draft length that these were made with; windows may be longer, with padding
    num_asked: (
        int  # the draft length that the drafter was asked for: it may have had fewer for everybody
    )
    to_host: ToHost
    logprob_rows: LogprobRows
    ended_at: (
        float | None
    )  # when results were here, by perf_counter; None: not before they are waited for
    behind: DeviceSpan | None  # what the device does behind them; None: nothing

    def wait(self) -> tuple[list[list[int]], dict[int, list[dict[int, Logprob]]]]:
        """Results: for every ended context, then every generating request, how many tokens are new,
        then the tokens. And log probabilities by request id."""
        table, *logprobs = self.to_host.wait()
        return table.tolist(), self.logprob_rows.per_request(logprobs)
