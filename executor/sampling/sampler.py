"""Chooses the target's token at every sampled position and accepts drafts by it (DESIGN section 5).

The choice at a position is a function of that position's logits, the request's parameters and noise keyed by
(seed, position, token): it does not depend on drafts. A draft is accepted when it equals the choice. Nothing here waits
for the device except Python code that a request brings (logits processors).
"""

import torch

from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.host_edits import HostEdits
from tllm_spec.executor.sampling.logits import apply_penalties, choose, filter_logits, mask_stop_ids
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.executor.sampling.rejection import reject_chain
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups, Subset
from tllm_spec.executor.sampling.state import RowParameters, SamplingState
from tllm_spec.kernels.accept_chain import accept_chain
from tllm_spec.kernels.gumbel import gumbel_noise


class Sampler:
    """One for the target model. `groups` is shared with the draft sampling, which reads the same noise."""

    def __init__(self, slots: SlotState, state: SamplingState, groups: RowGroups, *, rejection: bool) -> None:
        self.slots = slots
        self.state = state
        self.groups = groups
        self.rejection = rejection
        self.host_edits = HostEdits()

    def start(self, request: LlmRequest) -> None:
        """The request was given a slot."""
        self.state.start(request)
        self.groups.forget()

    def sample(self, batch: ScheduledBatch, logits: torch.Tensor) -> tuple[SampledTokens, LogprobRows]:
        """logits `[C + B * (K+1), V]` float32, one row for each finished context, then the windows. Writes the next
        round's inputs into the slot state."""
        contexts = batch.last_chunk_requests
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        logprobs = LogprobRows()
        if contexts:
            group = self.groups.get(contexts, 1)
            tokens, lens = self._sample_group(group, logits[: len(contexts)], logprobs, None)
            tail = torch.tensor([request.tokens[-1] for request in contexts], device=tokens.device)
            self.slots.start_generation(group.slots, tail, tokens[:, 0])
            parts.append((torch.nn.functional.pad(tokens, (0, batch.draft_len)), lens))
        if batch.generation_requests:
            group = self.groups.get(batch.generation_requests, batch.window)
            tokens, lens = self._sample_group(group, logits[len(contexts) :], logprobs, batch)
            self.slots.advance(group.slots, tokens, lens)
            parts.append((tokens, lens))
        self.groups.end_round()
        if not parts:  # chunks of contexts only, and none of them the last
            empty = torch.empty((0, 1), dtype=torch.int64, device=logits.device)
            return SampledTokens(empty, empty[:, 0]), logprobs
        if len(parts) == 1:
            return SampledTokens(*parts[0]), logprobs
        return SampledTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True))), logprobs

    def _sample_group(
        self, group: RowGroup, logits: torch.Tensor, logprobs: LogprobRows, batch: ScheduledBatch | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emitted tokens `[N, W]` and their numbers `[N]` of one group. `batch` is None for finished contexts."""
        width = group.window
        # The first sampled token of a context stands at kv_len; in a window the bonus token stands there.
        first = self.slots.kv_lens.index_select(0, group.slots) + (batch is not None)
        drafts = self.slots.window.index_select(0, group.slots)[:, 1:width]
        raw = group.with_logprobs.take(logits).log_softmax(-1) if group.with_logprobs else None
        logits = self._edit(group, logits, first, drafts)
        num_drafts = _draft_counts(batch, logits.device)
        if self.rejection:
            tokens, lens = self._reject(group, logits, first, drafts, num_drafts, batch)
        else:
            tokens = self._choose(group, logits, first).view(-1, width)
            lens = accept_chain(tokens, drafts, num_drafts)
        if group.penalised:
            self._count(group, group.penalised, tokens, lens)
        if raw is not None:
            assert group.with_logprobs is not None
            logprobs.add(group, raw, group.with_logprobs.take_requests(tokens))
        return tokens, lens

    def _edit(
        self, group: RowGroup, logits: torch.Tensor, first: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """Everything that changes logits before temperature, at each position as if it were decoded alone."""
        if group.penalised:
            logits = group.penalised.put(logits, self._penalise(group, group.penalised, logits, drafts))
        if group.bias is not None:
            rows, tokens, values = group.bias
            logits = logits.index_put((rows, tokens), values, accumulate=True)
        if group.early:
            rows_logits = group.early.take(logits)
            slots = group.early.take_requests(group.slots).repeat_interleave(group.window)
            positions = window_positions(group.early.take_requests(first), group.window)
            too_early = positions < self.state.gather(slots).integer("min_position")
            mask_stop_ids(rows_logits, self.state.stop_ids.index_select(0, slots), too_early)
            logits = group.early.put(logits, rows_logits)
        if group.edited:
            logits = self.host_edits.apply(group, logits, drafts)
        return logits

    def _penalise(
        self, group: RowGroup, subset: Subset, logits: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """A window's row j sees the drafts before it as if they were output already."""
        counts, width = self.state.counts, group.window
        rows = counts.row_of_slot[subset.take_requests(group.slots)]
        output = counts.output[rows].unsqueeze(1).repeat(1, width, 1)  # [M, W, V]
        if width > 1:
            seen = torch.zeros_like(output)
            tokens = subset.take_requests(drafts).unsqueeze(2)
            seen[:, 1:].scatter_(2, tokens, 1)
            output += seen.cumsum(dim=1)
        assert group.penalties is not None
        return apply_penalties(
            subset.take(logits),
            output.view(-1, output.shape[-1]),
            counts.prompt[rows].repeat_interleave(width, dim=0),
            group.penalties.column("repetition"),
            group.penalties.column("presence"),
            group.penalties.column("frequency"),
        )

    def _choose(self, group: RowGroup, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The target's token of every row, `[N * W]`."""
        if group.sampled is None:
            return choose(logits)
        assert group.sampled_parameters is not None
        scaled = self.scaled(group, group.sampled.take(logits), group.sampled_parameters)
        perturbed = scaled + self.noise(group, first)
        if group.sampled.rows is None:
            return choose(perturbed)
        return group.sampled.put(choose(logits), choose(perturbed))

    def scaled(self, group: RowGroup, logits: torch.Tensor, parameters: RowParameters) -> torch.Tensor:
        """Temperature and filters on rows `[R, V]` of sampled requests with the parameters of those rows."""
        logits = logits / parameters.column("temperature")
        if not group.filtered:
            return logits
        top_k = parameters.integer("top_k").unsqueeze(1).clamp_max(logits.shape[1])
        return filter_logits(logits, top_k, parameters.column("top_p"), parameters.column("min_p"))

    def noise(self, group: RowGroup, first: torch.Tensor) -> torch.Tensor:
        """Noise of the group's sampled rows `[M * W, V]`; made once a round, since coupled drafts use the same."""
        if "noise" not in group.memo:
            assert group.sampled is not None and group.sampled_parameters is not None
            positions = window_positions(group.sampled.take_requests(first), group.window)
            seeds = group.sampled_parameters.integer("seed")
            group.memo["noise"] = gumbel_noise(seeds, positions, self.state.vocab_size)
        return group.memo["noise"]

    def _reject(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        first: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor | None,
        batch: ScheduledBatch | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Classical rejection sampling; a greedy request's distribution has all its mass on one token."""
        probs = _one_hot_of_best(logits)
        if group.sampled is not None:
            assert group.sampled_parameters is not None
            sampled = self.scaled(group, group.sampled.take(logits), group.sampled_parameters)
            probs = group.sampled.put(probs, sampled.softmax(dim=-1))
        shape = (len(group.requests), group.window, -1)
        return reject_chain(
            probs.view(shape),
            None if batch is None else batch.draft_probs,
            drafts,
            num_drafts,
            self.state.integers.index_select(0, group.slots)[:, 0],
            window_positions(first, group.window).view(shape[:2]),
        )

    def _count(self, group: RowGroup, subset: Subset, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        emitted = subset.take_requests(tokens)
        valid = torch.arange(group.window, device=tokens.device) < subset.take_requests(lens).unsqueeze(1)
        self.state.counts.add(subset.take_requests(group.slots), emitted, valid)


def window_positions(first: torch.Tensor, window: int) -> torch.Tensor:
    """Sequence positions of the tokens that W consecutive rows sample, flattened: `[N]` -> `[N * W]`."""
    return (first.unsqueeze(1) + torch.arange(window, device=first.device)).flatten()


def _draft_counts(batch: ScheduledBatch | None, device: torch.device) -> torch.Tensor | None:
    """Real drafts of each generating request `[B]`, or None where no window has padding."""
    if batch is None or all(r.py_num_draft_tokens == batch.draft_len for r in batch.generation_requests):
        return None
    return torch.tensor([r.py_num_draft_tokens for r in batch.generation_requests], device=device)


def _one_hot_of_best(logits: torch.Tensor) -> torch.Tensor:
    best = choose(logits)
    probs = torch.zeros_like(logits).scatter_(1, best.clamp_min(0).unsqueeze(1), 1.0)
    return probs.masked_fill_((best < 0).unsqueeze(1), torch.nan)
