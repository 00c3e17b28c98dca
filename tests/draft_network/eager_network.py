"""The network's definition run in torch, on any device and inside CUDA graphs."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from tllm_spec.draft_network.network import LOGITS, NetworkModel, StepNetwork


class EagerNetwork:
    may_be_captured = True

    def __init__(self, model: NetworkModel) -> None:
        self.step = StepNetwork.of(model)

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        device = outputs[LOGITS].device
        if self.step.weights["norm"].device != device:
            weights = {name: weight.to(device) for name, weight in self.step.weights.items()}
            self.step = replace(self.step, weights=weights)
        step = self.step
        found = step.forward(*(inputs[name] for name in step.inputs))
        for name, value in zip(step.outputs, found, strict=True):
            assert outputs[name].dtype == value.dtype and outputs[name].shape == value.shape
            outputs[name].copy_(value)
