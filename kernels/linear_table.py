"""Which algorithm a linear layer's product runs, by its shape and number of rows, and the file that
keeps the table for the next start.

It knows neither the library behind an algorithm nor how the choice was made.
"""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from tllm_spec.kernels.disk_cache import write_file

logger = logging.getLogger(__name__)

FORMAT = 1
SMALLEST_ROWS = 16


def rows_class(rows: int) -> int:
    """Products of 33 to 48 rows are one class, those of 49 to 64 the next: powers of two and what
    lies halfway between two. What is best for the class's largest number of rows serves all of
    it."""
    power = max(SMALLEST_ROWS, 1 << max(rows - 1, 0).bit_length())
    halfway = power * 3 // 4
    return halfway if power > SMALLEST_ROWS and rows <= halfway else power


@dataclass(frozen=True)
class ProductKey:
    """Of `[rows, in_features]` and `[out_features, in_features]`; `rows` is a class. `dtype`:
    `bfloat16`. `adds`: to a running sum, which another algorithm may do best. `place`: the products
    of the layers that it runs among; empty: it was measured alone."""

    in_features: int
    out_features: int
    dtype: str
    rows: int
    adds: bool = False
    place: str = ""

    def __str__(self) -> str:
        kind = "sum" if self.adds else "product"
        where = f" in {self.place}" if self.place else ""
        return f"{self.rows}x{self.in_features}x{self.out_features} {self.dtype} {kind}{where}"


@dataclass
class LinearTable:
    """By `str(ProductKey)`: the algorithm, or None where torch's own choice is as fast.
    `finalists`: the fastest few of what was measured since the start."""

    choices: dict[str, bytes | None] = field(default_factory=dict)
    finalists: dict[str, list[bytes]] = field(default_factory=dict, compare=False)

    def __contains__(self, key: ProductKey) -> bool:
        return str(key) in self.choices

    def __getitem__(self, key: ProductKey) -> bytes | None:
        return self.choices[str(key)]

    def __setitem__(self, key: ProductKey, algorithm: bytes | None) -> None:
        self.choices[str(key)] = algorithm

    def get(self, key: ProductKey) -> bytes | None:
        """None, too, where nothing was measured."""
        return self.choices.get(str(key))


def table_path(folder: Path, device_name: str, library_version: int, torch_version: str) -> Path:
    """Of a kind of device and versions of the libraries: with any other an algorithm may mean
    something else."""
    name = f"linear-{device_name}-cublasLt{library_version}-torch{torch_version}"
    return folder / (re.sub(r"[^A-Za-z0-9.+-]+", "_", name) + ".json")


def read_table(path: Path, algorithm_bytes: int) -> LinearTable:
    """Empty where there is no file, or one that nobody can read, which is logged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        choices = {
            key: None if hexed is None else bytes.fromhex(hexed)
            for key, hexed in content["choices"].items()
        }
        if any(
            algorithm is not None and len(algorithm) != algorithm_bytes
            for algorithm in choices.values()
        ):
            raise ValueError("an algorithm of another length")
    except FileNotFoundError:
        return LinearTable()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used and will be made anew: %s", path, error)
        return LinearTable()
    return LinearTable(choices)


def write_table(path: Path, table: LinearTable) -> None:
    choices = {
        key: None if found is None else found.hex() for key, found in sorted(table.choices.items())
    }
    write_file(path, json.dumps({"format": FORMAT, "choices": choices}, indent=1).encode())
