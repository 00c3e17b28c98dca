"""Chooses the target's token at every sampled position and accepts drafts by it.

The choice at a position is a function of its logits, the request's parameters and noise keyed by
(seed, position, token). It does not depend on drafts. A draft is accepted when it equals the
choice. Nothing here waits for the device, except for a request's logits processors, and for the
round before under a grammar."""

from collections.abc import Iterable

import torch

from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.request import LlmRequest, LogprobForm
from tllm_spec.executor.resources.slot_state import SlotState, WindowTree
from tllm_spec.executor.sampling.acceptance_rules import (
    Rates,
    RelaxedAcceptance,
    reject_chain,
    reject_tree,
    synthetic_acceptance,
)
from tllm_spec.executor.sampling.grammar_masks import GrammarMasks
from tllm_spec.executor.sampling.logits import (
    HostEdits,
    LogprobRows,
    apply_penalties,
    log_probabilities,
    mask_stop_ids,
    one_hot_of_best,
    rows_at_once,
)
from tllm_spec.executor.sampling.row_group import (
    RowGroup,
    RowGroups,
    RowParameters,
    RowPositions,
    SamplingState,
    Subset,
)
from tllm_spec.kernels.drafts.path_trees import path_ranks
from tllm_spec.kernels.sampling.choose_token import choose_best, choose_token
from tllm_spec.kernels.sampling.logit_filters import filter_cut
from tllm_spec.kernels.slots.accept import Accepted
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.kernels.slots.slot_windows import accept_windows, advance


