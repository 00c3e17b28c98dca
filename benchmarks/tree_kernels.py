"""The steps of a draft tree on one GPU, each in a CUDA graph, against plain torch and the floor.

    python -m benchmarks.tree_kernels [trees]

trees  5 steps of 8 beams, windows of 32 rows; see gpu_kernels.py for shapes and the floor"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_kernels import (
    BF16,
    CUDA,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    VOCAB,
    bound,
    read_us,
)
from benchmarks.harness.device_time import call_us
from benchmarks.harness.report import Options, Row, Subject, main, numbers, table

TOPK, STEPS, WINDOW = 8, 5, 32  # of the trees


def trees(options: Options) -> Iterator[Row]:
    for batch in (1, 8) if options.quick else (1, 4, 8, 32):
        for step, (calls, num_bytes) in tree_steps(batch).items():
            floor = read_us(num_bytes)
            yield {"step": step, "batch_size": batch, "floor": floor} | call_us(calls)


def tree_steps(batch: int) -> dict[str, tuple[dict[str, list[Callable[[], object]]], float]]:
    """The steps of one round: our calls and torch's, and the bytes that a call moves."""
    from tllm_spec.kernels.beam_pool import BeamPool
    from tllm_spec.kernels.draft_beams import (
        first_beams,
        grow,
        grow_reference,
        select,
        select_reference,
    )
    from tllm_spec.kernels.top_tokens import top_tokens, top_tokens_reference

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
        "torch": bound(lambda x: top_tokens_reference(x, TOPK), logits),
    }
    noisy = {
        "ours": bound(lambda x: top_tokens(x, TOPK, *coupled), logits),
        "torch": bound(lambda x: top_tokens_reference(x, TOPK, *coupled), logits),
    }
    return {
        "best tokens": (best, 2 * rows * VOCAB),
        "best tokens, coupled": (noisy, 2 * rows * VOCAB),
        "growth": (both(grow, grow_reference, pool, 1, beams, *children), 0),
        "selection of 31": (both(select, select_reference, pool, WINDOW - 1), 0),
        "selection of 63": (both(select, select_reference, pool, 63), 0),
        "acceptance": (both(*accept_sides(batch)), 0),
        "KV of 5 tokens": move_sides(batch),
    }


def accept_sides(batch: int) -> tuple[Any, ...]:
    """Two ways of `accept_trees`, and the arguments."""
    from tllm_spec.kernels.slot_tables import SlotTables
    from tllm_spec.kernels.slot_trees import accept_trees, accept_trees_reference

    slots = torch.arange(batch, device=CUDA)
    window = torch.zeros(batch, WINDOW, dtype=torch.int64, device=CUDA)
    tables = SlotTables(slots.clone(), window, slots.clone(), slots.clone())
    parents = (torch.arange(WINDOW, device=CUDA) // 2 - 1).expand(batch, WINDOW).clone()
    parents[:, 1] = 0
    return (accept_trees, accept_trees_reference, tables, parents, slots, slots.clone(),
            window.clone(), STEPS)  # fmt: skip


def move_sides(batch: int) -> tuple[dict[str, list[Callable[[], object]]], float]:
    from tllm_spec.kernels.move_kv import move_kv, move_kv_reference

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
        "torch": bound(lambda pool: move_kv_reference(pool, *where), pools),
    }
    return sides, batch * STEPS * 2 * 2 * LAYERS * 2 * KV_HEADS * HEAD_DIM


def trees_table(rows: Sequence[Row]) -> list[str]:
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        own = [row for row in rows if row["step"] == step]
        columns = [[row[key] for row in own] for key in ("ours", "torch", "floor")]
        lines.append([step, *map(numbers, columns)])
    by_batch = f"µs, with {' / '.join(map(str, sizes))} requests"
    return table((by_batch, "ours", "torch", "floor"), lines)


SUBJECTS = (Subject("trees", "Steps of draft trees", trees, trees_table, needs_cuda=True),)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
