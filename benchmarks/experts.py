"""Models and layers with experts on one GPU, with their floors.

    python -m benchmarks.experts [qwen3] [gpt_oss] [gemma3] [v3] [mtp1] [mtp3] [qwen3_next]
        [qwen3_next_mtp3] [qwen3_5] [qwen3_5_mtp3] [gemma4_e4b] [gemma4_e4b_mtp3] [gemma4_26b]
        [gemma4_26b_mtp3] [glm5] [glm5_mtp3] [layer] [latent_attention]

qwen3   Qwen3-30B-A3B: plain rounds of batch 1, 8 and 64, prefill of 64 prompts, start-up
gpt_oss the same of gpt-oss-20b, with experts in MXFP4
gemma3  the same of Gemma 3 12B, which has no experts, but windows in five of six layers
v3      the same of a DeepSeek-V3-style model
mtp1    its rounds with one draft of the MTP module, synthetic acceptance .8
mtp3    its rounds with three, synthetic acceptance .8 .6 .45
qwen3_next, qwen3_next_mtp3  rounds of 12 layers of Qwen3-Next, 9 with recurrent states: plain, and
        with three drafts of its MTP layer; the floor reads and writes each state once; and prompts
qwen3_5, qwen3_5_mtp3  the same of Qwen3.5-35B-A3B in FP8 with blocks; gemma4_...: of Gemma 4 in
        bf16, and with three drafts of an assistant; their floor is counted from what is loaded
glm5, glm5_mtp3  8 layers of GLM-5 in FP8 with blocks, 5 of them with experts, after prompts of
        1,024 tokens and of 32,768, of which a row attends to 2,048
layer   a layer (norm, router, experts, shared expert) and its two grouped GEMMs, by tokens
latent_attention  the window kernel alone, by batch, window and context

Random weights, in bf16 where nothing else is said. The V3-style model is measured with a correction
bias by which all tokens take the same experts, as with vLLM's dummy weights, and without one. The
floor reads the weights, the experts that are really hit and the cache once at 4.45 TB/s, or
computes at 790 TFLOP/s, as an H200 does; of gpt_oss, gemma3 and qwen3_next it is computed with what
a copy and a GEMM reach on the GPU at hand, and limits are multiples of it. Every call of a layer
has weights and tokens of its own. `--device cpu` takes tiny shapes. `--attn-backend TRITON` runs
prompts without FlashInfer, which may compile kernels for minutes at the first start."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.harness.device_time import call_us
from benchmarks.harness.expert_rounds import (
    gemma3,
    gpt_oss,
    multiples_table,
    qwen3,
    rounds_table,
    v3,
)
from benchmarks.harness.loaded_rounds import A4B, E4B, NEXT, QWEN3_5, SPARSE, Shape, rounds_of
from benchmarks.harness.models import MATMUL_FLOPS, READ_BYTES_PER_S, WEIGHT_BYTES
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.attention.latent_attention import (
    MAX_PARTIAL_ROWS,
    LatentTables,
    latent_attention,
)
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.models.layers import Placement, RMSNorm
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.models.weights import fill_random

ENTRY = 512 + 64  # of a token in the latent cache
CUDA, BF16, COPIES = "cuda", torch.bfloat16, 3
PLACEMENT = Placement(BF16, torch.device(CUDA), SINGLE_RANK)
QWEN3 = MoEConfig(2048, 128, 8, 768, normalise_top_k=True)
V3 = MoEConfig(
    2048, 64, 8, 1408, scoring="sigmoid", normalise_top_k=True, num_groups=8, top_groups=4,
    has_correction_bias=True, shared_intermediate_size=1408, float32_router=True,
)  # fmt: skip
SHAPES = {"Qwen3-30B-A3B": QWEN3, "V3-style": V3}
TOKENS = (1, 4, 8, 32, 64, 256, 4096, 65536)


@dataclass(frozen=True)
class Call:
    """A layer, its tokens `[T, H]`, and their experts `[T, k]`."""

    layer: SparseMoE
    x: torch.Tensor
    experts: torch.Tensor

    def multiply(self) -> torch.Tensor:
        """The permutation and the GEMMs."""
        experts = self.layer.experts
        return experts.forward(self.x, experts.sorted(self.x, self.experts))

    @property
    def num_hit(self) -> int:
        return len(self.experts.unique())


def layers_of(config: MoEConfig) -> list[SparseMoE]:
    layers = [SparseMoE(config, PLACEMENT) for _ in range(COPIES)]
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
        fill_random(norm := RMSNorm(config.hidden_size, 1e-6, PLACEMENT))
        for num_tokens in (1, 64, 4096) if options.quick else TOKENS:
            for same in (False, True) if config.has_correction_bias else (False,):
                calls = calls_of(layers, num_tokens, same)
                sides: dict[str, list[Callable[[], object]]] = {
                    "layer": [partial(c.layer.add_to, c.x.clone(), norm) for c in calls],
                    "gemms": [partial(Call.multiply, c) for c in calls],
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


def latent_attention_us(options: Options) -> Iterator[Row]:
    for batch, context in ((1, 1024), (8, 1024), (64, 1024), (1, 16384), (64, 8192)):
        for window in (1, 2, 4):
            calls = attention_calls(batch, context, window, options.device)
            floor = batch * context * ENTRY * WEIGHT_BYTES / READ_BYTES_PER_S * 1e6
            row = {"batch": batch, "context": context, "window": window, "floor": floor}
            yield row | call_us({"us": calls})


def attention_calls(
    batch: int, context: int, window: int, device: str
) -> list[Callable[[], torch.Tensor]]:
    """Attention of three layers of the V3-style shape."""
    heads, rank, nope, page, on_device = 16, 512, 128, 32, {"device": device, "dtype": BF16}
    pages = -(-context // page)
    workspace = WindowWorkspace.allocate(rank, torch.device(device), MAX_PARTIAL_ROWS)
    tables = torch.randperm(batch * pages, device=device).view(batch, -1).int()
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    given = LatentTables(RoundRows.rectangle(len(lens), window), tables, lens)
    q_latent = torch.randn(heads, batch * window, rank, **on_device)
    q = torch.randn(batch * window, heads, nope + ENTRY - rank, **on_device)
    layers = [torch.randn(batch * pages, page, ENTRY, **on_device) for _ in range(3)]
    return [
        partial(latent_attention, q_latent, q, layer, given, 0.1, workspace) for layer in layers
    ]


def attention_table(rows: Sequence[Row]) -> list[str]:
    keys = ("batch", "context", "window")
    lines = [
        [*(number(row[key]) for key in keys), number(row["us"]), number(row["floor"])]
        for row in rows
    ]
    return table((*keys, "µs", "floor"), lines)


def of(
    shape: Shape, draft_len: int
) -> tuple[Callable[[Options], Iterator[Row]], Callable[[Sequence[Row]], list[str]]]:
    return rounds_of(shape, draft_len), multiples_table


SUBJECTS = (
    Subject("qwen3", "Qwen3-30B-A3B", qwen3, rounds_table),
    Subject("gpt_oss", "gpt-oss-20b, experts in MXFP4", gpt_oss, multiples_table),
    Subject("gemma3", "Gemma 3 12B", gemma3, multiples_table),
    Subject("v3", "V3-style, plain", v3(0), rounds_table),
    Subject("mtp1", "V3-style, MTP with 1 draft", v3(1), rounds_table),
    Subject("mtp3", "V3-style, MTP with 3 drafts", v3(3), rounds_table),
    Subject("qwen3_next", "12 layers of Qwen3-Next, plain", *of(NEXT, 0)),
    Subject("qwen3_next_mtp3", "Its MTP layer with 3 drafts", *of(NEXT, 3)),
    Subject("qwen3_5", "12 layers of Qwen3.5-35B-A3B in FP8, plain", *of(QWEN3_5, 0)),
    Subject("qwen3_5_mtp3", "Its MTP layer with 3 drafts", *of(QWEN3_5, 3)),
    Subject("gemma4_e4b", "Gemma 4 of E4B's shape, plain", *of(E4B, 0)),
    Subject("gemma4_e4b_mtp3", "Its assistant with 3 drafts", *of(E4B, 3)),
    Subject("gemma4_26b", "Gemma 4 of 26B-A4B's shape, plain", *of(A4B, 0)),
    Subject("gemma4_26b_mtp3", "Its assistant with 3 drafts", *of(A4B, 3)),
    Subject("glm5", "8 layers of GLM-5 in FP8, plain", *of(SPARSE, 0)),
    Subject("glm5_mtp3", "Its MTP layer with 3 drafts", *of(SPARSE, 3)),
    Subject("layer", "Layers of experts", layer, layer_table, needs_cuda=True),
    Subject(
        "latent_attention", "Latent attention", latent_attention_us, attention_table,
        needs_cuda=True,
    ),
)  # fmt: skip

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__, attn_backend="auto"))
