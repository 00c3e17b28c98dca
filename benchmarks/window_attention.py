"""Attention of generation windows, layer after layer in one CUDA graph: its time beside what it has
to read.

    python benchmarks/window_attention.py [--cases 1x1050,8x1050,64x1050,64x1250] [--windows 1,4]
    [--output result.json] python benchmarks/window_attention.py --device cpu --layers 2 --cases
    2x40 --windows 3   # shows that it runs

Heads of an 8B Llama in bfloat16: 32 of queries, 8 of keys and values, 128 wide; pages of 32 tokens
in random order. A case is requests x tokens each; every layer has a pool of its own, so that no
cache has the keys already. The floor is reading keys and values once at 4.45 TB/s. Launches follow
each other directly, so a layer's first reads overlap the attention before it; in an engine they
overlap a projection, which leaves less room beside it. On a CPU the plain-torch reference runs, and
its time means nothing."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from driven_rounds import synchronize
from model_shapes import READ_BYTES_PER_S

from tllm_spec.kernels.window_attention import WindowPlaces, window_attention
from tllm_spec.kernels.window_splits import WindowWorkspace

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 32
ROOM = 512  # tokens that the block table has pages for beyond the context
RUNS, REPEATS = 10, 5


@dataclass(frozen=True)
class Row:
    """Microseconds of one layer."""

    batch_size: int
    context: int
    window: int
    measured: float
    floor: float


class Layers:
    """The pools of some layers, and requests of equal length on shuffled pages."""

    def __init__(
        self, batch_size: int, context: int, num_layers: int, device: torch.device
    ) -> None:
        self.batch_size, self.context, self.device = batch_size, context, device
        pages = -(-context // PAGE_SIZE)
        num_pages = batch_size * pages + 1
        shape = (num_layers, 2, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.pools = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.tables = torch.zeros(
            batch_size, pages + ROOM // PAGE_SIZE, dtype=torch.int32, device=device
        )
        order = torch.randperm(num_pages - 1, device=device) + 1
        self.tables[:, :pages] = order.view(batch_size, pages).to(torch.int32)

    def measure(self, window: int) -> Row:
        batch_size, device = self.batch_size, self.device
        rows = batch_size * window
        qkv = torch.randn(
            batch_size, window, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device
        ).bfloat16()
        turns = torch.randn(rows, 2, 1, HEAD_DIM, device=device).bfloat16()
        positions = self.context - window + torch.arange(window, device=device)
        slots = self.tables[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        lengths = torch.full((batch_size,), self.context, dtype=torch.int32, device=device)
        places = WindowPlaces(self.tables, lengths, slots.flatten())
        workspace = WindowWorkspace.allocate(HEAD_DIM, device)

        def all_layers() -> None:
            for layer in self.pools:
                window_attention(qkv, turns, layer, places, HEAD_DIM**-0.5, workspace)

        seconds = seconds_of(captured(all_layers) if device.type == "cuda" else all_layers)
        num_bytes = batch_size * self.context * 2 * KV_HEADS * HEAD_DIM * self.pools.element_size()
        floor = num_bytes / READ_BYTES_PER_S * 1e6
        return Row(batch_size, self.context, window, seconds / len(self.pools) * 1e6, floor)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds_of(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        synchronize()
        start = time.perf_counter()
        for _ in range(RUNS):
            call()
        synchronize()
        times.append((time.perf_counter() - start) / RUNS)
    return statistics.median(times)


def table_line(row: Row) -> str:
    case = f"| {row.batch_size} | {row.context} | {row.window} "
    return f"{case}| {row.measured:.1f} | {row.floor:.1f} | {row.measured / row.floor:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default="1x1050,8x1050,32x1050,64x1050,64x1250,96x1050,1x8192,16x4096,32x4200,64x4200",
    )
    parser.add_argument("--windows", default="1,4,8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    print(
        "| batch | context | window | µs | floor µs | times the floor |\n|---|---|---|---|---|---|"
    )
    for case in args.cases.split(","):
        batch_size, context = map(int, case.split("x"))
        layers = Layers(batch_size, context, args.layers, torch.device(args.device))
        for window in map(int, args.windows.split(",")):
            rows.append(layers.measure(window))
            print(table_line(rows[-1]), flush=True)
    if args.output is not None:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        result = {"device": name, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
