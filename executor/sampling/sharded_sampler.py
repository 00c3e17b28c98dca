"""Sampling from an output layer that is sharded by columns. Each rank offers its best value and
token after noise, and only these are exchanged. Filters, penalties, log probabilities and rejection
need all logits, and gather them. The tokens are the same bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tllm_spec.distributed.communicator import VocabShard
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.grammar_masks import GrammarMasks
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups, RowPositions, SamplingState
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.kernels.sampling.choose_token import offer_token
from tllm_spec.kernels.slots.round_rows import RoundRows


class ShardedRowGroups(RowGroups):
    """A graph that does not sample with filters reads the temperatures, too: filters need all
    logits, and temperatures do not."""

    def of_slots(
        self, slots: torch.Tensor, window: int, *, sampled: bool, rows: RoundRows | None = None
    ) -> RowGroup:
        group = super().of_slots(slots, window, sampled=True, rows=rows)
        return replace(group, filtered=sampled)


class ShardedSampler(Sampler):
    """`Sampler` of logits `[R, V / ranks]`. Its other arguments are `Sampler`'s; the groups are
    `ShardedRowGroups`."""

    def __init__(self, shard: VocabShard, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shard = shard
        last = shard.first + shard.size
        self._ids = torch.arange(shard.first, last, device=self.slots.device)

    def start(self, request: LlmRequest) -> None:
        super().start(request)
        if request.graph_samples and not request.rules.has_filters:
            request.graph_samples = False  # see `ShardedRowGroups`

    def _needs_all(self, group: RowGroup) -> bool:
        return bool(
            self.rejection
            or self._relaxed is not None
            or group.filtered
            or group.is_edited
            or group.with_logprobs
        )

    def sample(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        at: RowPositions,
        draft_probs: torch.Tensor | None,
        logprobs: LogprobRows,
    ) -> SampledTokens:
        if logits.shape[1] < self.state.vocab_size and self._needs_all(group):
            logits = self._shard.communicator.all_gather(logits)
        return super().sample(group, logits, at, draft_probs, logprobs)

    def _choose(self, group: RowGroup, logits: torch.Tensor, at: RowPositions) -> torch.Tensor:
        if logits.shape[1] == self.state.vocab_size:  # gathered
            return super()._choose(group, logits, at)
        first, sampled = self._shard.first, group.sampled
        if sampled is None:
            return self._shard.communicator.best_offers(offer_token(logits, first))
        offers = offer_token(
            sampled.take(logits),
            first,
            self._ids,
            sampled.parameters.column("temperature").squeeze(1),
            sampled.parameters.integer("seed"),
            at.positions(sampled.own, sampled.requests),
        )
        if sampled.rows is not None:
            offers = sampled.put(offer_token(logits, first), offers)
        return self._shard.communicator.best_offers(offers)


class ShardedDraftSampling(DraftSampling):
    """`DraftSampling` of logits `[N, V_draft / ranks]`. `token_map` has the target's ids of all
    columns."""

    def __init__(
        self, shard: VocabShard, sampler: Sampler, mode: str, token_map: torch.Tensor | None
    ) -> None:
        super().__init__(sampler, mode, token_map)
        self._shard = shard
        # Columns that no target token has must not be offered.
        self._always_gathers = self.keeps_probs or shard.num_columns > sampler.state.vocab_size
        last = shard.first + shard.size
        ids = torch.arange(shard.first, last, device=sampler.slots.device)
        self._ids = ids if token_map is None else token_map[shard.first : last].contiguous()

    def choose(
        self, group: RowGroup, step: int, logits: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled = None if self._mode == "greedy" else group.sampled
        if self._always_gathers or (group.filtered and sampled is not None):
            return super().choose(group, step, self._shard.communicator.all_gather(logits), first)
        if sampled is None:
            offers = offer_token(logits, self._shard.first)
        else:
            parameters = sampled.parameters.each_of(sampled.own)
            offers = offer_token(
                sampled.take_requests(logits),
                self._shard.first,
                self._ids,
                parameters.column("temperature").squeeze(1),
                parameters.integer("seed"),
                sampled.take_requests(first) + step,
            )
            if sampled.requests is not None:
                greedy = offer_token(logits, self._shard.first)
                offers = sampled.put_requests(greedy, offers)
        return self._target_ids(self._shard.communicator.best_offers(offers).clamp_min(0)), None

    def best(
        self, group: RowGroup, logits: torch.Tensor, positions: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().best(group, self._shard.communicator.all_gather(logits), positions, topk)


def sampler_of(
    shard: VocabShard | None,
    slots: SlotState,
    state: SamplingState,
    make: Callable[..., Sampler] = Sampler,
    *,
    serves_grammars: bool = True,
    **options: Any,
) -> Sampler:
    """shard: of the target's logits; None: every rank has all of them, and `make` makes the
    sampler. options: `Sampler`'s."""
    masks = GrammarMasks(
        slots, state.vocab_size, 0 if shard is None else shard.first, is_served=serves_grammars
    )
    if shard is None:
        return make(slots, state, RowGroups(state), masks, **options)
    return ShardedSampler(shard, slots, state, ShardedRowGroups(state), masks, **options)


def draft_sampling_of(
    shard: VocabShard | None, sampler: Sampler, mode: str, token_map: torch.Tensor | None = None
) -> DraftSampling:
    """shard: of the draft model's logits, as above."""
    if shard is None:
        return DraftSampling(sampler, mode, token_map)
    return ShardedDraftSampling(shard, sampler, mode, token_map)
