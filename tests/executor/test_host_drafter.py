"""A drafter that needs tokens on the host: the host schedules the next round while the device runs,
then reads, drafts and launches. Nothing of it changes a text."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch

from tests.executor.draft_caches import SMALL_POOL, submit_traffic
from tests.executor.harness import (
    Harness,
    ScriptedDrafter,
    all_pages_are_back,
    output_of,
    user_provided,
)
from tests.executor.hooks import before_launch, rounds_in_flight
from tests.executor.overlap_rounds import NO_OVERLAP, assert_same_text
from tests.executor.test_broken_rounds import Breaking
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.config.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.config.speculative_config import NGramDecodingConfig, UserProvidedDecodingConfig
from tllm_spec.executor import build
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.resources.interface import ResourceManager, SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.llm import LLM
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


def test_anything_that_holds_integers_is_a_draft() -> None:
    """Also next to another kind in one round."""
    kinds = [[5, 6], (5, 6), numpy.array([5, 6]), torch.tensor([5, 6]), range(5, 7)]
    for number in range(len(kinds)):
        bench = Bench(lambda request, first=number: kinds[(first + request.request_id) % 5])
        bench.round()
        assert [request.py_draft_tokens for request in bench.requests] == [[5, 6]] * 3
        assert bench.slots.window[:3, 1:3].tolist() == [[5, 6]] * 3


def test_a_list_that_the_drafter_keeps_is_neither_padded_nor_cut() -> None:
    kept = {1: [7], 2: [7, 8], 3: [7, 8, 9]}
    bench = Bench(lambda request: kept[request.request_id])
    bench.requests[2].draft_limit = 2
    assert bench.round().shape.depth == 2
    assert kept == {1: [7], 2: [7, 8], 3: [7, 8, 9]}


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


PROMPT = [3, 14, 15, 9, 26, 5, 35]


def host_drafter_overlap_user_provided(**options: Any) -> dict[str, Any]:
    drafter = ScriptedDrafter(lambda request: [1, 2, 3][: request.num_drafts_wanted])
    config = {"decoding_type": "User_Provided", "drafter": drafter, "max_draft_len": 3}
    return {"speculative_config": config | options}


class Watched(Harness):
    """Notes how many rounds are in flight when one is scheduled, drafted for and launched."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, **options)
        self.scheduled: list[int] = []
        self.drafted: list[int] = []
        self.launched: list[int] = []
        self.num_dropped = 0
        scheduler, drafter = self.parts.scheduler, self.parts.drafter
        schedule, prepare = scheduler.schedule, drafter.prepare_draft_tokens

        def watched_schedule(
            generating: list[LlmRequest], shape: DraftShape, **options: bool
        ) -> Any:
            self.scheduled.append(self._in_flight)
            self._generating = len(generating)
            return schedule(generating, shape, **options)

        def watched_prepare(batch: ScheduledBatch) -> None:
            if batch.shape.depth:
                self.drafted.append(self._in_flight)
            prepare(batch)

        def look(batch: ScheduledBatch) -> None:
            self.launched.append(self._in_flight)
            self.num_dropped += self._generating - len(batch.generation_requests)

        scheduler.schedule = watched_schedule  # type: ignore[method-assign] # the harness looks on
        drafter.prepare_draft_tokens = watched_prepare  # type: ignore[method-assign] # the same
        before_launch(self.executor, look)

    @property
    def _in_flight(self) -> int:
        return len(rounds_in_flight(self.executor))


def test_the_next_round_is_scheduled_in_time_and_drafted_for_when_all_tokens_are_read(
    tiny: Path,
) -> None:
    harness = Watched(tiny, **host_drafter_overlap_user_provided())
    for place in range(3):
        harness.submit([place, *PROMPT], max_tokens=60)
    for draft_len in [3, 3, 3, 0, 0, 0, 3, 0, 3, 0, 0]:
        harness.parts.tier_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
    assert harness.scheduled == [0] + [1] * 10
    assert harness.drafted == [0] * 4, "the first round had contexts only"
    assert not any(harness.launched)
    harness.run()


