"""Calls of the wrappers of kernels without tilings, with the sizes of real models."""

from collections.abc import Callable
from itertools import product

import torch

from tests.kernels.launches import META
from tests.kernels.model_launches import FLOATS, FP8, empty, float32, int32, int64, scales_of
from tllm_spec.kernels import dequantise, moe_permute, moe_routing
from tllm_spec.kernels.beam_pool import BeamPool, Beams, DraftTree
from tllm_spec.kernels.choose_token_triton import (
    choose_token_triton,
    gumbel_noise_triton,
    offer_token_triton,
)
from tllm_spec.kernels.draft_beams_triton import first_beams_triton, grow_triton, select_triton
from tllm_spec.kernels.draft_input_triton import draft_input_triton
from tllm_spec.kernels.filter_cut_triton import filter_cut_triton
from tllm_spec.kernels.latent_write_triton import latent_write_triton
from tllm_spec.kernels.moe_combine_triton import moe_combine_triton
from tllm_spec.kernels.move_kv_triton import move_kv_triton
from tllm_spec.kernels.path_ranks_triton import path_ranks_triton
from tllm_spec.kernels.rank_lines import BLOCK_WORDS, RankLines
from tllm_spec.kernels.rank_sum_triton import rank_sum_triton
from tllm_spec.kernels.rms_norm_triton import rms_norm_triton
from tllm_spec.kernels.rotary_write import Rotary
from tllm_spec.kernels.rotary_write_triton import rotary_write_triton
from tllm_spec.kernels.row_copies_triton import (
    copy_rows_triton,
    gather_rows_triton,
    gather_slice_rows_triton,
    store_in_rings_triton,
)
from tllm_spec.kernels.send_results_triton import send_results_triton
from tllm_spec.kernels.silu_and_mul_triton import silu_and_mul_triton
from tllm_spec.kernels.slot_tables import SlotTables, SyntheticRates, TreeRates, TreeTables
from tllm_spec.kernels.slot_trees_triton import accept_trees_triton, write_trees_triton
from tllm_spec.kernels.slot_windows_triton import accept_windows_triton, write_drafts_triton
from tllm_spec.kernels.token_mask_triton import mask_tokens_triton
from tllm_spec.kernels.top_tokens_triton import top_tokens_triton
from tllm_spec.kernels.window_rows_triton import window_rows_triton

BATCH, VOCABULARY, HIDDEN = 8, 128256, 4096


