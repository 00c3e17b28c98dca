"""The real request loop with nothing behind it: scheduler, pages, updates and responses are the
executor's own, and the device answers at once with tokens from a script.

Knows what `build.py` would plug together; no figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from tests.executor.one_group import manager_of
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.device.transfer import DeviceSpan, ToHost
from tllm_spec.executor.py_executor import ExecutorParts, PyExecutor
from tllm_spec.executor.request import DecodingRules, DraftCounters, LlmRequest, Response
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.sampling.row_group import SamplingState
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.sharded_sampler import sampler_of
from tllm_spec.executor.scheduler import Scheduler, SchedulerLimits
from tllm_spec.executor.sleep import Sleep
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.drafting.drafter import Drafter, When
from tllm_spec.executor.totals import DraftWatch
from tllm_spec.sampling_params import SamplingParams

VOCAB_SIZE = 128_000
SCRIPT_LEN = 61  # rounds; then the script begins again
CPU = torch.device("cpu")


class Script:
    """What the device answers: random tokens. Draft i of a window is accepted with probability
    `rates[i]` if those before it were."""

    def __init__(self, rates: tuple[float, ...], token_ids: Sequence[int]) -> None:
        self._rates = rates
        self._token_ids = token_ids
        self._random = Random(0)
        self._tables: dict[tuple[int, int], list[tuple[SampledTokens, torch.Tensor]]] = {}
        self._round = count()

    def replay(
        self, slots: list[int], shape: DraftShape, is_sampled: bool, is_adapted: bool
    ) -> SampledTokens:
        """Instead of `CudaGraphs.replay`."""
        sampled, table = self._result(len(slots), shape.depth)
        return replace(sampled, to_host=ToHost([table]))

    def tokens(self, num_rows: int, draft_len: int) -> SampledTokens:
        return self._result(num_rows, draft_len)[0]

    def _result(self, num_rows: int, draft_len: int) -> tuple[SampledTokens, torch.Tensor]:
        key = num_rows, draft_len
        if key not in self._tables:
            self._tables[key] = [self._table(*key) for _ in range(SCRIPT_LEN)]
        return self._tables[key][next(self._round) % SCRIPT_LEN]

    def _table(self, num_rows: int, draft_len: int) -> tuple[SampledTokens, torch.Tensor]:
        """Results, and the same side by side."""
        size = num_rows, 1 + draft_len
        tokens = torch.tensor(self._random.choices(self._token_ids, k=size[0] * size[1])).view(size)
        sampled = SampledTokens(
            tokens, torch.tensor([self._num_new(draft_len) for _ in range(num_rows)])
        )
        return sampled, sampled.table()

    def _num_new(self, draft_len: int) -> int:
        return next(
            (i + 1 for i in range(draft_len) if self._random.random() >= self._rates[i]),
            1 + draft_len,
        )


class ScriptedRunner(RoundRunner):
    """A round of windows takes the way of a captured graph, up to the graph itself."""

    def __init__(self, sampler: Sampler, script: Script, drafter: Drafter) -> None:
        engine: Any = SimpleNamespace(adapters=None, is_adapted=False)
        super().__init__(engine, sampler, drafter)
        graphs: Any = SimpleNamespace(whole=script)
        self.decode.graphs = graphs
        self._script = script

    def _launch_contexts(
        self, batch: ScheduledBatch, logprobs: LogprobRows
    ) -> tuple[ToHost, DeviceSpan | None]:
        self._start_joining(batch)
        number = len(batch.last_chunk_requests) + len(batch.generation_requests)
        sampled = self._script.tokens(number, batch.shape.depth)
        return self._send(sampled, logprobs), None


class ScriptedEngine:
    """An executor of `max_batch_size` requests with overlap; `rates` has one entry a draft, none is
    plain decoding."""

    def __init__(
        self,
        max_batch_size: int,
        rates: tuple[float, ...] = (),
        *,
        respond: Callable[[list[Response]], None] = lambda responses: None,
        max_len: int = 4096,
        page_size: int = 32,
        num_pages: int | None = None,
        may_preempt: bool = False,
        token_ids: Sequence[int] = range(VOCAB_SIZE),
    ) -> None:
        """`token_ids`: what the script draws from."""
        draft_len = self.draft_len = len(rates)
        extra = max(0, draft_len - 1)
        overshoot = 2 * (draft_len + 1) - 1 + extra
        max_pages = -(-(max_len + overshoot + 1) // page_size)
        num_pages = num_pages or 1 + max_batch_size * max_pages
        limits = SchedulerLimits(8192, overshoot, True, may_preempt, by_priority=False)
        managed = SeqSlotManager(max_batch_size)
        pool = KVPool(
            AttentionGeometry(1, 1, 1, 1, 1.0),
            num_pages=num_pages,
            page_size=page_size,
            kv_format=KVFormat(torch.bfloat16),
            device=CPU,
        )
        kv = manager_of(pool, BlockTable(managed, max_pages, CPU), extra=extra)
        slots, state = (
            SlotState(managed, DraftShapes.chains(draft_len), CPU),
            SamplingState(managed, VOCAB_SIZE, CPU),
        )
        sampler = sampler_of(None, slots, state, rejection=False)
        drafter = Drafter()
        drafter.when = When.GRAPH if draft_len else When.HOST
        self.parts = ExecutorParts(
            queue=RequestQueue(),
            scheduler=Scheduler(limits, managed, kv, [kv, managed]),
            kv=kv,
            resources=[kv, managed],
            slots=slots,
            runner=ScriptedRunner(sampler, Script(rates, token_ids), drafter),
            drafter=drafter,
            sampler=sampler,
            controller=AdaptiveController.fixed(draft_len),
            tier_for=lambda *_: draft_len,
            blame=lambda: None,
            draft_watch=DraftWatch(""),
            sleep=Sleep(None, {}, []),
            max_in_flight=1,
        )
        self.executor = PyExecutor(self.parts, respond)
        self._ids = count(1)

    def put(
        self,
        number: int,
        prompt_len: int,
        max_tokens: int,
        *,
        streaming: bool = False,
        **params: Any,
    ) -> list[LlmRequest]:
        """Requests of different prompts in the executor's inbox. Keywords are SamplingParams'."""
        requests = []
        for request_id in (next(self._ids) for _ in range(number)):
            rules = DecodingRules.from_params(
                SamplingParams(max_tokens=max_tokens, **params),
                vocab_size=VOCAB_SIZE,
                end_ids=(2,),
                encode=None,
            )
            requests.append(
                LlmRequest(
                    request_id,
                    Random(request_id).choices(range(VOCAB_SIZE), k=prompt_len),
                    rules,
                    seed=request_id,
                    arrival=request_id,
                    max_tokens=max_tokens,
                    draft_limit=self.draft_len,
                    streaming=streaming,
                    counters=DraftCounters(self.draft_len),
                )
            )
        self.parts.queue.put(requests)
        return requests
