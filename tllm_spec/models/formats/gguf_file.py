"""The header of a GGUF file: its metadata, and where its tensors are.

It is read without the package `gguf`, whose reader keeps every token and merge of the vocabulary as
an array of its own, which takes seconds. Source of the layout: ggml's `docs/gguf.md`."""

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# The other types of values, as `struct` calls them.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
MAX_DIMENSIONS = 4
MAX_KEPT = 1 << 10  # numbers of an array: one for each layer


@dataclass(frozen=True)
class TensorType:
    """How elements are stored: in blocks of neighbours in a row."""

    name: str
    elements: int
    num_bytes: int
    """Bytes of a block."""


# By ggml's numbers. Blocks of the K types have 256 elements in groups with scales of their own.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
}


@dataclass(frozen=True)
class ArraySize:
    """A large array in the metadata, or one of strings, of which only the number of elements is
    kept."""

    size: int


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """As torch has it: the last dimension is contiguous."""
    type_number: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GgufFile:
    """What the header of the file `path` says."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def rows(self, place: TensorPlace) -> NDArray[np.uint8]:
        """A tensor's stored bytes, memory-mapped, `[product of the other dimensions, row bytes]`.
        Changes do not reach the file.

        Raises ValueError if its type is not served, or if it does not fit into the file."""
        kind = TYPES.get(place.type_number)
        what = f"{self.path}: {place.name}"
        if kind is None:
            raise ValueError(
                f"{what} has ggml's type {place.type_number}; served are "
                f"{', '.join(f'{n} ({each.name})' for n, each in TYPES.items())}."
            )
        *outer, last = place.shape
        num_rows = int(np.prod(outer, dtype=object))
        row_bytes = last // kind.elements * kind.num_bytes
        if last % kind.elements:
            raise ValueError(
                f"{what} has rows of {last} elements; {kind.name} has blocks of {kind.elements}."
            )
        if not num_rows * row_bytes:
            raise ValueError(f"{what} has no elements.")
        if place.offset + num_rows * row_bytes > self.path.stat().st_size:
            raise ValueError(f"{what} ends after the end of the file, which is incomplete.")
        return np.memmap(self.path, np.uint8, "c", place.offset, (num_rows, row_bytes))


def read_gguf(path: Path, arrays: Collection[str] = ()) -> GgufFile:
    """arrays: the keys of arrays whose elements are kept, as lists.

    Raises ValueError for a file that is not GGUF, or of another version or byte order, and for
    one part of a file that was split."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _Header(data, arrays).read(path)
    except (OSError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}.") from error
    parts = found.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise ValueError(
            f"{path} is one of {parts} parts; join them with llama.cpp's llama-gguf-split --merge."
        )
    return found


class _Header:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap, arrays: Collection[str]) -> None:
        self.data, self.position, self.arrays = data, 0, arrays

    def read(self, path: Path) -> GgufFile:
        if self.data[:4] != MAGIC:
            raise ValueError(f"it does not start with {MAGIC.decode()}")
        self.position = len(MAGIC)
        version = self.number("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, or its byte order is not little-endian")
        num_tensors, num_values = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(num_values):
            key = self.text()
            kind = self.number("I")
            is_kept = kind == ARRAY and key in self.arrays
            metadata[key] = self.elements() if is_kept else self.value(kind)
        places = [self.place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = {
            name: TensorPlace(name, shape, kind, start + offset)
            for name, shape, kind, offset in places
        }
        return GgufFile(path, metadata, tensors)

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(form)
        return value

    def text(self) -> str:
        start = self.skip(self.number("Q"))
        return self.data[start : self.position].decode("utf-8")

    def skip(self, num_bytes: int) -> int:
        """Returns where they start. Raises ValueError where the file ends before they do."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise ValueError(f"{num_bytes} bytes from {start} on end after the end of the file")
        self.position += num_bytes
        return start

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def array(self, kind: int, size: int) -> ArraySize | tuple[Any, ...]:
        if kind in _NUMBERS and size <= MAX_KEPT:
            return tuple(self.number(_NUMBERS[kind]) for _ in range(size))
        if kind == STRING:
            for _ in range(size):
                self.skip(self.number("Q"))
        elif kind in _NUMBERS:
            self.skip(size * struct.calcsize(_NUMBERS[kind]))
        else:
            raise ValueError(f"an array has elements of type {kind}")
        return ArraySize(size)

    def elements(self) -> list[Any]:
        kind, size = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.text() for _ in range(size)]
        start = self.position
        self.array(kind, size)
        return list(struct.unpack_from(f"<{size}{_NUMBERS[kind]}", self.data, start))

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type, and offset from the first tensor."""
        name, num_dimensions = self.text(), self.number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        sizes = [self.number("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")
