"""The output layer of a checkpoint whose config.json says that it is tied to the embedding."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from tllm_spec.models.checkpoint import checkpoint_names, checkpoint_tensors

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
