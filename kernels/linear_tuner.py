"""Finds the fastest algorithm of linear layers' products by running what the library proposes, and
variants of the best
of that: other splits of the sums, other clusters.

It does not know which layers a model has, nor where the table is kept.

Candidates run on weights that take turns, so that no cache holds them. Before each, torch's product
of the same sizes keeps the device busy until the host has enqueued the candidate. Products of many
rows are limited by power, and which algorithm is the fastest depends on the clock that this leaves:
they are compared on a device that is busy all the time. A candidate's time is that between two
events on the device."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import torch

from tllm_spec.kernels.cublas_lt import CLUSTERS, CublasLt, Plan, Sizes
from tllm_spec.kernels.linear_table import LinearTable, ProductKey, rows_class
from tllm_spec.kernels.tuned_linear import key_of, plain_tuned_linear

MIN_ROWS = 9  # fewer are small_m_gemm's
MAX_OUTPUT_BYTES = 1 << 30  # logits of a whole prompt, which nobody asks for
PROPOSALS = 16
VARIED = 3  # of the proposals, the fastest
SPLITS = (1, 2)
# Beyond this variants bring nothing: there are tiles for all multiprocessors.
MAX_VARIED_ROWS = 512
FINALISTS = 4
ROUNDS = 5  # of the finalists and torch, in turn
# Microseconds: that a candidate runs for, about (once at least, MAX_LAUNCHES times at most),
# torch's before it, and before all those of a number of rows where power is the limit.
MEASURED, HEAD_START, HEAT = 100, 150, 200_000
MAX_LAUNCHES = 6
HOT_ROWS = 128
# An H200's. On a slower device everything takes longer.
BYTES_A_US, OPERATIONS_A_US = 4e6, 700e6
SHORTEST = 5  # microseconds of any launch
# What a choice has to gain; less is noise, and torch's own is the better known.
GAIN = 0.975

Call = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Product:
    """The layers of one shape. `adds`: to a running sum."""

    weights: Sequence[torch.Tensor]
    """Of each `[N, K]`."""
    adds: bool

    def sizes(self, rows: int) -> Sizes:
        out_features, in_features = self.weights[0].shape
        dtype = self.weights[0].dtype
        return Sizes(
            rows, in_features, out_features, in_features, out_features, dtype, adds=self.adds
        )


def tune_missing(
    table: LinearTable, lt: CublasLt, products: Sequence[Product], row_counts: Iterable[int]
) -> int:
    """Complete the table for these numbers of rows; how many entries were missing. Waits for the
    device."""
    # The largest of a class stands for all of it.
    largest = {rows_class(rows): rows for rows in sorted(row_counts) if rows >= MIN_ROWS}
    num_missing = 0
    for rows in sorted(largest.values(), reverse=True):
        missing: dict[ProductKey, Search] = {}
        for product in products:
            sizes = product.sizes(rows)
            if (key := key_of(sizes)) not in table and sizes.output_bytes <= MAX_OUTPUT_BYTES:
                missing[key] = Search(lt, sizes, product.weights)
        for search in missing.values():
            search.load()
        if rows >= HOT_ROWS:
            for search in missing.values():
                search.heat(HEAT / len(missing))
        for key, search in missing.items():
            table[key] = search.fastest()
            table.finalists[str(key)] = search.finalists
        num_missing += len(missing)
    return num_missing


class Search:
    """For the fastest algorithm of one product."""

    def __init__(self, lt: CublasLt, sizes: Sizes, weights: Sequence[torch.Tensor]) -> None:
        self._plan, self._weights, self._sizes = Plan(lt, sizes), cycle(weights), sizes
        self._x = torch.randn(
            sizes.rows, sizes.in_features, dtype=sizes.dtype, device=weights[0].device
        )
        self._output = self._x.new_zeros(sizes.rows, sizes.out_features)
        num_bytes = sizes.in_features * sizes.out_features * sizes.dtype.itemsize
        work = max(num_bytes / BYTES_A_US, num_bytes * sizes.rows / OPERATIONS_A_US)
        self._estimate = max(work, SHORTEST)
        self._algorithms: set[bytes] = set()
        self.finalists: list[bytes] = []

    def load(self) -> None:
        """Collect the algorithms and run each once: the library loads a kernel when it is first
        run."""
        proposals = self._plan.algorithms(PROPOSALS)
        self._run(self._torch, 1)
        self._load(proposals)
        if self._sizes.rows <= MAX_VARIED_ROWS:
            self._load(self._variants(self._ranked(sorted(self._algorithms))[:VARIED]))

    def heat(self, microseconds: float) -> None:
        self._run(self._torch, max(1, round(microseconds / self._estimate)))

    def fastest(self) -> bytes | None:
        """None where torch's choice is as fast."""
        self.finalists = self._ranked(sorted(self._algorithms))[:FINALISTS]
        calls = [self._torch, *map(self._call_of, self.finalists)]
        rounds = [self.microseconds(calls) for _ in range(ROUNDS)]
        baseline, *finals = map(median, zip(*rounds, strict=True))
        best, algorithm = min(zip(finals, self.finalists, strict=True), default=(baseline, b""))
        return algorithm if best < GAIN * baseline else None

    def microseconds(self, calls: Sequence[Call]) -> list[float]:
        """Of one launch of each."""
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
            except (
                RuntimeError
            ):  # of cublasLtMatmul, which may refuse what the check before it has accepted
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
