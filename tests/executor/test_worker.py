"""The executor's thread and what a user's code raises in it: nothing ends it but `stop` and what no
round survives."""

import threading
from pathlib import Path

import pytest

from tests.executor.harness import user_provided
from tests.executor.test_faults import ENDINGS
from tests.server.http_answers import SECONDS
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.worker import Worker
from tllm_spec.llm import LLM


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


# Asking the executor's thread: between rounds, while it idles, and when it is no more.


OPTIONS = {"skip_tokenizer_init": True, "max_batch_size": 4, "max_seq_len": 256}


class FakeExecutor:
    """Rounds that a test lets through one by one; `in_round` is set while one runs."""

    def __init__(self) -> None:
        self.in_round, self.go_on = threading.Event(), threading.Event()
        self.blocks = self.dies = False
        self.checked = threading.Event()

    def enter_thread(self) -> None: ...

    def close(self) -> None: ...

    def check_integrity(self) -> None:
        self.checked.set()

    def recover(self, error: Exception) -> None:
        raise error

    def step(self) -> bool:
        self.in_round.set()
        if self.blocks:
            self.go_on.wait(SECONDS)
        self.in_round.clear()
        if self.dies:
            raise AssertionError("lost a page")
        return False


def make_worker() -> tuple[Worker, FakeExecutor]:
    executor = FakeExecutor()
    return Worker(executor, RequestQueue(), lambda failure: None), executor


def in_thread(worker: Worker, answers: list[object], function: object) -> threading.Thread:
    def ask() -> None:
        try:
            answers.append(worker.call(function))  # type: ignore[arg-type] # the test's
        except (RuntimeError, LookupError, SystemExit) as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def answer_of(worker: Worker, function: object) -> object:
    """What is returned or raised."""
    answers: list[object] = []
    in_thread(worker, answers, function).join(SECONDS)
    assert answers, "there was no answer"
    return answers[0]


def test_an_idle_executor_answers_from_its_own_thread() -> None:
    worker, _ = make_worker()
    worker.start()
    worker.wait_until_idle()
    assert answer_of(worker, lambda: threading.current_thread().name) == "tllm-executor"
    assert answer_of(worker, lambda: 7) == 7
    worker.stop()


def test_a_call_waits_for_the_end_of_the_round() -> None:
    worker, executor = make_worker()
    executor.blocks = True
    worker.start()
    assert executor.in_round.wait(SECONDS)
    answers: list[object] = []
    asking = in_thread(worker, answers, executor.in_round.is_set)
    asking.join(0.1)
    assert asking.is_alive() and not answers
    executor.blocks = False
    executor.go_on.set()
    asking.join(SECONDS)
    assert answers == [False]
    worker.stop()


def test_what_the_function_raises_reaches_its_caller_only() -> None:
    worker, _ = make_worker()
    worker.start()
    for fault in (LookupError("not here"), SystemExit(3)):

        def fail(fault: BaseException = fault) -> None:
            raise fault

        assert answer_of(worker, fail) is fault
    assert answer_of(worker, lambda: "alive") == "alive" and worker.failure is None
    worker.stop()


def test_after_a_stop_calls_raise_and_do_not_wait() -> None:
    worker, _ = make_worker()
    worker.start()
    worker.stop()
    with pytest.raises(RuntimeError, match="has been shut down"):
        worker.call(lambda: 1)


def test_after_a_death_calls_raise_an_error_with_its_cause() -> None:
    worker, executor = make_worker()
    executor.dies = True
    worker.start()
    worker._thread.join()
    with pytest.raises(RuntimeError, match="has died: AssertionError: lost a page"):
        worker.call(lambda: 1)


def test_calls_that_wait_while_the_executor_dies_are_told() -> None:
    worker, executor = make_worker()
    executor.blocks = executor.dies = True
    worker.start()
    assert executor.in_round.wait(SECONDS)
    answers: list[object] = []
    threads = [in_thread(worker, answers, lambda: 1) for _ in range(3)]
    while len(worker._queue._calls) < 3:
        threads[0].join(0.005)
    executor.go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert [str(answer) for answer in answers] == [
        "the executor has died: AssertionError: lost a page"
    ] * 3


def test_integrity_is_checked_after_a_quiet_time_and_not_between_two_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tllm_spec.executor.worker.QUIET_SECONDS", 30)
    worker, executor = make_worker()
    worker.start()
    for number in range(3):
        assert answer_of(worker, lambda number=number: number) == number
    worker.stop()
    assert not executor.checked.is_set()
    monkeypatch.setattr("tllm_spec.executor.worker.QUIET_SECONDS", 0.01)
    worker, executor = make_worker()
    worker.start()
    assert executor.checked.wait(SECONDS)
    assert answer_of(worker, lambda: 1) == 1
    worker.stop()


def test_a_drafter_that_asks_from_inside_a_round_fails_its_request_instead_of_waiting_for_itself(
    tiny: Path,
) -> None:
    def propose(request: LlmRequest) -> list[int]:
        llm.server_info()
        return []

    with LLM(tiny, **OPTIONS, **user_provided(propose)) as llm:
        output = llm.generate_async([1, 2, 3], {"max_tokens": 8}).result(timeout=30)
        assert output.error is not None and "from inside a round" in output.error
        assert llm.server_info()["internal_states"][0]["num_requests_running"] == 0


def test_questions_while_requests_run_change_no_text(tiny: Path) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    with LLM(tiny, **OPTIONS) as llm:
        expected = [
            llm.generate(prompt, {"max_tokens": 100}).outputs[0].token_ids for prompt in prompts
        ]
        handles = [llm.generate_async(prompt, {"max_tokens": 100}) for prompt in prompts]
        running = [
            llm.server_info()["internal_states"][0]["num_requests_running"] for _ in range(30)
        ]
        assert [handle.result(timeout=30).outputs[0].token_ids for handle in handles] == expected
        assert max(running) > 0
        llm.check_integrity()
