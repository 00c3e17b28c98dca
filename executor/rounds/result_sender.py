"""Sends the results of a round to the host without waiting for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.device.transfer import DeviceSpan, PinnedBuffers, ToHost
from tllm_spec.executor.sampling.logprobs import LogprobRows


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
