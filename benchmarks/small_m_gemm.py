"""Linear layers of few rows: our kernel with what it fuses against torch's products alone and with
the same ops around.

    python benchmarks/small_m_gemm.py [--output result.json]

Each figure is the time of one call inside a CUDA graph of 32 calls with weights of their own (an 8B
Llama's, so that no cache holds them), median of 10 replays. The floor reads the weights once at
4.45 TB/s."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tllm_spec.kernels.rms_norm import rms_norm
from tllm_spec.kernels.silu_and_mul import silu_and_mul
from tllm_spec.kernels.small_m_gemm import NormWeight, small_m_gemm

NUM_LAYERS, REPLAYS, BYTES_A_US = 32, 10, 4.45e6
SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
NORMED = ("qkv", "gate_up")


@dataclass
class Row:
    """Microseconds of a call."""

    layer: str
    rows: int
    ours: float
    product: float
    product_and_ops: float
    floor: float


def microseconds(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    def run() -> None:
        for weight in weights:
            call(weight)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times[2:])


def measure(layer: str, rows: int, weights: list[torch.Tensor]) -> Row:
    in_features, out_features = SHAPES[layer]
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    norm = NormWeight(torch.ones(in_features, device="cuda", dtype=torch.bfloat16), 1e-5)
    total = torch.zeros(rows, out_features, device="cuda", dtype=torch.bfloat16)

    def ours(weight: torch.Tensor) -> object:
        if layer in NORMED:
            return small_m_gemm(x, weight, norm=norm, gated=layer == "gate_up")
        return small_m_gemm(x, weight, add_to=total)

    def product_and_ops(weight: torch.Tensor) -> object:
        if layer not in NORMED:
            return total.addmm_(x, weight.t())
        output = F.linear(rms_norm(x, norm.weight, norm.eps), weight)
        return silu_and_mul(output) if layer == "gate_up" else output

    floor = in_features * out_features * 2 / BYTES_A_US
    calls = (ours, lambda weight: F.linear(x, weight), product_and_ops)
    return Row(layer, rows, *(microseconds(call, weights) for call in calls), floor)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("small_m_gemm.py needs a CUDA device")
    found: list[Row] = []
    print(
        "| layer | rows | ours, fused, µs | product alone | product and ops | floor | ours / floor "
        "|"
    )
    print("|---|---|---|---|---|---|---|")
    for layer, (in_features, out_features) in SHAPES.items():
        weights = [
            torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
            / in_features**0.5
            for _ in range(NUM_LAYERS)
        ]
        for rows in map(int, args.rows.split(",")):
            row = measure(layer, rows, weights)
            found.append(row)
            times = (
                f"{row.ours:.1f} | {row.product:.1f} | {row.product_and_ops:.1f} | {row.floor:.1f}"
            )
            print(f"| {layer} | {rows} | {times} | {row.ours / row.floor:.2f} |", flush=True)
    if args.output is not None:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.output.write_text(
            json.dumps(result | {"rows": [asdict(row) for row in found]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
