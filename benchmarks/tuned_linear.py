"""Linear layers of more than a few rows: torch's product against the fastest of cuBLASLt's
algorithms.

    python benchmarks/tuned_linear.py [--output result.json]

The shapes are an 8B Llama's and its EAGLE-3 head's. A layer's figure is the time of one call inside
a CUDA graph of calls with weights of their own, so that no cache holds them; the model's is that of
one graph of all its 32 layers and the output layer. Both sides take turns; medians. The floor reads
the weights once at 4.45 TB/s or computes at 790 TFLOP/s. All is tuned at the beginning, as at an
engine's first start, and timed."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from tllm_spec.kernels.cublas_lt import CublasLt, Sizes, shared_library
from tllm_spec.kernels.linear_table import LinearTable
from tllm_spec.kernels.linear_tuner import Product, tune_missing
from tllm_spec.kernels.tuned_linear import TunedProducts, key_of, plain_tuned_linear, tuned_linear

NUM_LAYERS, BYTES_A_US, OPERATIONS_A_US = 32, 4.45e6, 790e6
TURNS, TURN_US = 5, 30e3
FEW_ROWS = 256  # up to here output layers take part
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True)
class Shape:
    in_features: int
    out_features: int
    num_weights: int = NUM_LAYERS
    adds: bool = False
    """To a running sum, as the second layer of a block does."""


MODEL = {
    "qkv": Shape(4096, 6144),
    "o": Shape(4096, 4096, adds=True),
    "gate_up": Shape(4096, 28672),
    "down": Shape(14336, 4096, adds=True),
    "lm_head": Shape(4096, 128256, 1),
}
HEAD = {
    "head fuse": Shape(12288, 4096, 4),
    "head qkv": Shape(8192, 6144, 4),
    "head lm_head": Shape(4096, 32000, 4),
}
SHAPES = MODEL | HEAD
ALWAYS = ("qkv", "o", "gate_up", "down")


@dataclass
class Row:
    """Microseconds of a call, or of a model's products."""

    layer: str
    rows: int
    floor: float
    is_tuned: bool
    torch: float = 0.0
    tuned: float = 0.0


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(graphs: Sequence[torch.cuda.CUDAGraph], floor: float) -> list[float]:
    """Of one replay of each, in turn. floor: of a replay."""
    replays = max(1, round(TURN_US / floor))
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(TURNS):
        for graph, found in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / replays)
    return [statistics.median(found) for found in times]


class Bench:
    def __init__(self) -> None:
        library = shared_library()
        if library is None:
            sys.exit("tuned_linear.py needs libcublasLt")
        self.tuned = TunedProducts(CublasLt(library, DEVICE), LinearTable())
        self.weights = {
            layer: [
                torch.randn(shape.out_features, shape.in_features, device=DEVICE, dtype=DTYPE).div_(
                    shape.in_features**0.5
                )
                for _ in range(shape.num_weights)
            ]
            for layer, shape in SHAPES.items()
        }
        self.tuning_seconds = 0.0
        self.rows: list[Row] = []

    def tune(self, row_counts: Sequence[int]) -> None:
        start = perf_counter()
        products = [Product(self.weights[layer], shape.adds) for layer, shape in SHAPES.items()]
        tune_missing(self.tuned.table, self.tuned.lt, products, row_counts)
        self.tuning_seconds = perf_counter() - start

    def is_tuned(self, layer: str, rows: int) -> bool:
        shape = SHAPES[layer]
        sizes = Sizes(
            rows,
            shape.in_features,
            shape.out_features,
            shape.in_features,
            shape.out_features,
            DTYPE,
            adds=shape.adds,
        )
        return self.tuned.table.get(key_of(sizes)) is not None

    def calls(
        self, layer: str, rows: int, products: TunedProducts | None
    ) -> list[Callable[[], object]]:
        """One for each weight."""
        shape = SHAPES[layer]
        x = torch.randn(rows, shape.in_features, device=DEVICE, dtype=DTYPE)
        total = (
            torch.zeros(rows, shape.out_features, device=DEVICE, dtype=DTYPE)
            if shape.adds
            else None
        )

        def call(weight: torch.Tensor) -> Callable[[], object]:
            if products is None:
                return lambda: plain_tuned_linear(x, weight, add_to=total)
            return lambda: tuned_linear(x, weight, products, add_to=total)

        return [call(weight) for weight in self.weights[layer]]

    def measure(self, rows: int) -> None:
        """Each layer, then all of a model's."""
        layers = [layer for layer in SHAPES if rows <= FEW_ROWS or layer in ALWAYS]
        model_floor, any_tuned = 0.0, False
        for layer in layers:
            shape, is_tuned = SHAPES[layer], self.is_tuned(layer, rows)
            size = shape.in_features * shape.out_features * 2
            floor = max(size / BYTES_A_US, size * rows / OPERATIONS_A_US)
            plain, tuned = (self.calls(layer, rows, products) for products in (None, self.tuned))
            self.compare(Row(layer, rows, floor, is_tuned), plain, tuned, shape.num_weights)
            if layer in MODEL:
                model_floor, any_tuned = (
                    model_floor + floor * shape.num_weights,
                    any_tuned or is_tuned,
                )
        plain, tuned = (self.model_calls(layers, rows, products) for products in (None, self.tuned))
        self.compare(Row("the model's", rows, model_floor, any_tuned), plain, tuned, 1)

    def model_calls(
        self, layers: Sequence[str], rows: int, products: TunedProducts | None
    ) -> list[Callable[[], object]]:
        """Layer after layer, and then the output layer."""
        calls = {layer: self.calls(layer, rows, products) for layer in layers if layer in MODEL}
        last = calls.pop("lm_head", [])
        return [
            call for of_a_layer in zip(*calls.values(), strict=True) for call in of_a_layer
        ] + last

    def compare(
        self,
        row: Row,
        plain: list[Callable[[], object]],
        tuned: list[Callable[[], object]],
        count: int,
    ) -> None:
        """count: of the products that the row's figures are the time of one of."""
        sides = [plain, tuned] if row.is_tuned else [plain]
        times = microseconds([graph_of(calls) for calls in sides], row.floor * count)
        row.torch, row.tuned = times[0] / count, times[-1] / count
        self.add(row)

    def as_json(self) -> str:
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cublasLt": self.tuned.lt.version,
            "tuning_seconds": self.tuning_seconds,
        }
        return json.dumps(about | {"rows": [asdict(row) for row in self.rows]}, indent=1)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        tuned = f"{row.tuned:,.1f}" if row.is_tuned else "torch's"
        gain = f"{row.torch / row.tuned:.3f}" if row.is_tuned else "–"
        print(
            f"| {row.rows} | {row.layer} | {row.torch:,.1f} | {tuned} | {row.floor:,.1f} | {gain} "
            "|",
            flush=True,
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="16,32,64,128,256,1024,8192")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tuned_linear.py needs a CUDA device")
    bench, row_counts = Bench(), [int(rows) for rows in args.rows.split(",")]
    bench.tune(row_counts)
    print(f"tuning took {bench.tuning_seconds:.1f} s\n")
    print("| rows | layer | torch, µs | tuned | floor | torch / tuned |\n|---|---|---|---|---|---|")
    for rows in row_counts:
        bench.measure(rows)
        if args.output is not None:
            args.output.write_text(bench.as_json() + "\n")


if __name__ == "__main__":
    main()
