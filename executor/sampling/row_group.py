"""Which rows of the logits belong to which requests, with which sampling parameters, and which
steps of sampling they need.

A group is N requests with at most W rows each: the windows of a round (W = K+1), or its finished
contexts (W = 1). `RowGroups` keeps a group for as long as the same requests run. Parameters are on
the device, by slot: written when a request starts, gathered by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import DecodingRules, LlmRequest, LogprobForm
from tllm_spec.executor.resources.interface import SeqSlotManager
from tllm_spec.executor.resources.slot_state import WindowTree
from tllm_spec.kernels.slots.round_rows import RoundRows

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTEGERS = ("seed", "top_k", "min_position")


@dataclass(frozen=True)
class RowParameters:
    """The parameters of R rows; floats `[R, 1]` float32, integers `[R]` int64."""

    floats: torch.Tensor
    integers: torch.Tensor

    def column(self, name: str) -> torch.Tensor:
        index = _FLOATS.index(name)
        return self.floats[:, index : index + 1]

    def integer(self, name: str) -> torch.Tensor:
        return self.integers[:, _INTEGERS.index(name)]

    def each_of(self, rows: RoundRows) -> RowParameters:
        """One row per request, where these are the parameters of the requests' `rows`."""
        return RowParameters(rows.column(self.floats, 0), rows.column(self.integers, 0))

    def repeated(self, times: int) -> RowParameters:
        """Each row `times` times in a row."""
        return RowParameters(
            self.floats.repeat_interleave(times, dim=0),
            self.integers.repeat_interleave(times, dim=0),
        )


class SamplingState:
    """`floats` `[S, 6]`, `integers` `[S, 3]`, `stop_ids` `[S, E]`, and the token counts of
    penalised requests."""

    def __init__(self, slots: SeqSlotManager, vocab_size: int, device: torch.device) -> None:
        num_rows = slots.dummy_slot + 1
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.zeros((num_rows, len(_FLOATS)), dtype=torch.float32, device=device)
        self.integers = torch.zeros((num_rows, len(_INTEGERS)), dtype=torch.int64, device=device)
        # Padding rows sample free slots: these are greedy and have no filters.
        self.floats[:, _FLOATS.index("top_p")] = 1.0
        self.integers[:, _INTEGERS.index("top_k")] = vocab_size
        self.stop_ids = torch.full((num_rows, 1), -1, dtype=torch.int64, device=device)
        self.counts = TokenCounts(num_rows, vocab_size, device)

    def start(self, request: LlmRequest) -> None:
        """Writes the row of a request that got a slot (again after a preemption)."""
        rules = request.rules
        floats = (
            rules.temperature,
            rules.top_p,
            rules.min_p,
            rules.repetition,
            rules.presence,
            rules.frequency,
        )
        min_tokens = min(rules.min_tokens, request.max_tokens)  # a user's may exceed 64 bits
        integers = (request.seed, rules.top_k or self.vocab_size, request.prompt_len + min_tokens)
        self.floats[request.slot] = to_device(floats, self.device)
        self.integers[request.slot] = to_device(integers, self.device)
        if rules.min_tokens:
            self._write_stop_ids(request)
        if rules.has_penalties:
            self.counts.start(request)

    def _write_stop_ids(self, request: LlmRequest) -> None:
        ids = sorted(request.rules.end_ids | request.rules.stop_token_ids)
        if not ids:
            self.stop_ids[request.slot].fill_(-1)
            return
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            more = self.stop_ids[:, :1].expand(-1, len(ids) - width)
            self.stop_ids = torch.cat((self.stop_ids, more), dim=1)
        ids += ids[:1] * (self.stop_ids.shape[1] - len(ids))
        self.stop_ids[request.slot] = to_device(ids, self.device)

    def gather(self, slots: torch.Tensor) -> RowParameters:
        return RowParameters(
            self.floats.index_select(0, slots), self.integers.index_select(0, slots)
        )


