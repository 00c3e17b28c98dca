"""FLASHINFER for MLA: what FlashInfer's wrapper is planned with in each phase of a round, by a
stand-in with its interface that computes what the plan says. A CUDA device runs the wrapper itself
(`-m gpu`)."""

import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention.test_latent import (
    GEOMETRY,
    HEADS,
    PAGE_SIZE,
    PHASES,
    RANK,
    ROPE,
    SEQ_LENS,
    PhaseArguments,
    Problem,
    ragged_attention,
)
from tests.kernels.row_counts import rows_of
from tests.kernels.tree_problem import bits_of, random_paths
from tests.models.deepseek import save_deepseek
from tllm_spec.attention.choice import create_backend, workspace_bytes
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.flashinfer_latent import FlashInferLatent
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.attention.kv_format import KVFormat
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.attention.latent import LatentBackend, TritonLatent, VanillaLatent
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.building import plan as plan_module
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.kernels.attention.planned_latent import (
    PLAN_BYTES,
    WORKSPACE_BYTES,
    LatentRows,
    PlannedLatent,
    plain_planned_latent,
)
from tllm_spec.kernels.attention.visible_keys import TreeMask

DEEPSEEK = LatentGeometry(1, 16, 512, 64, 128, 128, 0.1)


@dataclass
class Planned:
    """The arguments of the wrapper's `plan`, in its order."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor
    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    causal: bool
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype


class StandIn:
    """FlashInfer's wrapper, as far as the backend uses it."""

    def __init__(self) -> None:
        self.plans: list[Planned] = []
        self.num_runs = 0

    def plan(self, *arguments: Any) -> None:
        self.plans.append(Planned(*arguments))

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor
    ) -> torch.Tensor:
        plan, self.num_runs = self.plans[-1], self.num_runs + 1
        assert q_nope.shape[1:] == (plan.num_heads, plan.head_dim_ckv)
        assert q_pe.shape[1:] == (plan.num_heads, plan.head_dim_kpe)
        assert ckv.shape[1:] == (plan.page_size, plan.head_dim_ckv)
        assert kpe.shape[1:] == (plan.page_size, plan.head_dim_kpe)
        rows = LatentRows(
            plan.qo_indptr, plan.kv_indptr, plan.kv_len_arr, plan.kv_indices, plan.causal
        )
        return plain_planned_latent(q_nope, q_pe, ckv, kpe, rows, plan.sm_scale)


@pytest.fixture
def wrapper() -> StandIn:
    return StandIn()