class Sampler:
    """The target's sampler. `groups` is shared with the draft sampling.
    `thresholds`: of rejection sampling on trees (`reject_tree`). With `synthetic_rates` drafts are
    accepted at random, and the text is meaningless.

    Logits stay in the model's dtype until something computes with them. Greedy rows, and on CUDA
    sampled ones, never become float32 in memory."""

    def __init__(
        self,
        slots: SlotState,
        state: SamplingState,
        groups: RowGroups,
        grammar_masks: GrammarMasks,
        *,
        rejection: bool,
        thresholds: tuple[float, float] = (1.0, 1.0),
        synthetic_rates: Rates | None = None,
        relaxed: RelaxedAcceptance | None = None,
    ) -> None:
        seeds = RowParameters(state.floats, state.integers).integer("seed")
        self._synthetic = synthetic_acceptance(synthetic_rates, seeds)
        self._thresholds = thresholds
        self._relaxed = relaxed
        self.slots = slots
        self.state = state
        self.groups = groups
        self.rejection = rejection
        self.host_edits = HostEdits()
        self.grammar_masks = grammar_masks

    def start(self, request: LlmRequest) -> None:
        """Called when the request gets a slot."""
        self.state.start(request)
        if self._relaxed is not None:
            self._relaxed.start(request)
        self.groups.forget()

    def sample(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        at: RowPositions,
        draft_probs: torch.Tensor | None,
        logprobs: LogprobRows,
    ) -> SampledTokens:
        """Samples a group, in parts where its rows need more memory than there is for sampling.
        Windows accept drafts, and their slots advance. logits `[T, V]`; draft_probs `[B, K, V]`:
        for rejection sampling, what the drafts of windows were drawn from."""
        max_rows = rows_at_once(group, logits, rejection=self.rejection)
        if len(logits) <= max_rows:
            return self._sample_part(group, logits, at, draft_probs, logprobs)
        parts = self.groups.parts(group, max(1, max_rows // group.rows.window))
        sizes = [len(part.slots) for part in parts]
        all_probs = (
            [None] * len(parts) if draft_probs is None else draft_probs.split_with_sizes(sizes)
        )
        sampled = [
            self._sample_part(part, rows, own, probs, logprobs)
            for part, rows, own, probs in zip(
                parts, _rows_of_parts(group, parts, logits), at.split(sizes), all_probs, strict=True
            )
        ]
        rows = [part.rows for part in sampled if part.rows is not None]
        ranks = [part.ranks for part in sampled if part.ranks is not None]
        return SampledTokens(
            torch.cat([part.new_tokens for part in sampled]),
            torch.cat([part.new_lens for part in sampled]),
            torch.cat(rows) if rows else None,
            torch.cat(ranks) if ranks else None,
        )

    def _sample_part(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        at: RowPositions,
        draft_probs: torch.Tensor | None,
        logprobs: LogprobRows,
    ) -> SampledTokens:
        """`sample` of as many requests as one part may have."""
        values = dict[LogprobForm, torch.Tensor]()
        if group.with_logprobs:
            values = self._values(group, logits, processed=False)
        if group.is_edited:
            logits = self._edit(group, logits, at)
        if group.is_guided:
            self.grammar_masks.apply(group, logits)
        if group.with_logprobs:
            values |= self._values(group, logits, processed=True)
        sampled = self._emit(group, logits, at, draft_probs)
        if self._relaxed is not None:
            self._relaxed.note(group.slots, sampled.new_tokens, sampled.new_lens)
        if group.penalised is not None:
            self._count(group, group.penalised, sampled)
        for form, rows in values.items():
            logprobs.add(group, form, rows, sampled)
        return sampled

    def _values(
        self, group: RowGroup, logits: torch.Tensor, *, processed: bool
    ) -> dict[LogprobForm, torch.Tensor]:
        """By form, what the rows of requests that ask for log probabilities say before or after
        all edits of `logits` `[T, V]`. A copy: edits may be in place."""
        found = {}
        for form, own in group.with_logprobs.items():
            if form.is_processed == processed:
                rows = own.take(logits)
                if form.is_scaled:
                    rows = self.scaled(group, rows, own.parameters)
                if form.is_logits:
                    found[form] = rows.to(torch.float32, copy=True)
                else:
                    found[form] = log_probabilities(rows)
        return found

    def _emit(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        at: RowPositions,
        draft_probs: torch.Tensor | None,
    ) -> SampledTokens:
        """Chooses tokens, and accepts drafts where the rows are windows."""
        slots, kv_lens, num_drafts = group.slots, at.kv_lens, None
        if at.tree is not None and self.slots.shapes.tree_tiers:  # the host learns from ranks
            num_drafts = gather_rows(self.slots.num_drafts, slots)
        if self.rejection:
            accepted = self._reject(group, logits, at, draft_probs)
            if at.ahead:
                advance(self.slots.tables, slots, kv_lens, accepted)
        else:
            targets = group.rows.padded(self._choose(group, logits, at))
            if not at.ahead:
                return SampledTokens(targets, torch.ones_like(kv_lens))
            if self._relaxed is not None:
                targets = self._relaxed.relax(group, logits, targets)
            depth = None if at.tree is None else at.tree.depth
            own = slots, kv_lens, targets, depth, self._synthetic
            accepted = accept_windows(self.slots.tables, *own)
        ranks, trees = None, self.slots.trees
        if num_drafts is not None and trees is not None and accepted.rows is not None:
            found = num_drafts, accepted.rows, accepted.lens
            ranks = path_ranks(trees.parents, slots, *found, group.rows.window)
        return SampledTokens(*accepted, ranks)

    def _drafts(self, group: RowGroup) -> torch.Tensor:
        """`[N, W-1]`, until the slots advance."""
        return self.slots.window.index_select(0, group.slots)[:, 1 : group.rows.window]

    def _edit(self, group: RowGroup, logits: torch.Tensor, at: RowPositions) -> torch.Tensor:
        """Applies what changes logits before temperature, at each position as if it were decoded
        alone."""
        logits = logits.to(torch.float32)
        if group.penalised is not None:
            logits = group.penalised.put(
                logits, self._penalise(group, group.penalised, logits, at.tree)
            )
        if group.bias is not None:
            rows, tokens, values = group.bias
            logits = logits.index_put((rows, tokens), values, accumulate=True)
        if group.early is not None:
            early, rows_logits = group.early, group.early.take(logits)
            slots = early.own.expand(early.take_requests(group.slots))
            positions = at.positions(early.own, early.requests)
            too_early = positions < early.parameters.integer("min_position")
            mask_stop_ids(rows_logits, self.state.stop_ids.index_select(0, slots), too_early)
            logits = early.put(logits, rows_logits)
        if group.edited:
            parents = None
            if at.tree is not None:
                parents = self.slots.parents(group.slots, group.rows.window)
            logits = self.host_edits.apply(group, logits, self._drafts(group), parents)
        return logits

    def _penalise(
        self, group: RowGroup, subset: Subset, logits: torch.Tensor, tree: WindowTree | None
    ) -> torch.Tensor:
        """A row of a window counts its own draft and those before it as output."""
        counts, width = self.state.counts, group.rows.window
        rows = counts.row_of_slot[subset.take_requests(group.slots)]
        output = counts.output[rows].unsqueeze(1).repeat(1, width, 1)  # [M, W, V]
        if tree is not None:
            drafts = subset.take_requests(self.slots.window.index_select(0, group.slots))
            paths = tree.of(subset.requests).paths.to(output.dtype)
            output.scatter_add_(2, drafts[:, None, :width].expand(-1, width, -1), paths)
        elif width > 1:
            seen = torch.zeros_like(output)
            tokens = subset.take_requests(self._drafts(group)).unsqueeze(2)
            seen[:, 1:].scatter_(2, tokens, 1)
            output += seen.cumsum(dim=1)
        names = "repetition", "presence", "frequency"
        return apply_penalties(
            subset.take(logits),
            subset.own.flat(output),
            subset.own.expand(counts.prompt[rows]),
            *map(subset.parameters.column, names),
        )

    def _choose(self, group: RowGroup, logits: torch.Tensor, at: RowPositions) -> torch.Tensor:
        """The target's choice of every row, `[T]`."""
        if group.sampled is None:
            return choose_best(logits)
        sampled, parameters = group.sampled, group.sampled.parameters
        rows, positions = sampled.take(logits), at.positions(sampled.own, sampled.requests)
        temperature, seeds = parameters.column("temperature"), parameters.integer("seed")
        cut = self.cut(group, rows, parameters)
        chosen = choose_token(rows, temperature.squeeze(1), seeds, positions, cut)
        return chosen if sampled.rows is None else sampled.put(choose_best(logits), chosen)

    def cut(
        self, group: RowGroup, logits: torch.Tensor, parameters: RowParameters
    ) -> torch.Tensor | None:
        """The least logits / temperature that the filters keep, `[R]`, of rows `[R, V]` with these
        parameters."""
        if not group.filtered:
            return None
        floats = (parameters.column(name).squeeze(1) for name in ("temperature", "top_p", "min_p"))
        temperature, top_p, min_p = floats
        return filter_cut(logits, temperature, parameters.integer("top_k"), top_p, min_p)

    def scaled(
        self, group: RowGroup, logits: torch.Tensor, parameters: RowParameters
    ) -> torch.Tensor:
        """Logits / temperature, filtered, in float32: rows `[R, V]` of sampled requests, with their
        parameters."""
        temperature = parameters.column("temperature")
        if group.mixed:
            temperature = torch.where(temperature > 0, temperature, 1.0)
        values = logits.to(torch.float32) / temperature
        cut = self.cut(group, logits, parameters)
        return values if cut is None else values.masked_fill(values < cut.unsqueeze(1), -torch.inf)

    def _reject(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        at: RowPositions,
        draft_probs: torch.Tensor | None,
    ) -> Accepted:
        """Rejection sampling: of chains the classical one, of trees that of SGLang."""
        rows, num_drafts = group.rows, None
        probs = rows.padded(self._probs(group, logits))
        seeds = self.state.integers.index_select(0, group.slots)[:, 0]
        if at.tree is not None:
            tokens = self.slots.window.index_select(0, group.slots)[:, : rows.window]
            parents = self.slots.parents(group.slots, rows.window)
            tree = at.tree.depths, at.tree.depth
            own = tokens, parents, *tree, seeds, at.kv_lens + 1
            return reject_tree(probs, *own, *self._thresholds)
        if rows.window > 1:  # the slots may have more drafts than this round verifies
            num_drafts = self.slots.num_drafts.index_select(0, group.slots).clamp_max(
                rows.window - 1
            )
        positions = rows.padded(at.positions(rows))
        return reject_chain(probs, draft_probs, self._drafts(group), num_drafts, seeds, positions)

    def _probs(self, group: RowGroup, logits: torch.Tensor) -> torch.Tensor:
        """The distribution of every row, `[T, V]`. A greedy request's has all mass on one
        token."""
        probs = one_hot_of_best(logits)
        if (own := group.sampled) is None:
            return probs
        sampled = self.scaled(group, own.take(logits), own.parameters).softmax(-1)
        if group.mixed:
            sampled = torch.where(own.parameters.column("temperature") > 0, sampled, probs)
        return own.put(probs, sampled)

    def _count(self, group: RowGroup, subset: Subset, sampled: SampledTokens) -> None:
        emitted = subset.take_requests(sampled.new_tokens)
        columns = torch.arange(emitted.shape[1], device=emitted.device)
        valid = columns < subset.take_requests(sampled.new_lens).unsqueeze(1)
        self.state.counts.add(subset.take_requests(group.slots), emitted, valid)


def _rows_of_parts(
    group: RowGroup, parts: list[RowGroup], logits: torch.Tensor
) -> Iterable[torch.Tensor]:
    """The group's logits `[T, V]` by part. Parts of a graph's group have whole windows."""
    if group.requests or group.rows.offsets is None:
        return logits.split_with_sizes([part.rows.num_rows for part in parts])
    rows = group.rows.padded_rows.split_with_sizes([len(part.slots) for part in parts])
    return (logits.index_select(0, own.flatten()) for own in rows)
