"""FP8 activations by an FP8 weight with cuBLASLt: the inputs and outputs of fp8_linear.py, where
the library is faster than the kernel. The order of sums depends on the number of rows, and the
library adds each 128 inputs in float32."""

from dataclasses import dataclass, field

import torch

from tllm_spec.kernels.gemm.cublas_lt import ALIGNMENT, DATA_TYPES, CublasLt, Plan, Scaling, Sizes
from tllm_spec.kernels.gemm.fp8_numbers import ROWS_TOGETHER

TILE = 128  # outputs that share a scale with Scaling.TILES
# On an H100 the kernel is as fast with 128 rows of one scale each, and with 16 rows of blocks.
MIN_ROWS, MIN_ROWS_OF_BLOCKS = 129, 17
# From so many rows and elements of the output on scales of tiles are faster than those of BLOCKS.
MIN_TILED_ROWS, MIN_TILED_OUTPUTS = 65, 1 << 20
# From so many rows on CTAs that share outputs form clusters, which the library's first proposal for
# scales of rows does not have: on an H100 an 8B model's layers take 0.89 to 0.98 of its time.
MIN_CLUSTERED_ROWS, CLUSTER = 1024, (1, 2)


def tile_scales(scales: torch.Tensor) -> torch.Tensor | None:
    """The scales of tiles of 128 x 128, `[ceil(N / 128), G]` with a multiple of 4 columns, of
    scales `[N, G]`; None if rows of a tile differ. Waits for the device."""
    outputs, groups = scales.shape
    if outputs % TILE:
        return None
    tiles = scales.reshape(-1, TILE, groups)
    if not torch.equal(tiles, tiles[:, :1].expand_as(tiles)):
        return None
    return torch.nn.functional.pad(tiles[:, 0], (0, -groups % 4)).contiguous()


@dataclass(frozen=True)
class Fp8Gemms:
    """The library. All GEMMs share a workspace, so they must run on one stream."""

    lt: CublasLt
    _prepared: dict[Sizes, tuple[Plan, bytes] | None] = field(default_factory=dict)

    def run(
        self,
        codes: torch.Tensor,
        code_scales: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        tiles: torch.Tensor | None,
        bias: torch.Tensor | None,
        output: torch.Tensor,
        *,
        adds: bool,
    ) -> bool:
        """Whether the library serves these operands and is faster; if so, the output `[T, N]` is
        written, or with `adds` added to. scales: in memory `[N]` or `[ceil(K / 128), N]`; tiles: of
        `tile_scales`. Codes and their scales are those of `quantise_rows`."""
        rows, outputs = output.shape
        in_blocks = len(code_scales) > 1
        if in_blocks != (scales.shape[1] > 1) or output.dtype not in DATA_TYPES:
            return False
        if rows < (MIN_ROWS_OF_BLOCKS if in_blocks else MIN_ROWS):
            return False
        if not in_blocks:
            scaling = Scaling.ROWS
        elif tiles is not None and rows >= MIN_TILED_ROWS and rows * outputs >= MIN_TILED_OUTPUTS:
            scaling, scales = Scaling.TILES, tiles
        else:
            scaling = Scaling.BLOCKS
        short = -rows % ROWS_TOGETHER if in_blocks else 0
        target = output
        if short:  # the rows that follow in memory have no meaning
            target = output.new_empty(rows + short, outputs)
            if adds:
                target[:rows] = output
        prepared = self._plan(target, codes.shape[1], bias is not None, adds, scaling)
        if prepared is None:
            return False
        plan, algorithm = prepared
        plan.run(algorithm, codes, weight, target, bias=bias, scales=(scales, code_scales))
        if short:
            output.copy_(target[:rows])
        return True

    def _plan(
        self, output: torch.Tensor, inputs: int, has_bias: bool, adds: bool, scaling: Scaling
    ) -> tuple[Plan, bytes] | None:
        """None if rows are not aligned, or the library has no algorithm."""
        (rows, outputs), stride, size = output.shape, output.stride(0), output.element_size()
        address = output.data_ptr()
        if any(each % ALIGNMENT for each in (inputs, outputs * size, stride * size, address)):
            return None
        forms = output.dtype, has_bias, adds, scaling
        sizes = Sizes(rows, inputs, outputs, inputs, stride, *forms)
        if sizes not in self._prepared:
            plan = Plan(self.lt, sizes)
            found = plan.algorithms(1)
            if found and scaling is Scaling.ROWS and rows >= MIN_CLUSTERED_ROWS:
                found = [plan.variant(found[0], 1, CLUSTER) or found[0]]
            self._prepared[sizes] = (plan, found[0]) if found else None
        return self._prepared[sizes]
