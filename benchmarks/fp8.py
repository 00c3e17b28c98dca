"""Rounds of models with FP8 or 4-bit weights, next to the same models in bf16, and rounds over an
FP8 KV cache, next to one of 16 bits.

    python -m benchmarks.fp8 [llama-8b] [activations] [blocks] [int4] [cache] [qwen3-30b] [v3]

llama-8b     plain rounds, and EAGLE-3 with 3 drafts, whose head is bf16
activations  the same with activations in FP8, too, with one scale a token
blocks       the same with a scale for each 128 inputs of a token
int4         the same with weights of 4 bits in groups of 128, as AWQ has them
cache        the same with requests of 4,200 tokens; both sides have FP8 weights and activations
qwen3-30b    plain rounds of a model with 128 experts
v3           plain rounds of the DeepSeek-V3-style model, whose routers spread the tokens

Random weights, prompts of 1,024 tokens but for `cache`, greedy, synthetic acceptance; FP8 with
blocks of 128 x 128, and next to activations with one scale a token with one scale a row. The output
layer, the embedding and routers are bf16. Both sides of a row are engines of one run. `prefill` is
milliseconds for 8 prompts of 1,024 tokens. `--quick` measures the largest batch only. `--device
cpu` takes tiny shapes: shows that it runs."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.harness.dummy_models import (
    QWEN3_30B,
    TINY_EAGLE3,
    TINY_LLAMA,
    TINY_QWEN3,
    TINY_V3,
    V3_STYLE,
    dummy_engine,
)
from benchmarks.harness.engine import release
from benchmarks.harness.expert_rounds import SPREAD, set_bias
from benchmarks.harness.models import EAGLE3_8B, LLAMA_8B, Config
from benchmarks.harness.report import Options, Row, Subject, main, number, table

WEIGHTS_ONLY = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BY_TOKEN = {"quant_method": "fbgemm_fp8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
DRAFT_LEN, ROUNDS, TIMINGS = 3, 40, 3
NUM_PROMPTS, PROMPT_LEN = 8, 1024


@dataclass(frozen=True)
class Side:
    """One column: what it adds to the target's configuration, and to the options of the cache."""

    name: str
    config: Config = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)


Sides = tuple[Side, Side]


def compared(
    sides: Sides,
    full: Config,
    tiny: Config,
    heads: Sequence[Config | None],
    context: int,
    options: Options,
) -> Iterator[Row]:
    """`heads`: EAGLE-3 heads of the full shape; None: plain rounds."""
    is_full = options.device == "cuda"
    for head in heads:
        if head is not None and not is_full:
            head = TINY_EAGLE3
        found = [
            measured(side, full if is_full else tiny, head, context, options) for side in sides
        ]
        drafting = "plain" if head is None else f"EAGLE-3 K={DRAFT_LEN}"
        for what in found[0]:
            values = {side.name.lower(): own[what] for side, own in zip(sides, found, strict=True)}
            yield {"drafting": drafting, "what": what} | values


def measured(
    side: Side, target: Config, head: Config | None, context: int, options: Options
) -> dict[str, float]:
    """Milliseconds of a round by batch size, of a prefill, and GiB of weights."""
    is_full = options.device == "cuda"
    sizes, prompt_len = ((1, 8, 64), PROMPT_LEN) if is_full else ((1, 2), 16)
    length = context if is_full else prompt_len
    if options.quick and is_full:
        sizes = sizes[-1:]
    cache = {"enable_block_reuse": False} | ({} if is_full else {"max_tokens": 8192})
    engine = dummy_engine(
        target | side.config,
        batch_sizes=sizes,
        prompt_len=length,
        device=options.device,
        speculation=None if head is None else {"max_draft_len": DRAFT_LEN},
        head=head,
        kv_cache_config=cache | side.cache,
    )
    if "n_routed_experts" in target:
        set_bias(engine, SPREAD)
    found: dict[str, float] = {}
    for batch_size in sizes:
        engine.start(batch_size, length)
        timings = (engine.timed(ROUNDS if is_full else 3) for _ in range(TIMINGS))
        found[f"batch {batch_size}, ms"] = statistics.median(each.round_ms for each in timings)
        engine.stop()
    prompts = min(NUM_PROMPTS, sizes[-1])
    engine.prompts_ms(prompts, prompt_len)  # compiles
    times = [engine.prompts_ms(prompts, prompt_len) for _ in range(TIMINGS)]
    found["prefill, ms"] = statistics.median(times)
    found["weights, GiB"] = engine.executor.parts.ranks[0]["weight_bytes"] / 2**30
    del engine
    release()
    return found


def compared_table(rows: Sequence[Row], sides: Sides) -> list[str]:
    names = [side.name for side in sides]
    lines = []
    for row in rows:
        first, second = (row[name.lower()] for name in names)
        times = number(first), number(second), f"{second / first:.2f}"
        lines.append([row["drafting"], row["what"], *times])
    return table(("", "", *names, f"{names[1]} / {names[0]}"), lines)


def subject(
    name: str,
    title: str,
    *shapes: Any,
    quantization: Config = BLOCKS,
    column: str = "FP8",
    sides: Sides | None = None,
    context: int = PROMPT_LEN,
) -> Subject:
    sides = sides or (Side("bf16"), Side(column, {"quantization_config": quantization}))
    run = partial(compared, sides, *shapes, context)
    return Subject(name, title, run, partial(compared_table, sides=sides))


OF_8B = (LLAMA_8B, TINY_LLAMA, (None, EAGLE3_8B))
IN_FP8: Config = {"quantization_config": BY_TOKEN}
CACHES = (
    Side("16-bit cache", IN_FP8, {"dtype": "model"}),
    Side("FP8 cache", IN_FP8, {"dtype": "fp8"}),
)
SUBJECTS = (
    subject("llama-8b", "8B in FP8", *OF_8B, quantization=WEIGHTS_ONLY),
    subject("activations", "8B with activations in FP8", *OF_8B, quantization=BY_TOKEN),
    subject("blocks", "8B with activations in FP8 in blocks", *OF_8B),
    subject("int4", "8B in 4 bits", *OF_8B, quantization=AWQ, column="INT4"),
    subject("cache", "8B over an FP8 cache", *OF_8B, sides=CACHES, context=4200),
    subject("qwen3-30b", "Qwen3 30B-A3B in FP8", QWEN3_30B, TINY_QWEN3, (None,)),
    subject("v3", "V3-style in FP8", V3_STYLE, TINY_V3, (None,)),
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
