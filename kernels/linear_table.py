"""The table of chosen GEMM algorithms by shape and number of rows, and its file on disk."""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from tllm_spec.kernels.disk_cache import write_file

logger = logging.getLogger(__name__)

FORMAT = 2
SMALLEST_ROWS = 16


def rows_class(rows: int) -> int:
    """The class of a number of rows, as its largest number: 16, 24, 32, 48, 64, 96, ... All rows of
    a class use the algorithm that is fastest for the largest one measured."""
    power = max(SMALLEST_ROWS, 1 << max(rows - 1, 0).bit_length())
    halfway = power * 3 // 4
    return halfway if power > SMALLEST_ROWS and rows <= halfway else power


@dataclass(frozen=True)
class GemmKey:
    """A GEMM of `[rows, in_features]` and `[out_features, in_features]`; `rows` is a class (see
    `rows_class`). dtype: such as `bfloat16`. adds: whether the result is added to the output."""

    in_features: int
    out_features: int
    dtype: str
    rows: int
    adds: bool = False

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.in_features}x{self.out_features}"
        return f"{sizes} {self.dtype}{' add' if self.adds else ''}"


@dataclass
class LinearTable:
    """By `str(GemmKey)`: the algorithm, or None if torch's choice is as fast."""

    choices: dict[str, bytes | None] = field(default_factory=dict)

    def __contains__(self, key: GemmKey) -> bool:
        return str(key) in self.choices

    def __getitem__(self, key: GemmKey) -> bytes | None:
        return self.choices[str(key)]

    def __setitem__(self, key: GemmKey, algorithm: bytes | None) -> None:
        self.choices[str(key)] = algorithm

    def get(self, key: GemmKey) -> bytes | None:
        """None also if the key is not in the table."""
        return self.choices.get(str(key))


def table_path(folder: Path, device_name: str, library_version: int, torch_version: str) -> Path:
    """One file per device name and library versions, because the bytes of an algorithm are only
    valid for these."""
    name = f"linear-{device_name}-cublasLt{library_version}-torch{torch_version}"
    return folder / (re.sub(r"[^A-Za-z0-9.+-]+", "_", name) + ".json")


def read_table(path: Path, algorithm_bytes: int) -> LinearTable:
    """Empty without a file, or if it cannot be read, which is logged."""
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
        logger.warning("%s cannot be read and will be measured again: %s", path, error)
        return LinearTable()
    return LinearTable(choices)


def write_table(path: Path, table: LinearTable) -> None:
    choices = {
        key: None if found is None else found.hex() for key, found in sorted(table.choices.items())
    }
    write_file(path, json.dumps({"format": FORMAT, "choices": choices}, indent=1).encode())
