"""The TensorRT engine of the zoo's draft model: its definition, how it is built, and how it runs on
torch's memory, with a stand-in for the engine."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.draft_network.head_pairs import head_pair, load_head, load_target
from tests.draft_network.step_pairs import CPU, MAX_LEN, PAGE_SIZE, load, network_side, torch_side
from tests.draft_network.test_numbers import assert_close, assert_equal_rounds, assert_equal_steps
from tllm_spec.draft_network.network import NetworkModel, StepNetwork
from tllm_spec.draft_network.tensorrt import (
    EngineLimits,
    TensorRTNetwork,
    TensorRTPackage,
    build,
    define,
    trt_logger,
)
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import load_model
from tllm_spec.zoo.registry import resolve_model

trt = pytest.importorskip("tensorrt_rtx")  # there are wheels for Linux on x86-64
PACKAGE = TensorRTPackage(trt, trt.ComputeCapability.SM89, "")
LIMITS = EngineLimits(
    max_batch_size=20, max_window=2, max_chunk=256, max_cached=MAX_LEN, page_size=PAGE_SIZE
)
INTEGERS = "token_ids", "positions", "own_keys", "cached_rows", "wanted"
TYPES = {torch.float32: trt.float32, torch.bfloat16: trt.bfloat16, torch.float16: trt.float16}


def zoo_model(dtype: torch.dtype = torch.float32) -> CausalLM:
    folder = resolve_model("zoo:llama-draft")
    return load_model(folder, dtype=dtype, device=CPU, max_positions=MAX_LEN)


def zoo_head(dtype: torch.dtype = torch.float32) -> Eagle3Head:
    target = load_target(resolve_model("zoo:llama"), dtype)
    return load_head(resolve_model("zoo:llama-eagle3"), target, 3)


def shapes_of(number: int, get: Callable[[int], Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of each input or output."""
    tensors = map(get, range(number))
    return {tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in tensors}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_head", [False, True])
def test_inputs_and_outputs_of_the_zoos_draft_networks(is_head: bool, dtype: torch.dtype) -> None:
    draft = zoo_head(dtype) if is_head else zoo_model(dtype)
    network, _parser = define(PACKAGE, trt.Builder(trt_logger(trt)), StepNetwork.of(draft))
    own, num_heads, num_layers = TYPES[dtype], 1 + is_head, 2 - is_head
    heads = [f"{kind}.{layer}" for layer in range(num_layers) for kind in ("keys", "values")]
    of_head = {"states": ((-1, -1, 192), own), "wanted": ((-1,), trt.int64)}
    ids = ("token_ids", "positions", "own_keys", "cached_rows")
    cache = dict.fromkeys(heads, ((-1, num_heads, 32), own))
    expected = dict.fromkeys(ids, ((-1, -1), trt.int64)) | (of_head if is_head else {}) | cache
    assert shapes_of(network.num_inputs, network.get_input) == expected
    results = {"next_states": ((-1, 192), own), "logits": ((-1, 1024), own)}
    assert shapes_of(network.num_outputs, network.get_output) == (
        results if is_head else {"logits": ((-1, 2048), own)}
    ) | {f"new_{name}": ((-1, -1, num_heads, 32), own) for name in heads}


def test_layers_with_equal_weights_have_all_of_them_in_the_network() -> None:
    """The exporter leaves out parameters that are equal, and the parser refuses unknown names."""
    own, model = zoo_model(), zoo_model()
    first, second = model.model.layers
    second.load_state_dict(first.state_dict())
    networks = [StepNetwork.of(each) for each in (own, model)]
    found = [define(PACKAGE, trt.Builder(trt_logger(trt)), each) for each in networks]
    assert found[0][0].num_layers == found[1][0].num_layers


def test_what_the_parser_does_not_read_is_refused_with_its_words() -> None:
    network = StepNetwork.of(zoo_model())
    broken = replace(network, weights={**network.weights, "norm": torch.ones(3)})
    broken.__dict__["onnx_graph"] = network.onnx_graph
    with pytest.raises(ValueError, match=r"^tensorrt_rtx .* cannot read the draft model's network"):
        define(PACKAGE, trt.Builder(trt_logger(trt)), broken)


