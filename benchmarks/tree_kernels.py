"""The steps of a draft tree on one GPU, each in a CUDA graph, against plain torch and the floor.

    python -m benchmarks.tree_kernels [trees] [splits]

trees   5 steps of 8 beams, windows of 32 rows; see gpu_kernels.py for shapes and the floor
splits  attention of wide windows by number of splits of the keys, the chosen one marked"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_kernels import (
    BF16,
    CUDA,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    TREE_CASES,
    VOCAB,
    bound,
    paged_cache,
    read_us,
    window_calls,
)
from benchmarks.harness.device_time import call_us
from benchmarks.harness.report import Options, Row, Subject, main, number, numbers, table

TOPK, STEPS, WINDOW = 8, 5, 32  # of the trees
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


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
        select,
    )
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


def trees_table(rows: Sequence[Row]) -> list[str]:
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        own = [row for row in rows if row["step"] == step]
        columns = [[row[key] for row in own] for key in ("ours", "torch", "floor")]
        lines.append([step, *map(numbers, columns)])
    by_batch = f"µs, with {' / '.join(map(str, sizes))} requests"
    return table((by_batch, "ours", "torch", "floor"), lines)


def splits(options: Options) -> Iterator[Row]:
    from tllm_spec.kernels.window_splits import (
        MAX_PARTIAL_ROWS,
        MIN_KEYS_PER_SPLIT,
        Splits,
        WindowWorkspace,
    )

    for (batch, context), rows in product(TREE_CASES[: 2 if options.quick else None], (16, 32, 64)):
        pools, tables = paged_cache(batch, context)
        case = {"batch_size": batch, "context": context, "rows": rows}
        number, us = chosen_splits(pools, tables, context, rows)
        yield case | {"splits": number, "us": us, "is_chosen": True}
        room = MAX_PARTIAL_ROWS // (batch * rows * HEADS)
        for count in (each for each in SPLITS if each <= room):
            forced = Splits(count, MIN_KEYS_PER_SPLIT, False, False)
            with mock.patch.object(WindowWorkspace, "splits", lambda *_, of=forced, **__: of):
                found = call_us({"us": window_calls(pools, tables, context, rows)})
            yield case | {"splits": count, "us": found["us"], "is_chosen": False}


def chosen_splits(
    pools: torch.Tensor, tables: torch.Tensor, context: int, rows: int
) -> tuple[int, float]:
    """The number of splits that a launch chooses, and its microseconds."""
    from tllm_spec.kernels.window_splits import Splits, WindowWorkspace

    chosen, choose = list[Splits](), WindowWorkspace.splits

    def noted(self: WindowWorkspace, *sizes: int, is_wide: bool = False) -> Splits:
        chosen.append(choose(self, *sizes, is_wide=is_wide))
        return chosen[-1]

    with mock.patch.object(WindowWorkspace, "splits", noted):
        us = call_us({"us": window_calls(pools, tables, context, rows)})["us"]
    return chosen[-1].number, us


def splits_table(rows: Sequence[Row]) -> list[str]:
    cases = list(dict.fromkeys((r["batch_size"], r["context"], r["rows"]) for r in rows))
    lines = []
    for case in cases:
        own = [row for row in rows if (row["batch_size"], row["context"], row["rows"]) == case]
        us = {row["splits"]: row["us"] for row in own if not row["is_chosen"]}
        [chosen] = [f"{number(row['us'])} ({row['splits']})" for row in own if row["is_chosen"]]
        cells = [number(us.get(each)) for each in SPLITS]
        lines.append([f"{case[0]} x {case[1]:,}, {case[2]} rows", chosen, *cells])
    return table(("µs, by requests x context", "chosen", *map(str, SPLITS)), lines)


SUBJECTS = (
    Subject("trees", "Steps of draft trees", trees, trees_table, needs_cuda=True),
    Subject("splits", "Splits of wide windows", splits, splits_table, needs_cuda=True),
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
