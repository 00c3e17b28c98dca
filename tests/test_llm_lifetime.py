"""An `LLM`'s life: interrupted waits, shutdown, threads, and what is freed."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.short_llm import llm as llm
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.llm import LLM
from tllm_spec.models.llama import CausalLM
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams

THREE = SamplingParams(max_tokens=3)


@pytest.mark.parametrize("prompt", ["import os", ["import os", "def f("]])
def test_an_interrupted_wait_aborts_its_requests(
    llm: LLM, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for: list[RequestHandle] = []

    def interrupted(handle: RequestHandle, timeout: float | None) -> None:
        waited_for.append(handle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RequestHandle, "_wait", interrupted)
        llm.generate(prompt, SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
    assert waited_for[0].result(timeout=60).outputs[0].finish_reason == "cancelled"


@pytest.mark.parametrize("is_last_moment", [True, False])
def test_a_request_that_arrives_at_shutdown_is_answered_or_refused(
    monkeypatch: pytest.MonkeyPatch, is_last_moment: bool
) -> None:
    late = LLM("zoo:llama", max_seq_len=256)
    take_calls = RequestQueue.take_calls
    errors: list[str | None] = []

    def ask() -> None:
        monkeypatch.setattr(late, "_is_shut_down", False)  # as another thread saw it before
        try:
            handle = late.generate_async("import os", THREE)
        except RuntimeError as refusal:
            errors.append(str(refusal))
        else:
            waiting.append(handle)

    def one_more_at_the_end(queue: RequestQueue, *, last: bool = False) -> Any:
        if last and is_last_moment:
            ask()
        calls = take_calls(queue, last=last)
        if last and not is_last_moment:
            ask()
        return calls

    waiting: list[RequestHandle] = []
    monkeypatch.setattr(RequestQueue, "take_calls", one_more_at_the_end)
    late.shutdown()
    errors += [handle.result(timeout=60).error for handle in waiting]
    assert errors == ["the executor has been shut down"]
    assert bool(waiting) == is_last_moment
    with pytest.raises(RuntimeError, match="shut down"):
        late.generate_async("import os", THREE)


def model_of(llm: LLM) -> "weakref.ref[CausalLM]":
    return weakref.ref(llm._executor.parts.runner.engine.model)


@pytest.mark.thinned
@pytest.mark.parametrize(
    "speculative_config", [None, {"decoding_type": "NGram", "max_draft_len": 3, "adaptive": {}}]
)
def test_weights_are_freed_at_shutdown(speculative_config: Any) -> None:
    with LLM("zoo:llama", max_seq_len=256, speculative_config=speculative_config) as llm:
        model = model_of(llm)
        llm.generate("import os", THREE)
    gc.collect()
    assert model() is None
    with pytest.raises(RuntimeError, match="shut down"):
        llm.check_integrity()


def test_an_unreferenced_llm_ends_although_its_outputs_are_kept() -> None:
    llm = LLM("zoo:llama", max_seq_len=256)
    model, worker, answer = model_of(llm), llm._worker, llm.generate("import os", THREE)
    del llm
    gc.collect()
    assert (model(), worker._thread.is_alive(), answer.error) == (None, False, None)


def test_a_running_request_keeps_its_llm_alive() -> None:
    handle = LLM("zoo:llama", max_seq_len=256).generate_async("import os", THREE)
    gc.collect()
    assert handle.result(timeout=60).outputs[0].length == 3


def test_requests_from_several_threads_are_all_answered(llm: LLM) -> None:
    lengths: list[int] = []

    def ask(number: int) -> None:
        lengths.append(llm.generate([number, number + 1], THREE).outputs[0].length)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [3] * 8


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy])
def test_an_llm_that_is_pickled_or_copied_says_what_to_do(
    llm: LLM, copied: Callable[[LLM], object]
) -> None:
    with pytest.raises(TypeError, match="an LLM cannot be pickled: make one from its arguments"):
        copied(llm)


def test_every_llm_has_an_id_of_its_own(llm: LLM) -> None:
    with LLM("zoo:llama", max_seq_len=64) as other:
        assert isinstance(llm.llm_id, str) and llm.llm_id != other.llm_id


def test_an_architecture_is_checked_before_the_tokenizer_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma2ForCausalLM"]}')
    with pytest.raises(ValueError, match=r"architectures is .*; it must be one of"):
        LLM(tmp_path)
