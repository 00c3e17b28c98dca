"""The executor's thread and what a user's code raises in it: nothing ends it but `stop` and what no
round survives."""

from asyncio import CancelledError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import all_pages_are_back, user_provided
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.worker import Worker
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

PROMPTS, LENGTH = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]], 24
# What is raised to end a task, a program or a generator ends none here: the thread is the
# executor's own.
ENDINGS = [CancelledError, KeyboardInterrupt, GeneratorExit, SystemExit]


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, skip_tokenizer_init=True, max_batch_size=8, max_seq_len=64, **options)


def outputs_of(
    llm: LLM, culprits_params: SamplingParams | None = None
) -> Iterator[tuple[str | None, list[int]]]:
    """Error and tokens of each prompt; the second one's parameters are these."""
    usual = SamplingParams(max_tokens=LENGTH)
    all_params = [usual, culprits_params or usual, usual]
    handles = [llm.generate_async(*each) for each in zip(PROMPTS, all_params, strict=True)]
    for handle in handles:
        handle.result(timeout=30)
        yield handle.error, handle.outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    with make_llm(tiny) as llm:
        return [tokens for _, tokens in outputs_of(llm)]


def assert_only_the_second_failed(
    llm: LLM,
    ending: type[BaseException],
    expected: list[list[int]],
    params: SamplingParams | None = None,
) -> None:
    first, (error, _), third = outputs_of(llm, params)
    assert error == f"{ending.__name__}: enough"
    assert [first, third] == [(None, expected[0]), (None, expected[2])]
    assert llm.is_healthy
    llm.check_integrity()
    assert all_pages_are_back(llm._executor)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_logits_processor_that_raises_systemexit_fails_its_own_request(
    tiny: Path, expected: list[list[int]], ending: type[BaseException]
) -> None:
    def give_up(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 8:
            raise ending("enough")
        return logits

    with make_llm(tiny) as llm:
        params = SamplingParams(max_tokens=LENGTH, logits_processor=give_up)
        assert_only_the_second_failed(llm, ending, expected, params)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_drafter_that_raises_systemexit_fails_the_request_that_it_drafted_for(
    tiny: Path, expected: list[list[int]], ending: type[BaseException]
) -> None:
    def propose(request: LlmRequest) -> list[int]:
        if request.tokens[:3] == PROMPTS[1]:
            raise ending("enough")
        return [7]

    with make_llm(tiny, **user_provided(propose)) as llm:
        assert_only_the_second_failed(llm, ending, expected)


class Dying:
    """An executor that no round's end can help."""

    def __init__(self, ending: BaseException) -> None:
        self._ending = ending

    def enter_thread(self) -> None: ...

    def step(self) -> bool:
        raise self._ending

    def recover(self, error: BaseException) -> None:
        raise error

    def close(self) -> None: ...


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_executor_that_dies_of_systemexit_reports_it(ending: type[BaseException]) -> None:
    told: list[str] = []
    worker = Worker(Dying(ending("enough")), RequestQueue(), told.append)  # type: ignore[arg-type] # a stand-in
    worker.start()
    worker.wait_until_idle()
    assert worker.failure == f"{ending.__name__}: enough" and told == [worker.failure]
    assert worker.why_ended == f"the executor has died: {worker.failure}"
    worker.stop()
