from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.executor.harness import Harness, ScriptedDrafter, user_provided
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.config.draft_shape import DraftShapes, chain_of
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import DecodingRules, LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager, SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.sampling_params import SamplingParams

RULES = DecodingRules.from_params(SamplingParams(), vocab_size=64, end_ids=(), encode=None)
DRAFT_LEN = 4


class Bench:
    """A HostDrafter and three generating requests, 1 to 3, in slots 0 to 2."""

    def __init__(self, propose: Callable[[LlmRequest], Any]) -> None:
        slots = SeqSlotManager(3)
        self.slots = SlotState(slots, DraftShapes.chains(DRAFT_LEN), torch.device("cpu"))
        self.drafter = HostDrafter(ScriptedDrafter(propose), None, self.slots, 64)
        self.requests = [
            LlmRequest(number, [number] * 5, RULES, seed=0, max_tokens=99, draft_limit=DRAFT_LEN)
            for number in (1, 2, 3)
        ]
        for request in self.requests:
            slots.acquire(request)
            self.slots.start(request)

    def round(self, draft_len: int = DRAFT_LEN) -> ScheduledBatch:
        for request in self.requests:
            request.py_draft_tokens, request.py_num_draft_tokens = [0] * draft_len, 0
        batch = ScheduledBatch(generation_requests=list(self.requests), shape=chain_of(draft_len))
        self.drafter.prepare_draft_tokens(batch)
        return batch


def test_drafts_are_padded_to_the_longest_and_their_real_number_is_kept() -> None:
    bench = Bench(lambda request: [7, 8, 9][: request.request_id - 1])
    batch = bench.round()
    assert batch.shape.depth == 2
    assert [request.py_num_draft_tokens for request in bench.requests] == [0, 1, 2]
    padded = [[1, 1], [7, 2], [7, 8]]  # the requests' last tokens
    assert [request.py_draft_tokens for request in bench.requests] == [[], [7], [7, 8]]
    assert bench.slots.window[:3, 1:3].tolist() == padded
    assert bench.slots.num_drafts[:3].tolist() == [
        0,
        1,
        2,
    ]  # else a padding that happens to be right is accepted


def test_untouched_placeholders_are_no_drafts_but_a_list_of_zeros_is_a_draft() -> None:
    batch = Bench(lambda request: None).round()
    assert batch.shape.depth == 0
    bench = Bench(lambda request: [0, 0])
    assert bench.round().shape.depth == 2
    assert [request.py_num_draft_tokens for request in bench.requests] == [2, 2, 2]


def test_drafts_beyond_what_a_request_can_use_are_cut_off() -> None:
    bench = Bench(lambda request: [7, 8, 9, 10])
    bench.requests[0].draft_limit = 1
    bench.requests[1].max_tokens = 3
    assert bench.round().shape.depth == 4
    assert [request.py_num_draft_tokens for request in bench.requests] == [1, 2, 4]
    assert bench.slots.window[:2, 1:5].tolist() == [[7, 1, 1, 1], [7, 8, 2, 2]]
    assert bench.round(draft_len=3).shape.depth == 3


def test_padding_puts_no_token_into_a_window_after_which_there_are_no_numbers(
    tmp_path: Path,
) -> None:
    model = write_tiny_llama(tmp_path, nan_token=0)
    harness = Harness(
        model, **user_provided(lambda request: [5, 6] if request.request_id == 2 else [])
    )
    requests = [harness.submit([i, 5], max_tokens=12, logit_bias={0: -100.0}) for i in (1, 2)]
    harness.run()
    assert [request.error for request in requests] == [None, None]


def test_in_a_round_of_draft_length_0_the_drafter_is_not_called() -> None:
    bench = Bench(lambda request: pytest.fail("asked"))
    bench.drafter.prepare_draft_tokens(
        ScheduledBatch(generation_requests=bench.requests, shape=chain_of(0))
    )


