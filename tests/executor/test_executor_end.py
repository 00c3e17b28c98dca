"""How an executor ends, by a shutdown or a fault, and that no caller waits forever."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.executor.harness import user_provided
from tests.executor.test_faults import GOOD, NAN_TOKEN, PARAMS, make_llm
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.sampling_params import SamplingParams


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
        assert llm.is_healthy and llm.generate(GOOD[0], PARAMS).error is None
        llm.check_integrity()


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
        with pytest.raises(
            RuntimeError, match="the executor has died: RuntimeError: not to be freed"
        ):
            llm.generate_async(GOOD[0], PARAMS)


def test_a_program_that_forgets_to_shut_down_still_ends_well(model: Path) -> None:
    code = f"""
from tllm_spec.llm import LLM
llm = LLM({str(model)!r}, skip_tokenizer_init=True, max_batch_size=8)
next(llm.generate_async([1, 2, 3], {{"max_tokens": 400}}, streaming=True))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


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
