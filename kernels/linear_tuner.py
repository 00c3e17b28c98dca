"""Finds the fastest GEMM algorithm for linear layers: it times the algorithms that cuBLASLt
proposes, and variants of the best ones with other splits of K and other clusters.

Candidates run on several weights round-robin, so that no cache holds them. Before each one torch's
GEMM of the same sizes keeps the device busy until the host has enqueued the candidate. Large GEMMs
are limited by power, and the fastest algorithm depends on the clock that this leaves, so the device
is heated up before they are compared. Times are between two events on the device."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import torch

from tllm_spec.kernels.cublas_lt import CLUSTERS, CublasLt, Plan, Sizes
from tllm_spec.kernels.linear_table import GemmKey, LinearTable, rows_class
from tllm_spec.kernels.tuned_linear import key_of, plain_tuned_linear
from tllm_spec.progress import progress

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
    missing: dict[GemmKey, Search] = {}
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
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch's
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
