"""What the wrappers launch on GPUs of every compute capability fits their shared memory, and is on
Hopper what was measured. Compiling needs no device."""

import ast
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.hopper import HOPPER
from tests.kernels.interpreter import only_outside_the_interpreter, only_with_the_compiler
from tests.kernels.launches import FIRST_WITH_FP8, LIMITS, META, Launch, launches_of, use_gpu
from tllm_spec.kernels import launch as shared_memory
from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.attention import paged_prefill, window_attention_cuda
from tllm_spec.kernels.experts import grouped_gemm as grouped_tilings
from tllm_spec.kernels.experts.grouped_gemm import ExpertWeights
from tllm_spec.kernels.gemm import small_m_gemm
from tllm_spec.kernels.gemm.batch_invariant_linear import BLOCK_IN, batch_invariant_linear
from tllm_spec.kernels.launch import (
    HOPPER_BYTES,
    has_tensor_memory,
    shared_memory_bytes,
    stages_that_fit,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WITH_LESS = [capability for capability, limit in LIMITS.items() if limit < HOPPER_BYTES >> 10]
EXPERTS = ("experts", "scaled_experts", "int4_experts")
GEMMS = ("linears", "scaled_linears", *EXPERTS, "heads")
LINEARS = ("fp8_linears", "int4_linears")
ATTENTION = ("windows", "invariant_attention", "latents", "invariant_latents")
OVER_CODES = tuple(f"{name} over codes" for name in ATTENTION)
CODES = tuple(f"scaled_{form}_experts" for form in ("codes", "blocks", "tiles"))
TILED = (*GEMMS, *CODES, *LINEARS, *ATTENTION, *OVER_CODES)
SMALL = ("choices", "trees", "chains", "layers", "mixtures", "scaled_weights", "sums", "states")
SMALL += ("prompts", "adapters")


def launches(name: str, capability: int) -> list[Launch]:
    # Importing these files imports Triton.
    from tests.kernels import model_launches, small_launches

    call = (model_launches.CALLS | small_launches.CALLS)[name]
    with pytest.MonkeyPatch.context() as patch:
        return launches_of(call, capability, patch)


@pytest.mark.parametrize("capability", LIMITS)
def test_the_device_says_how_much_a_program_may_have(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu(capability, monkeypatch)
    assert shared_memory_bytes.__wrapped__(CUDA) == LIMITS[capability] << 10
    assert shared_memory_bytes.__wrapped__(CPU) == HOPPER_BYTES


def test_a_pipeline_has_fewer_stages_only_where_they_do_not_fit() -> None:
    stages = functools.partial(stages_that_fit, 4, 48 << 10)
    assert [stages(limit << 10) for limit in (227, 163, 99, 64)] == [4, 4, 3, 2]
    assert stages_that_fit(4, 1 << 20, HOPPER_BYTES) == 4


@pytest.mark.parametrize("capability", LIMITS)
def test_blocks_of_int4_experts_have_fewer_rows_only_where_tensor_memory_is_small(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu(capability, monkeypatch)
    has_memory = has_tensor_memory.__wrapped__
    monkeypatch.setattr(shared_memory, "has_tensor_memory", has_memory)
    monkeypatch.setattr(grouped_tilings, "has_kernels", lambda device: True)

    def rows(num_assignments: int, group: int, words: torch.dtype = torch.int32) -> int:
        on = {"device": "meta", "dtype": torch.uint8}
        scales = torch.empty(1, 1, 1, device="meta", dtype=words)
        sums = ExpertWeights(torch.empty(1, 1, 64, **on), scales, group).num_sums(torch.bfloat16)
        return grouped_tilings.block_rows_of(num_assignments, 1, torch.bfloat16, CUDA, "int4", sums)

    groups = ((16, torch.float32), (32, torch.int32), (64, torch.int32), (128, torch.int32))
    expected = [32, 64, 128, 128] if capability == 100 else [128] * 4
    assert [rows(1000, *group) for group in groups] == expected
    assert rows(1000, 32, torch.uint8) == 128
    assert [rows(number, 64) for number in (8, 24, 64)] == [16, 32, 64]


@pytest.mark.thinned(5)
@only_with_the_compiler
@pytest.mark.parametrize("name", [name for name in TILED if not name.startswith("latents")])
@pytest.mark.parametrize("capability", WITH_LESS)
def test_with_less_shared_memory_only_stages_differ(capability: int, name: str) -> None:
    """So the sums have the same order, and a row's bits depend on as little as on Hopper. Windows
    over latents, which are not batch-invariant, may have smaller tiles."""

    def without_stages(made: Launch) -> str:
        constants = [item for item in made.constants.items() if item[0] != "PDL"]
        num_warps = made.options.get("num_warps")
        return f"{made.name} {sorted(made.types.items())} {sorted(constants)} {num_warps}"

    own, hoppers = launches(name, capability), launches(name, HOPPER)
    expected = [without_stages(made) for made in hoppers if made.runs_on(capability)]
    assert [without_stages(made) for made in own] == expected


def bytes_of_stages(made: Launch) -> int:
    """Bytes of a GEMM's pipeline for 16-bit rows, without the stage in registers. They are exact
    on GPUs with less shared memory than Hopper."""
    names = (("BLOCK_ROWS", "BLOCK_M"), ("BLOCK_OUT", "BLOCK_N"), ("BLOCK_IN", "BLOCK_K", "BLOCK"))
    rows, outputs, inputs = (
        next(made.constants[name] for name in each if name in made.constants) for each in names
    )
    weight_bytes = 1 if made.types["weight"] == "*fp8e4nv" else 2
    number: int = made.options["num_stages"] - 1
    return number * inputs * (2 * rows + weight_bytes * outputs)


@only_with_the_compiler
@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("capability", WITH_LESS)
def test_the_pipelines_of_gemms_fit(capability: int, name: str) -> None:
    found = [made for made in launches(name, capability) if made.types.get("x") == "*bf16"]
    assert found or (name.startswith("scaled") and capability < FIRST_WITH_FP8)
    for made in found:
        assert bytes_of_stages(made) <= LIMITS[capability] << 10, made.key
        assert made.options["num_stages"] >= 2, "nothing would be in flight"


@only_with_the_compiler
@pytest.mark.parametrize(
    "name", ["linears", *(pytest.param(name, marks=pytest.mark.slow) for name in GEMMS[1:-1])]
)
def test_gemms_of_any_number_of_rows_have_one_kind_of_instruction_on_hopper(name: str) -> None:
    found = [made for made in launches(name, HOPPER) if made.types.get("x") == "*bf16"]
    assert len(found) > 2
    for made in found:
        ptx = made.compiled(HOPPER).asm["ptx"]
        kinds = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx))
        assert kinds == {f"m64n{made.constants['BLOCK_ROWS']}k16"} and "mma.sync" not in ptx
        # FP8 weights are converted without an instruction of one eighth of the throughput.
        assert "cp.async" in ptx and "cvt.rn.bf16.f16" not in ptx


@only_with_the_compiler
def test_the_compiler_adds_the_bias_after_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it knew that the inputs fit one block, it would start the accumulation with the bias."""

    def call() -> None:
        inputs = BLOCK_IN // 2
        shapes = ((1, inputs), (48, inputs), (48,))
        batch_invariant_linear(*(torch.empty(shape, device=META) for shape in shapes))

    (made,) = launches_of(call, HOPPER, monkeypatch)
    code = made.compiled(HOPPER).asm["ttir"]
    assert code.count("tt.dot") == 1 and code.count("arith.addf") == 2


# Launches that did not fit with Hopper's tilings. By call: a part of the key.
@pytest.mark.thinned(60)
@only_with_the_compiler
@pytest.mark.parametrize(
    ("capability", "name", "part"),
    [
        (86, "experts", "('BLOCK_ROWS', 128)"),
        (89, "latents", "('BLOCK_M', 16), ('BLOCK_N', 64)"),
        (80, "latents", "('BLOCK_M', 16), ('BLOCK_N', 64)"),
    ],
)
def test_a_launch_that_needed_more_fits(capability: int, name: str, part: str) -> None:
    made = next(made for made in launches(name, capability) if part in made.key)
    made.check(capability)


@pytest.mark.thinned(2)
@only_with_the_compiler
@pytest.mark.parametrize("name", SMALL)
def test_the_front_end_takes_every_kernel_without_tiles(name: str) -> None:
    """Once for all types. The interpreter runs what the compiler refuses, such as a constexpr that
    is defined again in a loop."""
    first = {(made.name, *sorted(made.types.items())): made for made in launches(name, HOPPER)}
    for made in first.values():
        made.check_front_end()


@pytest.mark.slow
@only_with_the_compiler
@pytest.mark.parametrize("name", [*TILED, *SMALL])
@pytest.mark.parametrize("capability", LIMITS)
def test_every_launch_compiles_and_fits(capability: int, name: str) -> None:
    for made in launches(name, capability):
        made.check(capability)


@only_with_the_compiler
def test_no_kernel_is_missing() -> None:
    folder = Path(nvrtc.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    launched = {
        node.func.value.id  # of `kernel[grid](...)`
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id not in ("dict", "list")
    }
    assert len(launched) > 30
    found = {made.name for name in (*TILED, *SMALL) for made in launches(name, HOPPER)}
    assert {name.rpartition(".")[2] for name in found} >= launched
    assert sum(name.endswith(".attention_kernel") for name in found) == 3


@only_outside_the_interpreter
@pytest.mark.parametrize("capability", LIMITS)
def test_cuda_kernels_and_prefill_in_graphs_are_left_out_elsewhere(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their place take Triton's kernels, torch's GEMMs, and prompts without CUDA graphs."""
    use_gpu(capability, monkeypatch)
    monkeypatch.setattr(nvrtc, "is_installed", lambda: True)
    monkeypatch.setattr(nvrtc, "why_unavailable", nvrtc.why_unavailable.__wrapped__)
    monkeypatch.setattr(paged_prefill, "PrefillInPlace", lambda *arguments: "plans")

    def on_cuda(*shape: int) -> Any:
        return SimpleNamespace(is_cuda=True, shape=shape, dtype=torch.bfloat16, device=CUDA)

    has_cuda_kernels = capability in (90, 100)
    qkv, layer = on_cuda(1, 4, 48, 128), on_cuda(2, 8, 32, 8, 128)
    assert window_attention_cuda.serves(qkv, qkv, None, layer) == has_cuda_kernels
    assert small_m_gemm.serves(on_cuda(1, 4096), on_cuda(4096, 4096)) == has_cuda_kernels
    kernels: Any = SimpleNamespace(_layer=layer)
    plans = paged_prefill.PagedPrefill.in_place(kernels, paged_prefill.PrefillLimits(64, 1, 8))
    assert plans == ("plans" if capability == HOPPER else None)
