"""Copies between host and device, and what they may do where there is no device to see it."""

from typing import Any, ClassVar

import pytest
import torch

from tllm_spec.executor.device.transfer import PinnedBuffers, ToHost, to_device

CPU, META = torch.device("cpu"), torch.device("meta")


class PinnedMemory:
    """Stands in for torch's makers of pinned memory: what they gave, and that no tensor is pinned
    afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[torch.Tensor] = []
        for name in ("empty", "tensor"):
            self._watch(monkeypatch, name, getattr(torch, name))
        monkeypatch.setattr(torch.Tensor, "pin_memory", None)
        monkeypatch.setattr(torch.Tensor, "is_pinned", None)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, make: Any) -> None:
        def made(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*arguments, **keywords)
            if pin_memory:
                self.given.append(tensor)
            return tensor

        monkeypatch.setattr(torch, name, made)


@pytest.mark.parametrize(
    "values", [[[1, 2], [3, 4]], torch.tensor([1.5, 2.5], dtype=torch.float32), []]
)
def test_what_goes_to_a_device_goes_through_pinned_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, values: Any
) -> None:
    memory, copied = PinnedMemory(monkeypatch), []
    original = torch.Tensor.to

    def copy(
        tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        copied.append((tensor, non_blocking))
        return original(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", copy)
    expected = values.clone() if isinstance(values, torch.Tensor) else torch.tensor(values)
    sent = [to_device(values, META) for _ in range(3)]
    assert all(
        (each.shape, each.dtype, each.device) == (expected.shape, expected.dtype, META)
        for each in sent
    )
    sources = [tensor for tensor, _ in copied]
    assert all(ours is theirs for ours, theirs in zip(sources, memory.given, strict=True))
    assert all(tensor.equal(expected) and non_blocking for tensor, non_blocking in copied)
    # An earlier copy may be under way still: nothing is written where it reads.
    places = [tensor.data_ptr() for tensor in sources if tensor.numel()]
    assert len(set(places)) == len(places)
    assert not isinstance(values, torch.Tensor) or values.data_ptr() not in places


def test_on_the_host_nothing_is_pinned_and_a_tensor_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, values = PinnedMemory(monkeypatch), torch.arange(3)
    assert to_device(values, CPU) is values
    assert to_device([3, 4], CPU).tolist() == [3, 4]
    assert not memory.given


def test_the_host_reads_what_was_there_when_the_copy_began() -> None:
    table, lens = torch.arange(6).view(2, 3), torch.ones(2)
    to_host = ToHost([table, lens])
    table.fill_(9)
    lens.fill_(9)
    assert to_host.is_here
    assert [tensor.tolist() for tensor in to_host.wait()] == [[[0, 1, 2], [3, 4, 5]], [1, 1]]


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device."""

    is_cuda = True


class Arrival:
    """Stands in for a CUDA event: the copies of a round and the waits for them, in order."""

    log: ClassVar[list[str]] = []

    def record(self) -> None:
        self.log.append("copy")

    def synchronize(self) -> None:
        self.log.append("wait")


def on_device(values: list[int]) -> torch.Tensor:
    tensor: torch.Tensor = torch.Tensor._make_subclass(OnDevice, torch.tensor(values))
    return tensor


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    Arrival.log.clear()
    monkeypatch.setattr(torch.cuda, "Event", Arrival)
    return PinnedMemory(monkeypatch)


def test_rounds_in_turn_use_two_buffers_and_none_is_written_before_it_was_read(
    memory: PinnedMemory,
) -> None:
    buffers = PinnedBuffers()
    before = ToHost([on_device([0, 0])], buffers)
    for number in range(1, 9):
        after = ToHost(
            [on_device([number, -number])], buffers
        )  # launched before the one before it is read
        assert not before.is_here
        assert before.wait()[0].tolist() == [number - 1, 1 - number]
        before = after
    assert len(memory.given) == 2
    assert Arrival.log == ["copy", *["copy", "wait"] * 8]


def test_a_round_that_is_read_twice_gives_its_place_back_once(memory: PinnedMemory) -> None:
    buffers = PinnedBuffers()
    to_host = ToHost([on_device([1, 2])], buffers)
    assert to_host.wait()[0].tolist() == to_host.wait()[0].tolist() == [1, 2]
    both = [ToHost([on_device([value, 0])], buffers) for value in (3, 4)]
    assert [each.wait()[0].tolist() for each in both] == [[3, 0], [4, 0]]


def test_buffers_have_one_shape_and_dtype_and_a_lost_one_is_made_again(
    memory: PinnedMemory,
) -> None:
    buffers = PinnedBuffers()
    tensors = [
        on_device([1, 2, 3]),
        on_device([4, 5]),
        on_device([[6, 7]]),
        on_device([8, 9]).to(torch.int32),
    ]  # type: ignore[list-item]
    for tensor in tensors:
        for _ in range(2):
            assert ToHost([tensor], buffers).wait()[0].tolist() == tensor.tolist()
    assert len(memory.given) == len(tensors)
    ToHost([tensors[0]], buffers)  # of a round that broke off
    assert ToHost([tensors[0]], buffers).wait()[0].tolist() == [1, 2, 3]
    assert len(memory.given) == len(tensors) + 1


def test_tensors_after_the_first_have_memory_of_their_own(memory: PinnedMemory) -> None:
    buffers = PinnedBuffers()
    rounds = [ToHost([on_device([value]), on_device([-value])], buffers) for value in (1, 2)]
    assert [[tensor.tolist() for tensor in each.wait()] for each in rounds] == [
        [[1], [-1]],
        [[2], [-2]],
    ]
