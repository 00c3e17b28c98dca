"""The network's definition run in torch, on any device and inside CUDA graphs."""

from collections.abc import Mapping

import torch

from tllm_spec.draft_network.network import LOGITS, NetworkModel, StepNetwork


class EagerNetwork:
    may_be_captured = True

    def __init__(self, model: NetworkModel) -> None:
        self.step = StepNetwork(model)

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        step = self.step.to(outputs[LOGITS].device)
        found = step.forward(*(inputs[name] for name in step.inputs))
        for name, value in zip(step.outputs, found, strict=True):
            assert outputs[name].dtype == value.dtype and outputs[name].shape == value.shape
            outputs[name].copy_(value)