class TokenCounts:
    """How often each token occurs, for penalties. Only penalised requests have a row; the rows
    double when there are too few."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.row_of_slot = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._rows: dict[int, int] = {}  # slot -> row; a row stays with its slot

    def start(self, request: LlmRequest) -> None:
        row = self._rows.setdefault(request.slot, len(self._rows))
        if row >= len(self.output):
            self.output = torch.cat(
                (self.output, self.output.new_zeros((max(8, row), self.output.shape[1])))
            )
            self.prompt = torch.cat(
                (self.prompt, self.prompt.new_zeros((max(8, row), self.prompt.shape[1])))
            )
        device = self.output.device
        # Filled, not assigned: assigning copies from pageable memory, and the host waits for that.
        self.row_of_slot[request.slot].fill_(row)
        self.prompt[row].fill_(False).index_fill_(
            0, to_device(request.tokens[: request.prompt_len], device), True
        )
        output = torch.tensor(request.tokens[request.prompt_len :], dtype=torch.int64)
        counts = torch.bincount(output, minlength=self.output.shape[1]).to(torch.int32)
        self.output[row] = to_device(counts, device)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor) -> None:
        """Counts the emitted tokens `[N, W]` where `valid` `[N, W]`."""
        rows = self.row_of_slot[slots].unsqueeze(1).expand_as(tokens)
        self.output.index_put_((rows, tokens.clamp_min(0)), valid.to(torch.int32), accumulate=True)


@dataclass(frozen=True)
class Subset:
    """All or some of a group's requests, and their rows. Only a subset of some requests has
    indices."""

    own: RoundRows  # whose the rows are
    parameters: RowParameters  # of the rows
    requests: torch.Tensor | None = None  # [M]
    rows: torch.Tensor | None = None  # [T]: their indices in the group's rows

    def with_rows(self, each: int) -> Subset:
        """The same requests of a group with `each` rows per request, and one row of parameters."""
        own, rows = RoundRows.rectangle(self.own.num_requests, each), None
        if self.requests is not None:
            rows = _indices(self.requests, own, None)
        return Subset(own, self.parameters.each_of(self.own), self.requests, rows)

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """These requests' rows of `[T, V]` of the group."""
        return logits if self.rows is None else logits.index_select(0, self.rows)

    def take_requests(self, values: torch.Tensor) -> torch.Tensor:
        """These requests' entries of `[N, ...]`."""
        return values if self.requests is None else values.index_select(0, self.requests)

    def put_requests(self, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` with these requests' entries replaced. May write in place."""
        return own if self.requests is None else values.index_copy_(0, self.requests, own)

    def put(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The group's `[T, ...]` with these requests' rows replaced. May write in place."""
        return rows if self.rows is None else logits.index_copy_(0, self.rows, rows)


def _indices(requests: torch.Tensor, own: RoundRows, offsets: torch.Tensor | None) -> torch.Tensor:
    """The indices of the rows `own` of requests `[M]`, in a group with `offsets` or a rectangle."""
    if offsets is None or own.offsets is None:
        columns = torch.arange(own.window, device=requests.device)
        return (requests.unsqueeze(1) * own.window + columns).flatten()
    shifts = offsets.index_select(0, requests) - own.offsets[:-1]
    return own.expand(shifts) + torch.arange(own.num_rows, device=requests.device)


@dataclass(frozen=True)
class RowGroup:
    """N requests and their rows. The step of a subset that is None is skipped."""

    requests: list[LlmRequest]  # empty in a graph's group
    counts: list[int]  # rows of each of these
    rows: RoundRows
    slots: torch.Tensor  # [N]
    sampled: Subset | None = None  # temperature > 0, or all if the group is mixed
    filtered: bool = False  # any of them uses top_k, top_p or min_p
    penalised: Subset | None = None
    early: Subset | None = None  # min_tokens
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # row, token, value
    with_logprobs: dict[LogprobForm, Subset] = field(default_factory=dict)
    num_logprobs: int = 0
    edited: list[int] = field(default_factory=list)  # indices of those that `HostEdits` edits
    is_edited: bool = False  # whether anything changes logits before temperature and filters
    is_guided: bool = False  # any of them has a grammar
    # A graph's group: all rows are sampled, and a temperature of 0 makes one greedy.
    mixed: bool = False
    parts: list[RowGroup] = field(default_factory=list)  # see `RowGroups.parts`


class RowGroups:
    """Makes groups, and keeps the latest ones for as long as their requests stay the same."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state
        self._kept: dict[tuple[int, ...], RowGroup] = {}

    def get(
        self, requests: Sequence[LlmRequest], window: int, counts: Sequence[int] | None = None
    ) -> RowGroup:
        """counts: the rows of each request, at most `window`; None: so many."""
        key = (window, *(request.request_id for request in requests), *(counts or ()))
        group = self._kept.get(key)
        if group is None:
            # A few groups alternate, for different draft lengths; older ones do not come back.
            if len(self._kept) >= 8:
                self._kept.clear()
            group = self._kept[key] = self._make(list(requests), window, counts)
        return group

    def of_slots(
        self, slots: torch.Tensor, window: int, *, sampled: bool, rows: RoundRows | None = None
    ) -> RowGroup:
        """A group of the slots' owners at the time of its use: all parameters are read on the
        device. slots `[N]`. rows: None for whole windows."""
        rows, own = rows or RoundRows.rectangle(len(slots), window), None
        if sampled:
            own = Subset(rows, self._state.gather(rows.expand(slots)))
        return RowGroup([], [], rows, slots, own, filtered=sampled, mixed=sampled)

    def one_row_each(self, group: RowGroup) -> RowGroup:
        """The group with one row per request, to draw drafts for."""
        if group.requests:
            return self.get(group.requests, 1)
        rows = RoundRows.rectangle(len(group.slots), 1)
        sampled = group.sampled and group.sampled.with_rows(1)
        return replace(group, rows=rows, sampled=sampled, parts=[])

    def parts(self, group: RowGroup, size: int) -> list[RowGroup]:
        """The group cut into groups of at most `size` requests, which is the same in every call."""
        if not group.parts:
            requests, window = group.requests, group.rows.window
            counts = group.counts if group.rows.offsets is not None else None
            for own in (slice(i, i + size) for i in range(0, len(group.slots), size)):
                group.parts.append(
                    self._make(requests[own], window, counts and counts[own])
                    if requests
                    else self.of_slots(group.slots[own], window, sampled=group.filtered)
                )
        return group.parts

    def forget(self) -> None:
        """Drops all groups: slots have new owners or parameters."""
        self._kept.clear()

    def _make(
        self, requests: list[LlmRequest], window: int, counts: Sequence[int] | None
    ) -> RowGroup:
        state, all_rules = self._state, [request.rules for request in requests]
        device = state.device

        def rows_of(indices: Sequence[int]) -> RoundRows:
            if counts is None:
                return RoundRows.rectangle(len(indices), window)
            ends = [0, *accumulate(counts[index] for index in indices)]
            offsets = to_device(torch.tensor(ends, dtype=torch.int32), device)
            return RoundRows(len(indices), window, ends[-1], offsets)

        all_rows = rows_of(range(len(requests)))
        slots = to_device([request.slot for request in requests], device)

        def subset(wanted: Callable[[DecodingRules], bool]) -> Subset | None:
            chosen = [index for index, rules in enumerate(all_rules) if wanted(rules)]
            if not chosen:
                return None
            if len(chosen) == len(all_rules):
                return Subset(all_rows, state.gather(all_rows.expand(slots)))
            own, indices = rows_of(chosen), to_device(chosen, device)
            parameters = state.gather(own.expand(slots.index_select(0, indices)))
            return Subset(own, parameters, indices, _indices(indices, own, all_rows.offsets))

        asking = [rules for rules in all_rules if rules.logprobs is not None]
        row_counts = [window] * len(requests) if counts is None else list(counts)
        bias = None
        if any(rules.token_bias for rules in all_rules):
            bias = _bias_entries(all_rules, row_counts, device)
        edited = [index for index, rules in enumerate(all_rules) if rules.needs_host_edits]
        penalised = subset(lambda rules: rules.has_penalties)
        early = subset(lambda rules: rules.min_tokens > 0)
        return RowGroup(
            requests=requests,
            counts=row_counts,
            rows=all_rows,
            slots=slots,
            sampled=subset(lambda rules: rules.temperature > 0),
            filtered=any(rules.temperature > 0 and rules.has_filters for rules in all_rules),
            penalised=penalised,
            early=early,
            bias=bias,
            with_logprobs={
                form: own
                for form in dict.fromkeys(rules.logprob_form for rules in asking)
                if form and (own := subset(form.is_of))
            },
            num_logprobs=max((rules.logprobs or 0 for rules in asking), default=0),
            edited=edited,
            is_edited=bool(penalised or early or bias or edited),
            is_guided=any(request.grammar is not None for request in requests),
        )


def _bias_entries(
    all_rules: list[DecodingRules], counts: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logit bias and bad words of one token (-inf), as one sparse addition to the group's rows."""
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for end, count, rules in zip(accumulate(counts), counts, all_rules, strict=True):
        for row in range(end - count, end if rules.token_bias else 0):
            rows += [row] * len(rules.token_bias)
            tokens += rules.token_bias.keys()
            values += rules.token_bias.values()
    return (
        to_device(rows, device),
        to_device(tokens, device),
        to_device(torch.tensor(values, dtype=torch.float32), device),
    )


# Where the tokens stand that the rows of a group sample, and which drafts are before each.


@dataclass(frozen=True)
class RowPositions:
    """Positions of the tokens that the rows of N requests sample. A first row's token stands at
    kv_lens `[N]` + `ahead`: 0 after contexts, 1 in windows, whose bonus token is at kv_lens. The
    other rows follow one after another, or as the nodes of `tree`."""

    kv_lens: torch.Tensor
    ahead: int
    tree: WindowTree | None = None

    def positions(self, rows: RoundRows, requests: torch.Tensor | None = None) -> torch.Tensor:
        """`[T]`: of the rows of these requests; None: of all."""
        first = self.kv_lens if requests is None else self.kv_lens.index_select(0, requests)
        if self.tree is None:
            steps = torch.arange(self.ahead, self.ahead + rows.window, device=first.device)
            return rows.flat(first.unsqueeze(1) + steps)
        depths = self.tree.of(requests).depths
        return rows.flat(first.unsqueeze(1) + depths + self.ahead)

    def split(self, sizes: Sequence[int]) -> list[RowPositions]:
        lens = self.kv_lens.split_with_sizes(list(sizes))
        trees = [None] * len(sizes) if self.tree is None else self.tree.split(sizes)
        return [RowPositions(own, self.ahead, tree) for own, tree in zip(lens, trees, strict=True)]
