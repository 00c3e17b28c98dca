"""The kernels of draft trees compile for Hopper at real sizes, which needs no device."""

from typing import Any

import pytest

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import only_with_the_compiler

FLOATS = ("sums", "probs", "scores", "pool_scores", "next_scores", "parts", "temperatures", "cuts")
NO_NOISE = dict.fromkeys(("temperatures", "seeds", "positions", "cuts", "token_map"))
POOL = {"pool_size": 264, "beams_size": 32, "topk": 8, "PDL": True}  # of 8 beams and 5 steps


def check(kernel: Any, num_warps: int, pointers: tuple[str, ...], **constants: Any) -> None:
    types = {name: "*fp32" if name in FLOATS else "*i64" for name in pointers}
    types |= {"logits": "*bf16", "block_tables": "*i32", "planes": "*i32", "bounds": "*fp64"}
    code = compiled_for_hopper(kernel, types, constants, num_warps=num_warps)
    assert ".local" not in code.asm["ptx"] and code.asm["cubin"]


@only_with_the_compiler
def test_the_kernels_of_the_best_tokens_compile() -> None:
    from tllm_spec.kernels.top_tokens_triton import _best_of_row, _reduce_part

    noise = ("temperatures", "seeds", "positions", "cuts", "token_map")
    for pointers, without in (((), NO_NOISE), (noise, {})):
        common = {"rows_per_request": 8, "block": 512, "PDL": True} | without
        check(_reduce_part, 4, ("parts", *pointers), **common)
        sizes = {"topk": 8, "topk_block": 8, "parts_block": 256}
        check(_best_of_row, 8, ("parts", "probs", "tokens", *pointers), **common, **sizes)


@only_with_the_compiler
def test_the_kernels_of_growth_and_selection_compile() -> None:
    from tllm_spec.kernels.draft_beams_triton import _first, _grow, _select

    pool = ("pool_scores", "pool_tokens", "pool_beams")
    beams = ("next_tokens", "next_scores", "next_rows", "next_bits")
    check(_first, 1, ("probs", "tokens", "rows", "bits", *pool), **POOL, block=8)
    inputs, sizes = ("scores", "bits", "probs", "tokens"), {"topk_block": 8, "block": 64}
    check(_grow, 1, (*inputs, *beams, *pool), **POOL, **sizes, is_last=False)
    none = dict.fromkeys(beams)
    check(_grow, 1, (*inputs, *pool), **POOL, **sizes, **none, is_last=True)
    results, sizes = ("tokens", "parents", "depths", "all_bits"), {"size": 264, "block": 512}
    check(_select, 4, (*results, *pool), **POOL, **sizes, num_drafts=63)


@only_with_the_compiler
def test_the_kernels_of_slots_and_kv_compile() -> None:
    from tllm_spec.kernels.move_kv_triton import move_kv_kernel
    from tllm_spec.kernels.slot_trees_triton import _accept, _write

    slots = ("windows", "all_num_drafts", "all_parents", "slots")
    accept = ("all_kv_lens", "previous_tokens", "kv_lens", "targets", "rows", "tokens", "lens")
    sizes = {"width": 33, "block": 64, "depth": 5, "path_block": 8, "coin_domain": 2, "PDL": True}
    ranks = {"num_ranks": 4, "ranks_block": 4}
    check(_accept, 1, (*slots, *accept, "seeds"), **sizes, **ranks)
    no_rates = {"bounds": None, "seeds": None, "num_ranks": 1, "ranks_block": 1}
    check(_accept, 1, (*slots, *accept), **sizes, **no_rates)
    trees = ("all_depths", "all_bits", "tokens", "parents", "depths", "bits", "draft_limits")
    check(_write, 1, (*slots, *trees), width=33, block=64, PDL=True, num_drafts=None)
    check(_write, 1, (*slots, *trees, "num_drafts"), width=33, block=64, PDL=True)
    paths = {"PAGE_SIZE": 32, "WIDTH": 512, "STEPS": 8, "BLOCK": 512, "PDL": True}
    check(move_kv_kernel, 4, ("all_first", "rows", "lens"), **paths)


@pytest.mark.thinned(3)
@only_with_the_compiler
@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_kernels_of_chains_that_are_drafted_as_trees_compile(length: int) -> None:
    from tllm_spec.kernels.draft_beams_triton import _first, _grow, _select
    from tllm_spec.kernels.path_ranks_triton import _path_ranks
    from tllm_spec.kernels.top_tokens_triton import _best_of_row

    pool = ("pool_scores", "pool_tokens", "pool_beams")
    beams = ("next_tokens", "next_scores", "next_rows", "next_bits")
    chain = {"pool_size": length, "beams_size": max(length - 1, 1), "topk": 1, "PDL": True}
    check(_first, 1, ("probs", "tokens", "rows", "bits", *pool), **chain, block=1)
    inputs, sizes = ("scores", "bits", "probs", "tokens"), {"topk_block": 1, "block": 1}
    check(_grow, 1, (*inputs, *beams, *pool), **chain, **sizes, is_last=False)
    results, block = ("tokens", "parents", "depths", "all_bits"), 1 << (length - 1).bit_length()
    sizes = {"size": length, "block": block, "num_drafts": length}
    check(_select, 4, (*results, *pool), **chain, **sizes)
    sizes = {"rows_per_request": 1, "block": 512, "topk": 1, "topk_block": 1, "parts_block": 256}
    noise = ("temperatures", "seeds", "positions", "cuts", "token_map")
    check(_best_of_row, 8, ("parts", "probs", "tokens", *noise), **sizes, PDL=True)
    path = {"width": 1 + length, "block": 2 * block, "path": 1 + length, "PDL": True}
    values = {"end": 64, "off_chain": 128, "nothing": -1}
    pointers = ("all_parents", "slots", "all_num_drafts", "rows", "lens", "found")
    check(_path_ranks, 1, pointers, **path, **values)
