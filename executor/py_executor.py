"""The request loop (DESIGN section 3). `step` is one round; everything that differs between the ways of speculating was
plugged in by `build.py`.

It runs in one thread. Requests and cancellations come in through the inbox, responses leave through `respond`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import torch

from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.model_engine import ContextChunk, ModelEngine, Windows
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.response import Response, response_of
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.executor.sampling.prompt_logprobs import collect_prompt_logprobs
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.scheduler import Scheduler
from tllm_spec.executor.speculative.drafter import Drafter
from tllm_spec.outputs import Logprob

NO_TOKEN = "no token can be chosen next: the logits are not numbers (NaN), or every token is excluded (-inf)"


@dataclass
class ExecutorParts:
    """What `build.py` puts together."""

    queue: RequestQueue
    scheduler: Scheduler
    kv: KVCacheManager
    resources: list[ResourceManager]  # in the order of their calls
    slots: SlotState
    engine: ModelEngine
    drafter: Drafter
    sampler: Sampler
    draft_len_for: Callable[[int], int]  # draft length of a round by its number of generating requests
    blame: Callable[[], list[LlmRequest] | None]  # who caused an exception; None: not known
    max_num_tokens: int
    cpu_threads: int | None = None  # of torch in the executor's thread; None: as they are
    stream_interval: int = 1


class PyExecutor:
    """One model (and its drafter) serving requests, round after round."""

    def __init__(self, parts: ExecutorParts, respond: Callable[[list[Response]], None]) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.resources = parts.resources
        self._respond = respond
        self._speculating = parts.slots.max_draft_len > 0
        self._batch = ScheduledBatch()

    def enter_thread(self) -> None:
        """Called once by the thread that will run the rounds."""
        if self.parts.cpu_threads is not None:
            torch.set_num_threads(self.parts.cpu_threads)

    @torch.inference_mode()
    def step(self) -> bool:
        """One round. False when there was nothing to do."""
        self._fetch_new_requests()
        self._prepare_draft_requests()
        batch = self._batch = self._schedule()
        if not batch:
            return False
        for manager in self.resources:
            manager.prepare_resources(batch)
        self.parts.drafter.prepare_draft_tokens(batch)
        logits = self._forward(batch)
        sampled, logprobs = self.parts.sampler.sample(batch, logits)
        self._update_requests(batch, sampled, logprobs)
        for manager in self.resources:
            manager.update_resources(batch)
        self._finish_round(batch)
        return True

    def _fetch_new_requests(self) -> None:
        new, cancelled = self.parts.queue.take()
        for request in new:
            try:
                self.scheduler.add(request)
            except ValueError as error:
                request.finish("error", error=str(error))
                self._send([request])
        if cancelled:
            alive = {
                request.request_id: request for request in self.scheduler.waiting + self.scheduler.running
            }
            self._end([alive[i] for i in dict.fromkeys(cancelled) if i in alive], "cancelled")

    def _prepare_draft_requests(self) -> None:
        """Placeholders, so that scheduling counts the drafts of the round before they exist."""
        generating = [r for r in self.scheduler.running if r.state is RequestState.GENERATION]
        draft_len = 0
        if generating and self._speculating:
            longest = max(request.draft_limit for request in generating)
            room = self.parts.max_num_tokens // len(generating) - 1
            draft_len = max(0, min(self.parts.draft_len_for(len(generating)), longest, room))
        for request in generating:
            request.py_draft_tokens = [0] * draft_len
            request.py_num_draft_tokens = 0

    def _schedule(self) -> ScheduledBatch:
        batch, admitted = self.scheduler.schedule()
        for request in admitted:
            self.parts.sampler.start(request)
            if request.first_scheduled_time is None:
                request.cached_tokens, request.first_scheduled_time = request.kv_len, monotonic()
        if batch.generation_requests:
            batch.draft_len = len(batch.generation_requests[0].py_draft_tokens)
        return batch

    def _forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits of the rows that are sampled: the last row of each finished context, then all window rows."""
        parts, windows = self.parts, None
        chunks = [
            ContextChunk(r.slot, r.kv_len, r.tokens[r.kv_len : r.kv_len + r.context_chunk])
            for r in batch.context_requests
        ]
        if batch.generation_requests:
            slot_ids = parts.sampler.groups.get(batch.generation_requests, batch.window).slots
            longest = max(request.num_tokens for request in batch.generation_requests)
            windows = Windows(
                slots=slot_ids,
                first=parts.slots.kv_lens.index_select(0, slot_ids),
                token_ids=parts.slots.window.index_select(0, slot_ids)[:, : batch.window],
                max_kv_len=longest + batch.draft_len,
            )
        hidden = parts.engine.forward(chunks, windows)
        if chunks:
            collect_prompt_logprobs(batch.context_requests, hidden, parts.engine.compute_logits)
            hidden = self._finish_contexts(batch, hidden)
        return parts.engine.compute_logits(hidden)

    def _finish_contexts(self, batch: ScheduledBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Drops the context rows that are not sampled, and tells the slots how long the contexts are."""
        rows: list[int] = []
        end = 0
        for request in batch.context_requests:
            end += request.context_chunk
            rows += [end - 1] if request.is_last_context_chunk else []
        finished = batch.last_chunk_requests
        device = hidden.device
        if finished:
            slot_ids = torch.tensor([request.slot for request in finished], device=device)
            lens = torch.tensor([request.num_tokens for request in finished], device=device)
            self.parts.slots.kv_lens[slot_ids] = lens
        wanted = torch.cat((torch.tensor(rows, dtype=torch.int64), torch.arange(end, hidden.shape[0])))
        return hidden.index_select(0, wanted.to(device))

    def _update_requests(self, batch: ScheduledBatch, sampled: SampledTokens, logprobs: LogprobRows) -> None:
        """The host learns what was emitted: one copy from the device."""
        table = torch.cat((sampled.new_lens.unsqueeze(1), sampled.new_tokens), dim=1).tolist()
        found = logprobs.per_request()
        finished_contexts = batch.last_chunk_requests
        for request in batch.context_requests:
            request.kv_len += request.context_chunk
            request.context_chunk = 0
        for request, (num_new, *tokens) in zip(finished_contexts, table, strict=False):
            request.state = RequestState.GENERATION
            self._emit(request, tokens[:num_new], found)
        rows = table[len(finished_contexts) :]
        for request, (num_new, *tokens) in zip(batch.generation_requests, rows, strict=True):
            num_emitted = self._emit(request, tokens[:num_new], found)
            request.py_num_accepted_draft_tokens = num_new - 1
            request.py_rewind_len = batch.draft_len - (num_new - 1)
            request.kv_len += num_new
            if self._speculating:
                request.counters.num_emitted_tokens += num_emitted
                num_accepted = min(num_new - 1, num_emitted)
                request.counters.record(request.py_num_draft_tokens, num_accepted)
                request.draft_pause.observe(request.py_num_draft_tokens, num_accepted)

    def _emit(self, request: LlmRequest, run: list[int], found: dict[int, list[dict[int, Logprob]]]) -> int:
        """Appends a run and returns how many tokens of it are kept: a stop inside the run drops the rest."""
        before = request.num_tokens
        good = run[: run.index(-1)] if -1 in run else run
        request.append_run(good)
        if len(good) < len(run) and not request.is_finished:
            request.finish("error", error=NO_TOKEN)
        num_emitted = request.num_tokens - before
        if request.request_id in found:
            request.logprobs += found[request.request_id][:num_emitted]
        return num_emitted

    def _finish_round(self, batch: ScheduledBatch) -> None:
        """Responses for whoever has news; finished requests give everything back."""
        interval = self.parts.stream_interval
        self._send(
            [
                request
                for request in batch.requests()
                if request.streaming
                and not request.is_finished
                and request.num_output_tokens - request.num_responded >= interval
            ]
        )
        self._end([request for request in batch.requests() if request.is_finished])

    def _end(self, requests: list[LlmRequest], reason: str | None = None) -> None:
        for request in requests:
            if reason is not None:
                request.finish(reason)
            request.kv_len = min(request.kv_len, max(request.num_tokens - 1, 0))
            for manager in self.resources:
                manager.free_resources(request)
            self.scheduler.remove(request)
            self._send([request])

    def _send(self, requests: list[LlmRequest]) -> None:
        if requests:
            self._respond([response_of(request, speculating=self._speculating) for request in requests])

    @torch.inference_mode()
    def recover(self, error: Exception) -> None:
        """A round broke off. Whoever caused it fails with the error, or everybody in the round if that is not known;
        the others go on from where they stood before the round. Raises the error if it was nobody's round."""
        alive = [request for request in self._batch.requests() if request.slot >= 0]
        self._batch = ScheduledBatch()
        culprits = self.parts.blame()
        if culprits is None:
            culprits = alive
            if not alive:
                raise error  # nobody whose end could help: the next round would break off too
        for request in alive:
            request.context_chunk = 0
            request.draft_kv_len = min(request.draft_kv_len, request.kv_len)
            self.parts.kv.rewind(request, request.kv_len)
            self.parts.sampler.start(request)  # its token counts may have the round's tokens in them
        for request in culprits:
            request.finish("error", error=f"{type(error).__name__}: {error}")
        self._end(culprits)

    def check_integrity(self) -> None:
        """Raises AssertionError when slots or pages do not add up."""
        for manager in self.resources:
            manager.check_integrity()
