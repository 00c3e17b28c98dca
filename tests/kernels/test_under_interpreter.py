"""Runs the tests of the Triton kernels, and of what uses them, under Triton's interpreter. All
files share a subprocess: importing torch and Triton takes longer than most of their tests."""

from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import check_files_under_the_interpreter
from tllm_spec.kernels.dispatch import has_kernels

# Each has at least one test there. A file of another folder than this one has its folder's name.
NAMES = (
    "batch_invariant_attention",
    "rms_norm",
    "silu_and_mul",
    "gated_delta",
    "row_copies",
    "token_mask",
    "attention_sinks",
    "window_attention",
    "window_rows",
    "draft_input",
    "slot_windows",
    "choose_rows",
    "choose_token",
    "tree_attention",
    "batch_invariant_tree",
    "lossless/deterministic",
    "latent_attention",
    "latent_write",
    "head_gemm",
    "rank_sum",
    "rank_best",
    "two_shot_sum",
    "scaled_linear",
    "scaled_linear_slices",
    "quantise_rows",
    "fp8_linear",
    "int4_weights",
    "dequantise",
    "moe_routing",
    "moe_permute",
    "grouped_gemm",
    "quantised_grouped_gemm",
    "moe_combine",
    "draft_beams",
    "top_tokens",
    "move_kv",
    "path_ranks",
    "suffix_match",
    "path_trees",
    "draft_sources",
    "match_branches",
    "filter_cut",
    "batch_invariant_linear",
    "rotary_write",
    "send_results",
    "widen_pages",
    "attention/triton",
    "attention/fp8_pool",
    "attention/sinks",
    "attention/fp8_latents",
    "attention/tree",
    "attention/batch_invariant",
    "batch_invariant_latent",
)


def test_the_kernels_pass_under_tritons_interpreter() -> None:
    """One combination of each test's parameters."""
    assert not has_kernels(torch.device("cpu")), "only the subprocess runs the interpreter"
    check_files_under_the_interpreter(list(map(path_of, NAMES)))


@pytest.mark.slow
def test_what_is_slow_passes_under_tritons_interpreter() -> None:
    check_files_under_the_interpreter(list(map(path_of, NAMES)), "-m", "slow and not gpu")


def path_of(name: str) -> str:
    *folder, name = name.split("/")
    return str(Path(__file__).parents[1].joinpath(*(folder or ["kernels"]), f"test_{name}.py"))
