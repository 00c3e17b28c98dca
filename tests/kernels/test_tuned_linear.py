"""Linear layers with an algorithm of the table: when it is used, the reference against the formula,
and on a CUDA device (`-m gpu`) the library itself, on odd sizes and in a graph."""

import ctypes
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tllm_spec.kernels.gemm import cublas_lt
from tllm_spec.kernels.gemm.cublas_lt import (
    ALGORITHM_BYTES,
    CLUSTERS,
    CublasLt,
    Plan,
    Sizes,
    shared_library,
)
from tllm_spec.kernels.gemm.tuned_linear import (
    GemmGroup,
    LinearTable,
    TunedGemms,
    key_of,
    plain_tuned_linear,
    tune_missing,
    tuned_linear,
)

BFLOAT16, CUDA = torch.bfloat16, torch.device("cuda")
ALGORITHM = bytes(range(64))
on_each_form = pytest.mark.parametrize(("has_bias", "adds"), list(product([False, True], repeat=2)))


class Case:
    """Operands with strides between rows, and the formula."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        has_bias: bool = False,
        adds: bool = False,
        *,
        dtype: torch.dtype = BFLOAT16,
        device: str = "cpu",
    ) -> None:
        rows, in_features, out_features = sizes
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.x = random(rows, 2 * in_features)[:, in_features:]
        self.weight = random(out_features, in_features) / in_features**0.5
        self.bias = random(out_features) if has_bias else None
        self.total = (
            random(rows, 3 * out_features)[:, out_features : 2 * out_features] if adds else None
        )
        self.expected = self.x.double() @ self.weight.double().t()
        for addend in (self.bias, self.total):
            self.expected += 0 if addend is None else addend.double()

    def check(self, tuned: TunedGemms) -> None:
        output = tuned_linear(self.x, self.weight, tuned, bias=self.bias, add_to=self.total)
        assert self.total is None or output is self.total
        self.check_output(output)

    def check_output(self, output: torch.Tensor) -> None:
        """One rounding, or two where torch rounds the GEMM and the sum."""
        rounding = 2.0**-8 if output.dtype == BFLOAT16 else 2.0**-11
        assert output.dtype == self.x.dtype
        torch.testing.assert_close(
            output.double(), self.expected, rtol=2 * rounding, atol=2 * rounding
        )


class FakePlan:
    """Replaces the library: records the algorithms, and computes as the reference does."""

    made: list[Sizes]
    run_with: list[bytes]
    accepted = True

    def __init__(self, lt: object, sizes: Sizes) -> None:
        self.made.append(sizes)
        self.adds = sizes.adds

    def accepts(self, algorithm: bytes) -> bool:
        return self.accepted

    def run(self, algorithm: bytes, x: Any, weight: Any, output: Any, *, bias: Any) -> None:
        self.run_with.append(algorithm)
        if not self.adds:
            output.zero_()
        plain_tuned_linear(x, weight, bias=bias, add_to=output)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> type[FakePlan]:
    FakePlan.made, FakePlan.run_with = [], []
    monkeypatch.setattr("tllm_spec.kernels.gemm.tuned_linear.Plan", FakePlan)
    return FakePlan


def sizes_of(
    sizes: tuple[int, int, int],
    *,
    dtype: torch.dtype = BFLOAT16,
    has_bias: bool = False,
    adds: bool = False,
) -> Sizes:
    """Sizes of contiguous operands."""
    _, in_features, out_features = sizes
    return Sizes(*sizes, in_features, out_features, dtype, has_bias, adds)


def tuned_for(
    sizes: tuple[int, int, int],
    algorithm: bytes | None = ALGORITHM,
    *,
    dtype: torch.dtype = BFLOAT16,
    lt: CublasLt | None = None,
) -> TunedGemms:
    """A table with the same algorithm for both forms."""
    table, library = LinearTable(), lt
    for adds in (False, True):
        table[key_of(sizes_of(sizes, dtype=dtype, adds=adds))] = algorithm
    given: Any = library
    return TunedGemms(given, table)


@on_each_form
def test_the_reference_equals_the_formula(has_bias: bool, adds: bool) -> None:
    case = Case((9, 40, 24), has_bias, adds)
    case.check_output(plain_tuned_linear(case.x, case.weight, bias=case.bias, add_to=case.total))


@on_each_form
def test_every_form_runs_the_tables_algorithm(
    has_bias: bool, adds: bool, plans: type[FakePlan]
) -> None:
    case = Case((33, 64, 48), has_bias, adds)
    case.check(tuned_for((33, 64, 48)))
    assert plans.run_with == [ALGORITHM]
    assert plans.made == [Sizes(33, 64, 48, 128, 144 if adds else 48, BFLOAT16, has_bias, adds)]


def test_all_rows_of_a_class_run_its_algorithm_and_others_do_not(plans: type[FakePlan]) -> None:
    tuned = tuned_for((48, 64, 48))
    for rows in (32, 33, 40, 48, 49, 33):
        Case((rows, 64, 48)).check(tuned)
    assert len(plans.run_with) == 4
    assert [sizes.rows for sizes in plans.made] == [33, 40, 48]  # a plan is made once
    Case((33, 64, 56)).check(tuned)
    Case((33, 56, 48)).check(tuned)
    Case((33, 64, 48), dtype=torch.float16).check(tuned)
    tuned.table[key_of(sizes_of((33, 64, 48), adds=True))] = None
    Case((33, 64, 48), adds=True).check(tuned)
    assert len(plans.run_with) == 4


def test_torch_computes_what_the_algorithm_refuses(
    plans: type[FakePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "accepted", False)
    Case((33, 64, 48)).check(tuned_for((33, 64, 48)))
    assert plans.made and not plans.run_with


def test_torch_computes_where_torchs_is_as_fast(plans: type[FakePlan]) -> None:
    Case((33, 64, 48)).check(tuned_for((33, 64, 48), None))
    assert not plans.made


def test_torch_computes_unsupported_strides_alignments_and_types(plans: type[FakePlan]) -> None:
    """Unaligned rows, column-major operands, other types, no rows."""
    case = Case((33, 64, 48), adds=True)
    assert case.total is not None
    wide = torch.randn(33, 72).to(BFLOAT16)
    weight, tuned = case.weight, tuned_for((33, 64, 48))
    by_columns = wide[:, :64].t().contiguous().t()
    for x in (
        wide[:, 1:65],
        wide.flatten()[: 33 * 67].view(33, 67)[:, :64],
        by_columns,
        wide[:0, :64],
    ):
        assert torch.equal(tuned_linear(x, weight, tuned), x @ weight.t())
    for other in (
        weight.t().contiguous().t(),
        torch.empty(48 * 64 + 1, dtype=BFLOAT16)[1:].view(48, 64),
    ):
        other.copy_(weight)
        assert torch.equal(tuned_linear(case.x, other, tuned), case.x @ other.t())
    total = torch.zeros(33, 49, dtype=BFLOAT16)[:, 1:]
    tuned_linear(case.x, weight, tuned, add_to=total)
    assert torch.equal(total, case.x @ weight.t())
    one_row = case.x[:1].expand(33, 64)
    assert torch.equal(tuned_linear(one_row, weight, tuned), one_row @ weight.t())
    for sizes, dtype in (((33, 64, 44), BFLOAT16), ((33, 64, 48), torch.float32)):
        Case(sizes, dtype=dtype).check(tuned_for(sizes, dtype=dtype))
    assert not plans.made


def test_structures_have_the_sizes_of_the_header() -> None:
    """`cublasLtMatmulAlgo_t` is 8 words of 64 bits, `cublasLtMatmulHeuristicResult_t` 96 bytes."""
    assert ALGORITHM_BYTES == 64 and ctypes.sizeof(cublas_lt._Proposal) == 96
    assert (cublas_lt._Proposal.workspace_bytes.offset, cublas_lt._Proposal.state.offset) == (
        64,
        72,
    )


@pytest.mark.parametrize("version", [None, "99.9"])
def test_the_library_may_be_missing(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert shared_library.__wrapped__() is None


@pytest.fixture(scope="module")
def lt() -> Iterator[CublasLt]:
    library = shared_library()
    assert library is not None
    yield CublasLt(library, CUDA)


UGLY = [(9, 8, 16), (17, 136, 72), (31, 4096, 1000), (33, 1032, 4104), (200, 14336, 520)]


@pytest.mark.gpu
@on_each_form
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", UGLY, ids=str)
@torch.inference_mode()
def test_every_algorithm_equals_the_formula_in_every_form(
    sizes: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, adds: bool, lt: CublasLt
) -> None:
    case = Case(sizes, has_bias, adds, dtype=dtype, device="cuda")
    total = None if case.total is None else case.total.clone()
    plan = Plan(lt, sizes_of(sizes, dtype=dtype, has_bias=has_bias, adds=adds))
    proposed = plan.algorithms(8)
    variants = {
        plan.variant(one, *how) for one in proposed[:2] for how in product((1, 2), CLUSTERS)
    }
    algorithms = [*proposed, *(variant for variant in variants if variant is not None)]
    assert len(algorithms) > len(proposed) > 0
    num_run = 0
    for algorithm in algorithms:
        tuned = tuned_for(sizes, algorithm, dtype=dtype, lt=lt)
        if case.total is not None and total is not None:
            case.total.copy_(total)
        case.check(tuned)
        num_run += any(prepared is not None for prepared in tuned._prepared.values())
    assert num_run >= len(proposed)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_the_gemm_with_new_operands(lt: CublasLt) -> None:
    sizes = (33, 4096, 4096)
    case = Case(sizes, has_bias=True, device="cuda")
    plan = Plan(lt, sizes_of(sizes, has_bias=True))
    splitting = [plan.variant(one, 2, (2, 1)) for one in plan.algorithms(8)]
    algorithm = next(one for one in splitting if one is not None)
    tuned, graph = tuned_for(sizes, algorithm, lt=lt), torch.cuda.CUDAGraph()
    case.check(tuned)
    x = torch.zeros_like(case.x)
    with torch.cuda.graph(graph):
        output = tuned_linear(x, case.weight, tuned, bias=case.bias)
    x.copy_(case.x)
    for _ in range(2):
        output.fill_(float("nan"))
        graph.replay()
        case.check_output(output)


@pytest.mark.gpu
@torch.inference_mode()
def test_the_tuners_choices_compute_the_gemm(lt: CublasLt) -> None:
    weights = [torch.randn(4096, 14336, device="cuda", dtype=BFLOAT16) for _ in range(3)]
    before = [weight.clone() for weight in weights]
    table, groups = LinearTable(), [GemmGroup(weights, adds) for adds in (False, True)]
    assert tune_missing(table, lt, groups, [32, 200, 1000]) == 6
    assert all(map(torch.equal, weights, before))
    for rows in (32, 200, 1000):
        for adds in (False, True):
            Case((rows, 14336, 4096), adds=adds, device="cuda").check(TunedGemms(lt, table))
