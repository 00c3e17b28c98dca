"""A handle stands for its request, and its plain output can leave the process; a reader that is gone harms nobody."""

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Callable

import pytest

from tllm_spec.executor.response import Response
from tllm_spec.outputs import RequestOutput
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams


def test_a_response_for_a_reader_whose_event_loop_is_closed_is_kept_quietly() -> None:
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


def test_a_handle_is_equal_to_itself_only() -> None:
    handle, twin = finished_handle(), finished_handle()
    twin.metrics = handle.metrics
    assert handle == handle and handle != twin
    assert len({handle, twin}) == 2


@pytest.mark.parametrize(
    "copied", [lambda handle: pickle.loads(pickle.dumps(handle)), copy.deepcopy, copy.copy]
)
def test_the_copy_of_a_handle_is_its_plain_output(copied: Callable[[RequestHandle], RequestOutput]) -> None:
    handle = finished_handle()
    output = copied(handle)
    assert type(output) is RequestOutput
    assert vars(output).items() <= vars(handle).items()
    assert output.finished and output.outputs[1].token_ids == [7, 8]
