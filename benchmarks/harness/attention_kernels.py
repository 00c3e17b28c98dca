"""Attention of query windows and of draft trees, in a CUDA graph; parts of gpu_kernels.py."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from benchmarks.harness.device_time import call_us
from benchmarks.harness.models import READ_BYTES_PER_S
from benchmarks.harness.report import Options, Row, number, numbers, table

if TYPE_CHECKING:
    from tllm_spec.kernels.tree_mask import TreeMask

LAYERS, VOCAB, CUDA, BF16 = 32, 128256, "cuda", torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 32
CASES = ((1, 1050), (8, 1050), (64, 1050), (1, 8192), (32, 1050), (64, 1250), (96, 1050),
         (16, 4096), (32, 4200), (64, 4200))  # fmt: skip
WINDOWS = (1, 4, 8)
# Rows, and earlier keys of the tree's region.
TREES = ((8, 0), (16, 0), (32, 0), (64, 0), (8, 24))
TREE_CASES = tuple((batch, context) for context in (1024, 8192) for batch in (1, 8, 32))
MAX_TREE_RATIO = 1.15


def read_us(num_bytes: float) -> float:
    return num_bytes / READ_BYTES_PER_S * 1e6


def bound(
    call: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor]
) -> list[Callable[[], object]]:
    return [lambda value=value: call(value) for value in inputs]


def attention(options: Options) -> Iterator[Row]:
    for batch_size, context in CASES[: 4 if options.quick else None]:
        pools, tables = paged_cache(batch_size, context)
        floor = read_us(batch_size * context * 2 * KV_HEADS * HEAD_DIM * 2)
        for window in WINDOWS:
            us = call_us({"ours": window_calls(pools, tables, context, window)})["ours"]
            yield {
                "batch_size": batch_size, "context": context, "window": window, "us": us,
                "floor": floor,
            }  # fmt: skip


def paged_cache(batch_size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layers' pools, and block tables with room for 16 pages more."""
    pages = -(-context // PAGE_SIZE)
    num_pages = batch_size * pages + 1
    shape = (LAYERS, 2, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pools = torch.empty(shape, dtype=BF16, device=CUDA).normal_()
    tables = torch.zeros(batch_size, pages + 16, dtype=torch.int32, device=CUDA)
    order = torch.randperm(num_pages - 1, device=CUDA) + 1
    tables[:, :pages] = order.view(batch_size, pages).to(torch.int32)
    return pools, tables


def window_calls(
    pools: torch.Tensor,
    tables: torch.Tensor,
    context: int,
    window: int,
    tree: "TreeMask | None" = None,
) -> list[Callable[[], object]]:
    """One call for each layer: norm and rotary embedding, the KV write, and attention."""
    from tllm_spec.kernels.round_rows import RoundRows
    from tllm_spec.kernels.window_attention import WindowTables, window_attention
    from tllm_spec.kernels.window_splits import WindowWorkspace

    batch_size = tables.shape[0]
    rows = RoundRows.rectangle(batch_size, window)
    shape = (batch_size * window, HEADS + 2 * KV_HEADS, HEAD_DIM)
    qkv = torch.randn(shape, device=CUDA).to(BF16)
    cos_sin = torch.randn(batch_size * window, 2, 1, HEAD_DIM, device=CUDA).to(BF16)
    positions = context - window + torch.arange(window, device=CUDA)
    slots = tables[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device=CUDA)
    places = WindowTables(rows, tables, lengths, slots.flatten(), tree=tree)
    workspace = WindowWorkspace.allocate(HEAD_DIM, torch.device(CUDA))

    def call(pool: torch.Tensor) -> Callable[[], object]:
        return lambda: window_attention(qkv, cos_sin, pool, places, HEAD_DIM**-0.5, workspace)

    return [call(pool) for pool in pools]


def tree_attention(options: Options) -> Iterator[Row]:
    from tllm_spec.kernels.tree_mask import TreeMask

    for batch_size, context in TREE_CASES[: 2 if options.quick else None]:
        pools, tables = paged_cache(batch_size, context)
        for window, offset in TREES:
            bits = torch.tensor(random_bits(offset + window)[offset:], device=CUDA)
            mask = TreeMask(bits.repeat(batch_size, 1), offset + window)
            sides = {
                "chain": window_calls(pools, tables, context, window),
                "tree": window_calls(pools, tables, context, window, mask),
            }
            case = {"batch_size": batch_size, "context": context, "rows": window}
            yield case | {"offset": offset} | call_us(sides)


def random_bits(num_nodes: int) -> list[int]:
    """Of each node of a random tree: itself and its ancestors, as an int64."""
    bits: list[int] = []
    for node in range(num_nodes):
        parent = bits[int(torch.randint(node, ()))] if node else 0
        bits.append(parent + ((1 << node) if node < 63 else -(1 << 63)))
    return bits


def tree_attention_table(rows: Sequence[Row]) -> list[str]:
    cases = list(dict.fromkeys((row["batch_size"], row["context"]) for row in rows))
    titles = ("µs tree / chain, by requests x context", *(f"{b} x {c:,}" for b, c in cases))
    lines: dict[str, list[str]] = {}
    for row in rows:
        step = f" after {row['offset']} keys of earlier steps" if row["offset"] else ""
        own = lines.setdefault(f"{row['rows']} rows{step}", [])
        own.append(numbers((row["tree"], row["chain"])))
    worst = max(row["tree"] / row["chain"] for row in rows)
    last = ["worst ratio", f"{worst:.3f} (bar {MAX_TREE_RATIO})", *[""] * (len(cases) - 1)]
    return table(titles, [*([name, *cells] for name, cells in lines.items()), last])


def attention_table(rows: Sequence[Row]) -> list[str]:
    cases = list(dict.fromkeys((row["batch_size"], row["context"]) for row in rows))
    us = {(row["batch_size"], row["context"], row["window"]): row["us"] for row in rows}
    floors = {(row["batch_size"], row["context"]): row["floor"] for row in rows}
    titles = ("µs, by requests x context", *(f"{size} x {context:,}" for size, context in cases))
    lines = [[f"window of {w}", *(number(us[(*case, w)]) for case in cases)] for w in WINDOWS]
    return table(titles, [*lines, ["floor", *(number(floors[case]) for case in cases)]])
