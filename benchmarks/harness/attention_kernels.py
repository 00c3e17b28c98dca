"""Attention of query windows and of draft trees, and the steps of a draft tree, each in a CUDA
graph; parts of gpu_kernels.py."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
TOPK, STEPS, WINDOW = 8, 5, 32  # of trees


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


def tree_steps(options: Options) -> Iterator[Row]:
    for batch in (1, 8) if options.quick else (1, 4, 8, 32):
        for step, (calls, num_bytes) in sides_of(batch).items():
            floor = read_us(num_bytes)
            yield {"step": step, "batch_size": batch, "floor": floor} | call_us(calls)


def sides_of(batch: int) -> dict[str, tuple[dict[str, list[Callable[[], object]]], float]]:
    """The steps of one round: our calls and torch's, and the bytes that a call moves."""
    from tllm_spec.kernels.beam_pool import BeamPool
    from tllm_spec.kernels.draft_beams import first_beams, grow, select
    from tllm_spec.kernels.top_tokens import top_tokens

    rows = batch * TOPK
    count = max(2, min(20, (200 << 20) // (rows * VOCAB * 2)))
    logits = [(torch.randn(rows, VOCAB, device=CUDA) * 3).to(BF16) for _ in range(count)]
    seeds = torch.arange(batch, device=CUDA)
    coupled = (None, torch.full((batch,), 0.8, device=CUDA), seeds, seeds)
    pool = BeamPool.allocate(batch, TOPK, STEPS, torch.device(CUDA))
    pool.scores.uniform_()
    pool.tokens.zero_()
    probs, tokens = top_tokens(logits[0], TOPK)
    children = probs.view(batch, TOPK, TOPK), tokens.view(batch, TOPK, TOPK)
    beams = first_beams(pool, children[0][:, 0].contiguous(), children[1][:, 0].contiguous())
    for step in range(1, STEPS - 1):
        grow(pool, step, beams, *children)

    def both(
        ours: Callable[..., object], torch_ops: Callable[..., object], *arguments: object
    ) -> dict[str, list[Callable[[], object]]]:
        return {
            "ours": [lambda: ours(*arguments)] * 20,
            "torch": [lambda: torch_ops(*arguments)] * 20,
        }

    best = {
        "ours": bound(lambda x: top_tokens(x, TOPK), logits),
        "torch": bound(lambda x: top_tokens.reference(x, TOPK), logits),
    }
    noisy = {
        "ours": bound(lambda x: top_tokens(x, TOPK, *coupled), logits),
        "torch": bound(lambda x: top_tokens.reference(x, TOPK, *coupled), logits),
    }
    return {
        "best tokens": (best, 2 * rows * VOCAB),
        "best tokens, coupled": (noisy, 2 * rows * VOCAB),
        "growth": (both(grow, grow.reference, pool, 1, beams, *children), 0),
        "selection of 31": (both(select, select.reference, pool, WINDOW - 1), 0),
        "selection of 63": (both(select, select.reference, pool, 63), 0),
        "acceptance": (both(*accept_sides(batch)), 0),
        "KV of 5 tokens": move_sides(batch),
    }


def accept_sides(batch: int) -> tuple[Any, ...]:
    """Two ways of `accept_trees`, and the arguments."""
    from tllm_spec.kernels.slot_tables import SlotTables
    from tllm_spec.kernels.slot_trees import accept_trees

    slots = torch.arange(batch, device=CUDA)
    window = torch.zeros(batch, WINDOW, dtype=torch.int64, device=CUDA)
    tables = SlotTables(slots.clone(), window, slots.clone(), slots.clone())
    parents = (torch.arange(WINDOW, device=CUDA) // 2 - 1).expand(batch, WINDOW).clone()
    parents[:, 1] = 0
    return (accept_trees, accept_trees.reference, tables, parents, slots, slots.clone(),
            window.clone(), STEPS)  # fmt: skip


def move_sides(batch: int) -> tuple[dict[str, list[Callable[[], object]]], float]:
    from tllm_spec.kernels.move_kv import move_kv

    pages = 4
    shape = (2 * LAYERS, batch * pages + 1, PAGE_SIZE, KV_HEADS * HEAD_DIM)
    pools = [torch.zeros(shape, dtype=BF16, device=CUDA) for _ in range(4)]
    tables = torch.arange(1, batch * pages + 1, dtype=torch.int32, device=CUDA).view(batch, pages)
    first = torch.full((batch,), 50, device=CUDA)
    rows = torch.tensor([0, 2, 5, 9, 17, 30], device=CUDA).repeat(batch, 1)
    lens = torch.full((batch,), STEPS + 1, device=CUDA)
    where = tables, first, rows, lens
    sides = {
        "ours": bound(lambda pool: move_kv(pool, *where), pools),
        "torch": bound(lambda pool: move_kv.reference(pool, *where), pools),
    }
    return sides, batch * STEPS * 2 * 2 * LAYERS * 2 * KV_HEADS * HEAD_DIM


def steps_table(rows: Sequence[Row]) -> list[str]:
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        own = [row for row in rows if row["step"] == step]
        columns = [[row[key] for row in own] for key in ("ours", "torch", "floor")]
        lines.append([step, *map(numbers, columns)])
    by_batch = f"µs, with {' / '.join(map(str, sizes))} requests"
    return table((by_batch, "ours", "torch", "floor"), lines)
