"""Relaxed acceptance (TensorRT-LLM): while a greedy request thinks, a draft is accepted if it is
among the target's best tokens, and not much less likely than the best. It is lossy.

Whether a request thinks is kept per slot on the device, so that a CUDA graph can hold it."""

import torch

from tllm_spec.config.speculative_base import RelaxedRule
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.state import SamplingState


class RelaxedAcceptance:
    """`is_thinking` `[S]` bool: whether a slot's tokens, the bonus token included, end between the
    rule's two tokens."""

    def __init__(self, rule: RelaxedRule, slots: SlotState, state: SamplingState) -> None:
        """Raises ValueError if the vocabulary does not have the rule's tokens."""
        for name, token in (("begin", rule.begin_token), ("end", rule.end_token)):
            if not 0 <= token < state.vocab_size:
                raise ValueError(
                    f"{name}_thinking_phase_token = {token} is not in the vocabulary of the model, "
                    f"0 to {state.vocab_size - 1}"
                )
        self._rule, self._slots, self._state = rule, slots, state
        self.is_thinking = torch.zeros(len(slots.kv_lens), dtype=torch.bool, device=slots.device)

    def start(self, request: LlmRequest) -> None:
        """Called when the request gets a slot (again after a preemption)."""
        ends = self._rule.begin_token, self._rule.end_token
        last = next((token for token in reversed(request.tokens) if token in ends), None)
        self.is_thinking[request.slot].fill_(last == self._rule.begin_token)

    def relax(self, group: RowGroup, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The target's tokens `[N, W]` of a group's windows, with each draft that the rule accepts
        instead of the target's token. logits `[T, V]`: what the tokens were chosen from."""
        slots, width = group.slots, targets.shape[1]
        if width == 1:
            return targets
        window = self._slots.window.index_select(0, slots)[:, :width]
        num_drafts = self._slots.num_drafts.index_select(0, slots).unsqueeze(1)
        may_relax = phases(self.is_thinking.index_select(0, slots), window, self._rule)[:, :-1]
        may_relax &= torch.arange(width - 1, device=slots.device) < num_drafts
        if not group.sampled.is_empty:
            may_relax &= self._state.gather(slots).column("temperature") == 0
        drafts = window[:, 1:]
        rows = group.rows.padded(logits)[:, :-1]
        accepted = may_relax & is_close(rows, drafts, self._rule)
        return torch.cat((torch.where(accepted, drafts, targets[:, :-1]), targets[:, -1:]), dim=1)

    def note(self, slots: torch.Tensor, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Slots `[N]` have emitted the first `lens` `[N]` of tokens `[N, W]`."""
        after = phases(self.is_thinking.index_select(0, slots), tokens, self._rule)
        self.is_thinking[slots] = after.gather(1, lens.unsqueeze(1) - 1).squeeze(1)


def phases(before: torch.Tensor, tokens: torch.Tensor, rule: RelaxedRule) -> torch.Tensor:
    """Whether a request thinks after each of the tokens `[N, W]`: `[N, W]` bool. before `[N]`: the
    phase before them."""
    begins = tokens == rule.begin_token
    numbers = torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
    last = (numbers * (begins | (tokens == rule.end_token))).cummax(dim=1).values
    return torch.where(last > 0, begins.gather(1, (last - 1).clamp_min(0)), before.unsqueeze(1))


def is_close(logits: torch.Tensor, tokens: torch.Tensor, rule: RelaxedRule) -> torch.Tensor:
    """Whether tokens `[N, K]` are among the `top_k` best of logits `[N, K, V]` (equal ones
    included), and their log probabilities at most `delta` below the best one's."""
    own = logits.gather(2, tokens.unsqueeze(2))
    rank = (logits > own).sum(dim=2)
    # Differences of logits are those of log probabilities.
    gap = logits.amax(dim=2).float() - own.squeeze(2).float()
    return (rank < rule.top_k) & (gap <= rule.delta)
