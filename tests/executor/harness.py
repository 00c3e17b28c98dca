"""An executor that a test steps itself, round by round: no thread, no tokenizer."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests.executor.hooks import before_launch
from tests.executor.one_group import all_are_free
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.request import (
    DecodingRules,
    DraftCounters,
    LlmRequest,
    RequestPause,
    RequestState,
    Response,
)
from tllm_spec.executor.resources.interface import ResourceManager, SeqSlotManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.sampling_params import SamplingParams


class Harness:
    """`responses` holds what was sent for each request id."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        options = {"skip_tokenizer_init": True, "max_batch_size": 8, "max_seq_len": 256} | options
        args = LlmArgs.from_kwargs(model, **options)
        built = build_executor(args, None, self._receive)
        self.executor = built.executor
        self.parts = built.executor.parts
        self.queue = built.queue
        self.max_draft_len = built.limits.max_draft_len
        spec = args.speculative_config
        self.text_search = None if spec is None else spec.text_search(args.max_batch_size)
        self.vocab_size = built.model_config.vocab_size
        self.responses: dict[int, list[Response]] = {}
        self._ids = count(1)
        before_launch(built.executor, self._check_pages)

    def _check_pages(self, batch: ScheduledBatch) -> None:
        """Every row of the windows has a page of the request's own. Only dummy requests, of a
        warm-up, have none."""
        cache = self.parts.kv.cache
        counts = batch.row_counts or [batch.shape.window] * len(batch.generation_requests)
        for request, rows in zip(batch.generation_requests, counts, strict=True):
            if request.request_id > 0:
                groups = cache.sequences[request.request_id].groups
                room = max(len(own.pages) for own in groups) * cache.page_size
                assert request.num_tokens_bound - 1 + rows <= room, (request, rows, room)

    def _receive(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses.setdefault(response.request_id, []).append(response)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        draft_limit: int | None = None,
        patience: int | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        streaming: bool = False,
        grammar: GrammarState | None = None,
        **params: Any,
    ) -> LlmRequest:
        """A request in the executor's inbox. patience: rejected rounds after which it pauses.
        Other keywords are SamplingParams'."""
        rules = DecodingRules.from_params(
            SamplingParams(max_tokens=max_tokens, **params),
            vocab_size=self.vocab_size,
            end_ids=(),
            encode=None,
        )
        number = next(self._ids)
        request = LlmRequest(
            request_id=number,
            tokens=list(prompt),
            rules=rules,
            seed=params.get("seed", number),
            arrival=number,
            max_tokens=max_tokens,
            draft_limit=self.max_draft_len if draft_limit is None else draft_limit,
            cache_salt=cache_salt,
            adapter=adapter,
            streaming=streaming,
            grammar=grammar,
            counters=DraftCounters(self.max_draft_len),
            draft_pause=RequestPause(patience),
        )
        self.queue.put([request])
        return request

    def round(self) -> bool:
        """One step; a round that breaks off is recovered from, as the worker does. False when there
        is nothing to do."""
        try:
            return self.executor.step()
        except Exception as error:  # noqa: BLE001 (stands in for the worker, a border)
            self.executor.recover(error)
            return True

    def rounds(self, number: int) -> None:
        for _ in range(number):
            self.round()

    def run(self, rounds: int = 10_000) -> None:
        """Rounds until nothing is left to do, and no request holds a page or a slot."""
        while self.round():
            rounds -= 1
            assert rounds, "the executor does not come to an end"
        self.executor.check_integrity()
        assert all_pages_are_back(self.executor)

    def run_until(self, request: LlmRequest, state: RequestState) -> None:
        while request.state is not state:
            assert self.round(), f"nothing to do, and the request is {request.state}"


class ScriptedDrafter(Drafter):
    """Proposes what a function says; None leaves the placeholders untouched."""

    def __init__(self, propose: Callable[[LlmRequest], Any]) -> None:
        self._propose = propose

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            drafts = self._propose(request)
            if drafts is not None:
                request.py_draft_tokens = drafts


def draft_target(model: Path, draft_len: int = 4, **options: Any) -> dict[str, Any]:
    """Keyword arguments for Draft/Target decoding with the draft model in a folder."""
    return {
        "speculative_config": {
            "decoding_type": "Draft_Target",
            "speculative_model": str(model),
            "max_draft_len": draft_len,
            **options,
        }
    }


def user_provided(
    propose: Callable[[LlmRequest], Any], draft_len: int = 4, **options: Any
) -> dict[str, Any]:
    """Keyword arguments for drafts that come from a function."""
    drafter = ScriptedDrafter(propose)
    return {
        "speculative_config": {
            "decoding_type": "User_Provided",
            "drafter": drafter,
            "max_draft_len": draft_len,
            **options,
        }
    }


def output_of(request: LlmRequest) -> list[int]:
    return request.tokens[request.prompt_len :]


def all_pages_are_back(executor: PyExecutor) -> bool:
    """No request holds a page or a slot, of the target or a draft model: every page is free or
    cached."""
    managers = executor.resources
    caches = [each for each in managers if isinstance(each, KVCacheManager)]
    slots = [each for each in managers if isinstance(each, SeqSlotManager)]
    return all(map(all_are_free, caches)) and all(
        len(each.free) == each.max_batch_size for each in slots
    )


def tensors_of(result: SampledTokens | torch.Tensor | None) -> list[torch.Tensor]:
    """What a graph leaves in its memory."""
    if not isinstance(result, SampledTokens):
        return [] if result is None else [result]
    others = result.rows, result.num_drafts
    return [result.new_tokens, result.new_lens, *(each for each in others if each is not None)]
