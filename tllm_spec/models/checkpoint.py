"""The tensors of a checkpoint in safetensors files."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tllm_spec.config.option_checks import shown
from tllm_spec.models.config_file import read_json
from tllm_spec.models.formats.gguf_tensors import gguf_names
from tllm_spec.zoo.registry import is_gguf

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def checkpoint_files(path: Path) -> list[Path]:
    """`model.safetensors`, or the shards that the index names.

    Raises:
        ValueError: neither exists, a shard is missing, or the index leads out of the folder.
    """
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        raise ValueError(
            f"{path} has neither {SINGLE} nor {INDEX}; other weight formats are not read."
        )
    shards = set(_weight_map(path).values())
    absent = sorted(shard for shard in shards if not (path / shard).is_file())
    if absent:
        raise ValueError(f"{path / INDEX} names files that are not there: {listed(absent)}.")
    return [path / shard for shard in sorted(shards)]


def checkpoint_names(path: Path) -> list[str]:
    """The names of the checkpoint's tensors; none without a checkpoint. Raises ValueError for a
    file that is not readable."""
    if is_gguf(path):
        return gguf_names(path)
    if (path / SINGLE).is_file():
        with opened(path / SINGLE) as checkpoint:
            return list(checkpoint.keys())
    return list(_weight_map(path)) if (path / INDEX).is_file() else []


def names_of_type(path: Path, dtype: str) -> frozenset[str]:
    """The checkpoint's tensors of a type, as safetensors calls it, such as `F8_E4M3`. Reads the
    files' headers only. Raises ValueError as `checkpoint_tensors`."""
    return frozenset(
        name for file, name in _places(path) if file.get_slice(name).get_dtype() == dtype
    )


def checkpoint_tensors(
    path: Path, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and memory-mapped tensors of the checkpoint in the folder `path`, file by file. Only
    tensors whose names are wanted are read.

    Raises:
        ValueError: no checkpoint, or a file that is not readable.
    """
    for file, name in _places(path):
        if wants(name):
            yield name, file.get_tensor(name)


def _places(path: Path) -> Iterator[tuple[Any, str]]:
    """Open files with the names of their tensors. A shard may also have an old copy of a tensor
    that the index assigns to another one; this copy does not count."""
    files = checkpoint_files(path)
    weight_map = {} if files == [path / SINGLE] else _weight_map(path)
    for file in files:
        shard = str(file.relative_to(path))
        with opened(file) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                if weight_map.get(name, shard) == shard:
                    yield checkpoint, name


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor names to files in the folder, normalised. Raises ValueError if the index has none."""
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path / INDEX} has no weight_map of tensor names to files.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_below(shard):
            raise ValueError(
                f"{path / INDEX}: weight_map has {shown(shard)} for {shown(name)}; it must be a "
                "file in the folder."
            )
    return {name: str(PurePosixPath(shard)) for name, shard in weight_map.items()}


def _is_below(shard: str) -> bool:
    """Whether a relative path stays in its folder. A link may lead out of it, as those of Hugging
    Face's cache do."""
    parts = PurePosixPath(shard).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in shard


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as checkpoint:
            yield checkpoint
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}.") from error


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The first names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"


# The output layer of a checkpoint whose config.json says that it is tied to the embedding.


logger = logging.getLogger(__name__)

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def has_own_output(path: Path, dtype: torch.dtype, parameter_name: Callable[[str], str]) -> bool:
    """Whether the checkpoint in the folder `path` has an output layer that differs from its
    embedding in the served `dtype`. Such a layer is used, as in transformers: config.json may be
    that of the model before a training that untied them.

    parameter_name: a tensor's name here, by its stored one.

    Raises ValueError for a file that is not readable."""
    pair = stored_pair(path, parameter_name)
    if pair.keys() != {EMBEDDING, OUTPUT}:
        return False
    tensors = dict(checkpoint_tensors(path, lambda name: name in pair.values()))
    embedding, output = tensors[pair[EMBEDDING]], tensors[pair[OUTPUT]]
    if is_same(embedding, output, dtype):
        return False
    logger.warning(
        "%s: tie_word_embeddings is true, but %s differs from %s; the output layer is used as "
        "stored",
        path,
        pair[OUTPUT],
        pair[EMBEDDING],
    )
    return True


def stored_pair(path: Path, parameter_name: Callable[[str], str]) -> dict[str, str]:
    """The stored names of `EMBEDDING` and `OUTPUT`, of those that the checkpoint has."""
    names = {parameter_name(name): name for name in checkpoint_names(path)}
    return {name: names[name] for name in (EMBEDDING, OUTPUT) if name in names}


def is_same(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two stored tensors are equal after their conversion to `dtype`."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    return torch.equal(one.to(dtype), other.to(dtype))
