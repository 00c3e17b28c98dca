"""Fills a model's parameters from safetensors files or with random numbers.

Tensors are copied one at a time from the memory-mapped file into the (fused, sharded) parameter, so
the host holds no second copy. `Module.slots` says where each tensor goes."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.checkpoint import checkpoint_tensors, listed
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.fp8_blocks import dequantised_tensors
from tllm_spec.models.layers import HeadNorm, RMSNorm
from tllm_spec.models.module import Module, WeightSlot


def load_weights(model: CausalLM, path: Path) -> None:
    """Fill `model` from the checkpoint in the folder `path`.

    Raises:
        ValueError: there is no checkpoint, or tensors are missing or surplus; the message names
            them.
    """
    stored = (
        (model.parameter_name(name), tensor)
        for name, tensor in stored_tensors(path, model.config, lambda name: not model.ignores(name))
    )
    fill(model, stored, f"The checkpoint in {path} does not fit {model.config.architecture}")


def stored_tensors(
    path: Path, config: ModelConfig, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint whose names are wanted, dequantised. Raises ValueError for a file
    that is missing or not readable."""
    return (checkpoint_tensors if config.fp8 is None else dequantised_tensors)(path, wants)


def fill(model: Module, tensors: Iterable[tuple[str, torch.Tensor]], misfit: str) -> None:
    """Fill `model` from named tensors.

    Raises:
        ValueError: tensors are missing or surplus; the message names them after `misfit`.
    """
    missing = weight_table(model)
    surplus: list[str] = []
    for name, tensor in tensors:
        if name in missing:
            _load(name, tensor, missing.pop(name))
        else:
            surplus.append(name)
    if missing or surplus:
        raise ValueError(f"{misfit}: missing {listed(missing)}; surplus {listed(surplus)}.")


def fill_random(model: Module, seed: int = 0) -> None:
    """Norms are 1. The rest is normal with a scale that keeps the size of activations, and depends
    on the seed only."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, (RMSNorm, HeadNorm)):
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(parameter.device).manual_seed(seed)
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
                seed += 1


def weight_table(model: Module) -> dict[str, WeightSlot]:
    """The slot of every tensor that a checkpoint of this model must have, by name."""
    table: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, Module):
            table.update(module.slots(path))
    return table


def _load(name: str, tensor: torch.Tensor, slot: WeightSlot) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}; the config asks for {list(slot.shape)}."
        )
    slot.load(tensor)
