"""A pool on a CPU starts as zeros and takes memory only for the pages that are written."""

from pathlib import Path
from resource import getpagesize

import pytest
import torch

from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool

NUM_PAGES, PAGE_SIZE = 1 << 14, 32
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * getpagesize()


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell what is resident")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_that_were_never_written_are_zeros_and_take_no_memory(dtype: torch.dtype) -> None:
    geometry = AttentionGeometry(2, 4, 4, 32, 1.0)
    before = resident_bytes()
    options = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
    pool = KVPool(geometry, **options, kv_format=KVFormat(dtype), device=torch.device("cpu"))
    num_bytes = pool.data.numel() * dtype.itemsize
    assert (
        num_bytes == NUM_PAGES * KVPool.page_bytes(geometry, PAGE_SIZE, KVFormat(dtype)) >= 1 << 28
    )
    assert resident_bytes() - before < num_bytes // 8
    assert pool.data.dtype == dtype and pool.data.data_ptr() % 64 == 0
    pool.planes[:, 1] = 3.0
    pool.copy_page(1, NUM_PAGES - 1)
    places = torch.tensor([0, 2, NUM_PAGES // 2, NUM_PAGES - 2])
    assert not pool.planes[:, places].any()
    assert (pool.planes[:, NUM_PAGES - 1] == 3.0).all()
