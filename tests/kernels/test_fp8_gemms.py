"""FP8 GEMMs of cuBLASLt: which scaling serves which operands, and on a CUDA device (`-m gpu`) the
formula."""

from typing import Any, cast

import pytest
import torch

from tests.kernels.test_fp8_linear import BLOCKS, Problem, check, problem
from tllm_spec.kernels.gemm.cublas_lt import CublasLt, Plan, Scaling, Sizes, shared_library
from tllm_spec.kernels.gemm.fp8_linear import Fp8Gemms, fp8_linear, tile_scales

OF_ROWS, MIXED, OF_BLOCKS = BLOCKS[:3]


class FakePlan:
    """It computes with the reference, as the library would on operands of these sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def run(
        self,
        algorithm: bytes,
        codes: torch.Tensor,
        weight: torch.Tensor,
        output: Any,
        *,
        bias: torch.Tensor | None,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        of_weight, of_x = scales
        if self.sizes.scaling is Scaling.TILES:
            of_weight = of_weight.repeat_interleave(128, 0)[:, : len(of_x)]
        rows = self.sizes.rows
        in_memory = torch.full((rows, codes.shape[1]), 3.0).to(codes.dtype)
        in_memory[: len(codes)] = codes
        of_all = torch.ones(len(of_x), rows)
        of_all[:, : len(codes)] = of_x
        own = {"add_to": output} if self.sizes.adds else {}
        found = fp8_linear.reference(
            in_memory, of_all, weight, of_weight, output.dtype, bias, **own
        )
        output.copy_(found)


class FakeGemms(Fp8Gemms):
    def __init__(self) -> None:
        super().__init__(cast(CublasLt, None))
        object.__setattr__(self, "used", [])

    def _plan(self, output: torch.Tensor, inputs: int, *forms: Any) -> Any:
        sizes = Sizes(*output.shape[:1], inputs, output.shape[1], inputs, 0, output.dtype, *forms)
        self.used.append((sizes.scaling, sizes.rows))  # type: ignore[attr-defined]  # of the fake
        return cast(Plan, FakePlan(sizes)), b""


def run(p: Problem, gemms: Fp8Gemms, tiles: torch.Tensor | None = None) -> bool:
    """With bias and without, added to what was there. Checks what the library serves."""
    operands = p.codes, p.code_scales, p.weight, p.scales, tiles
    output, total = torch.empty_like(p.total), p.total.clone()
    if not gemms.run(*operands, p.bias, output, adds=False):
        return False
    check(output, p, p.bias)
    assert gemms.run(*operands, None, total, adds=True)
    check(total, p, None, p.total)
    return True


@pytest.mark.parametrize(
    ("rows", "in_blocks", "used"),
    [
        (128, OF_ROWS, None),
        (129, OF_ROWS, (Scaling.ROWS, 129)),
        (16, OF_BLOCKS, None),
        (17, OF_BLOCKS, (Scaling.BLOCKS, 20)),
        (129, MIXED, None),
    ],
)
def test_rows_run_the_library_where_it_is_faster_and_blocks_a_multiple_of_4_of_them(
    rows: int, in_blocks: tuple[bool, bool], used: tuple[Scaling, int] | None
) -> None:
    gemms = FakeGemms()
    p = problem(rows, (256, 48), torch.bfloat16, "cpu", in_blocks)
    assert run(p, gemms) == (used is not None)
    assert gemms.used == ([] if used is None else [used] * 2)  # type: ignore[attr-defined]  # of the fake


def of_tiles(p: Problem) -> Problem:
    """With one scale for 128 x 128 weights."""
    scales = p.scales[::128].repeat_interleave(128, 0).t().contiguous().t()
    return Problem(p.codes, p.code_scales, p.weight, scales, p.bias, p.total)


def test_many_outputs_use_scales_of_tiles_where_all_rows_of_a_tile_have_one() -> None:
    p = problem(66, (384, 16384), torch.bfloat16, "cpu", OF_BLOCKS)
    assert tile_scales(p.scales) is None and tile_scales(p.scales[:100]) is None
    p, gemms = of_tiles(p), FakeGemms()
    tiles = tile_scales(p.scales)
    assert (
        tiles is not None
        and tiles.shape == (128, 4)
        and torch.equal(tiles[:, 0], p.scales[::128, 0])
    )
    assert run(p, gemms, tiles) and gemms.used == [(Scaling.TILES, 68)] * 2  # type: ignore[attr-defined]  # of the fake


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 33, 130, 1025])
@pytest.mark.parametrize("in_blocks", [OF_ROWS, OF_BLOCKS], ids=str)
def test_the_librarys_gemms_equal_the_formula(rows: int, in_blocks: tuple[bool, bool]) -> None:
    library = shared_library()
    assert library is not None
    gemms = Fp8Gemms(CublasLt(library, torch.device("cuda")))
    p = problem(rows, (1024, 2048), torch.bfloat16, "cuda", in_blocks)
    assert run(p, gemms) == (in_blocks == OF_BLOCKS or rows > 128)
    if in_blocks == OF_BLOCKS:
        p = of_tiles(p)
        assert run(p, gemms, tile_scales(p.scales))
