"""Reads the tensors of a published draft head and tells the kinds of heads apart. The modules that
they fill are not known here."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tllm_spec.models.checkpoint import checkpoint_tensors
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_kind import HeadKind, kind_by

EMBEDDING = "embed_tokens.weight"  # of a head; its output layer has the target's name
BIN = "pytorch_model.bin"
# Names of the mask token of networks that draft all tokens at once; the first that is there holds.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


def head_kind(path: Path) -> HeadKind | None:
    """What the draft weights in the folder `path` are: by config.json, or else by the names of the
    tensors. None: a language model, or neither says so.

    Raises:
        ValueError: a file is missing or not readable.
    """
    return kind_by(read_config(path), lambda: [name for name, _ in _stored(path, lambda _: True)])


def mask_token_in(config: Mapping[str, Any]) -> int | None:
    """The mask token that config.json names; None: it names none."""
    found = (config[name] for name in MASK_TOKENS if config.get(name) is not None)
    return next(map(int, found), None)


def head_tensors(
    path: Path, kind: HeadKind, unused: tuple[str, ...], renamed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The memory-mapped tensors of the head in the folder `path`, without the prefix `model.`.

    Args:
        kind: named in errors.
        unused: endings of the names of tensors that are left out.
        renamed: beginnings of names to what they become.

    Raises:
        ValueError: no checkpoint, a file that is not readable, two tensors of one name, or a weight
            without a dimension.
    """
    tensors: dict[str, torch.Tensor] = {}
    for stored, tensor in _stored(path, lambda name: True, is_needed=True):
        name = _canonical(stored, renamed)
        if name in tensors:
            raise ValueError(f"The {kind} head in {path} has {name} twice, once as {stored}.")
        if not name.endswith(unused):
            if name.endswith(".weight") and tensor.dim() == 0:
                raise ValueError(f"{stored} of the {kind} head in {path} is a single number.")
            tensors[name] = tensor
    return tensors


def _canonical(name: str, renamed: Mapping[str, str]) -> str:
    name = name.removeprefix("model.")
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _stored(
    path: Path, wants: Callable[[str], bool], *, is_needed: bool = False
) -> Iterable[tuple[str, torch.Tensor]]:
    """The wanted tensors of the folder's checkpoint; none without one. Raises ValueError if one is
    needed."""
    if any(path.glob("model.safetensors*")):
        return checkpoint_tensors(path, wants)
    if (path / BIN).is_file():
        return [each for each in _bin_tensors(path / BIN) if wants(each[0])]
    if not is_needed:
        return []
    raise ValueError(
        f"{path} has neither model.safetensors nor {BIN}; other weight formats are not read."
    )


def _bin_tensors(file: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a pickled state dict. `weights_only` refuses pickles that run code."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{file} is not a readable file of tensors: {error}") from error
    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise ValueError(f"{file} must hold a dictionary of names to tensors.")
    return list(state.items())
