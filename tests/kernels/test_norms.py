"""Norms and gated activations: the kernels against their references, and both against the formulas
in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
    stored,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.norms import (
    Gate,
    NormWeight,
    add_norm,
    rms_norm,
    silu_and_mul,
    soft_cap,
)

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Absolute tolerance of activations; float16 results may be denormal.
SMALLEST = {torch.float32: 1e-30, torch.float16: 6e-8, torch.bfloat16: 1e-30}
# With the absolute error by gate times up: torch's sum in GELU cancels for gates below 0.
ACTIVATIONS = {"silu": 0.0, "sigmoid": 0.0, "gelu_pytorch_tanh": 2.0**-23}
on_each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
Shape = tuple[int, int]
Tensors = tuple[torch.Tensor, ...]


def arguments(shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """x and weight; rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 1, shape[0])[:, None]
    x = (torch.randn(*shape, generator=generator) * sizes).to(device, dtype)
    weight = torch.rand(shape[1], generator=generator) + 0.5
    return x, weight.to(device, dtype)


def check(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """The formula in float64."""
    assert output.dtype == x.dtype
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    # One rounding of the result, plus the error of the float32 arithmetic before it.
    rounding = ROUNDING[x.dtype] + 6e-7
    torch.testing.assert_close(output.double(), wanted, rtol=rounding, atol=1e-7)


class Norm:
    shapes = ((1, 4096), (3, 192), (5, 100), (2, 1), (7, 5120), (0, 64))

    def arguments(self, *options: Any, **more: Any) -> Tensors:
        return arguments(*options, **more)

    def run(self, *given: torch.Tensor) -> torch.Tensor:
        return rms_norm(*given, EPS)

    def reference(self, *given: torch.Tensor) -> torch.Tensor:
        return rms_norm.reference(*given, EPS)

    def check(self, output: torch.Tensor, *given: torch.Tensor) -> None:
        check(output, *given)

    def views(self, dtype: torch.dtype, device: str) -> Tensors:
        x, weight = arguments((5, 3 * 192), dtype, device)
        return x[::2, 192:384], weight[192:384]


class Gated:
    shapes = ((1, 14336), (3, 192), (5, 100), (2, 1), (4, 1025), (0, 64))

    def __init__(self, activation: Gate) -> None:
        self.activation = activation

    def arguments(
        self, shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0
    ) -> Tensors:
        """`[T, 2 * I]`; gates of about -12 to 12."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape[0], 2 * shape[1], generator=generator) * 4
        return (values.to(device, dtype),)

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up, self.activation)

    def reference(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul.reference(gate_up, self.activation)

    def formula(self, gate: torch.Tensor) -> torch.Tensor:
        if self.activation != "gelu_pytorch_tanh":
            return (gate if self.activation == "silu" else 1) / (1 + (-gate).exp())
        return gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) / 2

    def check(self, output: torch.Tensor, gate_up: torch.Tensor) -> None:
        dtype, (gate, up) = gate_up.dtype, gate_up.double().chunk(2, -1)
        assert output.dtype == dtype and output.is_contiguous()
        # One rounding of the result, plus the error of the exponential and the division.
        wanted = self.formula(gate) * up
        most = (ROUNDING[dtype] + 2e-6) * wanted.abs() + SMALLEST[dtype]
        most += ACTIVATIONS[self.activation] * (gate * up).abs()
        assert ((output.double() - wanted).abs() <= most).all()

    def views(self, dtype: torch.dtype, device: str) -> Tensors:
        return (self.arguments((5, 300), dtype, device)[0][1::2, 7:407],)


KINDS: dict[str, Norm | Gated] = {"norm": Norm()}
KINDS |= {"silu": Gated("silu"), "gelu": Gated("gelu_pytorch_tanh"), "sigmoid": Gated("sigmoid")}
on_each_kind = pytest.mark.parametrize("kind", KINDS)
on_each_case = pytest.mark.parametrize(
    ("kind", "shape"), [(kind, shape) for kind in KINDS for shape in KINDS[kind].shapes], ids=str
)
also_interpreted = pytest.mark.interpreted("kind", "norm", "silu", "sigmoid")


@pytest.mark.covering
@on_each_case
@on_each_dtype
def test_the_reference_equals_the_formula(kind: str, shape: Shape, dtype: torch.dtype) -> None:
    given = KINDS[kind].arguments(shape, dtype)
    KINDS[kind].check(KINDS[kind].reference(*given), *given)


@also_interpreted
@on_each_kernel_device
@on_each_case
@on_each_dtype
def test_the_kernel_equals_the_formula_and_its_reference(
    kind: str, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    given = KINDS[kind].arguments(shape, dtype, device)
    before = given[0].clone()
    output = KINDS[kind].run(*given)
    assert torch.equal(given[0], before)
    KINDS[kind].check(output, *given)
    if kind != "gelu":
        check_like_the_reference(output, KINDS[kind].reference(*given))


@also_interpreted
@on_each_kernel_device
@on_each_kind
@on_each_dtype
def test_rows_may_be_views(kind: str, dtype: torch.dtype, device: str) -> None:
    given = KINDS[kind].views(dtype, device)
    KINDS[kind].check(KINDS[kind].run(*given), *given)


@on_each_kernel_device
@on_each_dtype
def test_a_weight_in_float32_is_not_rounded(dtype: torch.dtype, device: str) -> None:
    x, _ = arguments((5, 100), dtype, device)
    weight = arguments((5, 100), torch.float32, device)[1]
    output = rms_norm(x, weight, EPS)
    check(output, x, weight)
    reference = rms_norm.reference(x, weight, EPS)
    assert reference.dtype == dtype
    check_like_the_reference(output, reference)


@on_each_kernel_device
@on_each_dtype
def test_the_rounded_norm_is_added_in_place(dtype: torch.dtype, device: str) -> None:
    x, weight = arguments((5, 100), dtype, device)
    wide = arguments((5, 300), dtype, device, seed=1)[0]
    total, before = wide[:, 100:200], wide.clone()
    normed = rms_norm(x, weight, EPS)
    wanted = stored(before[:, 100:200].float() + normed.float(), dtype)
    assert add_norm(total, x, NormWeight(weight, EPS)) is total
    # In float32 a GPU multiplies by the weight and adds with one rounding.
    tolerance = 1e-6 if dtype == torch.float32 else 0
    torch.testing.assert_close(total, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[:, :100], before[:, :100])
    assert torch.equal(wide[:, 200:], before[:, 200:])
    reference = before[:, 100:200].clone()
    add_norm.reference(reference, x, NormWeight(weight, EPS))
    torch.testing.assert_close(total, reference, rtol=2 * ROUNDING[dtype], atol=4e-2)


@on_each_kernel_device
@on_each_dtype
def test_the_sum_is_multiplied_rounded_and_normed(dtype: torch.dtype, device: str) -> None:
    x, weight = arguments((5, 100), dtype, device)
    total, norm = arguments((5, 100), dtype, device, seed=1)[0], NormWeight(weight, EPS)
    factor, then = torch.tensor([0.7], device=device), NormWeight(weight.float() * 1.3, EPS)
    wanted = total.clone()
    add_norm(wanted, x, norm)
    wanted = stored(wanted.float() * factor, dtype)
    normed = add_norm(total, x, norm, factor=factor, then=then)
    tolerance = 1e-6 if dtype == torch.float32 else 0
    torch.testing.assert_close(total, wanted, rtol=tolerance, atol=tolerance)
    check(normed, total, then.weight)
    before = arguments((5, 100), dtype, device, seed=1)[0]
    reference = add_norm.reference(before, x, norm, factor=factor)
    torch.testing.assert_close(reference, wanted, rtol=2 * ROUNDING[dtype], atol=4e-2)


@on_each_kernel_device
@on_each_dtype
def test_the_norm_of_a_sum_of_two_norms_is_added(dtype: torch.dtype, device: str) -> None:
    given = [arguments((5, 100), dtype, device, seed) for seed in range(4)]
    (x, _), (y, _), (total, _), _ = given
    norms = tuple(NormWeight(weight * (1 + seed), EPS) for seed, (_, weight) in enumerate(given))
    both = stored(
        rms_norm(x, norms[0].weight, EPS).float() + rms_norm(y, norms[1].weight, EPS).float(), dtype
    )
    factor, wanted = torch.tensor([0.7], device=device), total.clone()
    add_norm(wanted, both, norms[2], factor=factor)
    for add in (add_norm, add_norm.reference):
        found = total.clone()
        add(found, x, norms[0], factor=factor, parallel=(y, norms[1], norms[2]))
        torch.testing.assert_close(found, wanted, rtol=2 * ROUNDING[dtype] + 1e-6, atol=4e-2)
        assert add is not add_norm or dtype == torch.float32 or torch.equal(found, wanted)


@on_each_kernel_device
@on_each_dtype
def test_a_soft_cap_bounds_every_value(dtype: torch.dtype, device: str) -> None:
    sizes = torch.logspace(-6, 2.5, 1500, device=device)
    x = torch.stack((sizes, -sizes, 0 * sizes)).to(dtype)
    wanted = 30 * (x.double() / 30).tanh()
    assert torch.isfinite(wanted).all() and wanted.abs().max() <= 30
    for cap in (soft_cap, soft_cap.reference):
        found = cap(x.clone(), 30.0)
        torch.testing.assert_close(
            found.double(), wanted, rtol=ROUNDING[dtype] + 2e-6, atol=SMALLEST[dtype]
        )


@on_each_kernel_device
@on_each_activation
@on_each_dtype
def test_gates_may_multiply_rows_of_another_tensor(
    dtype: torch.dtype, activation: Gate, device: str
) -> None:
    (gate_up,) = Gated(activation).arguments((5, 100), dtype, device)
    gates, ups = gate_up[:, :100], gate_up[:, 100:]
    output = silu_and_mul(gates, activation, ups)
    for found in (output, silu_and_mul.reference(gates, activation, ups)):
        Gated(activation).check(found, gate_up)


@on_each_kernel_device
@pytest.mark.parametrize("size", [192, 4096, 1000])
@on_each_dtype
def test_the_kernel_equals_torch_bit_for_bit_if_the_sum_of_squares_is_exact(
    dtype: torch.dtype, size: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(size)
    # Integers with a sum of squares below 2**24.
    x = torch.randint(-40, 41, (4, size), generator=generator).to(device, dtype)
    _, weight = arguments((4, size), dtype, device)
    wanted = F.rms_norm(x, (size,), weight, EPS)
    if INTERPRETED:
        wanted = stored(F.rms_norm(x.float(), (size,), weight.float(), EPS), dtype)
    assert torch.equal(rms_norm(x, weight, EPS), wanted)


@on_each_kernel_device
def test_a_nan_stays_in_its_row_and_zeros_stay_zeros(device: str) -> None:
    x, weight = arguments((4, 192), torch.bfloat16, device)
    x[1, 7] = torch.nan
    x[2] = 0
    output = rms_norm(x, weight, EPS)
    assert output.isnan().any(-1).tolist() == [False, True, False, False]
    assert output[2].count_nonzero() == 0


@on_each_kernel_device
def test_epsilon_is_used(device: str) -> None:
    x, weight = arguments((1, 64), torch.float32, device)
    large = rms_norm(x, weight, 3.0)
    torch.testing.assert_close(large, rms_norm.reference(x, weight, 3.0))
    assert (large - rms_norm(x, weight, EPS)).abs().max() > 0.1 * large.abs().max()


@on_each_kernel_device
@on_each_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_gates_overflow_like_torch(
    dtype: torch.dtype, activation: Gate, device: str
) -> None:
    gates = torch.tensor([-87.0, -89.0, -1e4, -3e38, 0.0, 88.0, 3e38, torch.inf, torch.nan])
    gate_up = torch.stack((gates, torch.full_like(gates, 0.5)), 0).flatten()[None].to(device, dtype)
    output = silu_and_mul(gate_up, activation)
    plain = silu_and_mul.reference(gate_up, activation)
    torch.testing.assert_close(output, plain, rtol=0.02, atol=1e-36, equal_nan=True)
    assert output[0, -1].isnan() and output[0, :-1].isnan().sum() == 0


@only_outside_the_interpreter
@on_each_kind
def test_a_tensor_on_the_cpu_runs_the_reference(kind: str) -> None:
    given = KINDS[kind].arguments((3, 192), torch.bfloat16)
    assert torch.equal(KINDS[kind].run(*given), KINDS[kind].reference(*given))


@pytest.mark.gpu
@on_each_kind
@on_each_dtype
def test_a_captured_graph_reads_its_inputs_at_replay(kind: str, dtype: torch.dtype) -> None:
    own, shape = KINDS[kind], (6, 4096)
    static = own.arguments(shape, dtype, "cuda")
    graph, output = captured_graph(lambda: own.run(*static))
    for seed in (1, 2):
        copy_all(static, own.arguments(shape, dtype, seed=seed))
        graph.replay()
        own.check(output, *static)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["norm", "silu"])
def test_rows_may_start_beyond_2_to_the_31_elements(kind: str) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free device memory")
    start, *others = KINDS[kind].arguments((3, 96), torch.bfloat16, "cuda")
    memory = torch.zeros((1 << 31) + 192, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided(start.shape, (1 << 30, 1))
    x.copy_(start)
    KINDS[kind].check(KINDS[kind].run(x, *others), x, *others)
