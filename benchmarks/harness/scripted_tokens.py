"""Drafts whose acceptance is scripted token by token: each has a probability of its own, and the
drafter knows it with noise. The text means nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import torch

from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.kernels.slots.accept import Accepted, Drafts, SlotTables
from tllm_spec.kernels.slots.choose_rows import features_of
from tllm_spec.kernels.slots.slot_windows import advance

CONCENTRATION = 2.0  # of Beta(1.2, 0.8), whose mean is 0.6
NOISE = 1.0  # of the drafter's log odds
QUANTILES = 4096
MIXED = (0.9, 0.2)


@cache
def quantiles(mean: float) -> torch.Tensor:
    """Returns quantiles of a draft's probability, `[QUANTILES]`, at equal steps."""
    torch.manual_seed(0)
    parts = torch.tensor(CONCENTRATION * mean), torch.tensor(CONCENTRATION * (1 - mean))
    samples = torch.distributions.Beta(*parts).sample((64 * QUANTILES,)).sort().values
    return samples[32::64].clamp(1e-4, 1 - 1e-4)


@dataclass
class TokenScript:
    """`table` `[2, QUANTILES]`: of slots with even and odd numbers. `probs` `[S, K]`: of the drafts
    in each slot. `total` `[1]`: tokens that the rounds since the start are expected to emit, given
    the drafts that they verify."""

    table: torch.Tensor
    probs: torch.Tensor
    total: torch.Tensor

    @classmethod
    def new(cls, num_slots: int, draft_len: int, device: str) -> "TokenScript":
        return cls(
            torch.zeros(2, QUANTILES, device=device),
            torch.zeros(num_slots, draft_len, device=device),
            torch.zeros(1, dtype=torch.float64, device=device),
        )

    def set_means(self, means: Sequence[float]) -> None:
        """One or two: of all slots, or of every second one each."""
        rows = [quantiles(means[i % len(means)]) for i in range(2)]
        self.table.copy_(torch.stack(rows))

    def draw(self, slots: torch.Tensor, number: int) -> torch.Tensor:
        """Probabilities of the next drafts of slots `[B]`; returns what the drafter says."""
        size = len(slots), number
        index = (torch.rand(size, device=slots.device) * QUANTILES).to(torch.int64)
        index = index.clamp_(0, QUANTILES - 1) + (slots % 2 * QUANTILES).unsqueeze(1)
        probs = self.table.flatten()[index]
        self.probs[slots, :number] = probs
        return (probs.logit() + NOISE * torch.randn(size, device=slots.device)).sigmoid()

    def accept(
        self, slots: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor
    ) -> torch.Tensor:
        """Emitted tokens of slots `[B]`, `[B]`. drafts `[B, K]`, of which num_drafts `[B]`."""
        number = drafts.shape[1]
        exists = torch.arange(number, device=slots.device) < num_drafts.unsqueeze(1)
        probs = self.probs.index_select(0, slots)[:, :number] * exists
        is_real = slots < len(self.probs) - 1  # the last slot is the dummy
        self.total += ((1 + probs.cumprod(1).sum(1)) * is_real).sum()
        coins = torch.rand(probs.shape, device=slots.device) < probs
        return coins.cumprod(1).sum(1) + 1


@contextmanager
def scripted_tokens(script: TokenScript) -> Iterator[None]:
    """Inside the block engines accept drafts as the script says. Graphs hold it."""
    write = SlotState.write

    def write_scripted(slots: SlotState, slot_ids: torch.Tensor, drafts: Drafts) -> None:
        write(slots, slot_ids, replace(drafts, likely=None))
        said = script.draw(slot_ids, drafts.tokens.shape[1])
        if slots.values is not None:
            slots.values.features[slot_ids, : said.shape[1]] = features_of(said)

    def accept(
        tables: SlotTables,
        slot_ids: torch.Tensor,
        kv_lens: torch.Tensor,
        targets: torch.Tensor,
        *_: object,
    ) -> Accepted:
        number = targets.shape[1] - 1
        drafts = tables.window.index_select(0, slot_ids)[:, 1 : 1 + number]
        num_drafts = tables.num_drafts.index_select(0, slot_ids).clamp_max(number)
        lens = script.accept(slot_ids, drafts, num_drafts)
        is_draft = torch.arange(number, device=slot_ids.device) < (lens - 1).unsqueeze(1)
        tokens = torch.cat((torch.where(is_draft, drafts, targets[:, :-1]), targets[:, -1:]), 1)
        accepted = Accepted(tokens, lens)
        advance(tables, slot_ids, kv_lens, accepted)
        return accepted

    with (
        mock.patch.object(SlotState, "write", write_scripted),
        mock.patch("tllm_spec.executor.sampling.sampler.accept_windows", accept),
    ):
        yield
