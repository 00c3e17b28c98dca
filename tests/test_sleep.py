"""An engine sleeps: its weights and its KV cache give their memory back, requests wait, and after
waking texts and acceptance are those of before. And an engine pauses."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters.folders import linear_shapes, random_pairs, write_adapter
from tests.executor.test_draft_weights import copy_of
from tests.server.http_answers import SECONDS, wait_for
from tests.test_target_update import DRAFTERS, PROMPT, SAMPLED, A, make_llm, started, text
from tllm_spec.llm import LLM
from tllm_spec.lora_request import LoRARequest
from tllm_spec.zoo.registry import resolve_model


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with other answers."""
    return str(copy_of(A, tmp_path_factory.mktemp("b") / "other", 0.9))


def told_of(llm: LLM) -> tuple[list[int], Any]:
    output = llm.generate(PROMPT, SAMPLED)
    return output.outputs[0].token_ids, output.speculative_decoding


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_and_acceptance_after_waking_are_those_of_before(name: str) -> None:
    with make_llm(spec=DRAFTERS[name]) as llm:
        expected, told = told_of(llm), []
        for _ in range(20 if name == "eagle3" else 2):
            told.append(llm.sleep())
            assert llm.is_sleeping
            waiting = llm.generate_async(PROMPT, SAMPLED)
            llm.wake_up(["weights"])
            assert llm.is_sleeping
            assert llm.wake_up()["host_bytes"] == 0 and not llm.is_sleeping
            output = waiting.result()
            assert (output.outputs[0].token_ids, output.speculative_decoding) == expected
        assert all(each == told[0] for each in told), "the memory is flat"
        weights = sum(each.nbytes for each in llm._executor.parts.runner.engine.model.parameters())
        assert told[0]["freed_bytes"] > told[0]["host_bytes"] >= weights
        llm.check_integrity()


def test_level_2_drops_the_weights_until_an_update(other: str) -> None:
    with make_llm() as llm, make_llm(other) as fresh:
        expected = told_of(fresh)
        stream = started(llm)
        told = llm.sleep(2)
        assert 0 < told["host_bytes"] < told["freed_bytes"] / 2, "those of the head only"
        with pytest.raises(ValueError, match="weights are asleep; wake_up"):
            llm.update_weights(other)
        llm.wake_up(["kv_cache"])
        llm.wake_up()
        with pytest.raises(ValueError, match="level 2 has dropped the weights; update_weights"):
            llm.generate(PROMPT)
        llm.update_weights(other, version="b")
        assert told_of(llm) == expected
        output = stream.result()  # it was computed again
        assert output.outputs[0].length == 30 and output.weight_version == "b"
        llm.check_integrity()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_that_slept_act_as_before(level: int, other: str, tmp_path: Path) -> None:
    tensors = load_file(resolve_model(A) / "model.safetensors")
    pairs = random_pairs(linear_shapes(tensors, "q_proj", "v_proj"))
    lora = {"lora_dir": {"own": str(write_adapter(tmp_path / "own", pairs))}}
    request = LoRARequest("own")
    target = other if level == 2 else A
    with make_llm(lora_config=lora) as llm, make_llm(target, lora_config=lora) as fresh:
        expected = [fresh.generate(PROMPT, SAMPLED, lora_request=each) for each in (request, None)]
        llm.generate(PROMPT, SAMPLED, lora_request=request)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(other)
        found = [llm.generate(PROMPT, SAMPLED, lora_request=each) for each in (request, None)]
    texts = [[each.outputs[0].token_ids for each in outputs] for outputs in (found, expected)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_on_a_gpu_memory_goes_and_graphs_stay(name: str, other: str) -> None:
    options = {"spec": DRAFTERS[name], "dtype": "float32", "enable_sleep_mode": True}
    with make_llm(**options) as llm:
        expected = told_of(llm)
        before = torch.cuda.mem_get_info()[0]
        for _ in range(3):
            freed = llm.sleep()["freed_bytes"]
            assert torch.cuda.mem_get_info()[0] - before > 0.9 * freed > 0
            llm.wake_up()
            assert told_of(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(other)
        updated = told_of(llm)
        llm.check_integrity()
    with make_llm(other, **options) as fresh:
        assert told_of(fresh) == updated != expected


@pytest.mark.gpu
def test_on_a_gpu_sleep_needs_its_option() -> None:
    with make_llm() as llm, pytest.raises(ValueError, match="without enable_sleep_mode: true"):
        llm.sleep()


def test_what_cannot_sleep_says_so() -> None:
    with make_llm() as llm:
        for call, why in (
            (lambda: llm.sleep(3), "level = 3; it must be 1 or 2"),
            (lambda: llm.wake_up(["draft"]), r"tags = \['draft'\]; accepted are weights, kv_cache"),
        ):
            with pytest.raises(ValueError, match=why):
                call()
        assert not llm.is_sleeping and len(text(llm)) == 30


# Pauses.


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_requests_wait_while_an_engine_is_paused(mode: Any) -> None:
    with make_llm() as llm:
        expected = text(llm)
        stream = started(llm)
        llm.pause(mode)
        assert llm.is_paused and llm.num_unfinished == 1
        new = llm.generate_async(PROMPT, SAMPLED)
        assert llm.server_info()["internal_states"][0]["num_requests_running"] == (mode == "keep")
        assert llm.num_unfinished == 2
        llm.resume()
        assert [each.result().outputs[0].token_ids for each in (stream, new)] == [expected] * 2
        llm.check_integrity()


def test_a_request_that_is_cancelled_in_a_pause_ends_then() -> None:
    with make_llm() as llm:
        for begin, end in ((lambda: llm.pause("keep"), llm.resume), (llm.sleep, llm.wake_up)):
            stream = started(llm)
            begin()
            stream.abort()
            assert stream.result().outputs[0].finish_reason == "cancelled"
            end()
            llm.check_integrity()


def test_a_pause_that_waits_finishes_requests_that_stood_still() -> None:
    """And is refused where none can run."""
    with make_llm() as llm:
        stream = started(llm)
        llm.pause("keep")
        llm.pause("wait")
        assert llm.num_unfinished == 0 and stream.result().outputs[0].length == 30
        llm.resume()
        stream = started(llm)
        llm.sleep()
        with pytest.raises(ValueError, match="no request can be finished while the engine sleeps"):
            llm.pause("wait")
        assert not llm.is_paused
        llm.wake_up()
        assert stream.result().outputs[0].length == 30


def test_resume_ends_a_pause_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm() as llm, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(llm._executor, "step", lambda: True)  # requests that never end
        pausing = threads.submit(llm.pause, "wait")
        wait_for(lambda: llm.is_paused)
        llm.resume()
        pausing.result(SECONDS)
        monkeypatch.undo()
        assert not llm.is_paused and len(text(llm)) == 30
        llm.check_integrity()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_paused_engine_may_refuse_requests(mode: Any) -> None:
    with make_llm() as llm:
        stream = started(llm)
        llm.pause(mode)
        (output,) = stream.result().outputs
        assert output.finish_reason == ("cancelled" if mode == "abort" else "length")
        with pytest.raises(RuntimeError, match="paused and takes no requests"):
            llm.generate(PROMPT)
        llm.resume()
        assert len(text(llm)) == 30
        with pytest.raises(ValueError, match="mode = 'stop'; it must be one of abort, wait"):
            llm.pause("stop")  # type: ignore[arg-type]
