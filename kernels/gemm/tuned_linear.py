"""Linear layers whose GEMM runs the cuBLASLt algorithm that is fastest for its shape and number of
rows: the layer, the table of algorithms with its file on disk, and the tuner that fills it."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median

import torch

from tllm_spec.kernels.disk_cache import write_file
from tllm_spec.kernels.gemm.cublas_lt import ALIGNMENT, CLUSTERS, DATA_TYPES, CublasLt, Plan, Sizes
from tllm_spec.progress import progress

# The table of chosen GEMM algorithms by shape and number of rows, and its file on disk.


logger = logging.getLogger(__name__)

FORMAT = 2
SMALLEST_ROWS = 16


def rows_class(rows: int) -> int:
    """The class of a number of rows, as its largest number: 16, 24, 32, 48, 64, 96, ... All rows of
    a class use the algorithm that is fastest for the largest one measured. Between 256 and 512,
    where torch's choice for one number can take twice as long as for another, steps are of 64."""
    power = max(SMALLEST_ROWS, 1 << max(rows - 1, 0).bit_length())
    step = power // 8 if power == 512 else power // 4
    return power if power == SMALLEST_ROWS else -(-rows // step) * step


LinearTable = dict[str, bytes | None]
"""By `key_of`: the algorithm, or None if torch's choice is as fast."""


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
    return choices


def write_table(path: Path, table: LinearTable) -> None:
    choices = {key: None if found is None else found.hex() for key, found in sorted(table.items())}
    write_file(path, json.dumps({"format": FORMAT, "choices": choices}, indent=1).encode())


# A linear layer whose GEMM runs the cuBLASLt algorithm that the table has for its shape, otherwise
# torch's choice. linear_tuner.py fills the table.
#
# Both sum in float32 and round once, but in another order, so their last bits may differ.


_Prepared = tuple[Plan, bytes] | None


@dataclass(frozen=True)
class TunedGemms:
    """The table and the library to run it. All GEMMs share a workspace, so they must run on one
    stream."""

    lt: CublasLt
    table: LinearTable
    _prepared: dict[Sizes, _Prepared] = field(default_factory=dict)

    def prepared(self, sizes: Sizes) -> _Prepared:
        """The plan of these sizes and its algorithm, or None for torch's choice."""
        if sizes not in self._prepared:
            self._prepared[sizes] = self._prepare(sizes)
        return self._prepared[sizes]

    def _prepare(self, sizes: Sizes) -> _Prepared:
        algorithm = self.table.get(key_of(sizes))
        if algorithm is None:
            return None
        plan = Plan(self.lt, sizes)
        return (plan, algorithm) if plan.accepts(algorithm) else None


def key_of(sizes: Sizes) -> str:
    """The same for all GEMMs of `[rows, in_features]` and `[out_features, in_features]` whose rows
    are of a class."""
    dtype = str(sizes.dtype).removeprefix("torch.")
    shape = f"{rows_class(sizes.rows)}x{sizes.in_features}x{sizes.out_features}"
    return f"{shape} {dtype}{' add' if sizes.adds else ''}"


def tuned_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: TunedGemms,
    *,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x W^T + bias`, added to `add_to` if given.

    Args:
        x: `[T, K]`, any stride between rows.
        weight: `[N, K]`.
        tuned: the table to choose from.
        bias: `[N]`.
        add_to: `[T, N]`, any stride between rows; changed in place and returned.
    """
    if not _suits(x, weight, add_to):
        return plain_tuned_linear(x, weight, bias=bias, add_to=add_to)
    (rows, in_features), out_features = x.shape, weight.shape[0]
    output_stride = out_features if add_to is None else add_to.stride(0)
    forms = (bias is not None, add_to is not None)
    sizes = Sizes(rows, in_features, out_features, x.stride(0), output_stride, x.dtype, *forms)
    prepared = tuned.prepared(sizes)
    if prepared is None:
        return plain_tuned_linear(x, weight, bias=bias, add_to=add_to)
    plan, algorithm = prepared
    output = x.new_empty(rows, out_features) if add_to is None else add_to
    plan.run(algorithm, x, weight, output, bias=bias)
    return output


def _suits(x: torch.Tensor, weight: torch.Tensor, add_to: torch.Tensor | None) -> bool:
    """Whether cuBLASLt can run with these types, strides and alignments."""
    if x.dtype not in DATA_TYPES or not x.shape[0] or not weight.is_contiguous():
        return False
    return all(_is_aligned(matrix) for matrix in (x, weight, add_to) if matrix is not None) and (
        weight.shape[0] * x.element_size() % ALIGNMENT == 0
    )


def _is_aligned(matrix: torch.Tensor) -> bool:
    offsets = matrix.data_ptr() | matrix.stride(0) * matrix.element_size()
    is_row_major = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return is_row_major and offsets % ALIGNMENT == 0


def plain_tuned_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `tuned_linear`: torch's GEMM."""
    matrix = weight.t()
    if add_to is None:
        return x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix)
    if bias is None and x.is_cuda:
        return add_to.addmm_(x, matrix)
    return add_to.add_(x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix))


# Finds the fastest GEMM algorithm for linear layers: it times the algorithms that cuBLASLt
# proposes, and variants of the best ones with other splits of K and other clusters.
#
# Candidates run on several weights round-robin, so that no cache holds them. Before each one
# torch's GEMM of the same sizes keeps the device busy until the host has enqueued the candidate.
# Large GEMMs are limited by power, and the fastest algorithm depends on the clock that this
# leaves, so the device is heated up before they are compared. Times are between two events on the
# device.


MIN_ROWS = 9  # fewer rows run small_m_gemm
MAX_OUTPUT_BYTES = 1 << 30  # more would be logits of a whole prompt, which are not computed
PROPOSALS = 16
VARIED = 3  # the fastest proposals, of which variants are tried
SPLITS = (1, 2)
# With more rows variants gain nothing: there are tiles for all multiprocessors.
MAX_VARIED_ROWS = 512
FINALISTS = 4
ROUNDS = 5  # timings of the finalists and torch, alternating
# Microseconds: about how long a candidate runs (1 to MAX_LAUNCHES launches), how long torch's GEMM
# runs before it, and how long the device is heated up from HOT_ROWS rows on.
MEASURED, HEAD_START, HEAT = 100, 150, 200_000
MAX_LAUNCHES = 6
HOT_ROWS = 128
# An H200 has these rates. On a slower device everything takes longer.
BYTES_PER_US, OPERATIONS_PER_US = 4e6, 700e6
SHORTEST = 5  # microseconds of any launch
# A choice must be faster than torch's by this factor; less is noise.
GAIN = 0.975

Call = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class GemmGroup:
    """Linear layers of one shape. adds: whether their results are added to the output."""

    weights: Sequence[torch.Tensor]
    """`[N, K]` each."""
    adds: bool

    def sizes(self, rows: int) -> Sizes:
        out_features, in_features = self.weights[0].shape
        dtype = self.weights[0].dtype
        return Sizes(
            rows, in_features, out_features, in_features, out_features, dtype, adds=self.adds
        )


def tune_missing(
    table: LinearTable, lt: CublasLt, groups: Sequence[GemmGroup], row_counts: Iterable[int]
) -> int:
    """Adds the missing entries for these numbers of rows to the table, and returns their number.
    Waits for the device."""
    # The largest number of a class is measured for the class.
    largest = {rows_class(rows): rows for rows in sorted(row_counts) if rows >= MIN_ROWS}
    num_missing = 0
    with progress("GEMMs", len(largest), "row counts", every=5) as bar:
        for rows in sorted(largest.values(), reverse=True):
            num_missing += _tune_rows(table, lt, groups, rows)
            bar.advance()
    return num_missing


def _tune_rows(table: LinearTable, lt: CublasLt, groups: Sequence[GemmGroup], rows: int) -> int:
    missing: dict[str, Search] = {}
    for group in groups:
        sizes = group.sizes(rows)
        if (key := key_of(sizes)) not in table and sizes.output_bytes <= MAX_OUTPUT_BYTES:
            missing[key] = Search(lt, sizes, group.weights)
    for search in missing.values():
        search.load()
    if rows >= HOT_ROWS:
        for search in missing.values():
            search.heat(HEAT / len(missing))
    for key, search in missing.items():
        table[key] = search.fastest()
    return len(missing)


class Search:
    """Search for the fastest algorithm of one GEMM."""

    def __init__(self, lt: CublasLt, sizes: Sizes, weights: Sequence[torch.Tensor]) -> None:
        self._plan, self._weights, self._sizes = Plan(lt, sizes), cycle(weights), sizes
        self._x = torch.randn(
            sizes.rows, sizes.in_features, dtype=sizes.dtype, device=weights[0].device
        )
        self._output = self._x.new_zeros(sizes.rows, sizes.out_features)
        num_bytes = sizes.in_features * sizes.out_features * sizes.dtype.itemsize
        work = max(num_bytes / BYTES_PER_US, num_bytes * sizes.rows / OPERATIONS_PER_US)
        self._estimate = max(work, SHORTEST)
        self._algorithms: set[bytes] = set()

    def load(self) -> None:
        """Collects the algorithms and runs each once, because the library loads a kernel when it
        first runs."""
        proposals = self._plan.algorithms(PROPOSALS)
        self._run(self._torch, 1)
        self._load(proposals)
        if self._sizes.rows <= MAX_VARIED_ROWS:
            self._load(self._variants(self._ranked(sorted(self._algorithms))[:VARIED]))

    def heat(self, microseconds: float) -> None:
        self._run(self._torch, max(1, round(microseconds / self._estimate)))

    def fastest(self) -> bytes | None:
        """None if torch's choice is as fast."""
        finalists = self._ranked(sorted(self._algorithms))[:FINALISTS]
        calls = [self._torch, *map(self._call_of, finalists)]
        rounds = [self.microseconds(calls) for _ in range(ROUNDS)]
        baseline, *finals = map(median, zip(*rounds, strict=True))
        best, algorithm = min(zip(finals, finalists, strict=True), default=(baseline, b""))
        return algorithm if best < GAIN * baseline else None

    def microseconds(self, calls: Sequence[Call]) -> list[float]:
        """The time of one launch of each call."""
        events = []
        for call in calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._run(self._torch, max(1, round(HEAD_START / self._estimate)))
            start.record()
            self._run(call, self._launches)
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self._launches for start, end in events]

    @property
    def _launches(self) -> int:
        return max(1, min(MAX_LAUNCHES, round(MEASURED / self._estimate)))

    def _torch(self, weight: torch.Tensor) -> object:
        if self._sizes.adds:
            return plain_tuned_linear(self._x, weight, add_to=self._output)
        return torch.mm(self._x, weight.t(), out=self._output)

    def _call_of(self, algorithm: bytes) -> Call:
        return lambda weight: self._plan.run(algorithm, self._x, weight, self._output)

    def _run(self, call: Call, times: int) -> None:
        for _ in range(times):
            call(next(self._weights))

    def _load(self, algorithms: Iterable[bytes]) -> None:
        for algorithm in set(algorithms) - self._algorithms:
            try:
                self._run(self._call_of(algorithm), 1)
            except RuntimeError:  # cublasLtMatmul may refuse what the check has accepted
                continue
            self._algorithms.add(algorithm)

    def _ranked(self, algorithms: Sequence[bytes]) -> list[bytes]:
        times = self.microseconds([self._call_of(algorithm) for algorithm in algorithms])
        return [algorithm for _, algorithm in sorted(zip(times, algorithms, strict=True))]

    def _variants(self, algorithms: Iterable[bytes]) -> list[bytes]:
        every = (
            self._plan.variant(algorithm, splits, cluster)
            for algorithm in algorithms
            for splits in SPLITS
            for cluster in CLUSTERS
        )
        return [variant for variant in every if variant is not None]
