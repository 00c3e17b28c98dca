"""A linear layer with weights of the type of x, in FP8 or of 4 bits, for tests: its formula, and
how far a kernel's result may be from it."""

from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.interpreter import ROUNDING
from tllm_spec.kernels.gemm import batch_invariant_linear as plain_linear
from tllm_spec.kernels.gemm.batch_invariant_linear import (
    CHUNK,
    Tiling,
    batch_invariant_linear,
    launch_linear,
)
from tllm_spec.kernels.gemm.int4_weights import (
    E2M1,
    MXFP4_GROUP,
    exponent_words,
    group_words,
    packed,
)
from tllm_spec.kernels.gemm.scaled_linear import (
    BLOCK,
    int4_tiling_of,
    launch_scaled_linear,
    scaled_linear,
    tiling_of,
)

FP8 = torch.float8_e4m3fn
SUM_ERROR = 4e-6
PLAIN_SUM_ERROR = 2e-7
# Of sums of thousands of products in float32, added one by one, next to the root of their number.
PLAIN_FLOAT32_ERROR = 6e-6
# Of millions of sums so many may be further off, which were large on their way: they are compared
# with the error of their own additions.
MOST_LARGE_SUMS = 100


@dataclass(frozen=True)
class Problem:
    """x has a stride between its rows. numbers: of the weight, in float64. group: -1 of a weight
    of the type of x."""

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    group: int
    numbers: torch.Tensor
    bias: torch.Tensor
    total: torch.Tensor

    def run(self, rows: slice = slice(None), **options: Any) -> torch.Tensor:
        if self.group < 0:
            return batch_invariant_linear(self.x[rows], self.weight, **options)
        return scaled_linear(self.x[rows], self.weight, self.scales, group=self.group, **options)

    def launch(self, output: torch.Tensor, tiling: Tiling, *, spreads: bool, adds: bool) -> None:
        options = {"spreads": spreads, "adds": adds}
        if self.group < 0:
            assert not adds
            own = self.x, self.weight, self.bias, tiling
            output.copy_(launch_linear(*own, spreads=spreads))
            return
        own = self.x, self.weight, self.scales, self.bias, output, tiling
        launch_scaled_linear(*own, group=self.group, **options)

    def tiling(self) -> Tiling:
        (num_rows, _), dtype = self.x.shape, self.x.dtype
        if self.group < 0:
            return plain_linear.tiling_of(num_rows, dtype)
        is_fp8 = self.group == 0
        return tiling_of(num_rows, dtype) if is_fp8 else int4_tiling_of(num_rows, 70, dtype)


def problem(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, form: str = "fp8"
) -> Problem:
    """Scales of FP8 are powers of two over a wide range, those of plain weights are 1."""
    generator = torch.Generator(device).manual_seed(num_rows)
    inputs, outputs = shape
    sizes = {"plain": -1, "fp8": 0, "mxfp4": MXFP4_GROUP, "nvfp4": 16}
    group = sizes[form] if form in sizes else int(form)
    size = group if group > 0 else BLOCK
    groups = -(-inputs // size)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, device=device)

    if form == "plain":
        words = scales = torch.ones(outputs, groups, device=device)
        weight = normal(outputs, inputs).to(dtype)
        numbers = weight.double()
    elif form == "fp8":
        words = scales = integers(-6, 3, outputs, groups).float().exp2()
        weight = normal(outputs, inputs).to(FP8)
        numbers = weight.double()
    else:
        scales, codes = normal(outputs, groups).half().float(), integers(0, 16, outputs, inputs)
        if form == "mxfp4":
            scales = scales.abs().log2().round().exp2()
        if form in ("mxfp4", "nvfp4"):
            words = exponent_words(scales) if form == "mxfp4" else scales
            table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=device)
            numbers = table.double()[codes]
        else:
            zeros = integers(0, 16, outputs, groups).float()
            words = group_words(scales, zeros)
            numbers = codes - zeros.double().repeat_interleave(group, 1)[:, :inputs]
        weight = packed(codes.byte())
    return Problem(
        normal(num_rows, inputs + 8).to(dtype)[:, :inputs],
        weight,
        words,
        group,
        numbers * scales.double().repeat_interleave(size, 1)[:, :inputs],
        normal(outputs).to(dtype),
        normal(num_rows, outputs).to(dtype),
    )


def check(
    output: torch.Tensor, p: Problem, *added: torch.Tensor, sum_error: float | None = None
) -> None:
    """Rounded once. sum_error: of float32 sums, relative to the sum of magnitudes."""
    if sum_error is None:
        sum_error = PLAIN_SUM_ERROR if p.group < 0 else SUM_ERROR
    expected, magnitudes = p.x.double() @ p.numbers.t(), magnitudes_of(p)
    for other in added:
        expected, magnitudes = expected + other.double(), magnitudes + other.abs()
    bound = ROUNDING[p.x.dtype] * expected.abs() + sum_error * magnitudes
    if p.group < 0 and p.x.dtype == torch.float32:
        bound = PLAIN_FLOAT32_ERROR * (expected.abs() + p.x.shape[1] ** 0.5)
    assert output.dtype == p.x.dtype and output.shape == expected.shape
    error = (output.double() - expected).abs()
    over = (error > bound).nonzero()
    if p.group < 0 and p.x.dtype == torch.float32 and len(over) <= MOST_LARGE_SUMS:
        bound[over[:, 0], over[:, 1]] = error_of_additions(p, over)
    assert (error <= bound).all()


def error_of_additions(p: Problem, places: torch.Tensor) -> torch.Tensor:
    """What the rounding of each addition of a float32 sum may add up to: half a unit in the last
    place of the sum so far, where products are added one by one in each chunk."""
    products = p.x[places[:, 0]].double() * p.numbers[places[:, 1]]
    sums = [chunk.cumsum(1).abs().sum(1) for chunk in products.split(CHUNK, 1)]
    totals = torch.stack([chunk.sum(1) for chunk in products.split(CHUNK, 1)], 1)
    return 2.0**-24 * (sum(sums) + totals.cumsum(1).abs().sum(1))


def magnitudes_of(p: Problem) -> torch.Tensor:
    return p.x.double().abs() @ p.numbers.abs().t()
