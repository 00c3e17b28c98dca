"""Which rows of the logits belong to which requests, and which steps of sampling they need.

A group is N requests with W rows each: the windows of a round (W = K+1), or its finished contexts
(W = 1). `RowGroups` keeps a group for as long as the same requests run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.sampling.state import RowParameters, SamplingState


@dataclass(frozen=True)
class Subset:
    """Some requests of a group, by index, and their rows. None stands for all of them: nothing is
    indexed then."""

    requests: torch.Tensor | None  # [M]
    rows: torch.Tensor | None  # [M * W]

    def with_rows(self, each: int) -> "Subset":
        """The same requests, with `each` rows."""
        if self.requests is None:
            return self
        columns = torch.arange(each, device=self.requests.device)
        return Subset(self.requests, (self.requests.unsqueeze(1) * each + columns).flatten())

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """These requests' rows of `[N * W, V]`."""
        return logits if self.rows is None else logits.index_select(0, self.rows)

    def take_requests(self, values: torch.Tensor) -> torch.Tensor:
        """These requests' entries of `[N, ...]`."""
        return values if self.requests is None else values.index_select(0, self.requests)

    def put_requests(self, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` with these requests' entries replaced. May write in place."""
        return own if self.requests is None else values.index_copy_(0, self.requests, own)

    def put(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`[N * W, ...]` with these requests' rows replaced. May write in place."""
        return rows if self.rows is None else logits.index_copy_(0, self.rows, rows)


@dataclass
class RowGroup:
    """N requests with W rows each. A subset that is None is empty: its step is skipped."""

    requests: list[LlmRequest]
    window: int
    slots: torch.Tensor  # [N]
    sampled: Subset | None  # temperature > 0, or all if the group is mixed
    filtered: bool  # any of them uses top_k, top_p or min_p
    penalised: Subset | None
    early: Subset | None  # min_tokens
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # row, token, value
    with_logprobs: Subset | None
    num_logprobs: int
    edited: list[int]  # indices of requests that `HostEdits` edits
    is_guided: bool  # any of them has a grammar
    sampled_parameters: RowParameters | None = None  # of the sampled rows
    penalties: RowParameters | None = None  # of the penalised rows
    # A graph's group: all rows are sampled, and a temperature of 0 makes one greedy.
    mixed: bool = False
    memo: dict[str, torch.Tensor] = field(default_factory=dict)  # of this round only
    parts: list["RowGroup"] = field(default_factory=list)  # see `RowGroups.parts`

    @property
    def is_edited(self) -> bool:
        """Whether anything changes the logits before temperature and filters."""
        return bool(self.penalised or self.bias or self.early or self.edited)


class RowGroups:
    """Makes groups, and keeps the latest ones for as long as their requests stay the same."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._kept: dict[tuple[int, ...], RowGroup] = {}

    def get(self, requests: Sequence[LlmRequest], window: int) -> RowGroup:
        key = (window, *(request.request_id for request in requests))
        group = self._kept.get(key)
        if group is None:
            # A few groups alternate, for different draft lengths; older ones do not come back.
            if len(self._kept) >= 8:
                self._kept.clear()
            group = self._kept[key] = self._make(list(requests), window)
        return group

    def of_slots(self, slots: torch.Tensor, window: int, *, sampled: bool) -> RowGroup:
        """A group of the slots' owners at the time of its use: all parameters are read on the
        device. slots `[N]`."""
        group = RowGroup(
            requests=[],
            window=window,
            slots=slots,
            sampled=Subset(None, None) if sampled else None,
            filtered=sampled,
            penalised=None,
            early=None,
            bias=None,
            with_logprobs=None,
            num_logprobs=0,
            edited=[],
            is_guided=False,
            mixed=sampled,
        )
        if group.sampled is not None:
            group.sampled_parameters = self._parameters(group, group.sampled)
        return group

    def one_row_each(self, group: RowGroup) -> RowGroup:
        """The group with one row per request, to draw drafts for."""
        if group.requests:
            return self.get(group.requests, 1)
        parameters = group.sampled_parameters and group.sampled_parameters.every(group.window)
        return replace(group, window=1, sampled_parameters=parameters, memo={}, parts=[])

    def parts(self, group: RowGroup, size: int) -> list[RowGroup]:
        """The group cut into groups of at most `size` requests, which is the same in every call."""
        if not group.parts:
            firsts, requests, window = (
                range(0, len(group.slots), size),
                group.requests,
                group.window,
            )
            group.parts = [
                self._make(requests[first : first + size], window)
                if requests
                else self.of_slots(
                    group.slots[first : first + size], window, sampled=group.filtered
                )
                for first in firsts
            ]
        return group.parts

    def end_round(self) -> None:
        """Drops what was kept for the round's positions."""
        for group in self._kept.values():
            for each in (group, *group.parts):
                each.memo.clear()

    def forget(self) -> None:
        """Drops all groups: slots have new owners or parameters."""
        self._kept.clear()

    def _make(self, requests: list[LlmRequest], window: int) -> RowGroup:
        state, all_rules = self._state, [request.rules for request in requests]
        device = state.device

        def subset(wanted: Callable[[DecodingRules], bool]) -> Subset | None:
            chosen = [index for index, rules in enumerate(all_rules) if wanted(rules)]
            if not chosen:
                return None
            if len(chosen) == len(all_rules):
                return Subset(None, None)
            index = to_device(chosen, device)
            return Subset(index, None).with_rows(window)

        group = RowGroup(
            requests=requests,
            window=window,
            slots=to_device([request.slot for request in requests], device),
            sampled=subset(lambda rules: not rules.is_greedy),
            filtered=any(rules.has_filters and not rules.is_greedy for rules in all_rules),
            penalised=subset(lambda rules: rules.has_penalties),
            early=subset(lambda rules: rules.min_tokens > 0),
            bias=_bias_entries(all_rules, window, device),
            with_logprobs=subset(lambda rules: rules.logprobs is not None),
            num_logprobs=max((rules.logprobs or 0 for rules in all_rules), default=0),
            edited=[index for index, rules in enumerate(all_rules) if rules.needs_host_edits],
            is_guided=any(request.grammar is not None for request in requests),
        )
        if group.sampled is not None:
            group.sampled_parameters = self._parameters(group, group.sampled)
        if group.penalised is not None:
            group.penalties = self._parameters(group, group.penalised)
        return group

    def _parameters(self, group: RowGroup, subset: Subset) -> RowParameters:
        return self._state.gather(subset.take_requests(group.slots).repeat_interleave(group.window))


def _bias_entries(
    all_rules: list[DecodingRules], window: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Logit bias and bad words of one token (-inf), as one sparse addition to the group's rows."""
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for index, rules in enumerate(all_rules):
        for offset in range(window if rules.token_bias else 0):
            rows += [index * window + offset] * len(rules.token_bias)
            tokens += rules.token_bias.keys()
            values += rules.token_bias.values()
    if not rows:
        return None
    return (
        to_device(rows, device),
        to_device(tokens, device),
        to_device(torch.tensor(values, dtype=torch.float32), device),
    )