@pytest.mark.parametrize("drafts", [(5, 6), numpy.array([5, 6]), torch.tensor([5, 6]), range(5, 7)])
def test_anything_that_holds_integers_is_a_draft(drafts: object) -> None:
    bench = Bench(lambda request: drafts)
    bench.round()
    assert [request.py_draft_tokens for request in bench.requests] == [[5, 6]] * 3


def test_a_list_that_the_drafter_keeps_is_neither_padded_nor_cut() -> None:
    kept = {1: [7], 2: [7, 8], 3: [7, 8, 9]}
    bench = Bench(lambda request: kept[request.request_id])
    bench.requests[2].draft_limit = 2
    assert bench.round().shape.depth == 2
    assert kept == {1: [7], 2: [7, 8], 3: [7, 8, 9]}


def test_lists_and_other_sequences_in_one_round_give_the_same_drafts() -> None:
    proposed = {1: [5, 6], 2: numpy.array([5, 6]), 3: (5, 6)}
    bench = Bench(lambda request: proposed[request.request_id])
    bench.round()
    assert [request.py_draft_tokens for request in bench.requests] == [[5, 6]] * 3
    assert bench.slots.window[:3, 1:3].tolist() == [[5, 6]] * 3


@pytest.mark.parametrize(
    ("drafts", "error", "message"),
    [
        ([1] * 5, ValueError, "proposed 5 tokens; max_draft_len is 4"),
        ([1, 64], ValueError, "the model has token ids 0 to 63"),
        ([-1], ValueError, "the model has token ids 0 to 63"),
        ([1.0], ValueError, r"the drafter proposed \[1.0\], which are no token ids: .*integer"),
        (["a"], ValueError, r"the drafter proposed \['a'\], .*integer"),
        (7, ValueError, "the drafter proposed 7, .*not iterable"),
    ],
)
def test_a_bad_draft_is_its_requests_fault_alone(
    drafts: object, error: type[Exception], message: str
) -> None:
    bench = Bench(lambda request: drafts if request.request_id == 2 else [1])
    with pytest.raises(error, match=message):
        bench.round()
    assert bench.drafter.blame() == [bench.requests[1]]


def test_after_an_exception_the_drafter_is_asked_one_by_one_until_the_culprit_shows() -> None:
    calls: list[int] = []

    class Picky(Drafter):
        def prepare_draft_tokens(
            self,
            scheduled_requests: ScheduledBatch,
            resource_manager: ResourceManager | None = None,
        ) -> None:
            calls.append(len(scheduled_requests.generation_requests))
            for request in scheduled_requests.generation_requests:
                if request.request_id == 2:
                    raise RuntimeError("not this one")
                request.py_draft_tokens = [1]

    bench = Bench(lambda request: None)
    bench.drafter = HostDrafter(Picky(), None, bench.slots, 64)
    with pytest.raises(RuntimeError):
        bench.round()
    assert bench.drafter.blame() == []  # not known yet
    with pytest.raises(RuntimeError):
        bench.round()
    assert bench.drafter.blame() == [bench.requests[1]]
    del bench.requests[1]
    bench.round()
    bench.round()
    assert calls == [3, 1, 1, 1, 1, 2]


def test_an_exception_from_elsewhere_blames_no_request() -> None:
    bench = Bench(lambda request: [1])
    bench.round()
    assert bench.drafter.blame() is None


def test_the_drafter_gets_its_own_resource_manager() -> None:
    seen: list[ResourceManager | None] = []

    class Asking(Drafter):
        def prepare_draft_tokens(
            self,
            scheduled_requests: ScheduledBatch,
            resource_manager: ResourceManager | None = None,
        ) -> None:
            seen.append(resource_manager)

    bench, manager = Bench(lambda request: None), ResourceManager()
    bench.drafter = HostDrafter(Asking(), manager, bench.slots, 64)
    bench.round()
    assert seen == [manager]