def test_disabling_overlap_reads_every_round_before_the_next_is_scheduled(tiny: Path) -> None:
    harness = Watched(tiny, **host_drafter_overlap_user_provided(), **NO_OVERLAP)
    harness.parts.tier_for = lambda *_: 3 * (len(harness.scheduled) % 2)
    harness.submit(PROMPT, max_tokens=20)
    harness.run()
    assert not any(harness.scheduled) and len(harness.scheduled) > 10


SITUATIONS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "chunked_prefill": {"max_num_tokens": 24, "enable_chunked_prefill": True},
    "preemption": SMALL_POOL,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_texts_are_those_of_rounds_that_are_read_at_once(situation: str, tiny: Path) -> None:
    """Requests end at stop tokens, also while their next round is scheduled."""
    options = host_drafter_overlap_user_provided() | SITUATIONS[situation]
    harness, alone = Watched(tiny, **options), Harness(tiny, **options, **NO_OVERLAP)
    ours, theirs = (submit_traffic(each, Random(3), 24) for each in (harness, alone))
    while harness.round():
        harness.executor.check_integrity()
    alone.run()
    assert_same_text(ours, theirs)
    assert sum(harness.scheduled) > 20 and not any(harness.drafted) and harness.num_dropped > 1
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    if situation == "undisturbed":
        ours, theirs = ([r.counters.rounds_by_outcome for r in each] for each in (ours, theirs))
        assert ours == theirs
    assert all_pages_are_back(harness.executor)


def test_a_request_cancelled_before_its_round_is_read_is_in_no_round_any_more(tiny: Path) -> None:
    harness = Watched(tiny, **host_drafter_overlap_user_provided(), max_batch_size=2)
    victim, other = (harness.submit([place, *PROMPT], max_tokens=40) for place in range(2))
    waiting = harness.submit([2, *PROMPT], max_tokens=9)
    harness.rounds(4)
    assert victim.tokens_in_flight and waiting.state is RequestState.WAITING
    harness.queue.cancel(victim.request_id)
    harness.round()
    num_tokens = victim.num_tokens
    assert victim.finish_reason == "cancelled" and waiting.slot >= 0
    harness.run()
    assert victim.num_tokens == num_tokens
    alone = Harness(tiny, **NO_OVERLAP)
    texts = [alone.submit([place, *PROMPT], number) for place, number in ((1, 40), (2, 9))]
    alone.run()
    assert list(map(output_of, (other, waiting))) == list(map(output_of, texts))


def test_when_reading_breaks_off_a_request_that_joins_the_scheduled_round_runs_on(
    tiny: Path,
) -> None:
    breaking = Breaking()
    harness = Watched(tiny, **host_drafter_overlap_user_provided(resource_manager=breaking))
    failing = harness.submit(PROMPT, max_tokens=40)
    harness.rounds(3)
    joining = harness.submit([9, *PROMPT], max_tokens=12, presence_penalty=0.5, temperature=0.9)
    breaking.is_due = True
    harness.round()
    assert failing.error == "BufferError: the disk went"
    assert joining.slot >= 0 and not joining.num_output_tokens
    harness.run()
    alone = Harness(tiny, **NO_OVERLAP)
    text = alone.submit([9, *PROMPT], 12, seed=joining.seed, presence_penalty=0.5, temperature=0.9)
    alone.run()
    assert output_of(joining) == output_of(text)


