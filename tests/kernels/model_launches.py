"""Calls of the wrappers that choose tilings, with the sizes of real models."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from tests.kernels.launches import META
from tllm_spec.kernels.attention import (
    batch_invariant_attention,
    batch_invariant_latent,
    latent_attention,
    prompt_attention,
    window_attention,
    window_splits,
)
from tllm_spec.kernels.attention.rotary_write import HeadWeights
from tllm_spec.kernels.attention.visible_keys import KeySpan, KeySpans, TreeMask, TreePaths
from tllm_spec.kernels.experts import grouped_gemm
from tllm_spec.kernels.experts.grouped_gemm import Form, block_rows_of
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm import (
    batch_invariant_linear,
    fp8_linear,
    head_gemm,
    int4_weights,
    scaled_linear,
)
from tllm_spec.kernels.gemm import fp8_numbers as quantise_rows
from tllm_spec.kernels.gemm.int4_weights import row_bytes, row_words
from tllm_spec.kernels.gemm.norms import NormWeight
from tllm_spec.kernels.slots.round_rows import RoundRows

FLOATS = (torch.bfloat16, torch.float32)  # float16 takes as much as bfloat16
FP8 = torch.float8_e4m3fn
PAGE_SIZE, PROCESSORS = 32, 132


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def float32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def int32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def int64(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def scales_of(weight: torch.Tensor) -> torch.Tensor:
    return float32(*weight.shape[:-1], -(-weight.shape[-1] // 128))


# Inputs and outputs: of an 8B Llama, and of the zoo's target, with one chunk of inputs.
LINEAR_SHAPES = ((4096, 6144), (192, 512))
NUM_ROWS = (1, 17, 33, 65)


def linears() -> None:
    for (inputs, outputs), dtype, rows in product(LINEAR_SHAPES, FLOATS, NUM_ROWS):
        x, weight = empty(rows, inputs, dtype=dtype), empty(outputs, inputs, dtype=dtype)
        batch_invariant_linear.batch_invariant_linear(x, weight, empty(outputs, dtype=dtype))


def scaled_linears() -> None:
    for (inputs, outputs), dtype, rows in product(LINEAR_SHAPES, FLOATS, NUM_ROWS):
        x, weight = empty(rows, inputs, dtype=dtype), empty(outputs, inputs, dtype=FP8)
        scaled_linear.scaled_linear(x, weight, scales_of(weight), empty(outputs, dtype=dtype))


# Inputs of a group, and the type of its word: whole numbers, NVFP4, MXFP4.
INT4_GROUPS = (
    *((32, torch.int32), (128, torch.int32)),
    *((16, torch.float32), (32, torch.uint8)),
)


def int4_linears() -> None:
    for (inputs, outputs), dtype, rows in product(LINEAR_SHAPES, FLOATS, NUM_ROWS):
        codes = empty(outputs, int4_weights.row_bytes(inputs), dtype=torch.uint8)
        x = empty(rows, inputs, dtype=dtype)
        for (group, kind), invariant in product(INT4_GROUPS, (False, True)):
            words = empty(outputs, row_words(inputs, group, kind), dtype=kind)
            scaled_linear.scaled_linear(x, codes, words, group=group, invariant=invariant)


def fp8_linears() -> None:
    for (inputs, outputs), rows in product(LINEAR_SHAPES, NUM_ROWS):
        x, weight = empty(rows, inputs), empty(outputs, inputs, dtype=FP8)
        quantise_rows.quantise_rows(empty(rows, 2 * inputs), gated=True)
        for in_blocks in (False, True):
            norm = NormWeight(empty(inputs), 1e-6)
            codes, scales = quantise_rows.quantise_rows(x, norm, in_blocks=in_blocks)
            own = scales_of(weight) if in_blocks else float32(outputs, 1)
            operands = codes, scales, weight, own, x.dtype
            fp8_linear.fp8_linear(*operands, bias=empty(outputs))
            if rows <= quantise_rows.FUSED_ROWS:
                counters = int32(fp8_linear.NUM_COUNTERS)
                fp8_linear.fp8_swiglu(*operands, counters=counters)
                fp8_linear.fp8_linear(*operands, add_to=empty(rows, outputs), counters=counters)


# Experts, experts of a token, hidden size, inner size: Qwen3-30B-A3B, DeepSeek V2 Lite, Mixtral.
MOE_SHAPES = ((128, 8, 2048, 768), (64, 6, 2048, 1408), (8, 2, 4096, 14336))


CODES: tuple[Form, ...] = ("codes", "blocks", "tiles")


def experts(*, form: Form) -> None:
    for (number, top_k, hidden, inner), dtype, rows, group in product(
        MOE_SHAPES, FLOATS, (1, 20, 60, 200), INT4_GROUPS if form == "int4" else INT4_GROUPS[:1]
    ):
        tokens = rows * number // top_k
        layers = [
            expert_weights(form, dtype, group, *shape)
            for shape in ((number, 2 * inner, hidden), (number, hidden, inner))
        ]
        sums = layers[0].num_sums(dtype)
        block = block_rows_of(tokens * top_k, number, dtype, META, form, sums)
        chosen = int32(tokens, top_k)
        own = ExpertRows(int32(tokens * top_k), int32(3, number), int32(1), block, top_k, chosen)
        x, options = inputs_of(form, dtype, tokens, hidden)
        grouped_gemm.gate_up_silu(x, layers[0], own, **options)
        x, options = inputs_of(form, dtype, tokens * top_k, inner)
        grouped_gemm.down(x, layers[1], own, **options)


def expert_weights(
    form: Form,
    dtype: torch.dtype,
    group: tuple[int, torch.dtype],
    number: int,
    outputs: int,
    inputs: int,
) -> grouped_gemm.ExpertWeights:
    if form == "int4":
        stored = empty(number, outputs, row_bytes(inputs), dtype=torch.uint8)
        words = empty(number, outputs, row_words(inputs, *group), dtype=group[1])
        return grouped_gemm.ExpertWeights(stored, words, group[0])
    weight = empty(number, outputs, inputs, dtype=dtype if form == "plain" else FP8)
    if form == "plain":
        return grouped_gemm.ExpertWeights(weight)
    scales = scales_of(weight)
    if form in CODES:
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "codes":
        scales = scales[..., :1].transpose(1, 2).contiguous().transpose(1, 2)
    return grouped_gemm.ExpertWeights(weight, scales, has_tiles=form == "tiles")


def inputs_of(
    form: Form, dtype: torch.dtype, rows: int, size: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    if form not in CODES:
        return empty(rows, size, dtype=dtype), {}
    scales = float32(1 if form == "codes" else -(-size // 128), rows)
    return empty(rows, size, dtype=FP8), {"code_scales": scales, "dtype": dtype}


def heads() -> None:
    for dtype, rows, (depth, width), invariant in product(
        FLOATS, (1, 17, 64), ((128, 512), (512, 128)), (False, True)
    ):
        x, weight = empty(rows, 16, depth, dtype=dtype), empty(16, depth, width, dtype=dtype)
        for each in (weight, empty(16, width, depth, dtype=dtype).mT):
            out = empty(rows, 16, width, dtype=dtype)
            head_gemm.head_gemm(x, each, out, batch_invariant=invariant)


# Query heads, heads of keys and values, size of a head: an 8B Llama, a 1B Llama, and large heads.
ATTENTION_SHAPES = ((32, 8, 128), (32, 8, 64), (16, 16, 256))
WINDOWS = (1, 8, 64)
OF_ALL_KINDS = (ATTENTION_SHAPES[0], torch.bfloat16, 8, 64)


@dataclass(frozen=True)
class Kind:
    """Distinguishes launches of windows."""

    in_tree: bool = False
    offset: int = 0
    span: KeySpan | None = None
    has_norm: bool = False
    is_padded: bool = False
    is_ragged: bool = False
    has_sinks: bool = False

    def rows(self, batch: int, window: int) -> RoundRows:
        offsets = int32(batch + 1) if self.is_ragged else None
        return RoundRows(batch, window, batch * window, offsets)

    def tree(self, rows: RoundRows) -> TreeMask | None:
        length = min(64, rows.window + self.offset)
        if not self.in_tree:
            return None
        if self.is_ragged:
            return TreeMask(int64(rows.num_rows), length, rows)
        return TreeMask(int64(rows.num_requests, rows.window), length)

    def tables(self, batch: int, window: int) -> window_attention.WindowTables:
        rows, own = batch * window, self.rows(batch, window)
        return window_attention.WindowTables(
            own,
            int32(batch, 128),
            int32(batch),
            int64(rows),
            int64(batch) if self.is_padded else None,
            self.tree(own),
            KeySpans(self.span, int64(rows)) if self.span else None,
        )


PLAIN, RAGGED = Kind(), Kind(is_ragged=True)
CHUNKS, SLIDING = KeySpan(8192, slides=False), KeySpan(4096, slides=True)
KINDS = (
    PLAIN,
    Kind(has_norm=True, is_padded=True),
    Kind(in_tree=True),
    Kind(in_tree=True, offset=4, has_norm=True),
    Kind(span=CHUNKS),
    Kind(in_tree=True, span=CHUNKS),
    Kind(span=SLIDING),
    Kind(in_tree=True, span=SLIDING),
    Kind(is_ragged=True, has_norm=True),
    Kind(is_ragged=True, span=SLIDING),
    Kind(in_tree=True, is_ragged=True),
    Kind(span=SLIDING, has_sinks=True),
)


def windows(*, has_codes: bool) -> None:
    for shape, window, batch, dtype in product(ATTENTION_SHAPES, WINDOWS, (1, 64), FLOATS):
        q_heads, kv_heads, head_dim = shape
        workspace = window_splits.WindowWorkspace(
            float32(1 << 15, head_dim), float32(1 << 15), PROCESSORS, 3 * PROCESSORS
        )
        qkv = empty(batch * window, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
        stored = FP8 if has_codes else dtype
        layer = empty(2, 4096, PAGE_SIZE, kv_heads, head_dim, dtype=stored)
        cos_sin = empty(batch * window, 2, 1, head_dim, dtype=dtype)
        norm = HeadWeights(empty(q_heads + kv_heads, head_dim, dtype=dtype), 1e-6)
        # Masks take no shared memory, so one shape has all kinds.
        for kind in KINDS if (shape, dtype, window, batch) == OF_ALL_KINDS else (PLAIN,):
            call = window_attention.WindowCall(
                qkv, cos_sin, layer, kind.tables(batch, window), 0.1, workspace,
                norm if kind.has_norm else None,
                sinks=float32(q_heads) if kind.has_sinks else None,
            )  # fmt: skip
            window_attention.window_attention(call)


def invariant_attention(*, has_codes: bool) -> None:
    for shape, dtype, span, in_tree, batch in product(
        ATTENTION_SHAPES, FLOATS, (None, CHUNKS, SLIDING), (False, True), (1, 200)
    ):
        if (span or in_tree) and shape != ATTENTION_SHAPES[0]:
            continue
        q_heads, kv_heads, head_dim = shape
        size = batch_invariant_attention.tokens_per_tile(q_heads // kv_heads)
        q = empty(batch * size, q_heads, head_dim, dtype=dtype)
        stored = FP8 if has_codes else dtype
        layer = empty(2, 4096, PAGE_SIZE, kv_heads, head_dim, dtype=stored)
        paths = tree_paths(batch, size) if in_tree else None
        tiles = batch_invariant_attention.QueryTiles(int32(4, batch), size, paths)
        results = window_splits.WindowWorkspace.allocate(
            head_dim, META, batch_invariant_attention.MAX_PARTIAL_ROWS
        )
        batch_invariant_attention.batch_invariant_attention(
            *(q, layer, int32(batch, 128), tiles, 0.1, results, span),
            sinks=float32(q_heads) if span == SLIDING else None,
        )


def prompts() -> None:
    """The heads of Gemma 4's layers without a window."""
    for dtype, span, (q_heads, kv_heads) in product(FLOATS, (None, SLIDING), ((8, 1), (32, 4))):
        q = empty(256, q_heads, 512, dtype=dtype)
        size = prompt_attention.prompt_tokens_per_tile(q, 512, q_heads // kv_heads)
        tiles = batch_invariant_attention.QueryTiles(int32(4, 16), size)
        for stored in (dtype, FP8):
            layer = empty(2, 4096, PAGE_SIZE, kv_heads, 512, dtype=stored)
            prompt_attention.prompt_attention(q, layer, int32(1, 128), tiles, 0.1, span)


def tree_paths(batch: int, window: int) -> TreePaths:
    mask = TreeMask(int64(batch, window), window)
    return TreePaths(mask, int32(batch * window, window), int32(batch * window))


LATENT_KINDS = PLAIN, Kind(in_tree=True), RAGGED, Kind(in_tree=True, is_ragged=True)
# Heads, rank, rotary size, size of a query's head: DeepSeek V3 on one and on eight devices.
LATENT_SHAPES = ((128, 512, 64, 192), (16, 512, 64, 192))


def latents(*, has_codes: bool) -> None:
    for (number, rank, rope, head_dim), dtype, window, batch, kind in product(
        LATENT_SHAPES, FLOATS, (1, 2, 4), (1, 256), LATENT_KINDS
    ):
        workspace = window_splits.WindowWorkspace(
            float32(1 << 14, rank), float32(1 << 14), PROCESSORS
        )
        rows = kind.rows(batch, window)
        tables = latent_attention.LatentTables(
            rows, int32(batch, 128), int32(batch), kind.tree(rows)
        )
        latent_attention.latent_attention(
            empty(number, batch * window, rank, dtype=dtype),
            empty(batch * window, number, head_dim, dtype=dtype),
            empty(4096, PAGE_SIZE, rank + rope, dtype=FP8 if has_codes else dtype),
            tables,
            0.1,
            workspace,
        )


def invariant_latents(*, has_codes: bool) -> None:
    for (number, rank, rope, head_dim), dtype, in_tree, batch in product(
        LATENT_SHAPES, FLOATS, (False, True), (1, 600)
    ):
        size = 1 if in_tree else batch_invariant_latent.latent_tokens_per_tile(number)
        paths = tree_paths(batch, size) if in_tree else None
        tiles = batch_invariant_attention.QueryTiles(int32(4, batch), size, paths)
        batch_invariant_latent.batch_invariant_latent(
            empty(batch * size, number, rank, dtype=dtype),
            empty(batch * size, number, head_dim, dtype=dtype),
            empty(4096, PAGE_SIZE, rank + rope, dtype=FP8 if has_codes else dtype),
            int32(batch, 128),
            tiles,
            0.1,
            window_splits.WindowWorkspace.allocate(
                rank, META, batch_invariant_attention.MAX_PARTIAL_ROWS
            ),
        )


CALLS: dict[str, Callable[[], None]] = {
    "linears": linears,
    "scaled_linears": scaled_linears,
    "fp8_linears": fp8_linears,
    "int4_linears": int4_linears,
    "experts": lambda: experts(form="plain"),
    "scaled_experts": lambda: experts(form="fp8"),
    "scaled_codes_experts": lambda: experts(form="codes"),
    "scaled_blocks_experts": lambda: experts(form="blocks"),
    "scaled_tiles_experts": lambda: experts(form="tiles"),
    "int4_experts": lambda: experts(form="int4"),
    "heads": heads,
    "windows": lambda: windows(has_codes=False),
    "invariant_attention": lambda: invariant_attention(has_codes=False),
    "prompts": prompts,
    "latents": lambda: latents(has_codes=False),
    "invariant_latents": lambda: invariant_latents(has_codes=False),
    "windows over codes": lambda: windows(has_codes=True),
    "invariant_attention over codes": lambda: invariant_attention(has_codes=True),
    "latents over codes": lambda: latents(has_codes=True),
    "invariant_latents over codes": lambda: invariant_latents(has_codes=True),
}
