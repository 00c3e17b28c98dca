"""How an executor ends, by a shutdown or a fault, and that no caller waits forever."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import SMALL_POOL
from tests.executor.harness import (
    Harness,
    all_pages_are_back,
    draft_target,
    output_of,
    user_provided,
)
from tests.executor.test_faults import (
    GOOD,
    NAN_TOKEN,
    PARAMS,
    assert_clean,
    generate,
    make_llm,
    tokens_of,
)
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.sampling_params import SamplingParams

PROMPT = [3, 14, 15, 9, 26, 5, 35]


@pytest.fixture(params=["plain", "ngram", "draft_target", "one_model"])
def speculation(request: pytest.FixtureRequest, tiny_draft: Path) -> dict[str, Any]:
    ngram = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}
    return {
        "plain": {},
        "ngram": {"speculative_config": ngram},
        "draft_target": draft_target(tiny_draft, 3),
        "one_model": draft_target(tiny_draft, 3, draft_target_one_model=True),
    }[request.param]


def submit_some(harness: Harness, random: Random, number: int) -> list[LlmRequest]:
    """Prompts of 1 to 30 tokens, many with a common beginning; every second request is sampled."""
    shared = [random.randrange(64) for _ in range(30)]
    return [
        harness.submit(
            shared[: random.randrange(20)]
            + [random.randrange(64) for _ in range(random.randrange(1, 11))],
            max_tokens=random.randrange(1, 30),
            temperature=0.8 if index % 2 else None,
            presence_penalty=0.5 if index % 3 else 0.0,
        )
        for index in range(number)
    ]


def assert_rows_are_true(harness: Harness, request: LlmRequest) -> None:
    slots, kv = harness.parts.slots, harness.parts.kv
    assert slots.kv_lens[request.slot] == request.kv_len == request.num_tokens - 1
    assert slots.window[request.slot, 0] == request.tokens[-1]
    assert slots.previous_token[request.slot] == request.tokens[-2]
    kv.groups[0].table.flush()
    pages = kv.cache.pages(request.request_id)
    assert kv.groups[0].table.device_rows[request.slot, : len(pages)].tolist() == pages


def test_without_requests_there_is_nothing_to_do(tiny: Path) -> None:
    assert not Harness(tiny).round()


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(3))
def test_after_every_round_device_and_host_agree_and_only_kept_tokens_have_pages(
    tiny: Path, speculation: dict[str, Any], seed: int
) -> None:
    harness = Harness(tiny, **SMALL_POOL, **speculation, disable_overlap_scheduler=True)
    requests = submit_some(harness, Random(seed), 12)
    while harness.round():
        harness.executor.check_integrity()
        for request in harness.parts.scheduler.running:
            if request.state is RequestState.GENERATION:
                assert_rows_are_true(harness, request)
                kv = harness.parts.kv
                needed = kv.cache.pages_for(request.kv_len + kv.extra_kv_tokens)
                assert kv.held(request)[0] == needed
    assert harness.parts.scheduler.num_preemptions
    assert [(r.finish_reason, r.num_output_tokens) for r in requests] == [
        ("length", r.max_tokens) for r in requests
    ]
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned
def test_a_request_that_is_given_up_for_another_client_has_the_same_text(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    fair = {"capacity_scheduler_policy": "MAX_UTILIZATION", "fair_preemption": True}
    together = Harness(tiny, max_batch_size=3, scheduler_config=fair, **speculation)
    alone = Harness(tiny)
    outputs = []
    for harness in (together, alone):
        flood = [harness.submit([number, 5], 60, temperature=1.0) for number in range(8)]
        for request in flood:
            request.client = ("A",)
        harness.rounds(5)
        late = [harness.submit([number, 6], 5) for number in range(2)]
        for number, request in enumerate(late):
            request.client = (f"late {number}",)
        if harness is together:
            harness.round()
            harness.round()
            assert late[0].slot >= 0 and [each.num_preemptions for each in flood[:3]] == [0, 0, 1]
        harness.run()
        outputs.append([output_of(request) for request in flood + late])
    assert outputs[0] == outputs[1]


def test_a_round_keeps_the_pages_of_accepted_tokens_and_gives_back_all_others(
    tiny: Path, tiny_draft: Path
) -> None:
    pages_of_two = {"tokens_per_block": 2}
    no_overlap = {"disable_overlap_scheduler": True}
    harness = Harness(tiny, kv_cache_config=pages_of_two, **draft_target(tiny_draft), **no_overlap)
    request = harness.submit(PROMPT, max_tokens=200, temperature=1.0)
    harness.run_until(request, RequestState.GENERATION)
    num_rejected = set()
    while True:
        before = request.num_tokens
        harness.round()
        if request.is_finished:
            break
        num_rejected.add(request.py_num_draft_tokens - (request.num_tokens - before - 1))
        held = harness.parts.kv.held(request)[0]
        assert held == harness.parts.kv.cache.pages_for(request.num_tokens - 1)
    assert num_rejected == {0, 1, 2, 3, 4}


def test_a_round_may_hold_nothing_but_a_piece_of_a_prompt(tiny: Path) -> None:
    harness = Harness(tiny, max_num_tokens=4, max_batch_size=2, enable_chunked_prefill=True)
    request = harness.submit(PROMPT, max_tokens=2)
    assert harness.round() and request.kv_len == 4 and not output_of(request)
    harness.run()
    whole = Harness(tiny).submit(PROMPT, max_tokens=2)
    assert len(output_of(request)) == 2 and not output_of(whole)


def test_windows_shrink_when_the_token_budget_is_short(tiny: Path) -> None:
    no_overlap = {"disable_overlap_scheduler": True}
    harness = Harness(tiny, max_num_tokens=8, **draft_target(tiny), **no_overlap)
    requests = [harness.submit(PROMPT[:length], max_tokens=9) for length in (2, 2, 4)]
    harness.round()
    harness.round()
    assert [request.py_num_draft_tokens for request in requests] == [1, 1, 1]
    harness.executor._complete_rounds(0)
    assert [request.num_output_tokens for request in requests] == [3, 3, 3]


@pytest.mark.parametrize("one_model", [False, True])
def test_windows_do_not_keep_a_prompt_waiting_until_a_request_ends(
    tiny: Path, tiny_draft: Path, one_model: bool
) -> None:
    options = draft_target(tiny_draft, 3, draft_target_one_model=one_model)
    harness = Harness(tiny, max_num_tokens=16, enable_chunked_prefill=True, **options)
    running = [harness.submit([1 + position, 2, 3], max_tokens=100) for position in range(4)]
    late = harness.submit(list(range(40)), max_tokens=2)
    for _ in range(12):  # of 4 rows each at least
        harness.round()
    assert late.num_output_tokens and not any(request.is_finished for request in running)


@pytest.mark.parametrize(
    "state", [RequestState.WAITING, RequestState.CONTEXT, RequestState.GENERATION]
)
def test_cancelling_gives_everything_back_in_every_state(
    tiny: Path, tiny_draft: Path, state: RequestState
) -> None:
    options = {"max_batch_size": 1, "max_num_tokens": 5, "enable_chunked_prefill": True}
    harness = Harness(tiny, **options, **draft_target(tiny_draft))
    first = harness.submit(PROMPT * 3, max_tokens=100)
    second = harness.submit(PROMPT, max_tokens=3)
    victim, other = (second, first) if state is RequestState.WAITING else (first, second)
    other.max_tokens = 3
    harness.run_until(
        first, RequestState.GENERATION if state is RequestState.GENERATION else RequestState.CONTEXT
    )
    assert victim.state is state
    harness.queue.cancel(victim.request_id)
    harness.queue.cancel(victim.request_id)
    harness.run()
    assert (victim.finish_reason, other.finish_reason) == ("cancelled", "length")
    assert [response.finish_reason for response in harness.responses[victim.request_id]] == [
        "cancelled"
    ]


def test_cancelling_a_finished_or_unknown_request_does_nothing(tiny: Path) -> None:
    harness = Harness(tiny)
    request = harness.submit(PROMPT, max_tokens=2)
    harness.run()
    harness.queue.cancel(request.request_id)
    harness.queue.cancel(99)
    harness.run()
    assert request.finish_reason == "length" and len(harness.responses) == 1


def test_a_round_that_breaks_off_is_repeated_as_if_it_had_not_happened(
    tiny: Path, tiny_draft: Path
) -> None:
    fuse = {"lit": False}

    def processor(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if fuse["lit"]:
            raise KeyError("the fuse was lit")
        return logits

    sampled: dict[str, Any] = {
        "temperature": 0.9,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
    }
    harness = Harness(tiny, **draft_target(tiny_draft))
    older = harness.submit(PROMPT[1:], max_tokens=30, seed=5, **sampled)
    culprit = harness.submit(PROMPT, max_tokens=30, logits_processor=processor)
    harness.rounds(3)
    # Its context ends in the round that breaks off, after its first token was counted for the
    # penalties.
    joining = harness.submit(PROMPT, max_tokens=30, seed=6, **sampled)
    fuse["lit"] = True
    harness.round()
    assert culprit.error == "KeyError: 'the fuse was lit'" and joining.state is RequestState.CONTEXT
    harness.run()
    undisturbed = Harness(tiny)
    expected = [
        undisturbed.submit(PROMPT[1:], max_tokens=30, seed=5, **sampled),
        undisturbed.submit(PROMPT, max_tokens=30, seed=6, **sampled),
    ]
    undisturbed.run()
    assert [output_of(older), output_of(joining)] == list(map(output_of, expected))


def with_no_token_at(position: int, **params: Any) -> tuple[Any, dict[str, Any]]:
    """A drafter that knows the text, and parameters that leave nothing to choose at output position
    `position`."""
    text = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]

    def force(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        num_output_tokens = len(tokens) - len(PROMPT)
        if num_output_tokens == position:
            return torch.full_like(logits, -torch.inf)
        logits[text[num_output_tokens]] += 1000.0
        return logits

    def propose(request: LlmRequest) -> list[int]:
        return text[request.num_output_tokens :][: request.num_drafts_wanted]

    return propose, {"logits_processor": force, **params}


@pytest.mark.parametrize("position", range(1, 6))
def test_where_no_token_can_be_chosen_the_request_fails_after_its_good_tokens(
    tiny: Path, position: int
) -> None:
    propose, params = with_no_token_at(position)
    results = []
    for options in ({}, user_provided(propose)):
        harness = Harness(tiny, **options)
        request, other = (
            harness.submit(PROMPT, max_tokens=9, **params),
            harness.submit(PROMPT, max_tokens=9),
        )
        harness.run()
        assert request.error is not None and "no token can be chosen" in request.error
        assert other.finish_reason == "length"
        results.append((output_of(request), output_of(other)))
    assert results[0] == results[1] and len(results[0][0]) == position


def test_a_stop_inside_an_accepted_run_comes_before_a_fault_after_it(tiny: Path) -> None:
    propose, params = with_no_token_at(4, stop_token_ids=[43])
    harness = Harness(tiny, **user_provided(propose, draft_len=6))
    request = harness.submit(PROMPT, max_tokens=9, **params)
    harness.run()
    assert (request.finish_reason, request.stop_reason, request.error) == ("stop", 43, None)
    assert output_of(request) == [40, 41, 42, 43]


def test_streamed_pieces_are_at_least_stream_interval_long_and_make_up_the_text(
    tiny: Path, tiny_draft: Path
) -> None:
    harness = Harness(tiny, stream_interval=3, **draft_target(tiny_draft))
    request = harness.submit(PROMPT, max_tokens=40, streaming=True)
    quiet = harness.submit(PROMPT, max_tokens=40)
    harness.run()
    *pieces, last = harness.responses[request.request_id]
    assert len(pieces) > 2 and all(len(piece.token_ids) >= 3 for piece in pieces)
    streamed = [token for piece in [*pieces, last] for token in piece.token_ids]
    assert streamed == output_of(request)
    assert last.finish_reason == "length" and not any(piece.finish_reason for piece in pieces)
    assert [response.token_ids for response in harness.responses[quiet.request_id]] == [
        output_of(quiet)
    ]


def test_prompt_log_probabilities_come_once_whatever_becomes_of_the_request(tiny: Path) -> None:
    """Prefilled in pieces, preempted, and prefilled again with an output longer than a piece."""
    undisturbed, busy = Harness(tiny), Harness(tiny, **SMALL_POOL | {"max_num_tokens": 9})
    prompts = [[i, *PROMPT] for i in range(4)]
    pairs = [
        [each.submit(prompt, max_tokens=40, prompt_logprobs=1) for each in (undisturbed, busy)]
        for prompt in prompts
    ]
    undisturbed.run()
    busy.run()
    assert any(one.num_preemptions for _, one in pairs)
    for expected, found in pairs:
        assert output_of(found) == output_of(expected)
        assert len(found.prompt_logprobs) == found.prompt_len and found.prompt_logprobs[0] is None
        for position in range(1, found.prompt_len):
            ours, theirs = found.prompt_logprobs[position], expected.prompt_logprobs[position]
            assert ours is not None and theirs is not None and list(ours) == list(theirs)
            assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-4 for token in ours)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("nan"), nan_token=NAN_TOKEN)


def test_two_rounds_in_a_row_that_raise_while_they_are_read_do_not_kill_the_executor(
    model: Path,
) -> None:
    class Breaking(ResourceManager):
        times_left = 3

        def update_resources(self, batch: ScheduledBatch) -> None:
            self.times_left -= 1
            if self.times_left >= 0:
                raise OSError("the disk went")

    with make_llm(model, max_num_tokens=16) as llm:
        llm._executor.resources.append(Breaking())
        # A prompt a round: the second one's is in flight while the first one's is read.
        handles = [llm.generate_async([1 + i] * 12, PARAMS) for i in range(3)]
        errors = [handle.result(timeout=30).error for handle in handles]
        assert errors == ["OSError: the disk went"] * 3
        with make_llm(model) as undisturbed:
            assert tokens_of(generate(llm, GOOD, PARAMS)) == tokens_of(
                generate(undisturbed, GOOD, PARAMS)
            )
        assert_clean(llm)


def test_when_the_executor_dies_no_caller_waits_forever(model: Path) -> None:
    class Unfreeable(ResourceManager):
        def free_resources(self, request: LlmRequest) -> None:
            if request.tokens[:2] == GOOD[1][:2]:
                raise RuntimeError("not to be freed")

    options = user_provided(lambda request: [])
    options["speculative_config"]["resource_manager"] = Unfreeable()
    with make_llm(model, **options) as llm:
        handles = [llm.generate_async(prompt, {"max_tokens": 9, "n": 2}) for prompt in GOOD]
        results = [handle.result(timeout=30) for handle in handles]
        assert results[1].error == "RuntimeError: not to be freed"
        assert [output.finish_reason for output in results[1].outputs] == ["error"] * 2
        assert not llm.is_healthy
        for question in (lambda: llm.generate_async(GOOD[0], PARAMS), llm.server_info):
            with pytest.raises(RuntimeError, match="has died: RuntimeError: not to be freed"):
                question()


def test_shutting_down_ends_what_is_running(model: Path) -> None:
    llm = make_llm(model)
    handles = [llm.generate_async(prompt, PARAMS) for prompt in GOOD * 20]
    llm.shutdown()
    llm.shutdown()
    reasons = {handle.result(timeout=30).outputs[0].finish_reason for handle in handles}
    assert reasons <= {"cancelled", "length"} and "cancelled" in reasons
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate_async(GOOD[0], PARAMS)


@pytest.mark.parametrize("end", ["shutdown", "death"])
def test_a_caller_that_submits_while_the_executor_ends_does_not_wait_forever(
    model: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    llm = make_llm(model)
    put = llm._queue.put

    def end_first(requests: list[LlmRequest]) -> bool:
        if end == "shutdown":
            llm.shutdown()
        else:
            llm._worker.failure = "gone"
            llm._worker._queue.take_calls(last=True)  # as its last act does
        return put(requests)

    monkeypatch.setattr(llm._queue, "put", end_first)
    with pytest.raises(RuntimeError, match="shut down" if end == "shutdown" else "has died: gone"):
        llm.generate_async(GOOD[0], PARAMS)
    llm.shutdown()


def test_a_request_submitted_after_a_shutdowns_cancellations_ends_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(model)
    stop, handles = llm._worker.stop, []

    def submit_first() -> None:
        monkeypatch.setattr(llm, "_is_shut_down", False)
        handles.append(llm.generate_async(GOOD[0], SamplingParams(max_tokens=59)))
        stop()

    monkeypatch.setattr(llm._worker, "stop", submit_first)
    llm.shutdown()
    assert handles[0].result(timeout=30).outputs[0].finish_reason in ("error", "length")
