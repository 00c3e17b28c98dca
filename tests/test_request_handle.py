"""`RequestHandle`: waiting, copies, stop strings, and readers that are gone."""

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tllm_spec.executor.request import Response, StopMatch
from tllm_spec.outputs import Logprob, RequestOutput
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer


def test_a_response_for_a_closed_event_loop_is_kept_without_an_error() -> None:
    handle = RequestHandle(1, None, [5], SamplingParams(), None, lambda: None)
    loop = asyncio.new_event_loop()
    reading = loop.create_task(handle.aresult())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()  # with the reader still waiting
    handle.receive(Response(1, [7], finish_reason="length"))
    assert handle.result(timeout=1).outputs[0].token_ids == [7]
    reading._log_destroy_pending = False
    with contextlib.suppress(RuntimeError):
        reading.get_coro().close()


def test_waiting_longer_than_the_timeout_raises() -> None:
    handle = RequestHandle(1, None, [5], SamplingParams(), None, lambda: None)
    with pytest.raises(TimeoutError, match="request 1"):
        handle.result(timeout=0.01)


def test_a_tokenizer_that_raises_raises_at_every_read_and_no_reader_hangs() -> None:
    class Failing:
        def decode(self, token_ids: list[int], **options: object) -> str:
            raise KeyError("no such piece")

    tokenizer: Any = Failing()
    handle = RequestHandle(1, None, [5], SamplingParams(), tokenizer, lambda: None)
    handle.receive(Response(1, [7], finish_reason="length"))
    for _ in range(2):
        with pytest.raises(KeyError, match="no such piece"):
            handle.result(timeout=1)


def finished_handle() -> RequestHandle:
    handle = RequestHandle(1, "a", [5], SamplingParams(n=2), None, lambda: None)
    for index in range(2):
        handle.receive(Response(1, [7, 8], index, finish_reason="length", cached_tokens=3))
    return handle.result(timeout=1)


def test_handles_can_be_gathered() -> None:
    async def gather() -> list[RequestHandle]:
        return await asyncio.gather(*handles)

    handles = [finished_handle(), finished_handle()]
    assert asyncio.run(gather()) == handles


def test_a_handle_equals_only_itself() -> None:
    handle, reference = finished_handle(), finished_handle()
    reference.metrics = handle.metrics
    assert handle == handle and handle != reference
    assert len({handle, reference}) == 2


@pytest.mark.parametrize(
    "copied", [lambda handle: pickle.loads(pickle.dumps(handle)), copy.deepcopy, copy.copy]
)
def test_a_copy_of_a_handle_is_a_plain_output(
    copied: Callable[[RequestHandle], RequestOutput],
) -> None:
    handle = finished_handle()
    output = copied(handle)
    assert type(output) is RequestOutput
    assert vars(output).items() <= vars(handle).items()
    assert output.finished and output.outputs[1].token_ids == [7, 8]


@pytest.mark.parametrize("detokenize", [True, False])
def test_tokens_of_a_stop_string_are_never_delivered(detokenize: bool) -> None:
    tokenizer = load_tokenizer("zoo:llama")
    kept, stop = tokenizer.encode("x = 1"), tokenizer.encode("\n\ndef")
    params = SamplingParams(stop=["\n\ndef"], logprobs=0, detokenize=detokenize)
    handle = RequestHandle(1, "a", [5], params, tokenizer, lambda: None)
    output, delivered, logprobs = handle.outputs[0], [], []
    for token in [*kept, *stop]:
        is_last = token == stop[-1]
        match = StopMatch("\n\ndef", "x = 1", len(kept)) if is_last else None
        reason = "stop" if is_last else None
        at = [{token: Logprob(-1.0)}]
        handle.receive(Response(1, [token], logprobs=at, finish_reason=reason, stop_match=match))
        next(handle)
        delivered += output.token_ids_diff
        logprobs += output.logprobs_diff
    assert delivered == output.token_ids == kept
    assert logprobs == output.logprobs == [{token: Logprob(-1.0)} for token in kept]
    assert output.text == ("x = 1" if detokenize else "")


def test_held_tokens_are_delivered_when_no_stop_string_came() -> None:
    tokenizer = load_tokenizer("zoo:llama")
    token_ids = tokenizer.encode("x = 1\n\n")
    handle = RequestHandle(1, "a", [5], SamplingParams(stop=["\n\ndef"]), tokenizer, lambda: None)
    handle.receive(Response(1, token_ids))
    next(handle)
    assert handle.outputs[0].text == "x = 1"
    handle.receive(Response(1, [], finish_reason="cancelled"))
    output = handle.result(timeout=1).outputs[0]
    assert (output.text, output.token_ids) == ("x = 1\n\n", token_ids)


@pytest.mark.parametrize("later", [0, 1])
def test_the_moments_of_several_samples_are_those_of_the_earliest(later: int) -> None:
    handle = RequestHandle(1, "a", [5], SamplingParams(n=2), None, lambda: None)
    for index in range(2):
        late = float(index == later)
        times = {"first_scheduled_time": 1 + late, "first_token_time": 3 + late}
        handle.receive(Response(1, [7], index, **times))
        handle.receive(Response(1, [8], index, finish_reason="length"))
    metrics = handle.result(timeout=1).metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time) == (1, 3)


def test_a_handle_shows_itself_as_the_output_that_it_is() -> None:
    handle = RequestHandle(7, "a", [1], SamplingParams(n=2), None, lambda: None)
    shown = repr(handle)
    assert shown.startswith("RequestOutput(request_id=7, prompt='a', prompt_token_ids=[1]")
