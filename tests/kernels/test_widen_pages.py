"""Widened pages of codes, against the reference."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.attention.kv_codes import CODES, widen_pages


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [None, 3])
def test_the_kernel_equals_the_reference(
    count: int | None, dtype: torch.dtype, device: str
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(CODES).float().nan_to_num(nan=1.0)
    layer = codes[torch.randint(256, (2, 9, 4, 3, 20))].to(device, CODES)
    pages = torch.tensor([8, 1, 5, 5, 0], dtype=torch.int32, device=device)
    number = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    out = torch.full((2, 7, 4, 3, 20), 7.0, dtype=dtype, device=device)
    expected = out.clone()
    widen_pages(layer, pages, number, out)
    widen_pages.reference(layer, pages, number, expected)
    assert torch.equal(out, expected)
    used = len(pages) if count is None else count
    assert torch.equal(out[:, :used].float(), layer[:, pages[:used]].float())
    assert (out[:, used:] == 7).all()
