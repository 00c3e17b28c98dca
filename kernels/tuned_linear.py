"""A linear layer whose GEMM runs the cuBLASLt algorithm that the table has for its shape, otherwise
torch's choice. linear_tuner.py fills the table.

Both sum in float32 and round once, but in another order, so their last bits may differ."""

from dataclasses import dataclass, field

import torch

from tllm_spec.kernels.cublas_lt import ALIGNMENT, DATA_TYPES, CublasLt, Plan, Sizes
from tllm_spec.kernels.linear_table import GemmKey, LinearTable, rows_class

_Prepared = tuple[Plan, bytes] | None


@dataclass(frozen=True)
class TunedGemms:
    """The table and the library to run it. All GEMMs share a workspace, so they must run on one
    stream."""

    lt: CublasLt
    table: LinearTable
    _prepared: dict[Sizes, _Prepared] = field(default_factory=dict)

    def prepared(self, sizes: Sizes) -> _Prepared:
        """The plan of these sizes and its algorithm, or None for torch's choice."""
        if sizes not in self._prepared:
            self._prepared[sizes] = self._prepare(sizes)
        return self._prepared[sizes]

    def _prepare(self, sizes: Sizes) -> _Prepared:
        algorithm = self.table.get(key_of(sizes))
        if algorithm is None:
            return None
        plan = Plan(self.lt, sizes)
        return (plan, algorithm) if plan.accepts(algorithm) else None


def key_of(sizes: Sizes) -> GemmKey:
    dtype = str(sizes.dtype).removeprefix("torch.")
    return GemmKey(sizes.in_features, sizes.out_features, dtype, rows_class(sizes.rows), sizes.adds)


def tuned_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: TunedGemms,
    *,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x W^T + bias`, added to `add_to` if given.

    Args:
        x: `[T, K]`, any stride between rows.
        weight: `[N, K]`.
        tuned: the table to choose from.
        bias: `[N]`.
        add_to: `[T, N]`, any stride between rows; changed in place and returned.
    """
    if not _suits(x, weight, add_to):
        return plain_tuned_linear(x, weight, bias=bias, add_to=add_to)
    (rows, in_features), out_features = x.shape, weight.shape[0]
    output_stride = out_features if add_to is None else add_to.stride(0)
    forms = (bias is not None, add_to is not None)
    sizes = Sizes(rows, in_features, out_features, x.stride(0), output_stride, x.dtype, *forms)
    prepared = tuned.prepared(sizes)
    if prepared is None:
        return plain_tuned_linear(x, weight, bias=bias, add_to=add_to)
    plan, algorithm = prepared
    output = x.new_empty(rows, out_features) if add_to is None else add_to
    plan.run(algorithm, x, weight, output, bias=bias)
    return output


def _suits(x: torch.Tensor, weight: torch.Tensor, add_to: torch.Tensor | None) -> bool:
    """Whether cuBLASLt can run with these types, strides and alignments."""
    if x.dtype not in DATA_TYPES or not x.shape[0] or not weight.is_contiguous():
        return False
    return all(_is_aligned(matrix) for matrix in (x, weight, add_to) if matrix is not None) and (
        weight.shape[0] * x.element_size() % ALIGNMENT == 0
    )


def _is_aligned(matrix: torch.Tensor) -> bool:
    offsets = matrix.data_ptr() | matrix.stride(0) * matrix.element_size()
    is_row_major = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return is_row_major and offsets % ALIGNMENT == 0


def plain_tuned_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `tuned_linear`: torch's GEMM."""
    matrix = weight.t()
    if add_to is None:
        return x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix)
    if bias is None and x.is_cuda:
        return add_to.addmm_(x, matrix)
    return add_to.add_(x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix))