@pytest.mark.slow
def test_the_zoos_head_builds_and_serialises() -> None:
    head = zoo_head(torch.bfloat16)
    layers = [*head.layers.parameters(), head.output.weight, head.embedding.weight]
    weight_bytes = sum(each.numel() * each.element_size() for each in layers)
    assert (
        build(PACKAGE, StepNetwork.of(head), replace(LIMITS, max_window=16)).nbytes > weight_bytes
    )


@pytest.mark.slow
def test_the_zoos_draft_network_builds_and_serialises() -> None:
    model = zoo_model(torch.bfloat16)
    weight_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    assert build(PACKAGE, StepNetwork.of(model), LIMITS).nbytes > weight_bytes


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"),
    [
        (1, [(1, 1, 1)]),
        (2, [(1, 1, 1), (2, 2, 2)]),
        (9, [(1, 1, 1), (2, 8, 8), (9, 9, 9)]),
        (100, [(1, 1, 1), (2, 8, 8), (9, 64, 64), (65, 100, 100)]),
    ],
)
def test_profiles_cover_every_batch_size_once_and_then_the_chunks_of_prompts(
    max_batch_size: int, sizes: list[tuple[int, int, int]]
) -> None:
    *windows, prompts = replace(LIMITS, max_batch_size=max_batch_size).profiles
    assert [profile["batch"] for profile in windows] == sizes
    assert {profile["window"] for profile in windows} == {(1, 1, 2)}
    assert prompts["batch"] == (1, 1, 1) and prompts["window"] == (1, 256, 256)


@dataclass
class StandInContext:
    """An execution context without a device: it interprets the network on the memory that it was
    given."""

    engine: "StandInEngine"
    profile: int = -1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    num_shapes_set: int = 0

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0 and size == self.engine.device_memory_size_v2

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        self.num_shapes_set += name == "token_ids"
        if name == "token_ids":
            ranges = self.engine.limits.profiles[self.profile]
            sizes = zip(shape, (ranges["batch"], ranges["window"]), strict=True)
            return all(low <= size <= high for size, (low, _, high) in sizes)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes.get(name, (-1,))

    def execute_async_v3(self, stream: int) -> bool:
        self.engine.streams.append(stream)
        step = self.engine.step
        inputs = [self._tensor(name, self.shapes[name]) for name in step.inputs]
        for name, value in zip(step.outputs, step.forward(*inputs), strict=True):
            self._tensor(name, tuple(value.shape)).copy_(value)
        return True

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = torch.int64 if name in INTEGERS else torch.float32
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class StandInEngine:
    device_memory_size_v2 = 1000

    def __init__(self, model: NetworkModel, limits: EngineLimits = LIMITS) -> None:
        self.step, self.limits = StepNetwork.of(model), limits
        self.contexts: list[StandInContext] = []
        self.streams: list[int] = []
        self.names = [*self.step.inputs, *self.step.outputs]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Any:
        return trt.TensorIOMode.INPUT if name in self.step.inputs else trt.TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        """The smallest shapes for all three."""
        sizes = {"batch": 1, "window": 1, "cached": PAGE_SIZE, "kv_rows": PAGE_SIZE}
        found = self.step.inputs[name]
        return [tuple(size if isinstance(size, int) else sizes[size] for size in found)] * 3

    def create_execution_context(self, strategy: Any) -> StandInContext:
        assert strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(StandInContext(self))
        return self.contexts[-1]


class StandInStream:
    """CUDA streams without a device. Which waits for which is in `waits`."""

    current: "StandInStream"

    def __init__(self, *_: object) -> None:
        self.cuda_stream = id(self)
        self.waits: list[StandInStream] = []

    def wait_stream(self, other: "StandInStream") -> None:
        self.waits.append(other)

    def synchronize(self) -> None: ...


@pytest.fixture
def default_stream(monkeypatch: pytest.MonkeyPatch) -> StandInStream:
    stream = StandInStream.current = StandInStream()
    monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: StandInStream.current)
    return stream


