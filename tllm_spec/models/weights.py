"""Fills a model's parameters from safetensors files or with random numbers.

Tensors are copied one at a time from the memory-mapped file into the (fused, sharded) parameter, so
the host holds no second copy. `Module.slots` says where each tensor goes."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.config import read_json
from tllm_spec.models.layers import HeadNorm, RMSNorm
from tllm_spec.models.module import Module, WeightSlot

INDEX = "model.safetensors.index.json"


def load_weights(model: CausalLM, path: Path) -> None:
    """Fill `model` from the checkpoint in the folder `path`.

    Raises:
        ValueError: there is no checkpoint, or tensors are missing or surplus; the message names
            them.
    """
    stored = (
        (model.parameter_name(name), tensor)
        for name, tensor in checkpoint_tensors(path)
        if not model.ignores(name)
    )
    fill(model, stored, f"The checkpoint in {path} does not fit {model.config.architecture}")


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
        raise ValueError(f"{misfit}: missing {_listed(missing)}; surplus {_listed(surplus)}.")


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


def checkpoint_files(path: Path) -> list[Path]:
    """`model.safetensors`, or the shards that the index names.

    Raises:
        ValueError: neither exists, or a shard is missing.
    """
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if not (path / INDEX).is_file():
        raise ValueError(
            f"{path} has neither model.safetensors nor {INDEX}; other weight formats are not read."
        )
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path / INDEX} has no weight_map of tensor names to files.")
    shards = set(weight_map.values())
    absent = sorted(shard for shard in shards if not (path / shard).is_file())
    if absent:
        raise ValueError(f"{path / INDEX} names files that are not there: {_listed(absent)}.")
    return [path / shard for shard in sorted(shards)]


def checkpoint_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and memory-mapped tensors of the checkpoint in the folder `path`, file by file.

    Raises:
        ValueError: no checkpoint, or a file that is not readable.
    """
    for file in checkpoint_files(path):
        try:
            with safe_open(file, framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    yield name, checkpoint.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}.") from error


def _load(name: str, tensor: torch.Tensor, slot: WeightSlot) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}; the config asks for {list(slot.shape)}."
        )
    slot.load(tensor)


def _listed(names: Iterable[str], limit: int = 10) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"
