"""Which CUDA device is current in which thread. There is none here: torch's functions are fakes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tllm_spec import LLM, SamplingParams
from tllm_spec.executor import build, py_executor
from tllm_spec.executor.device.device_choice import on_device, pick_device, use_device
from tllm_spec.executor.engine.model_engine import ModelEngine

SECOND = torch.device("cuda", 1)
COST_MODEL = {
    "decoding_type": "Draft_Target",
    "max_draft_len": 2,
    "load_format": "dummy",
    "adaptive": {"strategy": "cost_model"},
}


class Current(threading.local):
    """A thread's current device, as CUDA has it: the first one in a new thread."""

    index = 0

    def set(self, device: torch.device | int) -> None:
        self.index = device if isinstance(device, int) else device.index

    def get(self) -> int:
        return self.index


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[Current]:
    fake = Current()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", fake.set)
    monkeypatch.setattr(torch.cuda, "current_device", fake.get)
    yield fake


def test_a_thread_keeps_its_device_when_the_block_ends_or_raises(current: Current) -> None:
    with on_device(SECOND):
        assert current.get() == 1
    assert current.get() == 0
    with pytest.raises(KeyError), on_device(SECOND):
        raise KeyError
    assert current.get() == 0
    use_device(SECOND)
    with on_device(torch.device("cpu")):
        assert current.get() == 1


def test_cuda_is_the_callers_current_device(current: Current) -> None:
    use_device(SECOND)
    assert pick_device("cuda") == SECOND and pick_device("cuda:0").index == 0


def test_ranks_use_the_devices_of_their_host_in_turn(current: Current) -> None:
    """They are those that torch sees (CUDA_VISIBLE_DEVICES limits them), or the first few."""
    assert [pick_device("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert [pick_device("auto", rank, 1).index for rank in range(3)] == [0, 0, 0]
    assert [pick_device("cpu", rank) for rank in range(2)] == [torch.device("cpu")] * 2


def test_a_device_that_torch_does_not_see_is_refused(current: Current) -> None:
    with pytest.raises(ValueError, match="device = 'cuda:2': torch sees 2 CUDA devices here"):
        pick_device("cuda:2")


def test_every_thread_that_launches_is_on_the_models_device(
    tiny: Path, current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are on the CPU; only what chooses the current device is told otherwise."""
    launches: set[tuple[str, int]] = set()

    def noted(self: ModelEngine, *args: Any, run: Any = ModelEngine.run, **kwargs: Any) -> Any:
        launches.add((threading.current_thread().name, current.get()))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(ModelEngine, "run", noted)
    monkeypatch.setattr(build, "on_device", lambda device: on_device(SECOND))
    monkeypatch.setattr(py_executor, "use_device", lambda device: use_device(SECOND))
    config = COST_MODEL | {"speculative_model": str(tiny)}
    with LLM(str(tiny), speculative_config=config, skip_tokenizer_init=True, device="cpu") as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert launches == {(threading.current_thread().name, 1), ("tllm-executor", 1)}
    assert current.get() == 0
