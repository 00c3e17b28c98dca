"""The network as a TensorRT engine on torch's stream and in torch's memory."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tllm_spec.draft_network.decoder import BATCH, CACHED_ROWS, TOKEN_IDS
from tllm_spec.draft_network.network import ALIGNMENT
from tllm_spec.draft_network.tensorrt_build import EngineLimits

_Tensors = Mapping[str, torch.Tensor]


@dataclass
class _Context:
    """An execution context and the shapes of the inputs that it has now."""

    context: Any
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def enqueue(self, inputs: _Tensors, outputs: _Tensors, stream: torch.cuda.Stream) -> None:
        for name, tensor in inputs.items():
            if self.shapes.get(name) != tensor.shape:
                _check(self.context.set_input_shape(name, tuple(tensor.shape)), name)
                self.shapes[name] = tensor.shape
        for name, tensor in (*inputs.items(), *outputs.items()):
            assert tensor.is_contiguous()
            assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
            _check(self.context.set_tensor_address(name, tensor.data_ptr()), name)
        _check(self.context.execute_async_v3(stream.cuda_stream), "the run")


class TensorRTNetwork:
    """All execution contexts share one block of scratch memory: runs are in the order of torch's
    current stream. `loaded`: a runtime and its engine."""

    def __init__(
        self, trt: Any, loaded: tuple[Any, Any], limits: EngineLimits, device: torch.device
    ) -> None:
        self._trt = trt
        self._runtime, self._engine = loaded
        self._sizes = [profile[BATCH][2] for profile in limits.profiles[:-1]]
        self._max_window, self._device = limits.max_window, device
        size = self._engine.device_memory_size_v2
        self._scratch = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        # On the default stream TensorRT would make the host wait.
        self._stream = torch.cuda.Stream(device)
        # Made before the pools take the memory that is left, and not in a round.
        self._shared = [self._context(profile) for profile in range(len(limits.profiles))]
        self._captured: dict[tuple[torch.Size, torch.Size], _Context] = {}

    @functools.cached_property
    def may_be_captured(self) -> bool:
        """The network has no layer that waits for the host. `tensorrt_rtx` says whether a stream
        can be captured; `tensorrt` has no such question."""
        context, engine = self._context(0).context, self._engine
        if not hasattr(context, "is_stream_capturable"):
            return True
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[1])
        return bool(context.is_stream_capturable(self._stream.cuda_stream))

    def run(self, inputs: _Tensors, outputs: _Tensors) -> None:
        current = torch.cuda.current_stream(self._device)
        if current != torch.cuda.default_stream(self._device):
            self._own_context(inputs).enqueue(inputs, outputs, current)
            return
        self._stream.wait_stream(current)
        shared = self._shared[self._profile(inputs[TOKEN_IDS].shape)]
        shared.enqueue(inputs, outputs, self._stream)
        current.wait_stream(self._stream)

    def _own_context(self, inputs: _Tensors) -> _Context:
        """Other streams are those of captures. A graph holds memory of its context, so each shape
        has a context that never runs another one."""
        key = inputs[TOKEN_IDS].shape, inputs[CACHED_ROWS].shape
        if key not in self._captured:
            self._captured[key] = self._context(self._profile(key[0]))
        return self._captured[key]

    def _profile(self, shape: torch.Size) -> int:
        """For token ids of this shape. The last profile is that of prompts."""
        batch_size, width = shape
        if width > self._max_window:
            return len(self._sizes)
        return next(index for index, size in enumerate(self._sizes) if size >= batch_size)

    def _context(self, profile: int) -> _Context:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise torch.cuda.OutOfMemoryError("TensorRT makes no execution context; see the log")
        start = -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
        context.set_device_memory(start, self._engine.device_memory_size_v2)
        stream = self._stream.cuda_stream
        _check(context.set_optimization_profile_async(profile, stream), f"profile {profile}")
        self._stream.synchronize()
        return _Context(context)


def _check(is_done: bool, what: str) -> None:
    if not is_done:
        raise RuntimeError(f"TensorRT refuses {what} of the draft model's network; see the log")
