"""Masks of the tokens that requests' grammars allow, at every row of a round.

A window's row after drafts is masked as if these drafts were the text, so a draft is accepted only
where plain decoding would choose it. The drafts are sent to the host before the round's forward is
launched. While it runs, the host reads the round before and fills the masks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import PinnedBuffers, ToHost, to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.kernels.sampling.logit_filters import mask_tokens

# llguidance works without Python's lock, so the masks of many requests are filled in threads.
NUM_THREADS = 4
MIN_FOR_THREADS = 4  # requests

# A request, its masks and their numbers.
Job = tuple[LlmRequest, torch.Tensor, torch.Tensor]


def mask_words(num_rows: int, vocab_size: int) -> int:
    """int32 words that the masks of that many rows take, with a number for each row."""
    return num_rows * (1 + -(-vocab_size // 32))


class GrammarMasks:
    """The masks of requests with grammars. Costs nothing in a round without such requests.

    Masks travel with the number of each row's mask in one copy: `[R]` numbers, -1 for no mask and
    -2 - token for one of that token only, then `[M, ceil(V / 32)]` words, all int32."""

    def __init__(
        self, slots: SlotState, vocab_size: int, first_token: int = 0, *, is_served: bool = True
    ) -> None:
        """first_token: of logits that are a part of the vocabulary's. is_served: whether there may
        be grammars."""
        self._slots = slots
        self._vocab_size, self._num_words = vocab_size, -(-vocab_size // 32)
        self._first_token = first_token
        self._buffers = PinnedBuffers()
        self._windows: ToHost | None = None
        self._drafts: list[torch.Tensor] = []
        self._index: dict[int, int] = {}  # of the round's windows, by request id
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tllm-masks")  # begun when needed
        self._for_graphs = torch.empty(0, dtype=torch.int32, device=slots.device)
        self._max_rows = 0  # of the largest graph
        self._is_sent = False  # whether `_for_graphs` has masks
        # Reads the rounds in flight, which brings their tokens to the requests: called where masks
        # need such tokens.
        self.read_rounds: Callable[[], None] = lambda: None
        self.is_served = is_served
        self.has_windows = False  # whether requests of this round have grammars

    def begin(self, batch: ScheduledBatch) -> None:
        """Sends a round's drafts, which are in the slots, to the host. Called before the forward is
        launched."""
        guided = [r for r in batch.generation_requests if r.grammar is not None]
        self._windows, self.has_windows = None, bool(guided)
        if guided and batch.shape.depth:
            self._index = {request.request_id: i for i, request in enumerate(guided)}
            slot_ids = to_device([request.slot for request in guided], self._slots.device)
            windows = self._slots.window[:, : batch.shape.window].index_select(0, slot_ids)
            sent = [windows]
            if self._slots.shapes.has_trees:
                sent.append(self._slots.parents(slot_ids, batch.shape.window))
            self._windows = ToHost(sent, self._buffers)

    def apply(self, group: RowGroup, logits: torch.Tensor) -> None:
        """Masks the rows of the group's requests with grammars, in place. logits `[T, V]`."""
        filled = self._fill(group.requests, group.counts, len(logits))
        numbers = filled.to(logits.device, non_blocking=True)
        self._mask(logits, *self._parts(numbers, len(logits)))

    def make_room(self, max_rows: int) -> None:
        """Allocates the masks of graphs of at most so many rows. Called before captures."""
        self._max_rows, size = max_rows, mask_words(max_rows, self._vocab_size)
        self._for_graphs = torch.full((size,), -1, dtype=torch.int32, device=self._slots.device)

    def send(self, requests: Sequence[LlmRequest], window: int, num_rows: int) -> None:
        """Sends the masks of a round's windows to a graph of that many rows; where there are none,
        takes back those of the round before."""
        if self.has_windows:
            filled = self._fill(requests, [window] * len(requests), num_rows)
            self._for_graphs[: len(filled)].copy_(filled, non_blocking=True)
        elif self._is_sent:
            self._for_graphs[: self._max_rows].fill_(-1)
        self._is_sent = self.has_windows

    def apply_sent(self, logits: torch.Tensor, group: RowGroup) -> None:
        """Applies the masks that were sent, which a graph can capture. logits `[T, V]`: of the
        group's windows, changed in place."""
        if self.is_served:
            size = group.rows.num_requests, group.rows.window
            of_rows, masks = self._parts(self._for_graphs, size[0] * size[1])
            self._mask(logits, group.rows.flat(of_rows.view(size)), masks)

    def _mask(self, logits: torch.Tensor, of_rows: torch.Tensor, masks: torch.Tensor) -> None:
        first = self._first_token if logits.shape[1] < self._vocab_size else 0
        mask_tokens(logits, of_rows, masks, first)

    def _parts(self, numbers: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_masks = (len(numbers) - num_rows) // self._num_words
        words = numbers[num_rows:][: num_masks * self._num_words]
        return numbers[:num_rows], words.view(num_masks, self._num_words)

    def _fill(
        self, requests: Sequence[LlmRequest], counts: Sequence[int], num_rows: int
    ) -> torch.Tensor:
        """Fills the masks of `num_rows` rows on the host. counts: the rows of each request. A
        request that has ended needs no masks."""
        if any(request.grammar and request.tokens_in_flight for request in requests):
            self.read_rounds()
        guided = {
            index: request
            for index, request in enumerate(requests)
            if request.grammar is not None and not request.is_finished
        }
        own_counts = [counts[index] for index in guided]
        size = num_rows + sum(own_counts) * self._num_words
        is_pinned = self._slots.device.type == "cuda"
        filled = torch.empty(size, dtype=torch.int32, pin_memory=is_pinned)
        mask_of_row, masks = self._parts(filled, num_rows)
        numbers, starts, first = [-1] * num_rows, [0, *accumulate(counts)], 0
        for index, count in zip(guided, own_counts, strict=True):
            numbers[starts[index] : starts[index + 1]] = range(first, first + count)
            first += count
        mask_of_row.copy_(torch.tensor(numbers, dtype=torch.int32))
        if guided:
            own_numbers = [mask_of_row[starts[index] : starts[index + 1]] for index in guided]
            own_masks = masks.split_with_sizes(own_counts)
            self._fill_all(list(zip(guided.values(), own_masks, own_numbers, strict=True)))
        return filled

    def _fill_all(self, jobs: list[Job]) -> None:
        if self._windows is not None:
            self._drafts, self._windows = self._windows.wait(), None
        if len(jobs) < MIN_FOR_THREADS:
            self._fill_some(jobs)
        else:
            parts = [jobs[i::NUM_THREADS] for i in range(NUM_THREADS)]
            list(self._threads.map(self._fill_some, parts))

    @torch.inference_mode()
    def _fill_some(self, jobs: Sequence[Job]) -> None:
        for request, masks, numbers in jobs:
            assert request.grammar is not None
            request.grammar.read(request.tokens, request.prompt_len)
            forced = request.grammar.fill(*self._nodes(request, len(masks)), masks.fill_(-1))
            for row, token in forced.items():
                numbers[row] = -2 - token

    def _nodes(self, request: LlmRequest, num_rows: int) -> tuple[list[int], Sequence[int]]:
        """Tokens and parents of the request's rows, without padding after the proposed drafts."""
        if num_rows == 1:
            return [0], [-1]
        windows, *parents = self._drafts
        index = self._index[request.request_id]
        if parents:
            return windows[index].tolist(), parents[0][index].tolist()
        num_rows = min(num_rows, 1 + request.py_num_draft_tokens)
        return windows[index, :num_rows].tolist(), range(-1, num_rows - 1)
