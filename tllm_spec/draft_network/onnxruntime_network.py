"""The network in onnxruntime, on a CPU. It shares the weights' memory with the model."""

from collections.abc import Mapping

import numpy as np
import onnxruntime
import torch

from tllm_spec.draft_network.definition import NetworkModel, emit_network
from tllm_spec.draft_network.onnx_emitter import OnnxEmitter

_TYPES = {torch.float32: np.float32, torch.int64: np.int64}


class OnnxRuntimeNetwork:
    """Runs the network of a float32 model in onnxruntime."""

    may_be_captured = False

    def __init__(self, model: NetworkModel, num_threads: int) -> None:
        emitter = OnnxEmitter()
        emit_network(emitter, model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        # Waiting threads would take time from the target's.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        names = list(emitter.weights)
        self._weights = [
            onnxruntime.OrtValue.ortvalue_from_numpy(weight.numpy())
            for weight in emitter.weights.values()
        ]
        options.add_external_initializers(names, self._weights)
        self._session = onnxruntime.InferenceSession(
            emitter.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        binding = self._session.io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                assert tensor.is_contiguous()
                bind(name, "cpu", 0, _TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())
        self._session.run_with_iobinding(binding)
