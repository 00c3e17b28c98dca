"""The tensors of a GGUF file under Hugging Face's names, dequantised at load. Layers may keep those
of Q4_0 in 4 bits."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tllm_spec.kernels.gemm.int4_weights import group_words
from tllm_spec.models.formats.four_bit_packings import SYMMETRIC_ZERO, FourBitTensor
from tllm_spec.models.formats.gguf_config import (
    ROPE_FACTORS,
    architecture_of,
    stored_name,
    unknown_keys,
)
from tllm_spec.models.formats.gguf_file import TYPES, GgufFile, TensorPlace, read_gguf

logger = logging.getLogger(__name__)

AT_ONCE = 1 << 20  # elements that a thread dequantises
Q4_0, Q4_0_GROUP, Q4_0_BYTES = 2, 32, 18


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor. It is read when it is dequantised."""

    file: GgufFile
    place: TensorPlace
    num_pairs_heads: int | None
    """Heads of a q or k whose rows are stored in pairs; None: rows are in Hugging Face's order."""
    offset: int
    """Subtracted from the stored elements."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.place.shape)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `shape` on the host. Threads dequantise rows into it, so that no copy of the
        tensor in float32 exists."""
        rows = self.file.rows(self.place)
        output = torch.empty(self.shape, dtype=dtype)
        by_row = output.view(len(rows), self.shape[-1])
        step = max(1, AT_ONCE // self.shape[-1])
        order = self._order()

        def fill(start: int) -> None:
            chosen = slice(start, start + step)
            own = rows[chosen] if order is None else rows[order[chosen]]
            values = torch.from_numpy(_dequantise(own, self.place.type_number))
            by_row[chosen] = values - self.offset if self.offset else values

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(0, len(rows), step)))
        return output

    def _order(self) -> NDArray[np.int64] | None:
        """The stored rows in the order of Hugging Face's, where rows that are rotated together are
        half a head apart."""
        if self.num_pairs_heads is None:
            return None
        pairs = np.arange(self.shape[0]).reshape(self.num_pairs_heads, -1, 2)
        order: NDArray[np.int64] = pairs.swapaxes(1, 2).ravel()
        return order

    def as_four_bit(self) -> FourBitTensor:
        """A matrix of Q4_0. In a block of 32 elements, a scale in float16 is followed by bytes,
        each with the code of element i in the low bits, and that of element i + 16 in the high
        ones. A code is the value plus 8."""
        assert self.place.type_number == Q4_0  # layers with others have been made plain
        rows, order = self.file.rows(self.place), self._order()
        stored = torch.from_numpy(np.ascontiguousarray(rows if order is None else rows[order]))
        blocks = stored.view(len(rows), -1, Q4_0_BYTES)
        scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
        pairs = blocks[..., 2:]
        codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(1)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
        return FourBitTensor(codes, group_words(scales, zeros), Q4_0_GROUP)


def gguf_tensors(
    path: Path, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor | GgufTensor]]:
    """Names and tensors of the file, of those whose names are wanted. Vectors are dequantised.

    Raises:
        ValueError: a tensor has a type that is not served, or is incomplete.
    """
    file = read_gguf(path)
    for place in file.tensors.values():
        file.rows(place)
    _log(file)
    heads = _num_pairs_heads(file)
    norm_offset = int(architecture_of(file).norms_are_added_to_one)
    for name, place in _named(file):
        if wants(name):
            offset = norm_offset if name.endswith("norm.weight") else 0
            own = GgufTensor(file, place, heads.get(name[name.find("self_attn") :]), offset)
            yield name, own if len(own.shape) > 1 else own.dequantised(torch.float32)


def gguf_names(path: Path, type_number: int | None = None) -> list[str]:
    """The names of the file's tensors in Hugging Face's format. type_number: of those that count;
    None: all."""
    return [
        name for name, place in _named(read_gguf(path)) if type_number in (None, place.type_number)
    ]


def _named(file: GgufFile) -> Iterator[tuple[str, TensorPlace]]:
    """All tensors but the factors of rotary frequencies, which the configuration has."""
    architecture = architecture_of(file)
    for place in file.tensors.values():
        if place.name != ROPE_FACTORS:
            yield stored_name(place.name, architecture), place


def _log(file: GgufFile) -> None:
    counts = Counter(TYPES[place.type_number].name for place in file.tensors.values())
    shown = ", ".join(f"{number} of {name}" for name, number in counts.most_common())
    logger.info("%s: layers may keep Q4_0, all else is dequantised at load: %s", file.path, shown)
    if unknown := unknown_keys(file):
        logger.warning(
            "%s: unknown metadata of the architecture is taken to change nothing: %s",
            file.path,
            ", ".join(unknown),
        )


def _num_pairs_heads(file: GgufFile) -> dict[str, int]:
    """Heads of the matrices whose rows are stored in pairs, by their names in a layer."""
    if not architecture_of(file).pairs_rotary:
        return {}
    key = f"{file.metadata['general.architecture']}.attention.head_count"
    num_heads = file.metadata[key]
    num_kv_heads = file.metadata.get(f"{key}_kv", num_heads)
    return {"self_attn.q_proj.weight": num_heads, "self_attn.k_proj.weight": num_kv_heads}


def _dequantise(rows: NDArray[np.uint8], type_number: int) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType, dequantize

    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType(type_number))
    return values
