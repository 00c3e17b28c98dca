"""The results of a round on their way to the host, and the round until it is read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.device.transfer import DeviceSpan, PinnedBuffers, ToHost
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.outputs import Logprob

# Sends the results of a round to the host without waiting for the device.


@dataclass(frozen=True)
class SentResults:
    """Results on their way to the host. `post_send`: what the device does in this round after
    sending them; None: nothing."""

    to_host: ToHost
    post_send: DeviceSpan | None = None


class ResultSender:
    """Sends results to the host. Reuses the pinned memory of rounds that were read."""

    def __init__(self) -> None:
        self._buffers = PinnedBuffers()

    def send(self, sampled: SampledTokens, logprobs: LogprobRows) -> ToHost:
        return ToHost([sampled.table(), *logprobs.tensors], self._buffers)


def joined(parts: Sequence[SampledTokens], width: int, device: torch.device) -> SampledTokens:
    """The results of all requests as one, rows padded to `width` tokens."""
    if not parts:  # chunks of contexts only, and none of them the last
        empty = torch.empty((0, width), dtype=torch.int64, device=device)
        return SampledTokens(empty, empty[:, 0])
    lens = torch.cat([p.new_lens for p in parts])
    tokens = [
        torch.nn.functional.pad(p.new_tokens, (0, width - p.new_tokens.shape[1])) for p in parts
    ]
    counts = [part.num_drafts for part in parts if part.num_drafts is not None]
    num_drafts = None
    if counts:  # contexts had none
        none = counts[0].new_zeros((len(lens) - len(counts[0]), counts[0].shape[1]))
        num_drafts = torch.cat((none, *counts))
    return SampledTokens(torch.cat(tokens), lens, num_drafts=num_drafts)


# A round that was launched on the device, and the way to its results.


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
