"""A linear layer whose product runs the algorithm that was the fastest when it was measured on this
device.

`tuned_linear` runs cuBLASLt with the table's algorithm where there is one, and its plain-torch
reference elsewhere. It does not know how the table came about (linear_tuner.py), nor what the layer
is for.

Both sum in float32 and round once; they add in another order, so they may differ in the last bit.
"""

from dataclasses import dataclass, field, replace

import torch

from tllm_spec.kernels.cublas_lt import ALIGNMENT, DATA_TYPES, CublasLt, Plan, Sizes
from tllm_spec.kernels.linear_table import LinearTable, ProductKey, rows_class

_Prepared = tuple[Plan, bytes] | None


@dataclass(frozen=True)
class TunedProducts:
    """The table, and what it takes to run it. Products share a workspace, so they belong on one
    stream. `place`: of the layers' keys; what was measured alone serves where nothing was measured
    there."""

    lt: CublasLt
    table: LinearTable
    place: str = ""
    _prepared: dict[Sizes, _Prepared] = field(default_factory=dict)

    def prepared(self, sizes: Sizes) -> _Prepared:
        """A plan of these sizes and its algorithm; None where torch is to choose."""
        if sizes not in self._prepared:
            self._prepared[sizes] = self._prepare(sizes)
        return self._prepared[sizes]

    def choose(self, key: ProductKey, algorithm: bytes | None) -> None:
        """From now on; graphs that are captured already keep what they have."""
        self.table[key] = algorithm
        self._prepared.clear()

    def _prepare(self, sizes: Sizes) -> _Prepared:
        alone = key_of(sizes)
        placed = replace(alone, place=self.place)
        algorithm = self.table.get(placed if placed in self.table else alone)
        if algorithm is None:
            return None
        plan = Plan(self.lt, sizes)
        return (plan, algorithm) if plan.accepts(algorithm) else None


def key_of(sizes: Sizes) -> ProductKey:
    dtype = str(sizes.dtype).removeprefix("torch.")
    return ProductKey(
        sizes.in_features, sizes.out_features, dtype, rows_class(sizes.rows), sizes.adds
    )


def tuned_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    products: TunedProducts,
    *,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x W^T + bias`, added to `add_to`.

    Args:
        x: `[T, K]`, any stride between rows.
        weight: `[N, K]`.
        bias: `[N]`.
        add_to: `[T, N]`, any stride between rows; changed in place and returned.
    """
    if not _suits(x, weight, add_to):
        return plain_tuned_linear(x, weight, bias=bias, add_to=add_to)
    (rows, in_features), out_features = x.shape, weight.shape[0]
    output_stride = out_features if add_to is None else add_to.stride(0)
    forms = (bias is not None, add_to is not None)
    sizes = Sizes(rows, in_features, out_features, x.stride(0), output_stride, x.dtype, *forms)
    prepared = products.prepared(sizes)
    if prepared is None:
        return plain_tuned_linear(x, weight, bias=bias, add_to=add_to)
    plan, algorithm = prepared
    output = x.new_empty(rows, out_features) if add_to is None else add_to
    plan.run(algorithm, x, weight, output, bias=bias)
    return output


def _suits(x: torch.Tensor, weight: torch.Tensor, add_to: torch.Tensor | None) -> bool:
    """Whether the library can be asked at all: type, and rows that begin where it expects them
    to."""
    if x.dtype not in DATA_TYPES or not x.shape[0] or not weight.is_contiguous():
        return False
    return all(_is_aligned(matrix) for matrix in (x, weight, add_to) if matrix is not None) and (
        weight.shape[0] * x.element_size() % ALIGNMENT == 0
    )


def _is_aligned(matrix: torch.Tensor) -> bool:
    places = matrix.data_ptr() | matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and places % ALIGNMENT == 0


def plain_tuned_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference of `tuned_linear`: torch's own products."""
    matrix = weight.t()
    if add_to is None:
        return x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix)
    if bias is None and x.is_cuda:
        return add_to.addmm_(x, matrix)
    return add_to.add_(x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix))