def test_an_engine_on_torchs_memory_gives_the_numbers_of_torch(
    default_stream: StandInStream,
) -> None:
    engine = StandInEngine(zoo_model())
    network = TensorRTNetwork(trt, (None, engine), LIMITS, CPU)
    model = load(resolve_model("zoo:llama-draft"))
    assert_equal_steps((torch_side(model), network_side(model, network)), 2048)
    # Not on the default stream, but in its order.
    assert set(engine.streams) == {default_stream.waits[0].cuda_stream}
    assert len(default_stream.waits) == len(engine.streams)
    # Of windows of 3 requests, and of prompts.
    assert {context.profile for context in engine.contexts if context.num_shapes_set} == {1, 3}


def test_a_heads_engine_on_torchs_memory_gives_the_numbers_of_torch(
    default_stream: StandInStream,
) -> None:
    head, limits = zoo_head(), replace(LIMITS, max_window=16)
    engine = StandInEngine(head, limits)
    network = TensorRTNetwork(trt, (None, engine), limits, CPU)
    assert_equal_rounds(head_pair(head, network), 2048)
    used = {context.profile for context in engine.contexts if context.num_shapes_set}
    assert used == {0, 1, 3}  # windows of 1 and of up to 8 requests, and prompts


def test_each_shape_of_a_captured_run_has_a_context_of_its_own(
    default_stream: StandInStream,
) -> None:
    engine = StandInEngine(zoo_model())
    network = TensorRTNetwork(trt, (None, engine), LIMITS, CPU)
    model = load(resolve_model("zoo:llama-draft"))
    sides = torch_side(model), network_side(model, network)
    for side in sides:
        side.read(0, [5, 6, 7])
    StandInStream.current = capturing = StandInStream()
    for tokens in ([[1, 2]], [[3]], [[1, 2]], [[3]]):
        assert_close(*(side.step([0], [3], torch.tensor(tokens)) for side in sides))
    assert engine.streams[1:] == [capturing.cuda_stream] * 4
    own = engine.contexts[len(LIMITS.profiles) :]
    assert [context.num_shapes_set for context in own] == [1, 1]


def test_a_run_outside_captures_makes_no_context(default_stream: StandInStream) -> None:
    """A context takes memory, and whoever makes one waits for the device: that is for start-up."""
    engine = StandInEngine(zoo_model())
    network = TensorRTNetwork(trt, (None, engine), LIMITS, CPU)
    assert [context.profile for context in engine.contexts] == [0, 1, 2, 3]
    side = network_side(load(resolve_model("zoo:llama-draft")), network)
    side.read(0, [5, 6, 7])
    side.step([0], [3], torch.tensor([[1, 2]]))
    assert len(engine.contexts) == 4


def test_a_context_that_tensorrt_cannot_make_is_out_of_memory(
    default_stream: StandInStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInEngine, "create_execution_context", lambda *_: None)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no execution context"):
        TensorRTNetwork(trt, (None, StandInEngine(zoo_model())), LIMITS, CPU)


@pytest.mark.parametrize("is_capturable", [True, False])
def test_a_package_that_can_be_asked_says_whether_runs_may_be_captured(
    is_capturable: bool, default_stream: StandInStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tensorrt_rtx` is asked with the shapes of a window; `tensorrt` has no such question."""
    engine = StandInEngine(zoo_model())
    assert TensorRTNetwork(trt, (None, engine), LIMITS, CPU).may_be_captured
    asked: list[dict[str, tuple[int, ...]]] = []

    def answer(context: StandInContext, stream: int) -> bool:
        asked.append(context.shapes)
        return is_capturable

    monkeypatch.setattr(StandInContext, "is_stream_capturable", answer, raising=False)
    assert TensorRTNetwork(trt, (None, engine), LIMITS, CPU).may_be_captured == is_capturable
    [shapes] = asked
    assert shapes["token_ids"] == (1, 1) and shapes["keys.1"] == (8, 1, 32)


def test_what_tensorrt_cannot_build_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingBuilder(trt.Builder):  # type: ignore[misc] # TensorRT has no types
        def build_serialized_network(self, *_: object) -> None: ...

    monkeypatch.setattr(trt, "Builder", FailingBuilder)
    with pytest.raises(ValueError, match=r"tensorrt_rtx .* cannot build the draft model's"):
        build(PACKAGE, StepNetwork.of(zoo_model()), LIMITS)
