"""Mixture-of-experts layers and models on one GPU, with their floors.

    python -m benchmarks.moe [layer] [tilings] [rounds]

layer    a layer (router, experts, shared expert) and its two grouped GEMMs, by tokens
tilings  the grouped GEMMs with other tilings than `grouped_gemm.py` chooses, to renew its table
rounds   Qwen3-30B-A3B: plain rounds, prefill and start-up; `--device cpu` takes a tiny shape

Random bf16 weights. The floor reads the experts that are really hit once at 4.45 TB/s, or computes
at 790 TFLOP/s. Every call of a layer has weights and tokens of its own."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch

from benchmarks.harness.device_time import call_us
from benchmarks.harness.models import MATMUL_FLOPS, READ_BYTES_PER_S
from benchmarks.harness.moe_rounds import rounds, rounds_table
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.distributed.mapping import SINGLE_RANK
from tllm_spec.kernels import grouped_gemm
from tllm_spec.kernels.grouped_gemm import Tiling, Tilings, down, gate_up_silu
from tllm_spec.kernels.moe_permute import moe_permute
from tllm_spec.models.module import Placement
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_shape import DEEPSEEK_NAMES, QWEN_NAMES, MoEConfig
from tllm_spec.models.weights import fill_random

CUDA, BF16, COPIES = "cuda", torch.bfloat16, 3
QWEN3 = MoEConfig(2048, 128, 8, 768, normalise_top_k=True)
V3 = MoEConfig(
    2048, 64, 8, 1408, scoring="sigmoid", normalise_top_k=True, num_groups=8, top_groups=4,
    has_correction_bias=True, shared_intermediate_size=1408, float32_router=True,
)  # fmt: skip
SHAPES = {"Qwen3-30B-A3B": QWEN3, "V3-style": V3}
TOKENS = (1, 4, 8, 32, 64, 256, 4096, 65536)
# By the block size: tokens at which tilings are tried, and outputs, inputs, warps and stages.
FEW = (
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 6), (64, 64, 4, 8),
    (64, 256, 4, 3), (128, 64, 4, 4), (128, 64, 4, 5), (128, 128, 4, 4), (128, 64, 8, 5),
)  # fmt: skip
MANY = (
    (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3),
    (256, 64, 8, 4),
)  # fmt: skip
TRIED = {16: ((1, 8, 64), FEW), 32: ((256,), FEW), 64: ((256, 512), MANY), 128: ((4096,), MANY)}


@dataclass(frozen=True)
class Call:
    """A layer, its tokens `[T, H]`, and their experts `[T, k]`."""

    layer: SparseMoE
    x: torch.Tensor
    experts: torch.Tensor

    @property
    def num_hit(self) -> int:
        return len(self.experts.unique())


def layers_of(config: MoEConfig) -> list[SparseMoE]:
    names = DEEPSEEK_NAMES if config.has_correction_bias else QWEN_NAMES
    placement = Placement(BF16, torch.device(CUDA), SINGLE_RANK)
    layers = [SparseMoE(config, placement, names) for _ in range(COPIES)]
    for seed, layer in enumerate(layers):
        fill_random(layer, seed)
    return layers


def calls_of(layers: Sequence[SparseMoE], num_tokens: int, same: bool) -> list[Call]:
    """`same`: a large correction bias makes all tokens take the same experts."""
    calls = []
    for layer in layers:
        bias = layer.router.e_score_correction_bias
        if bias is not None:
            bias.zero_()
            bias[: layer.config.top_k] = 100.0 * same
        x = torch.randn(num_tokens, layer.config.hidden_size, device=CUDA, dtype=BF16)
        calls.append(Call(layer, x, layer.router.route(x)[0]))
    return calls


def floor_us(call: Call, *, shared: bool) -> float:
    """`shared`: with the shared expert."""
    config, num_tokens = call.layer.config, len(call.x)
    own = config.shared_intermediate_size * shared * (1 - config.num_shared)
    features = call.num_hit * config.intermediate_size + own
    num_bytes = 3 * config.hidden_size * features * 2
    taken = config.routing.num_taken * config.intermediate_size + own
    flops = 2 * num_tokens * 3 * config.hidden_size * taken
    return max(num_bytes / READ_BYTES_PER_S, flops / MATMUL_FLOPS) * 1e6


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def layer(options: Options) -> Iterator[Row]:
    for name, config in SHAPES.items():
        layers = layers_of(config)
        for num_tokens in (1, 64, 4096) if options.quick else TOKENS:
            for same in (False, True) if config.has_correction_bias else (False,):
                calls = calls_of(layers, num_tokens, same)
                sides: dict[str, list[Callable[[], object]]] = {
                    "layer": [partial(c.layer.forward, c.x) for c in calls],
                    "gemms": [partial(c.layer.experts.forward, c.x, c.experts) for c in calls],
                }
                yield {
                    "shape": name, "tokens": num_tokens, "same": same,
                    "hit": mean([call.num_hit for call in calls]),
                    "floor": mean([floor_us(call, shared=True) for call in calls]),
                    "gemms_floor": mean([floor_us(call, shared=False) for call in calls]),
                } | call_us(sides)  # fmt: skip
        del layers
        torch.cuda.empty_cache()


def layer_table(rows: Sequence[Row]) -> list[str]:
    titles = ("shape, experts taken", "tokens", "experts hit", "layer, µs", "its floor",
              "permutation and GEMMs, µs", "their floor", "of the floor")  # fmt: skip
    lines = []
    for row in rows:
        taken = "the same" if row["same"] else "spread"
        keys = ("hit", "layer", "floor", "gemms", "gemms_floor")
        figures = [number(float(row[key])) for key in keys]
        share = f"{row['gemms'] / row['gemms_floor']:.2f}x"
        lines.append([f"{row['shape']}, {taken}", number(row["tokens"]), *figures, share])
    return table(titles, lines)


def tilings(options: Options) -> Iterator[Row]:
    """Each layer alone, on rows that are sorted already."""
    for name, config in SHAPES.items():
        layers = layers_of(replace(config, shared_intermediate_size=0))
        for block_rows, (numbers, tried) in TRIED.items():
            for num_tokens in numbers[-1:] if options.quick else numbers:
                calls = calls_of(layers, num_tokens, same=False)
                floor = mean([floor_us(call, shared=False) for call in calls])
                chosen = grouped_gemm.tilings_of(calls[0].experts.numel(), config.num_experts, BF16)
                for tiling in (Tiling(block_rows, *each) for each in tried):
                    found = tiled_us(calls, tiling)
                    for way, own, share in (
                        ("gate_up", chosen.gate_up, 2 / 3), ("down", chosen.down, 1 / 3)
                    ):  # fmt: skip
                        yield {
                            "shape": name, "layer": way, "tokens": num_tokens,
                            "tiling": str(tiling), "chosen": tiling == own,
                            "us": found[way], "floor": floor * share,
                        }  # fmt: skip
        del layers
        torch.cuda.empty_cache()


def tiled_us(calls: Sequence[Call], tiling: Tiling) -> dict[str, float]:
    sides: dict[str, list[Callable[[], object]]] = {"gate_up": [], "down": []}
    with mock.patch.object(grouped_gemm, "tilings_of", lambda *_: Tilings(tiling, tiling)):
        for call in calls:
            experts = call.layer.experts
            rows = moe_permute(call.experts, call.layer.config.num_experts, tiling.rows)
            inner = gate_up_silu(call.x, experts.gate_up, rows)
            sides["gate_up"].append(partial(gate_up_silu, call.x, experts.gate_up, rows))
            sides["down"].append(partial(down, inner, experts.down, rows))
        return call_us(sides)


def tilings_table(rows: Sequence[Row]) -> list[str]:
    """The fastest first."""
    keys = ("shape", "layer", "tokens")
    lines = [
        [row["shape"], row["layer"], number(row["tokens"]), row["tiling"],
         "yes" if row["chosen"] else "", number(row["us"]), f"{row['us'] / row['floor']:.2f}x"]
        for row in sorted(rows, key=lambda row: (*(row[key] for key in keys), row["us"]))
    ]  # fmt: skip
    return table((*keys, "tiling", "chosen", "µs", "of the floor"), lines)


SUBJECTS = (
    Subject("layer", "Layers of experts", layer, layer_table, needs_cuda=True),
    Subject("tilings", "Tilings of the grouped GEMM", tilings, tilings_table, needs_cuda=True),
    Subject("rounds", "Qwen3-30B-A3B", rounds, rounds_table),
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
