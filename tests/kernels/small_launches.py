"""Calls of the wrappers of kernels without tilings, with the sizes of real models."""

from collections.abc import Callable
from itertools import product

import torch

from tests.kernels.launches import META
from tests.kernels.model_launches import FLOATS, FP8, empty, float32, int32, int64, scales_of
from tllm_spec.executor.speculative.drafting.suffix_match import new_sources
from tllm_spec.kernels.attention.attention_sinks import add_sinks
from tllm_spec.kernels.attention.index_select import SeenKeys, select_keys
from tllm_spec.kernels.attention.index_write import IndexNorm, index_write
from tllm_spec.kernels.attention.kv_codes import CODES, widen_pages
from tllm_spec.kernels.attention.latent_write import LatentNorm, latent_write
from tllm_spec.kernels.attention.move_kv import move_kv
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.drafts.draft_beams import BeamPool, Beams, first_beams, grow, select
from tllm_spec.kernels.drafts.draft_input import DraftInputNorms, draft_input
from tllm_spec.kernels.drafts.draft_sources import choose_drafts, observe_drafts
from tllm_spec.kernels.drafts.match_branches import add_match
from tllm_spec.kernels.drafts.path_trees import path_ranks, path_trees
from tllm_spec.kernels.drafts.suffix_match import TextTable, append_tokens, match_suffixes
from tllm_spec.kernels.drafts.top_tokens import top_tokens
from tllm_spec.kernels.experts import few_tokens
from tllm_spec.kernels.experts import permute as moe_permute
from tllm_spec.kernels.experts import routing as moe_routing
from tllm_spec.kernels.experts.routing import moe_combine
from tllm_spec.kernels.gemm import fp8_numbers as dequantise
from tllm_spec.kernels.gemm import int4_weights
from tllm_spec.kernels.gemm.adapter_gemm import (
    TILE_ROWS,
    AdapterWeights,
    output_blocks,
    shrink,
    with_adapters,
)
from tllm_spec.kernels.gemm.norms import NormWeight, add_norm, rms_norm, silu_and_mul, soft_cap
from tllm_spec.kernels.parallel.rank_sum import (
    BLOCK_WORDS,
    RankLines,
    rank_best_triton,
    rank_sum_triton,
)
from tllm_spec.kernels.parallel.two_shot_sum import PART_WORDS, RankParts, two_shot_sum_triton
from tllm_spec.kernels.sampling.choose_token import choose_best, choose_draft, offer_token
from tllm_spec.kernels.sampling.gumbel import gumbel_noise
from tllm_spec.kernels.sampling.logit_filters import filter_cut, mask_tokens
from tllm_spec.kernels.slots.accept import Drafts, DraftTree, SlotTables, SyntheticRates, TreeTables
from tllm_spec.kernels.slots.choose_rows import DraftValues, choose_rows, learn_values
from tllm_spec.kernels.slots.round_rows import RoundRows, window_rows
from tllm_spec.kernels.slots.row_copies import (
    Rings,
    copy_rows,
    gather_rows,
    gather_slice_rows,
    send_results,
    store_in_rings,
)
from tllm_spec.kernels.slots.slot_windows import accept_windows, write_drafts
from tllm_spec.kernels.states.delta_blocks import delta_blocks
from tllm_spec.kernels.states.gated_delta import (
    DeltaBlocks,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    gated_delta,
    gated_norm,
)

BATCH, VOCABULARY, HIDDEN = 8, 128256, 4096


