"""Rounds over an FP8 KV cache, next to the same model with a cache of 16 bits.

    python -m benchmarks.fp8_kv [plain] [eagle3]

plain   plain rounds
eagle3  EAGLE-3 with 3 drafts, whose head is bf16

An 8B model with FP8 weights and activations, random weights, requests of 4,200 tokens, greedy,
synthetic acceptance. Both sides of a row are engines of one run. `prefill` is milliseconds for 8
prompts of 1,024 tokens and for 2 of 4,096. `--quick` has the largest batch only, `--device cpu`
takes tiny shapes: shows that it runs."""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8 import BY_TOKEN, DRAFT_LEN, ROUNDS, TIMINGS, TINY_EAGLE3, TINY_LLAMA
from benchmarks.harness.engine import Rounds, release
from benchmarks.harness.models import EAGLE3_8B, LLAMA_8B, RATES
from benchmarks.harness.report import Options, Row, Subject, main, number, table

CONTEXT, SIZES, PROMPTS = 4200, (1, 8, 64), ((8, 1024), (2, 4096))
TINY_CONTEXT, TINY_SIZES, TINY_PROMPTS = 40, (1, 2), ((2, 16),)


def compared(has_head: bool, options: Options) -> Iterator[Row]:
    sides = [measured(dtype, has_head, options) for dtype in ("model", "fp8")]
    for what in sides[0]:
        yield {"what": what, "wide": sides[0][what], "fp8": sides[1][what]}


def measured(dtype: str, has_head: bool, options: Options) -> dict[str, float]:
    """Milliseconds of a round by batch size, of prefills, and KiB of a token's keys and values."""
    is_full = options.device == "cuda"
    sizes, context = (SIZES, CONTEXT) if is_full else (TINY_SIZES, TINY_CONTEXT)
    with tempfile.TemporaryDirectory() as name:
        engine = built(Path(name), dtype, has_head, sizes[-1:] if options.quick else sizes, options)
    found: dict[str, float] = {}
    for batch_size in sizes[-1:] if options.quick else sizes:
        engine.start(batch_size, context)
        timings = (engine.timed(ROUNDS if is_full else 3) for _ in range(TIMINGS))
        found[f"batch {batch_size}, ms"] = statistics.median(each.round_ms for each in timings)
        engine.stop()
    for prompts in PROMPTS if is_full else TINY_PROMPTS:
        engine.prompts_ms(*prompts)  # compiles
        times = [engine.prompts_ms(*prompts) for _ in range(TIMINGS)]
        found[f"prefill {prompts[0]} x {prompts[1]:,}, ms"] = statistics.median(times)
    found["KiB a token"] = engine.executor.parts.kv.state()["bytes_per_token"] / 1024
    del engine
    release()
    return found


def built(
    folder: Path, dtype: str, has_head: bool, sizes: Sequence[int], options: Options
) -> Rounds:
    is_full = options.device == "cuda"
    target = (LLAMA_8B if is_full else TINY_LLAMA) | {"quantization_config": BY_TOKEN}
    head = EAGLE3_8B if is_full else TINY_EAGLE3
    for part, config in (("target", target), ("draft", head)):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    eagle3 = {
        "decoding_type": "Eagle3",
        "speculative_model": str(folder / "draft"),
        "load_format": "dummy",
        "max_draft_len": DRAFT_LEN,
        "synthetic_acceptance_rates": RATES[:DRAFT_LEN],
    }
    room = 512 * (1 + DRAFT_LEN * has_head)
    cache: dict[str, Any] = {"enable_block_reuse": False, "dtype": dtype}
    return Rounds(
        str(folder / "target"),
        max_batch_size=sizes[-1],
        max_seq_len=(CONTEXT if is_full else TINY_CONTEXT) + room,
        device=options.device,
        load_format="dummy",
        kv_cache_config=cache
        | {"max_tokens": sizes[-1] * (CONTEXT + room + 128) if is_full else 8192},
        cuda_graph_config={"batch_sizes": list(sizes)} if is_full else None,
        speculative_config=eagle3 if has_head else None,
    )


def compared_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [row["what"], number(row["wide"]), number(row["fp8"]), f"{row['fp8'] / row['wide']:.2f}"]
        for row in rows
    ]
    return table(("", "16-bit cache", "FP8 cache", "FP8 / 16 bits"), lines)


SUBJECTS = (
    Subject("plain", "8B, plain rounds", partial(compared, False), compared_table),
    Subject("eagle3", f"8B, EAGLE-3 K={DRAFT_LEN}", partial(compared, True), compared_table),
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
