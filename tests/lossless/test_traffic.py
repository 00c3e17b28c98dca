"""Requests that come and go in every round, from several threads, some of them cancelled: each gets
its own text."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pytest

from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.lossless.engines import MODES, tiny_engine
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

BUSY: dict[str, Any] = {
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 120},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    "enable_chunked_prefill": True,
    "max_num_tokens": 32,
    "max_batch_size": 6,
    "max_seq_len": 64,
}


QUICK = ("eagle3_tree",)


def quick_or_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


def with_threads() -> list[Any]:
    """Threads do not see how drafts are made."""
    quick = ("eagle3",)
    return [pytest.param(mode, marks=[] if mode in quick else [pytest.mark.slow]) for mode in MODES]


PARAMS = quick_or_slow([*MODES, *(f"{mode} in turn" for mode in MODES)])


@pytest.fixture(scope="module", params=PARAMS)
def engine(request: pytest.FixtureRequest, drafts: tuple[Path, Path]) -> dict[str, Any]:
    """ "in turn": every round is read before the next is scheduled."""
    mode = request.param.removesuffix(" in turn")
    return tiny_engine(mode, drafts, 3) | {"disable_overlap_scheduler": mode != request.param}


def sampling(number: int) -> dict[str, Any]:
    """Parameters that differ from request to request."""
    return {
        "temperature": (None, 0.8, 1.2)[number % 3],
        "presence_penalty": 0.7 * (number % 2),
        "top_p": 0.9 if number % 5 == 4 else None,
        "seed": number,
    }


def prompt(number: int) -> list[int]:
    """1 to 24 tokens, many of them with a common beginning."""
    random = Random(number)
    return [(7 * i) % 60 for i in range(random.randrange(20))] + [
        random.randrange(64) for _ in range(number % 4 + 1)
    ]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    harness = Harness(tiny, disable_overlap_scheduler=True, max_batch_size=60)
    requests = [
        harness.submit(prompt(number), max_tokens=30, **sampling(number)) for number in range(60)
    ]
    harness.run()
    return list(map(output_of, requests))


def test_one_joins_in_every_round_and_one_is_cancelled_in_every_third(
    tiny: Path, engine: dict[str, Any], expected: list[list[int]]
) -> None:
    harness, random = Harness(tiny, **BUSY, **engine), Random(3)
    requests: list[LlmRequest] = []
    for number in range(60):
        requests.append(
            harness.submit(prompt(number), max_tokens=1 + number % 30, **sampling(number))
        )
        if number % 3 == 0:
            harness.queue.cancel(random.choice(requests).request_id)
        harness.round()
        harness.executor.check_integrity()
    harness.run()
    for request, text in zip(requests, expected, strict=True):
        assert output_of(request) == text[: request.num_output_tokens]
        assert (
            request.num_output_tokens == request.max_tokens or request.finish_reason == "cancelled"
        )
    reasons = [request.finish_reason for request in requests]
    assert reasons.count("cancelled") > 5 and reasons.count("length") > 30
    assert harness.parts.scheduler.num_preemptions


@pytest.mark.parametrize(
    "engine", with_threads(), indirect=True
)  # its threads are the same in turn
def test_threads_that_submit_stream_and_cancel_get_their_own_texts(
    tiny: Path, engine: dict[str, Any], expected: list[list[int]]
) -> None:
    def one(number: int) -> None:
        sleep(Random(number).random() * 0.05)
        params = SamplingParams(max_tokens=30, **sampling(number))
        handle = llm.generate_async(prompt(number), params, streaming=number % 2 == 0)
        streamed: list[int] = []
        for output in handle:
            streamed += output.outputs[0].token_ids_diff
            if number % 6 == 4 and len(streamed) > number % 25:
                handle.abort()
        text, reason = handle.outputs[0].token_ids, handle.outputs[0].finish_reason
        assert streamed == text == expected[number][: len(text)]
        assert (reason == "length" and len(text) == 30) or (
            reason == "cancelled" and number % 6 == 4
        )

    with LLM(tiny, skip_tokenizer_init=True, **BUSY, **engine) as llm:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(one, range(24)))
        llm.check_integrity()
        assert llm.is_healthy and all_pages_are_back(llm._executor)
