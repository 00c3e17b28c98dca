"""GEMMs with FP8 and 4-bit weights on one GPU, next to bf16, with their floors.

    python -m benchmarks.fp8_kernels [linear] [int4] [experts]

linear   scaled_linear's kernel and torch's GEMM with bf16 weights, of an 8B Llama's layers; for
         many rows also slices of FP8 weights that are dequantised before torch multiplies them;
         activations in FP8, quantised with the norm before them: with one scale a token, and with
         one for each 128 inputs of a token
int4     the same layers with weights of 4 bits in groups of 128: small_m_gemm for up to 8 rows, and
         scaled_linear's kernel and slices
experts  the two grouped GEMMs of Qwen3-30B-A3B's and DeepSeek V3's experts in FP8 and in bf16

Other activations are bf16. Calls have weights or tokens of their own, so that no cache holds the
weights. The floor reads the FP8 weights (of the experts that are hit) and their scales once at 4.45
TB/s, or computes at 790 TFLOP/s; the share is floor / the kernel's time."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.device_time import call_us
from benchmarks.harness.models import MATMUL_FLOPS, READ_BYTES_PER_S
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.kernels.cublas_lt import CublasLt, shared_library
from tllm_spec.kernels.fp8_gemms import Fp8Gemms, tile_scales
from tllm_spec.kernels.fp8_linear import fp8_linear
from tllm_spec.kernels.grouped_gemm import block_rows_of, down, gate_up_silu
from tllm_spec.kernels.int4_weights import group_words
from tllm_spec.kernels.moe_permute import ExpertRows, moe_permute
from tllm_spec.kernels.quantise_rows import quantise_rows
from tllm_spec.kernels.scaled_linear import BLOCK, scaled_linear
from tllm_spec.kernels.scaled_linear_slices import multiply_slices, slice_outputs
from tllm_spec.kernels.small_m_gemm import NormWeight, small_m_gemm
from tllm_spec.kernels.small_m_plan import MAX_ROWS

CUDA, BF16, FP8 = "cuda", torch.bfloat16, torch.float8_e4m3fn
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS, SLICED_FROM = (1, 4, 8, 32, 64, 128, 256, 2048), 64
# Experts, hidden size, inner size; each token takes 8.
EXPERTS = {"Qwen3-30B-A3B": (128, 2048, 768), "DeepSeek V3": (256, 7168, 2048)}
TOKENS, TOP_K, TURNS = (1, 8, 64), 8, 4
WEIGHTS_BYTES = 512 << 20  # of a call's side together: more than the L2 cache holds
Pair = tuple[torch.Tensor, torch.Tensor]


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
                "fp8": [partial(scaled_linear, x, *pair) for pair in scaled],
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


def int4(options: Options) -> Iterator[Row]:
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
    for name, (num_experts, hidden, inner) in EXPERTS.items():
        sizes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
        plain = [torch.empty(size, dtype=BF16, device=CUDA).normal_() for size in sizes]
        scaled = [quantised(weight) for weight in plain]
        for tokens in (1, 64) if options.quick else TOKENS:
            sides: dict[str, list[Callable[[], object]]] = {"fp8": [], "bf16": []}
            num_hit = 0.0
            for _ in range(TURNS):
                x = torch.randn(tokens, hidden, device=CUDA, dtype=BF16)
                taken = torch.rand(tokens, num_experts, device=CUDA).argsort(-1)[:, :TOP_K]
                block_rows = block_rows_of(tokens * TOP_K, num_experts, BF16, x.device)
                rows = moe_permute(taken.int().contiguous(), num_experts, block_rows)
                num_hit += len(taken.unique()) / TURNS
                sides["fp8"].append(partial(both, x, rows, *scaled))
                sides["bf16"].append(partial(both, x, rows, *((weight, None) for weight in plain)))
            floor = floor_us(3 * hidden * inner * num_hit, tokens * TOP_K / num_hit)
            yield {"layer": name, "rows": tokens, "hit": num_hit, "floor": floor} | call_us(sides)
        del plain, scaled, sides


def both(
    x: torch.Tensor,
    rows: ExpertRows,
    gate_up: tuple[torch.Tensor, torch.Tensor | None],
    last: tuple[torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """gate_up and last: weights and scales."""
    inner = gate_up_silu(x, gate_up[0], rows, scales=gate_up[1])
    return down(inner, last[0], rows, last[1])


def linear_table(rows: Sequence[Row]) -> list[str]:
    columns = ("fp8", "slices", "activations", "blocks", "bf16", "floor")
    lines = [
        [row["layer"], number(row["rows"]),
         *(number(row[key]) if key in row else "–" for key in columns),
         f"{row['floor'] / row['fp8']:.0%}"]
        for row in rows
    ]  # fmt: skip
    return table(("µs", "rows", *columns, "share of the floor"), lines)


def int4_table(rows: Sequence[Row]) -> list[str]:
    columns = ("few rows", "kernel", "slices", "bf16", "floor")
    lines = [
        [row["layer"], number(row["rows"]),
         *(number(row[key]) if key in row else "–" for key in columns),
         f"{row['floor'] / min(row[key] for key in columns[:3] if key in row):.0%}"]
        for row in rows
    ]  # fmt: skip
    return table(("µs", "rows", *columns, "share of the floor"), lines)


def experts_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [row["layer"], number(row["rows"]), *(number(row[key]) for key in ("fp8", "bf16", "floor")),
         f"{row['floor'] / row['fp8']:.0%}"]
        for row in rows
    ]  # fmt: skip
    return table(("µs", "rows", "FP8", "bf16", "floor", "share of the floor"), lines)


SUBJECTS = (
    Subject("linear", "Linear layers with FP8 weights", linear, linear_table, needs_cuda=True),
    Subject("int4", "Linear layers with 4-bit weights", int4, int4_table, needs_cuda=True),
    Subject("experts", "Experts with FP8 weights", experts, experts_table, needs_cuda=True),
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
