"""Runs the tests of the Triton kernels, and of what uses them, under Triton's interpreter. Many
files share a subprocess: importing torch and Triton takes longer than most of their tests."""

from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import check_files_under_the_interpreter
from tllm_spec.kernels.triton_support import has_kernels

# By subprocess, of about equal time: each file's least number of tests. A file of another folder
# than this one has its folder's name.
GROUPS: tuple[dict[str, int], ...] = (
    {
        "batch_invariant_attention": 15,
        "rms_norm": 30,
        "silu_and_mul": 23,
        "row_copies": 90,
        "token_mask": 6,
        "window_attention": 31,
        "window_rows": 12,
        "draft_input": 28,
        "slot_windows": 12,
        "tree_attention": 9,
        "batch_invariant_tree": 3,
        "lossless/deterministic": 2,
        "latent_attention": 21,
        "latent_write": 10,
        "head_gemm": 24,
        "rank_sum": 10,
        "scaled_linear": 19,
        "scaled_linear_slices": 6,
        "quantise_rows": 9,
        "fp8_linear": 8,
        "int4_linear": 17,
        "dequantise": 5,
    },
    {
        "moe_routing": 21,
        "moe_permute": 10,
        "grouped_gemm": 11,
        "scaled_grouped_gemm": 9,
        "moe_combine": 15,
        "slot_trees": 12,
        "draft_beams": 6,
        "top_tokens": 15,
        "move_kv": 18,
        "path_ranks": 3,
        "suffix_match": 11,
        "draft_sources": 5,
        "filter_cut": 11,
        "batch_invariant_linear": 13,
        "rotary_write": 23,
        "send_results": 10,
        "attention/triton": 7,
        "attention/tree": 10,
        "attention/batch_invariant": 7,
        "batch_invariant_latent": 13,
    },
)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: next(iter(group)))
def test_the_kernels_pass_under_tritons_interpreter(group: dict[str, int]) -> None:
    assert not has_kernels(torch.device("cpu")), "only the subprocess runs the interpreter"
    check_files_under_the_interpreter({path_of(name): number for name, number in group.items()})


@pytest.mark.slow
def test_what_is_slow_passes_under_tritons_interpreter() -> None:
    numbers = {path_of(name): 0 for group in GROUPS for name in group}
    numbers[path_of("lossless/deterministic")] = 2
    check_files_under_the_interpreter(numbers, "-m", "slow and not gpu")


def path_of(name: str) -> str:
    *folder, name = name.split("/")
    return str(Path(__file__).parents[1].joinpath(*(folder or ["kernels"]), f"test_{name}.py"))
