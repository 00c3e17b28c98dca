"""Layers that see a part of the keys: trees that are cut, and that the kernels compile for Hopper
with each kind of span, which needs no device."""

from typing import Any

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import only_with_the_compiler
from tests.kernels.tree_problem import bits_of
from tllm_spec.kernels.key_spans import KeySpan, KeySpans
from tllm_spec.kernels.tree_mask import TreeMask

BF16 = dict.fromkeys(("qkv", "q", "cos_sin", "layer", "output"), "*bf16")
FP32 = dict.fromkeys(("partials", "log_sums", "means"), "*fp32")
I64 = dict.fromkeys(("kv_slots", "tree_bits", "positions"), "*i64")
I32 = dict.fromkeys(("block_tables", "kv_lens", "tiles", "paths", "path_lens"), "*i32")
TYPES = BF16 | FP32 | I64 | I32 | {"log2_scale": "fp32", "eps": "fp32"}
SIZES = {"KV_HEADS": 8, "HEAD_DIM": 128, "PAGE_SIZE": 32, "BLOCK_D": 128, "GROUP": 5}


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
    types = {name: own for name, own in TYPES.items() if name not in constants}
    return compiled_for_hopper(kernel, types, constants, num_warps=4, num_stages=3, **options)


def test_a_row_of_a_tree_keeps_the_keys_of_its_path_that_its_span_has() -> None:
    # Position 14 is before the region; the region's first key has position 15.
    paths = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 63]]
    positions = torch.tensor([15, 16, 17, 16, 18])
    mask = TreeMask(torch.tensor([bits_of(paths)]), 64)
    for size, kept in {
        16: [[0], [1], [1, 2], [3], [1, 2, 63]],
        17: [[0], [0, 1], [2], [0, 3], [2, 63]],
        1: [[0], [1], [2], [3], [63]],
        15: paths,
    }.items():
        spans = KeySpans(KeySpan(size, slides=False), positions)
        assert spans.cut(mask).bits.tolist() == [bits_of(kept)]
    for size, kept in {
        1: [[0], [1], [2], [3], [63]],
        2: [[0], [0, 1], [1, 2], [0, 3], [2, 63]],
        4: paths,
    }.items():
        spans = KeySpans(KeySpan(size, slides=True), positions)
        assert spans.cut(mask).bits.tolist() == [bits_of(kept)]


@pytest.mark.parametrize("slides", [False, True], ids=["chunks", "sliding"])
def test_the_first_key_is_the_same_on_the_host_and_on_the_device(slides: bool) -> None:
    span, positions = KeySpan(16, slides=slides), [0, 14, 15, 16, 17, 40]
    found = KeySpans(span, torch.tensor(positions)).first_keys().tolist()
    assert found == [span.first_key(position) for position in positions]
    assert found == ([0, 0, 0, 1, 2, 25] if slides else [0, 0, 0, 16, 16, 32])


@pytest.mark.thinned(3)
@only_with_the_compiler
@pytest.mark.parametrize("span", [0, 8192, -4096])
@pytest.mark.parametrize("in_tree", [False, True], ids=["chains", "trees"])
def test_the_kernels_of_windows_compile(in_tree: bool, span: int) -> None:
    from tllm_spec.kernels.window_attention_triton import attention_kernel

    constants: dict[str, Any] = {"norm_weights": None, "num_padding": None} | SIZES
    constants |= {"SPAN": span, "TREE": in_tree, "HAS_OFFSET": False, "PADDED": False}
    constants |= {"HAS_NORM": False, "SPLITS": True, "WINDOW": 4, "BLOCK_M": 32, "BLOCK_N": 64}
    constants |= {"BLOCK_W": 16, "WIDEN": False, "PDL": True}
    constants |= {"RAGGED": False, "offsets": None}
    constants |= {} if in_tree else {"tree_bits": None}
    constants |= {} if span else {"positions": None}
    code = compiled(attention_kernel, constants)
    assert ".local" not in code.asm["ptx"] and code.asm["cubin"]


@pytest.mark.thinned(3)
@only_with_the_compiler
@pytest.mark.parametrize("span", [0, 8192, -4096])
@pytest.mark.parametrize("in_tree", [False, True], ids=["chains", "trees"])
def test_the_batch_invariant_kernels_compile(in_tree: bool, span: int) -> None:
    from tllm_spec.kernels.batch_invariant_attention_triton import attention_kernel

    constants: dict[str, Any] = SIZES | {"SPAN": span, "TREE": in_tree, "SPREADS": False}
    constants |= {"WIDEN": False, "SPLIT_KEYS": 256, "BLOCK_M": 64, "BLOCK_N": 64}
    constants |= {} if in_tree else {"paths": None, "path_lens": None}
    constants |= {"log_sums": None}
    assert compiled(attention_kernel, constants, enable_fp_fusion=False).asm["cubin"]