def choices() -> None:
    for dtype in FLOATS:
        logits, ids = empty(BATCH, VOCABULARY, dtype=dtype), int64(VOCABULARY)
        noise = (float32(BATCH), int64(BATCH), int64(BATCH))
        choose_best(logits)
        choose_draft(empty(64, VOCABULARY, dtype=dtype), ids)
        choose_draft(logits, ids, *noise, float32(BATCH))
        offer_token(logits, 4096, ids, *noise)
        top_tokens(logits, 8)
        top_tokens(logits, 16, ids, *noise, float32(BATCH))
        mask_tokens(logits, int32(BATCH), int32(4, VOCABULARY // 32), 0)
        if dtype != torch.float32:
            filter_cut(logits, float32(BATCH), int64(BATCH), float32(BATCH), float32(BATCH))
    gumbel_noise(int64(BATCH), int64(BATCH), VOCABULARY)


def trees() -> None:
    for topk, steps, drafts in ((8, 5, 63), (1, 3, 3)):
        pool = BeamPool.allocate(BATCH, topk, steps, META)
        probs, tokens = float32(BATCH, topk), int64(BATCH, topk)
        first_beams(pool, probs, tokens)
        beams, more = Beams(tokens, probs, tokens, tokens), (BATCH, topk, topk)
        children = float32(*more), int64(*more)
        if topk > 1:
            grow(pool, 2, beams, *children)
        grow(pool, steps - 1, beams, *children)
        for with_scores in (False, True):
            select(pool, drafts, with_scores)
    own = TreeTables(*(int64(64, 64) for _ in range(3)))
    tables = SlotTables(int64(64), int64(64, 64), int64(64), int64(64), own)
    slots, nodes, path = int64(BATCH), int64(BATCH, 64), int64(BATCH, 6)
    rates = SyntheticRates(empty(5, 4, dtype=torch.float64), int64(64))
    for synthetic in (None, rates):
        accept_windows(tables, slots, slots, nodes, 5, synthetic)
    for number in (None, slots):
        tree = DraftTree(int64(BATCH, 63), number, parents=nodes, depths=nodes, bits=nodes)
        write_drafts(tables, slots, tree, int64(64))
    path_trees(int64(BATCH, 8, 4), int64(BATCH, 8), 16, 4)
    path_ranks(int64(64, 64), slots, slots, path, slots, 64)
    planes = empty(64, 1024, 32, 1024)
    move_kv(planes, int32(BATCH, 128), slots, path, slots)


def chains() -> None:
    tables = SlotTables(int64(64), int64(64, 8), int64(64), int64(64))
    slots, tokens = int64(BATCH), int64(BATCH, 4)
    rates = SyntheticRates(empty(3, 1, dtype=torch.float64), int64(64))
    for synthetic in (None, rates):
        accept_windows(tables, slots, slots, tokens, None, synthetic)
    for number in (None, slots):
        write_drafts(tables, slots, Drafts(int64(BATCH, 3), number), int64(64))
    values = DraftValues(int32(64, 7), float32(32), float32(64), int32(64), float32(5, 2))
    choose_rows(values, int64(64), slots, 8, 4 * BATCH)
    learn_values(values, slots, slots, slots)
    for depths, offset in ((None, 0), (int64(BATCH, 4), 4)):
        window_rows(int32(64, 4096), slots, slots, 4, 128, 32, depths, offset)
    send_results(int64(4, 1024), int64(1), slots, tokens)
    append_tokens(int32(64, 4096), slots, int64(64), tokens, slots)
    for salts, number in ((None, 1), (int32(66), 8), (int32(66), 1)):
        table = TextTable(int32(66 * 4096), 4096, int64(64), salts, number == 8)
        match_suffixes(table, slots, 3, 64, number, number == 1)
    sources = new_sources(65, 3, None, slots.device)
    observe_drafts(sources, slots, tokens, slots, True)
    choose_drafts(sources, slots, int64(64, 3), int64(64, 3), slots)
    nodes = int64(BATCH, 64)
    scores = float32(BATCH, 63)
    tree = DraftTree(int64(BATCH, 63), parents=nodes, depths=nodes, bits=nodes, scores=scores)
    for learns in (True, False):
        add_match(sources, slots, tree, int64(BATCH, 3), slots, slots, learns)


def layers() -> None:
    head_dim = 128
    for dtype in FLOATS:
        x, weight = empty(BATCH, HIDDEN, dtype=dtype), empty(HIDDEN, dtype=dtype)
        table, rows = empty(8192, 2, 1, head_dim, dtype=dtype), int64(BATCH)
        rms_norm(x, weight, 1e-6)
        add_sinks(empty(BATCH, 64, 64, dtype=dtype), float32(BATCH, 64), float32(64))
        rms_norm(empty(BATCH, 18432, dtype=dtype), empty(18432, dtype=dtype), 1e-6)
        add_norm(x, x, NormWeight(float32(HIDDEN), 1e-6))
        own = NormWeight(weight, 1e-6)
        add_norm(x, x, own, factor=weight[:1], then=own)
        add_norm(x, x, own, factor=float32(1), parallel=(x, own, own))
        silu_and_mul(empty(BATCH, 28672, dtype=dtype))
        silu_and_mul(empty(BATCH, 28672, dtype=dtype), "gelu_pytorch_tanh")
        silu_and_mul(x, "sigmoid", x)
        soft_cap(empty(BATCH, VOCABULARY, dtype=dtype), 30.0)
        silu_and_mul(x[:, :256], "gelu_pytorch_tanh", empty(BATCH, 42 * 256, dtype=dtype)[:, :256])
        rotary = Rotary(table, rows)
        draft_input(rows, x, x, DraftInputNorms(weight, weight, 1e-6), rotary, int64(2))
        draft_input(None, x, x, None, rotary)
        draft_input(rows, x, x, DraftInputNorms(weight, weight, 1e-6, True), rotary, int64(0))
        layer = empty(2, 4096, 32, 8, head_dim, dtype=dtype)
        codes = empty(*layer.shape, dtype=CODES)
        widen_pages(codes, int32(64), None, layer)
        widen_pages(codes, int32(64), int32(1), layer)
        head_weight = empty(40, head_dim, dtype=dtype)
        for norm in (None, HeadWeights(head_weight, 1e-6), HeadWeights(head_weight, 1e-6, True)):
            qkv = empty(BATCH, 48, head_dim, dtype=dtype)
            rotary_write(qkv, rotary, rows, layer, norm)
            rotary_write(qkv, rotary, rows, codes, norm)
        latent, ropes = empty(BATCH, 576, dtype=dtype), empty(8192, 2, 1, 64, dtype=dtype)
        for q in (None, empty(BATCH, 128, 192, dtype=dtype)):
            pool = empty(4096, 32, 576, dtype=dtype)
            own_norm = LatentNorm(empty(512, dtype=dtype), 1e-6)
            latent_write(latent, q, Rotary(ropes, rows), rows, pool, own_norm)
            entries = empty(*pool.shape, dtype=CODES)
            latent_write(latent, q, Rotary(ropes, rows), rows, entries, own_norm)
        index_keys, queries = empty(4096, 32, 128, dtype=dtype), empty(BATCH, 64, 128, dtype=dtype)
        key_norm = IndexNorm(empty(128, dtype=dtype), empty(128, dtype=dtype), 1e-6)
        for given in (None, queries):
            index_write(queries[:, 0], given, Rotary(ropes, rows), rows, index_keys, key_norm)
        slots, counts = int32(BATCH, 2048), int32(BATCH)
        for number, bits in ((64, None), (64, int64(BATCH)), (4096, None)):
            seen = SeenKeys(counts, counts, bits, int32(BATCH, number), number * 32)
            select_keys(queries, float32(BATCH, 64), index_keys, seen, slots, counts)
        gather_rows(x, rows)
        gather_slice_rows(x, rows, 4)
        copy_rows(x, x)
        ring = Rings(16, int64(1024), empty(1024, HIDDEN, dtype=dtype))
        store_in_rings(ring, rows, rows, rows, x)
        store_in_rings(Rings(16, ring.tokens, None), rows, rows, rows, None)


def mixtures() -> None:
    bias = float32(256)
    v3 = moe_routing.RoutingRule(8, "sigmoid", True, 2.5, 8, 4, 1)
    qwen3 = moe_routing.RoutingRule(8, "softmax", True)
    for dtype in FLOATS:
        moe_routing.moe_routing(empty(BATCH, 256, dtype=dtype), v3, bias)
        moe_routing.moe_routing(empty(BATCH, 128, dtype=dtype), qwen3)
        factors = empty(128, dtype=dtype)
        moe_routing.moe_routing(empty(BATCH, 128, dtype=dtype), qwen3, None, factors)
        for weights, add_to in (
            (float32(BATCH, 8), None),
            (None, empty(BATCH, HIDDEN, dtype=dtype)),
        ):
            moe_combine(empty(8 * BATCH, HIDDEN, dtype=dtype), weights, 8, add_to)
    for tokens, block_rows in ((1, 16), (64, 16), (500, 64), (4000, 128)):
        moe_permute.moe_permute(int32(tokens, 8), 128, block_rows)
    for tokens, dtype in product((1, 8), FLOATS):
        norm = NormWeight(empty(HIDDEN, dtype=dtype), 1e-6)
        for rule, number, own in ((v3, 256, (None, bias)), (qwen3, 128, (float32(128), None))):
            weight = empty(number, HIDDEN, dtype=dtype)
            router = few_tokens.RouterWeights(weight, *own, rule, dtype, int32(9))
            few_tokens.route_few(empty(tokens, HIDDEN, dtype=dtype), norm, router)


def scaled_weights() -> None:
    for dtype, inputs in product(FLOATS, (4096, 1040)):
        weight = empty(4096, inputs, dtype=FP8)
        dequantise.dequantise_rows(weight, scales_of(weight), empty(4096, inputs, dtype=dtype))
        stored = empty(4096, int4_weights.row_bytes(inputs), dtype=torch.uint8)
        for words in (int32(4096, -(-inputs // 32)), float32(4096, -(-inputs // 32))):
            int4_weights.dequantise_int4(stored, words, 32, empty(4096, inputs, dtype=dtype))


def sums() -> None:
    lines = RankLines(0, int64(2), int32((1 << 20) // 4 // BLOCK_WORDS))
    parts = RankParts(0, int64(2), int32((1 << 24) // 4 // (2 * PART_WORDS)))
    rank_best_triton(lines, int32(BATCH, 2))
    for dtype in FLOATS:
        values = empty(BATCH, HIDDEN, dtype=dtype)
        rank_sum_triton(lines, values)
        rank_sum_triton(lines, values, values)
        two_shot_sum_triton(parts, values)
        two_shot_sum_triton(parts, values, values)


def states() -> None:
    shape, slots, ring = DeltaShape(16, 32, 128, 128, 4), 9, 11
    heads = shape.num_value_heads, shape.key_dim, shape.value_dim
    whole, part = RoundRows.rectangle(BATCH, 4), RoundRows(BATCH, 4, 20, int32(BATCH + 1))
    numbers = int64(BATCH), int64(BATCH), int64(BATCH)
    for dtype in FLOATS:
        memory = DeltaMemory(
            float32(slots, *heads), empty(slots, ring, shape.num_inputs, dtype=dtype)
        )
        conv = empty(shape.num_channels, shape.kernel_size, dtype=dtype)
        weights = DeltaWeights(conv, float32(heads[0]), float32(heads[0]))
        blocks = DeltaBlocks(64, int32(BATCH + 1), int32(3))
        for rows in (
            DeltaRows(*numbers, part, are_kept=True, blocks=blocks),
            DeltaRows(*numbers, whole, are_kept=False),
            DeltaRows(*numbers, whole, are_kept=False, tree=int64(BATCH, 4)),
            DeltaRows(*numbers, part, are_kept=False),
            DeltaRows(*numbers, part, are_kept=True),
        ):
            projected = empty(rows.rows.num_rows, shape.num_projected, dtype=dtype)
            output = float32(rows.rows.num_rows, *heads[::2])
            if rows.blocks is not None:
                delta_blocks(projected, memory, shape, weights, rows, output)
            gated_delta(projected, memory, shape, weights, rows, output)
        gates = empty(BATCH, shape.num_projected, dtype=dtype)[:, shape.num_inputs :]
        gated_norm(float32(BATCH, *heads[::2]), gates, empty(heads[2], dtype=dtype), 1e-6)


def adapters() -> None:
    """The fused projection of an 8B Llama, and one of a rank with inputs of no whole chunk."""
    for dtype, num_rows, (sizes, inputs), step in product(
        FLOATS, (1, 64, 512), (((4096, 1024, 1024), HIDDEN), ((HIDDEN,), 1000)), (16, 64)
    ):
        a = empty(4, len(sizes) * step, inputs, dtype=dtype)
        b, ranks = empty(4, sum(sizes), step, dtype=dtype), int32(4, len(sizes))
        weights = AdapterWeights(a, b, ranks, output_blocks(sizes, META), sizes)
        x, total = (empty(num_rows, size, dtype=dtype) for size in (inputs, sum(sizes)))
        rows = moe_permute.moe_permute(int32(num_rows, 1), 4, TILE_ROWS, 0)
        with_adapters(x, weights, rows, total.clone)
        norm = NormWeight(empty(inputs, dtype=dtype), 1e-6)
        shrink(x, weights, rows, norm)
        if len(sizes) == 1:
            with_adapters(x, weights, rows, total.clone, gated=True)


CALLS: dict[str, Callable[[], None]] = {
    "choices": choices,
    "trees": trees,
    "chains": chains,
    "layers": layers,
    "mixtures": mixtures,
    "scaled_weights": scaled_weights,
    "sums": sums,
    "states": states,
    "adapters": adapters,
}
