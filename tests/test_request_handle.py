"""A reader that is gone must not harm the executor."""

import asyncio
import contextlib

import pytest

from tllm_spec.executor.response import Response
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
