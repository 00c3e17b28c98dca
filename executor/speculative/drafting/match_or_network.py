"""Drafts from two drafters: a draft network, and the match of the text's end. Of chains each
request has the one of which more is expected to be accepted; a tree has the likeliest of both."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.drafter import (
    ContextResult,
    Drafter,
    WindowResult,
)
from tllm_spec.executor.speculative.drafting.network_drafter import NetworkDrafter
from tllm_spec.executor.speculative.drafting.suffix_match import SuffixMatch
from tllm_spec.kernels.drafts.draft_sources import (
    MATCH,
    NETWORK,
    PRIOR,
    DraftSources,
    choose_drafts,
    observe_drafts,
)
from tllm_spec.kernels.drafts.match_branches import add_match
from tllm_spec.kernels.slots.accept import Drafts, DraftTree

NETWORK_RATE = 0.6  # of drafts that are right, before any was seen
NUM_CLASSES = 17  # of match lengths: none, 1 to 15 tokens, and more


def new_sources(
    num_slots: int, max_draft_len: int, threshold: int | None, device: torch.device
) -> DraftSources:
    """Without a threshold a match of n tokens begins with n right drafts of n + 2."""
    num_classes = NUM_CLASSES if threshold is None else threshold + 1
    lengths = torch.arange(num_classes, device=device)
    priors = torch.stack((torch.full((num_classes,), NETWORK_RATE, device=device),) * 2, dim=1)
    priors[:, MATCH] = lengths / (lengths + 2)
    takes_match = torch.zeros((num_classes, max_draft_len + 1), dtype=torch.int32, device=device)
    if threshold is None:
        takes_match[1:] = (priors[1:, MATCH] > priors[1:, NETWORK]).unsqueeze(1)
    else:
        takes_match[threshold:] = 1
    size = num_classes, 2, max_draft_len, 2
    return DraftSources(
        pending=torch.full((num_slots, 2, max_draft_len), -1, dtype=torch.int32, device=device),
        choices=torch.zeros((num_slots, 2), dtype=torch.int32, device=device),
        counts=torch.zeros(size, dtype=torch.int32, device=device),
        priors=priors * PRIOR,
        takes_match=takes_match,
        totals=torch.zeros((num_classes, 2, 2), dtype=torch.int64, device=device),
    )


class DraftChoice:
    """Adds the match's drafts to those of a network.

    threshold: a match of so many tokens or more is taken; None: what matches of each length are
    worth is learned from the rounds."""

    def __init__(self, match: SuffixMatch, slots: SlotState, threshold: int | None) -> None:
        self._match, self._learns = match, threshold is None
        size = len(slots.kv_lens), slots.max_draft_len
        self._sources = new_sources(*size, threshold, slots.device)

    def read(
        self, contexts: ContextResult | None, windows: WindowResult | None, group: RowGroup
    ) -> None:
        """Sees what was emitted, by both sources' latest drafts. group: ended contexts first."""
        self._match.read(contexts, windows, group)
        if contexts is not None and contexts.first_tokens is not None:
            started = group.slots[: len(contexts.first_tokens)]
            self._sources.pending.index_fill_(0, started, -1)  # of the request before
        if windows is not None:
            slots, sampled = windows.windows.slots, windows.sampled
            parts = sampled.new_tokens, sampled.new_lens
            observe_drafts(self._sources, slots, *parts, self._learns)

    def choose(self, drafts: Drafts, group: RowGroup, shape: DraftShape) -> Drafts:
        """drafts: the network's, of this shape, for the group, one row each."""
        found, sources = self._match.matches(group, shape), self._sources
        match, lens = found.drafts.squeeze(1), found.num_drafts.squeeze(1)
        if isinstance(drafts, DraftTree):
            own = group.slots, drafts, match, lens, found.lengths
            return add_match(sources, *own, self._learns)
        both = drafts.tokens, match, found.lengths
        return Drafts(choose_drafts(sources, group.slots, *both))

    def state(self) -> Mapping[str, Any]:
        totals = self._sources.totals.sum(dim=0).tolist()
        names = ("rounds", "accepted_tokens")
        by_source = {
            name: dict(zip(names, totals[source], strict=True))
            for name, source in (("network", NETWORK), ("match", MATCH))
        }
        return {"draft_sources": by_source}


class MatchOrNetwork(Drafter):
    """Both drafters see every round, so that the network's KV misses nothing."""

    def __init__(self, network: NetworkDrafter, choice: DraftChoice) -> None:
        self.network, self.choice = network, choice
        self.when, self.reads_whole_windows = network.when, network.reads_whole_windows

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        self.network.prepare_draft_tokens(scheduled_requests)

    def propose(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> Drafts | None:
        drafts = self.network.propose(contexts, windows, group, shape)
        self.choice.read(contexts, windows, group)
        return None if drafts is None else self.choice.choose(drafts, group, shape)

    def launched(self, batch: ScheduledBatch) -> None:
        self.network.launched(batch)

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        self.network.capture_graphs(rounds, keys)

    def state(self) -> Mapping[str, Any]:
        return self.choice.state()