@pytest.fixture
def kind(wrapper: StandIn) -> type[LatentBackend]:
    """The backend with the stand-in."""

    class Backend(FlashInferLatent):
        def __init__(self, geometry: LatentGeometry, pool: KVPool) -> None:
            layer, size = pool.data[0], geometry.latent_dim
            planned = PlannedLatent(layer, geometry.num_heads, size, geometry.scale, wrapper)
            super().__init__(geometry, pool, planned)

    return Backend


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_planned_as_in_the_table_and_run_as_planned(
    phase: str, wrapper: StandIn, kind: type[LatentBackend]
) -> None:
    num_rows, arguments = PHASES[phase]
    problem = Problem(arguments.kv_len_arr, [num_rows] * len(SEQ_LENS))
    expected = ragged_attention(problem, arguments)
    problem = Problem(arguments.kv_len_arr, [num_rows] * len(SEQ_LENS))
    torch.testing.assert_close(problem.run(kind), expected, rtol=1e-4, atol=1e-5)
    _, plan = wrapper.plans  # the first one compiles
    assert plan.qo_indptr.tolist() == arguments.qo_indptr
    assert plan.kv_len_arr.tolist() == arguments.kv_len_arr
    assert plan.causal == arguments.causal
    num_pages = [-(-length // PAGE_SIZE) for length in arguments.kv_len_arr]
    assert plan.kv_indptr.tolist() == [0, *accumulate(num_pages)]
    tables = zip(problem.tables.tolist(), num_pages, strict=True)
    assert plan.kv_indices.tolist() == [page for table, n in tables for page in table[:n]]
    integers = plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_len_arr
    assert all(each.dtype == torch.int32 for each in integers)
    assert (plan.num_heads, plan.head_dim_ckv, plan.head_dim_kpe) == (HEADS, RANK, ROPE)
    assert (plan.page_size, plan.sm_scale) == (PAGE_SIZE, GEOMETRY.scale)
    assert plan.q_data_type == plan.kv_data_type == torch.float32
    assert wrapper.num_runs == 1


def test_chunks_run_expanded_next_to_planned_windows(
    wrapper: StandIn, kind: type[LatentBackend]
) -> None:
    kv_lens, new = [6, 17, 9, 14], [6, 5, 2, 2]
    starts = [0, *accumulate(new)]
    expected = ragged_attention(
        Problem(kv_lens, new, num_contexts=2), PhaseArguments(starts, kv_lens, causal=True)
    )
    found = Problem(kv_lens, new, num_contexts=2).run(kind)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert wrapper.plans[-1].kv_len_arr.tolist() == [9, 14] and wrapper.num_runs == 1


def test_trees_run_as_in_triton(wrapper: StandIn, kind: type[LatentBackend]) -> None:
    outputs = []
    for each in (VanillaLatent, kind):
        problem, generator = Problem([14, 9], [3, 3]), torch.Generator().manual_seed(4)
        paths = [bits_of(random_paths(3, generator)) for _ in range(2)]
        problem.tree = TreeMask(torch.tensor(paths), 3)
        outputs.append(problem.run(each))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    assert wrapper.num_runs == 0 and len(wrapper.plans) == 1


def pool_of(geometry: LatentGeometry, dtype: torch.dtype) -> KVPool:
    return KVPool(
        geometry,
        num_pages=2,
        page_size=PAGE_SIZE,
        kv_format=KVFormat(dtype),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("geometry", "dtype", "reason"),
    [
        (GEOMETRY, torch.bfloat16, "the model has 24 + 8 in bfloat16"),
        (DEEPSEEK, torch.float32, "the model has 512 + 64 in float32"),
        (DEEPSEEK, torch.bfloat16, "cannot be compiled"),
    ],
)
def test_where_flashinfer_has_no_kernels_the_windows_run_triton_with_a_warning(
    geometry: LatentGeometry,
    dtype: torch.dtype,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    pool = pool_of(geometry, dtype)
    backend = create_backend(FlashInferAttention, geometry, pool, plans_latents=True)
    assert type(backend) is TritonLatent
    (line,) = caplog.messages
    assert "latent attention use TRITON" in line and reason in line


def test_memory_planning_knows_the_workspaces_of_flashinfers_kernels() -> None:
    kv_format = KVFormat(torch.bfloat16)
    planned = [
        workspace_bytes(FlashInferAttention, DEEPSEEK, kv_format, plans_latents=plans)
        for plans in (False, True)
    ]
    assert planned[1] - planned[0] == WORKSPACE_BYTES + PLAN_BYTES


@pytest.mark.parametrize("name", ["auto", "FLASHINFER"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_only_its_name_and_a_latent_target_choose_planned_windows(
    name: str, is_latent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "choose_backend", lambda *_: FlashInferAttention)
    save_deepseek(tmp_path, "DeepseekV3")
    model = str(tmp_path) if is_latent else "zoo:llama"
    plan = BuildPlan(LlmArgs.from_kwargs(model, attn_backend=name, max_seq_len=64))
    assert plan.plans_latents == (is_latent and name == "FLASHINFER")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [1, 4])
def test_flashinfers_kernels_equal_the_reference(window: int, dtype: torch.dtype) -> None:
    generator, lens = torch.Generator("cuda").manual_seed(1), [70, 5, 800]
    pool = KVPool(
        DEEPSEEK, num_pages=80, page_size=32, kv_format=KVFormat(dtype), device=torch.device("cuda")
    )
    pool.data.normal_(generator=generator)
    pages = torch.randperm(80, generator=generator, device="cuda")[:75]
    tables = pages.view(3, 25).to(torch.int32)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    rows = LatentRows.of_windows(kv_lens, rows_of([window] * len(lens)), tables, 32)
    num_rows = window * len(lens)
    # As the backend gives them: views that are contiguous along the last dimension only.
    q_latent = torch.randn(16, num_rows, 512, generator=generator, device="cuda").to(dtype)
    q = torch.randn(num_rows, 16, 192, generator=generator, device="cuda").to(dtype)[..., 128:]
    planned = PlannedLatent(pool.data[0], 16, 512, DEEPSEEK.scale)
    planned.plan(rows)
    found = planned.run(q_latent.transpose(0, 1), q, pool.data[0])
    latents, shared = pool.data[0].split((512, 64), 2)
    expected = plain_planned_latent(
        q_latent.transpose(0, 1), q, latents, shared, rows, DEEPSEEK.scale
    )
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
