"""What the target has emitted last, for a draft model with pages of its own that drafts trees or
all tokens at once, or next to matches in the text.

The accepted path is not in the draft cache where it belongs: beams, mask rows or other drafts were.
So a round of drafts first reads what the target emitted in the round before: its run of tokens, and
the token before the run."""

import torch

from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.round_end import WindowResult
from tllm_spec.kernels.slots.row_copies import gather_rows


class LatestRuns:
    """`_tokens` `[S, D + 2]`: the token before each slot's latest run, then the run, of which
    `_lens` `[S]` tokens are valid."""

    def __init__(self, slots: SlotState) -> None:
        self._slots, self.width = slots, slots.max_draft_len + 2
        size = len(slots.kv_lens), self.width
        self._tokens = torch.zeros(size, dtype=torch.int64, device=slots.device)
        self._lens = torch.ones(size[0], dtype=torch.int64, device=slots.device)

    def start(self, slot_ids: torch.Tensor) -> None:
        """Called when the contexts of these slots have ended."""
        self._tokens[slot_ids, 0] = self._slots.previous_token[slot_ids]
        self._tokens[slot_ids, 1] = self._slots.window[slot_ids, 0]
        self._lens.index_fill_(0, slot_ids, 1)

    def keep(self, result: WindowResult) -> None:
        slot_ids, sampled = result.windows.slots, result.sampled
        before = result.windows.token_ids[:, :1]
        runs = torch.cat((before, sampled.new_tokens.clamp_min(0)), dim=1)
        self._tokens[slot_ids, : runs.shape[1]] = runs
        self._lens[slot_ids] = sampled.new_lens

    def num_tokens(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """How many tokens of the windows of slots `[B]` are valid, `[B]`."""
        return gather_rows(self._lens, slot_ids) + 1

    def windows(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, max_kv_len: int
    ) -> tuple[Windows, torch.Tensor]:
        """The windows of slots `[B]`, and the rows of the runs' last tokens, `[B]`."""
        lens = gather_rows(self._lens, slot_ids)
        # The dummy slot, which pads graphs, has no token before its run.
        first = (kv_lens - lens).clamp_min_(0)
        windows = Windows(slot_ids, first, gather_rows(self._tokens, slot_ids), max_kv_len)
        rows = torch.arange(0, len(slot_ids) * self.width, self.width, device=lens.device) + lens
        return windows, rows