def choices() -> None:
    for dtype in FLOATS:
        logits, ids = empty(BATCH, VOCABULARY, dtype=dtype), int64(VOCABULARY)
        noise = (float32(BATCH), int64(BATCH), int64(BATCH))
        choose_token_triton(logits)
        choose_token_triton(empty(64, VOCABULARY, dtype=dtype), token_map=ids, drafting=True)
        choose_token_triton(logits, *noise, 1, float32(BATCH), ids, drafting=True)
        offer_token_triton(logits, 4096, ids, *noise)
        top_tokens_triton(logits, 8, None, None, None, None, None)
        top_tokens_triton(logits, 16, ids, *noise, float32(BATCH))
        mask_tokens_triton(logits, int32(BATCH), int32(4, VOCABULARY // 32), 0)
        if dtype != torch.float32:
            filter_cut_triton(logits, float32(BATCH), int64(BATCH), float32(BATCH), float32(BATCH))
    gumbel_noise_triton(int64(BATCH), int64(BATCH), VOCABULARY)


def trees() -> None:
    for topk, steps, drafts in ((8, 5, 63), (1, 3, 3)):
        pool = BeamPool.allocate(BATCH, topk, steps, META)
        probs, tokens = float32(BATCH, topk), int64(BATCH, topk)
        first_beams_triton(pool, probs, tokens)
        beams, more = Beams(tokens, probs, tokens, tokens), (BATCH, topk, topk)
        for is_last in (False, True):
            grow_triton(pool, 2, beams, float32(*more), int64(*more), is_last=is_last)
        select_triton(pool, drafts)
    tables = SlotTables(int64(64), int64(64, 64), int64(64), int64(64))
    slots, nodes, path = int64(BATCH), int64(BATCH, 64), int64(BATCH, 6)
    rates = TreeRates(empty(5, 4, dtype=torch.float64), int64(64))
    for synthetic in (None, rates):
        accept_trees_triton(tables, int64(64, 64), slots, slots, nodes, 5, synthetic)
    own = TreeTables(int64(64, 64), int64(64, 64), int64(64, 64))
    tree = DraftTree(int64(BATCH, 63), nodes, nodes, nodes)
    for num_drafts in (None, slots):
        write_trees_triton(tables, own, slots, tree, int64(64), num_drafts)
    path_ranks_triton(int64(64, 64), slots, slots, path, slots, 64)
    planes = empty(64, 1024, 32, 1024)
    move_kv_triton(planes, int32(BATCH, 128), slots, path, slots)


def chains() -> None:
    tables = SlotTables(int64(64), int64(64, 8), int64(64), int64(64))
    slots, tokens = int64(BATCH), int64(BATCH, 4)
    for synthetic in (None, SyntheticRates(float32(3), int64(64))):
        accept_windows_triton(tables, slots, slots, tokens, synthetic)
    write_drafts_triton(tables, slots, int64(BATCH, 3), int64(64))
    for depths, offset in ((None, 0), (int64(BATCH, 4), 4)):
        window_rows_triton(int32(64, 4096), slots, slots, 4, 128, 32, depths, offset)
    send_results_triton(int64(4, 1024), int64(1), slots, tokens)


def layers() -> None:
    head_dim = 128
    for dtype in FLOATS:
        x, weight = empty(BATCH, HIDDEN, dtype=dtype), empty(HIDDEN, dtype=dtype)
        table, rows = empty(8192, 2, 1, head_dim, dtype=dtype), int64(BATCH)
        rms_norm_triton(x, weight, 1e-6)
        rms_norm_triton(empty(BATCH, 18432, dtype=dtype), empty(18432, dtype=dtype), 1e-6)
        silu_and_mul_triton(empty(BATCH, 28672, dtype=dtype))
        rotary = Rotary(table, rows)
        draft_input_triton(rows, x, x, (weight, weight), 1e-6, rotary, int64(2))
        draft_input_triton(None, x, x, (None, None), 0.0, rotary, None)
        layer = empty(2, 4096, 32, 8, head_dim, dtype=dtype)
        for norm in (None, empty(40, head_dim, dtype=dtype)):
            qkv = empty(BATCH, 48, head_dim, dtype=dtype)
            rotary_write_triton(qkv, table, rows, rows, layer, norm, 1e-6)
        latent, ropes = empty(BATCH, 576, dtype=dtype), empty(8192, 2, 1, 64, dtype=dtype)
        for q in (None, empty(BATCH, 128, 192, dtype=dtype)):
            pool = empty(4096, 32, 576, dtype=dtype)
            norm_weight = empty(512, dtype=dtype)
            latent_write_triton(latent, q, ropes, rows, rows, pool, norm_weight, 1e-6)
        gather_rows_triton(x, rows)
        gather_slice_rows_triton(x, rows, 4)
        copy_rows_triton(x, x)
        ring = (16, int64(1024), empty(1024, HIDDEN, dtype=dtype))
        store_in_rings_triton(ring, rows, rows, rows, x)
        store_in_rings_triton((16, ring[1], None), rows, rows, rows, None)


def mixtures() -> None:
    bias = float32(256)
    v3 = moe_routing.RoutingRule(8, "sigmoid", True, 2.5, 8, 4, 1)
    qwen3 = moe_routing.RoutingRule(8, "softmax", True)
    for dtype in FLOATS:
        moe_routing.moe_routing(empty(BATCH, 256, dtype=dtype), v3, bias)
        moe_routing.moe_routing(empty(BATCH, 128, dtype=dtype), qwen3)
        for weights, add_to in (
            (float32(BATCH, 8), None),
            (None, empty(BATCH, HIDDEN, dtype=dtype)),
        ):
            moe_combine_triton(empty(8 * BATCH, HIDDEN, dtype=dtype), weights, 8, add_to)
    for tokens, block_rows in ((1, 16), (64, 16), (500, 64), (4000, 128)):
        moe_permute.moe_permute(int32(tokens, 8), 128, block_rows)


def scaled_weights() -> None:
    for dtype, inputs in product(FLOATS, (4096, 1040)):
        weight = empty(4096, inputs, dtype=FP8)
        dequantise.dequantise_rows(weight, scales_of(weight), empty(4096, inputs, dtype=dtype))


def sums() -> None:
    lines = RankLines(0, int64(2), int32((4 << 20) // 4 // BLOCK_WORDS))
    for dtype in FLOATS:
        values = empty(BATCH, HIDDEN, dtype=dtype)
        rank_sum_triton(values, lines)
        rank_sum_triton(values, lines, values)


CALLS: dict[str, Callable[[], None]] = {
    "choices": choices,
    "trees": trees,
    "chains": chains,
    "layers": layers,
    "mixtures": mixtures,
    "scaled_weights": scaled_weights,
    "sums": sums,
}
