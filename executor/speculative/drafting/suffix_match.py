"""Drafts from the request's own text: what followed the longest match of the text's end.

The texts of all slots are on the device, so that rounds overlap and a CUDA graph holds the search.
The host sends a text when its context ends; each round adds what it emitted."""

from array import array

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.proposer import DraftChains, Proposer
from tllm_spec.executor.speculative.drafting.round_end import ContextResult, WindowResult
from tllm_spec.kernels.suffix_match import Matches, append_tokens, match_suffixes


class SuffixMatch(Proposer):
    """Proposes chains. Texts have at most `max_len` tokens; `max_match`: of a text's end, how many
    tokens are compared at most."""

    def __init__(self, slots: SlotState, max_len: int, max_match: int) -> None:
        self._slots, self._max_match = slots, max_match
        size = len(slots.kv_lens), max_len
        self._texts = torch.zeros(size, dtype=torch.int32, device=slots.device)

    @staticmethod
    def num_bytes(num_slots: int, max_len: int) -> int:
        """Device memory of the texts."""
        return num_slots * max_len * torch.int32.itemsize

    def propose(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> DraftChains | None:
        self.read(contexts, windows, group)
        if shape == NO_DRAFTS or not len(group.slots):
            return None
        matches = self.matches(group, shape)
        return DraftChains(matches.drafts, matches.num_drafts)

    def read(
        self, contexts: ContextResult | None, windows: WindowResult | None, group: RowGroup
    ) -> None:
        """Adds to the texts what was emitted."""
        if contexts is not None and contexts.first_tokens is not None:
            self._start(contexts, contexts.first_tokens, group.slots)
        if windows is not None:
            slots, sampled, kv_lens = windows.windows.slots, windows.sampled, self._slots.kv_lens
            append_tokens(self._texts, slots, kv_lens, sampled.new_tokens, sampled.new_lens)

    def matches(self, group: RowGroup, shape: DraftShape) -> Matches:
        """What follows the matches of the group's texts, one row each."""
        kv_lens = self._slots.kv_lens
        return match_suffixes(self._texts, group.slots, kv_lens, shape.depth, self._max_match)

    def _start(
        self, contexts: ContextResult, first_tokens: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """The texts of requests whose context ended, `[C]`, which have the first of the slots."""
        for request, following in zip(contexts.requests, contexts.following, strict=True):
            if following is None:
                text = torch.frombuffer(array("i", request.tokens), dtype=torch.int32)
                to_device(text, self._slots.device, self._texts[request.slot, : len(text)])
        tokens = first_tokens.contiguous().unsqueeze(1)
        lens = torch.ones_like(first_tokens)
        append_tokens(self._texts, slots[: len(tokens)], self._slots.kv_lens, tokens, lens)