def test_a_users_manager_sees_a_round_end_before_the_next_one_begins(tiny: Path) -> None:
    events: list[str] = []

    class Listening(ResourceManager):
        def prepare_resources(self, batch: ScheduledBatch) -> None:
            events.append("prepare")

        def update_resources(self, batch: ScheduledBatch) -> None:
            events.append("update")

    harness = Watched(tiny, **host_drafter_overlap_user_provided(resource_manager=Listening()))
    harness.parts.tier_for = lambda *_: 3 * (len(harness.scheduled) % 3 > 0)
    harness.submit(PROMPT, max_tokens=30)
    harness.run()
    assert sum(harness.scheduled) > 10
    assert events == ["prepare", "update"] * (len(events) // 2)


# A user's drafter in the way of TensorRT-LLM's: its constructor and its names of a request.


PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


class RepeatLast(Drafter):
    """Proposes the last token again, as often as possible."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.request_ids: set[int] = set()

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in sorted(
            scheduled_requests.generation_requests,
            key=lambda r: (r.py_batch_idx is None, r.py_batch_idx or r.request_id),
        ):
            self.request_ids.add(request.py_request_id)
            prefix = request.get_tokens(0)
            assert prefix == request.get_tokens()[0]
            assert request.get_last_tokens(0) == prefix[-1]
            assert request.get_last_tokens() == [prefix[-1]]
            room = request.py_orig_prompt_len + request.py_max_new_tokens - len(prefix) - 1
            request.py_draft_tokens = [prefix[-1]] * min(4, room)
            prefix.append(-1)  # a copy: the request keeps its tokens


def generate(tiny: Path, spec: UserProvidedDecodingConfig | None) -> tuple[Any, int]:
    with LLM(
        tiny,
        skip_tokenizer_init=True,
        max_batch_size=2,
        max_seq_len=64,
        speculative_config=spec,
        attn_backend="TRTLLM",
        disable_overlap_scheduler=True,
    ) as llm:
        output = llm.generate([1, 2, 3], PARAMS)
    assert output.error is None
    stats = output.speculative_decoding
    return output.outputs[0].token_ids, stats.num_drafted_tokens if stats else 0


def test_a_drafter_written_for_tensorrt_llm_drafts_and_changes_no_text(tiny: Path) -> None:
    ngram = NGramDecodingConfig(max_draft_len=4, max_concurrency=None)
    drafter = RepeatLast(
        max_draft_len=ngram.max_draft_len,
        max_total_draft_tokens=ngram.max_total_draft_tokens,
        max_concurrency=ngram.max_concurrency,
        draft_len_schedule=ngram.draft_len_schedule,
    )
    spec = UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter)
    tokens, num_drafted = generate(tiny, spec)
    assert tokens == generate(tiny, None)[0]
    assert num_drafted > 0 and drafter.request_ids == {1}


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_draft_len": 8}, "max_draft_len = 8 of the drafter is not the 4"),
        ({"max_concurrency": 2}, "max_concurrency = 2 of the drafter is not the None"),
    ],
)
def test_limits_of_a_drafter_that_differ_from_its_configuration_are_refused(
    tiny: Path, limits: dict[str, Any], sentence: str
) -> None:
    spec = UserProvidedDecodingConfig(max_draft_len=4, drafter=RepeatLast(**limits))
    with pytest.raises(ValueError, match=sentence):
        generate(tiny, spec)


def test_a_start_without_the_resource_manager_that_a_drafter_needs_is_refused(tiny: Path) -> None:
    example = "tllm_spec.examples.copy_drafter"
    for manager in (None, ResourceManager()):
        spec = UserProvidedDecodingConfig(
            max_draft_len=4, drafter=f"{example}:CopyDrafter", resource_manager=manager
        )
        with pytest.raises(ValueError, match=f"CopyDrafter needs a {example}:LastSeen"):
            generate(tiny, spec)
    given = {"drafter": f"{example}:CopyDrafter", "resource_manager": f"{example}:LastSeen"}
    generate(tiny, UserProvidedDecodingConfig(max_draft_len=4, **given))


@pytest.mark.parametrize(
    "drafter", [f"{Drafter.__module__}:Drafter", Drafter()], ids=["path", "object"]
)
def test_a_drafter_that_proposes_nothing_is_refused_before_weights_are_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, drafter: Any
) -> None:
    monkeypatch.setattr(build, "build_engines", None)
    spec = UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter)
    with pytest.raises(ValueError, match="is abstract: it does not define prepare_draft_tokens"):
        generate(tiny, spec)
