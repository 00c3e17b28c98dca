"""Rounds of models with FP8 or 4-bit weights, next to the same models in bf16, rounds over an FP8
KV cache, next to one of 16 bits, and the GEMMs alone with their floors.

    python -m benchmarks.fp8 [llama-8b] [activations] [blocks] [int4] [cache] [qwen3-30b]
        [qwen3-30b-int4] [v3] [flips] [linear] [linear-int4] [experts]

llama-8b     plain rounds, and EAGLE-3 with 3 drafts, whose head is bf16
activations  the same with activations in FP8, too, with one scale a token
blocks       the same with a scale for each 128 inputs of a token
int4         the same with weights of 4 bits in groups of 128, as AWQ has them
cache        the same with requests of 4,200 tokens; both sides have FP8 weights and activations
qwen3-30b    plain rounds of a model with 128 experts, in FP8 with blocks, or with `-int4` in 4 bits
v3           plain rounds of the DeepSeek-V3-style model, whose routers spread the tokens
flips        after how many tokens a text of the zoo's model differs, if its rounds have
             other requests, or drafts
linear       GEMMs of an 8B Llama's layers with FP8 weights: activations in bf16; for many rows also
             slices of weights that are dequantised before torch multiplies them; activations in
             FP8, quantised with the norm before them, with one scale a token and with blocks
linear-int4  the same layers with weights of 4 bits in groups of 128: small_m_gemm for up to 8 rows,
             scaled_linear's kernel and slices
experts      the layers of Qwen3-30B-A3B's, DeepSeek V3's and gpt-oss-20b's experts with weights in
             FP8, with activations in FP8, too, and with weights of 4 bits

Random weights, prompts of 1,024 tokens but for `cache`, greedy, synthetic acceptance; FP8 with
blocks of 128 x 128, and next to activations with one scale a token with one scale a row. The output
layer, the embedding and routers are bf16. Both sides of a row are engines of one run. `prefill` is
milliseconds for 8 prompts of 1,024 tokens. `--quick` measures the largest batch only. `--device
cpu` takes tiny shapes: shows that it runs. Calls of GEMMs have weights or tokens of their own, so
that no cache holds the weights. Their floor reads the weights (of the experts that are hit) and
their scales once at 4.45 TB/s, or computes at 790 TFLOP/s."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import flips
from benchmarks.harness.device_time import call_us
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
from benchmarks.harness.models import EAGLE3_8B, LLAMA_8B, MATMUL_FLOPS, READ_BYTES_PER_S, Config
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.gemm.cublas_lt import CublasLt, shared_library
from tllm_spec.kernels.gemm.fp8_gemms import Fp8Gemms, tile_scales
from tllm_spec.kernels.gemm.fp8_linear import fp8_linear
from tllm_spec.kernels.gemm.fp8_numbers import quantise_rows
from tllm_spec.kernels.gemm.int4_weights import group_words
from tllm_spec.kernels.gemm.norms import NormWeight
from tllm_spec.kernels.gemm.scaled_linear import (
    BLOCK,
    multiply_slices,
    scaled_linear,
    slice_outputs,
)
from tllm_spec.kernels.gemm.small_m_gemm import MAX_ROWS, small_m_gemm
from tllm_spec.models.formats.quantisation import ActivationScales, FourBitGroups, Quantisation
from tllm_spec.models.layers import Placement
from tllm_spec.models.moe import Experts
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.models.weights import fill_random

WEIGHTS_ONLY = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BY_TOKEN = {"quant_method": "fbgemm_fp8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
DRAFT_LEN, ROUNDS, TIMINGS = 3, 40, 3
NUM_PROMPTS, PROMPT_LEN = 8, 1024
CUDA, BF16, FP8 = "cuda", torch.bfloat16, torch.float8_e4m3fn
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS, SLICED_FROM = (1, 4, 8, 32, 64, 128, 256, 2048, 8192), 64
EXPERTS = {
    "Qwen3-30B-A3B": MoEConfig(2048, 128, 8, 768),
    "DeepSeek V3": MoEConfig(7168, 256, 8, 2048),
    "gpt-oss-20b": MoEConfig(2880, 32, 4, 2880),
}
TOKENS, TURNS = (1, 8, 64, 256, 8192), 4
PLAIN = Placement(torch.bfloat16, torch.device("cuda"), SINGLE_RANK)
BY_COLUMN = {
    "FP8": replace(PLAIN, quantised=Quantisation("block")),
    "activations": replace(PLAIN, quantised=Quantisation("row", ActivationScales())),
    "blocks": replace(PLAIN, quantised=Quantisation("block", ActivationScales("block"))),
    "int4": replace(PLAIN, quantised=Quantisation(four_bit=FourBitGroups(BLOCK))),
    "mxfp4": replace(PLAIN, quantised=Quantisation(four_bit=FourBitGroups(32, is_float=True))),
    "bf16": PLAIN,
}
WEIGHTS_BYTES = 512 << 20  # of a call's side together: more than the L2 cache holds
Pair = tuple[torch.Tensor, torch.Tensor]


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


def quantised(weight: torch.Tensor) -> Pair:
    """The weight in FP8, and scales that are one."""
    shape = (*weight.shape[:-1], -(-weight.shape[-1] // BLOCK))
    return weight.to(FP8), torch.ones(shape, device=CUDA)


def floor_us(num_weights: float, rows_per_weight: float, bits: int = 8) -> float:
    num_bytes, flops = num_weights * (bits / 8 + 4 / BLOCK), 2 * num_weights * rows_per_weight
    return max(num_bytes / READ_BYTES_PER_S, flops / MATMUL_FLOPS) * 1e6


def linear(options: Options) -> Iterator[Row]:
    library = shared_library()
    assert library is not None
    gemms = Fp8Gemms(CublasLt(library, torch.device(CUDA)))
    for name, shape in SHAPES.items():
        count = max(2, WEIGHTS_BYTES // (shape[0] * shape[1]))
        weights = [torch.empty(shape, dtype=BF16, device=CUDA).normal_() for _ in range(count)]
        scaled = [quantised(weight) for weight in weights]
        tiles = tile_scales(scaled[0][1])
        for rows in (1, 8, 256) if options.quick else ROWS:
            x = torch.randn(rows, shape[1], device=CUDA, dtype=BF16)
            sides: dict[str, list[Callable[[], object]]] = {
                "FP8": [partial(scaled_linear, x, *pair) for pair in scaled],
                "bf16": [partial(F.linear, x, weight) for weight in weights],
            }
            norm = NormWeight(torch.ones(shape[1], device=CUDA, dtype=BF16), 1e-5)
            sides["activations"] = [
                partial(in_fp8, x, norm, weight, scales[:, :1].contiguous(), None, gemms)
                for weight, scales in scaled
            ]
            sides["blocks"] = [
                partial(in_fp8, x, norm, weight, scales.t().contiguous().t(), tiles, gemms)
                for weight, scales in scaled
            ]
            if rows >= SLICED_FROM:
                sides["slices"] = [partial(sliced, x, *pair) for pair in scaled]
            floor = floor_us(shape[0] * shape[1], rows)
            yield {"layer": name, "rows": rows, "floor": floor} | call_us(sides)
        del weights, scaled, sides


def linear_int4(options: Options) -> Iterator[Row]:
    for name, (features, inputs) in SHAPES.items():
        count = max(2, 2 * WEIGHTS_BYTES // (features * inputs))
        weights = [
            torch.empty(features, inputs, dtype=BF16, device=CUDA).normal_()
            for _ in range(max(2, count // 4))
        ]
        packed = [codes(features, inputs) for _ in range(count)]
        for rows in (1, 8, 256) if options.quick else ROWS:
            x = torch.randn(rows, inputs, device=CUDA, dtype=BF16)
            sides: dict[str, list[Callable[[], object]]] = {
                "kernel": [partial(scaled_linear, x, *each, group=BLOCK) for each in packed],
                "bf16": [partial(F.linear, x, weight) for weight in weights],
            }
            if rows <= MAX_ROWS:
                sides["few rows"] = [
                    partial(small_m_gemm, x, weight, scales=words, group=BLOCK)
                    for weight, words in packed
                ]
            if rows >= SLICED_FROM:
                sides["slices"] = [partial(sliced, x, *each, BLOCK) for each in packed]
            yield {
                "layer": name, "rows": rows, "floor": floor_us(features * inputs, rows, 4)
            } | call_us(sides)  # fmt: skip
        del weights, packed, sides


def codes(features: int, inputs: int) -> Pair:
    """A random weight of 4 bits, and words for each BLOCK inputs."""
    stored = torch.randint(0, 256, (features, inputs // 2), device=CUDA, dtype=torch.uint8)
    scales = torch.rand(features, inputs // BLOCK, device=CUDA)
    return stored, group_words(scales, torch.full_like(scales, 8))


def in_fp8(
    x: torch.Tensor,
    norm: NormWeight,
    weight: torch.Tensor,
    scales: torch.Tensor,
    tiles: torch.Tensor | None,
    gemms: Fp8Gemms,
) -> torch.Tensor:
    codes = quantise_rows(x, norm, in_blocks=scales.shape[1] > 1)
    output = x.new_empty(len(x), len(weight))
    if gemms.run(*codes, weight, scales, tiles, None, output, adds=False):
        return output
    return fp8_linear(*codes, weight, scales, x.dtype)


def sliced(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, group: int = 0
) -> torch.Tensor:
    output = x.new_empty(len(x), len(weight))
    size = slice_outputs(len(x), len(weight), x.shape[1], has_sums=False)
    multiply_slices(x, weight, scales, None, output, size, adds=False, group=group)
    return output


def experts(options: Options) -> Iterator[Row]:
    for name, config in EXPERTS.items():
        layers = {}
        for column, placement in BY_COLUMN.items():
            layers[column] = Experts(config, placement)
            fill_random(layers[column])
        for tokens in (1, 64) if options.quick else TOKENS:
            calls: dict[str, list[Callable[[], object]]] = {column: [] for column in layers}
            num_hit = 0.0
            for _ in range(TURNS):
                x = torch.randn(tokens, config.hidden_size, device=CUDA, dtype=BF16)
                taken = torch.rand(tokens, config.num_experts, device=CUDA).argsort(-1)
                taken = taken[:, : config.top_k].int().contiguous()
                num_hit += len(taken.unique()) / TURNS
                for column, layer in layers.items():
                    calls[column].append(partial(layer.forward, x, taken))
            floor = floor_us(
                3 * config.hidden_size * config.intermediate_size * num_hit,
                tokens * config.top_k / num_hit,
            )
            yield {"layer": name, "rows": tokens, "floor": floor} | call_us(calls)
        del layers, calls


def kernels_table(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    lines = [
        [row["layer"], number(row["rows"]),
         *(number(row[key]) if key in row else "–" for key in (*columns, "floor"))]
        for row in rows
    ]  # fmt: skip
    return table(("µs", "rows", *columns, "floor"), lines)


def kernels(
    name: str, title: str, run: Callable[[Options], Iterator[Row]], *columns: str
) -> Subject:
    return Subject(name, title, run, partial(kernels_table, columns=columns), needs_cuda=True)


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
    subject(
        "qwen3-30b-int4", "Qwen3 30B-A3B in 4 bits", QWEN3_30B, TINY_QWEN3, (None,),
        quantization=AWQ, column="INT4",
    ),
    subject("v3", "V3-style in FP8", V3_STYLE, TINY_V3, (None,)),
    Subject("flips", "Texts that part", flips.rates, flips.rates_table),
    kernels(
        "linear", "Layers in FP8", linear, "FP8", "slices", "activations", "blocks", "bf16"
    ),
    kernels(
        "linear-int4", "Layers in 4 bits", linear_int4, "few rows", "kernel", "slices", "bf16"
    ),
    kernels("experts", "Layers of experts", experts, *BY_COLUMN),
)  # fmt: skip

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
