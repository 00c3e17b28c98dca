"""Runs the tests of the Triton kernels under Triton's interpreter, in subprocesses. Several files
share a subprocess, because to import torch and Triton takes longer than most of their tests."""

from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import check_files_under_the_interpreter
from tllm_spec.kernels.triton_support import has_kernels

# By subprocess, of about equal time: each file's least number of tests.
GROUPS: tuple[dict[str, int], ...] = (
    {
        "batch_invariant_attention": 15,
        "rms_norm": 30,
        "silu_and_mul": 23,
        "row_copies": 90,
        "token_mask": 6,
    },
    {"window_attention": 47, "window_rows": 12, "draft_input": 28, "slot_windows": 12},
    {"tree_attention": 9, "batch_invariant_tree": 3},
    {"moe_routing": 21, "moe_permute": 10, "grouped_gemm": 17, "moe_combine": 15},
    {"slot_trees": 12, "draft_beams": 6, "top_tokens": 15, "move_kv": 18, "path_ranks": 3},
    {"latent_attention": 13, "latent_write": 10, "head_gemm": 24},
    {"batch_invariant_latent": 13},
    {"filter_cut": 12, "batch_invariant_linear": 13, "rotary_write": 23, "send_results": 10},
)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: next(iter(group)))
def test_the_kernels_pass_under_tritons_interpreter(group: dict[str, int]) -> None:
    assert not has_kernels(torch.device("cpu")), "only the subprocess runs the interpreter"
    folder = Path(__file__).parent
    files = {str(folder / f"test_{name}.py"): number for name, number in group.items()}
    check_files_under_the_interpreter(files)
