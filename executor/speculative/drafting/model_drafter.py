"""Draft/Target: a small model in its own engine, with its own KV cache, proposes chains of tokens
(two-model path).

Its cache follows the target's: a context chunk by chunk, then one or two tokens a round. When all K
drafts were accepted, the last of them is not in the draft cache yet, so every round starts by
re-reading the last two tokens. That is the same shape whatever was accepted, so a CUDA graph holds
all K steps."""

from collections.abc import Iterable
from operator import attrgetter

import torch

from tllm_spec.draft_shape import NO_DRAFTS, DraftShape, chain_of
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.drafting.missed_tokens import Missed, forwards_of
from tllm_spec.kernels.row_copies import gather_rows

_is_greedy = attrgetter("rules.is_greedy")


class DraftKVManager(ResourceManager):
    """The draft model's cache through the life of a request, whose `draft_kv_len` counts the final
    tokens in it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv

    def update_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            if self.kv.holds(request) and not request.is_finished:
                request.draft_kv_len = min(request.draft_kv_len, request.kv_len)
                self.kv.rewind(request, request.draft_kv_len)

    def free_resources(self, request: LlmRequest) -> None:
        self.kv.release(request, min(request.draft_kv_len, request.kv_len))
        request.draft_kv_len = 0

    def check_integrity(self) -> None:
        self.kv.check_integrity()


class ModelDrafter(GraphDrafter):
    """A request whose draft cache cannot get pages is not drafted for in this round."""

    def __init__(
        self,
        engine: ModelEngine,
        kv: KVCacheManager,
        slots: SlotState,
        groups: RowGroups,
        sampling: DraftSampling,
        max_num_tokens: int,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._slots = slots
        self._groups = groups
        self._sampling = sampling
        self._max_num_tokens = max_num_tokens
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch = scheduled_requests
        drafting = self._follow(batch)
        for request in batch.generation_requests:
            request.py_num_draft_tokens = 0
        if not drafting:
            batch.shape = NO_DRAFTS
            return
        for request in drafting:
            request.py_num_draft_tokens = request.num_drafts_wanted
        room, draft_len = batch.draft_len, max(r.py_num_draft_tokens for r in drafting)
        batch.shape, batch.num_steps = chain_of(draft_len), draft_len
        for request in drafting:
            request.draft_kv_len = request.num_tokens + draft_len - 1
        self._kv.table.flush()
        if not self._replay(drafting, draft_len, room):
            self._draft(batch, self._groups.get(drafting, batch.shape.window))
        self._limit_drafts(drafting, draft_len)

    def keys(self, of_rounds: list[GraphKey], asked: Iterable[GraphKey]) -> list[GraphKey]:
        """Where all requests want fewer drafts than were asked for, a longer graph runs and its
        last drafts are not used."""
        wanted = set(asked)
        return [key for key in of_rounds if key.draft_len and key in wanted]

    def draft_from_slots(self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool) -> None:
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        self._steps(group, shape.depth, self._engine.rows.max_len - shape.depth)

    def draft_for_dummies(
        self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool, max_kv_len: int
    ) -> torch.Tensor:
        if draft_len := shape.depth:
            longest = min(max_kv_len, self._engine.rows.max_len) - draft_len
            self._steps(self._groups.of_slots(slot_ids, 1, sampled=sampled), draft_len, longest)
        return self._slots.num_drafts[-1:]

    def _follow(self, batch: ScheduledBatch) -> list[LlmRequest]:
        """Brings the draft cache up to the target's, prefilling what is missing. Returns the
        requests to draft for and sets `batch.num_asked`."""
        ends = {r: r.kv_len + r.context_chunk for r in batch.context_requests if r.draft_limit}
        wanting = [r for r in batch.generation_requests if batch.draft_len and r.num_drafts_wanted]
        batch.num_asked = max((r.num_drafts_wanted for r in wanting), default=0)
        ends |= {r: r.num_tokens - 2 for r in wanting}
        following = {r: end for r, end in ends.items() if self._reserve(r, end, batch)}
        missed = [
            Missed(r, r.draft_kv_len, end) for r, end in following.items() if r.draft_kv_len < end
        ]
        batch.catches_up = any(not request.context_chunk for request, _, _ in missed)
        for chunks in forwards_of(missed, self._max_num_tokens):
            self._kv.table.flush()
            self._engine.forward(chunks, None, self._no_rows)
        for request, _, end in missed:
            request.draft_kv_len = end
            self._kv.store(request, end)
        return [request for request in wanting if request in following]

    def _reserve(self, request: LlmRequest, end: int, batch: ScheduledBatch) -> bool:
        """Takes draft pages for the request's next tokens, drafts included; False when there are
        not enough."""
        if not self._kv.holds(request):
            request.draft_kv_len = self._kv.start(request)
        return self._kv.extend(request, end + 1 + batch.draft_len)

    def _replay(self, drafting: list[LlmRequest], draft_len: int, room: int) -> bool:
        """By the shortest graph that makes as many drafts; there are pages for `room` drafts."""
        if self.graphs is None:
            return False
        slots = [request.slot for request in drafting]
        is_sampled = not all(map(_is_greedy, drafting))
        lengths, run = range(draft_len, room + 1), self.graphs.run
        return any(run(slots, chain_of(length), is_sampled) for length in lengths)

    def _draft(self, batch: ScheduledBatch, group: RowGroup) -> None:
        longest = max(request.num_tokens for request in group.requests)
        probs = self._steps(group, batch.draft_len, longest)
        if probs:
            stacked = self._sampling.spread(torch.stack(probs, dim=1))
            batch.draft_probs = self._spread(batch, group, stacked)

    def _steps(self, group: RowGroup, draft_len: int, longest: int) -> list[torch.Tensor]:
        """K steps on the device. Returns what each drew from, `[B, V]`, where rejection sampling
        needs it. The first step reads the last two tokens, the others the draft before. longest:
        bound of the group's tokens."""
        slots = self._slots
        positions = slots.positions(group.slots, draft_len)
        previous = gather_rows(slots.previous_token, group.slots)
        bonus = gather_rows(slots.window[:, 0], group.slots)
        # The dummy slot, which pads graphs, has no token before the bonus token.
        token_ids, first = torch.stack((previous, bonus), dim=1), (positions[0] - 1).clamp_min(0)
        drafts: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for step in range(draft_len):
            width = token_ids.shape[1]
            hidden = self._engine.forward(
                [], Windows(group.slots, first, token_ids, longest + step)
            )
            logits = self._engine.compute_logits(hidden[width - 1 :: width])
            tokens, distribution = self._sampling.choose(group, step, logits, positions[1])
            drafts.append(tokens)
            if distribution is not None:
                probs.append(distribution)
            token_ids, first = tokens.unsqueeze(1), positions[step + 1]
        slots.write_drafts(group.slots, torch.stack(drafts, dim=1))
        return probs

    def _limit_drafts(self, drafting: list[LlmRequest], draft_len: int) -> None:
        """The slots count as many drafts as each request may ever want; near its end it wants
        fewer."""
        wanted = [request.py_num_draft_tokens for request in drafting]
        if wanted != [min(draft_len, request.draft_limit) for request in drafting]:
            slots = to_device([request.slot for request in drafting], self._slots.device)
            self._slots.num_drafts[slots] = to_device(wanted, self._slots.device)

    def _spread(self, batch: ScheduledBatch, group: RowGroup, probs: torch.Tensor) -> torch.Tensor:
        """Rows for all generating requests `[B, K, V]`; the rows of requests without drafts are
        never read."""
        if len(group.requests) == len(batch.generation_requests):
            return probs
        drafted = set(group.requests)
        rows = [
            index for index, request in enumerate(batch.generation_requests) if request in drafted
        ]
        spread = probs.new_zeros((len(batch.generation_requests), *probs.shape[1:]))
        return spread.index_copy_(0, to_device(rows, probs.device), probs)
