"""Sampling parameters per slot on the device: written when a request starts, gathered by slot in
every round."""

from dataclasses import dataclass

import torch

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import SeqSlotManager
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

    def each_of(self, rows: RoundRows) -> "RowParameters":
        """One row per request, where these are the parameters of the requests' `rows`."""
        return RowParameters(rows.column(self.floats, 0), rows.column(self.integers, 0))

    def repeated(self, times: int) -> "RowParameters":
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
