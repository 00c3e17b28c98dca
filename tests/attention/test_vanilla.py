"""VANILLA attention, and the memory of its pool on a CPU."""

from dataclasses import replace
from pathlib import Path
from resource import getpagesize

import pytest
import torch

from tests.attention.batches import GEOMETRY, HEADS, LAYER, PAGE_SIZE, Batch, Forward
from tests.attention.test_triton import BATCHES
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.vanilla import VanillaAttention

PAGES = 24


def new_pool() -> KVPool:
    on_cpu = {"kv_format": KVFormat(torch.float32), "device": torch.device("cpu")}
    return KVPool(GEOMETRY, num_pages=PAGES, page_size=PAGE_SIZE, **on_cpu)


@pytest.mark.covering
@pytest.mark.parametrize("slack", [0, 7])
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_every_kind_of_batch_equals_the_formula(name: str, slack: int) -> None:
    forward = Forward(BATCHES[name], "cpu")
    forward.metadata.max_kv_len += slack
    backend = forward.backend(VanillaAttention)
    output = forward.run(backend)
    torch.testing.assert_close(output, forward.formula(backend.pool), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    together = Forward(Batch(((0, 9),), (17, 6, 12), window=2), "cpu")
    output = together.run(together.backend(VanillaAttention))
    for request in range(4):
        alone = together.only(request)
        found = alone.run(alone.backend(VanillaAttention))
        rows = output[together.rows_of(request)]
        torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_what_becomes_codes_has_the_same_bits_in_any_batch_and_window() -> None:
    """A last bit would change a whole code."""
    together = Forward(Batch(kv_lens=(30, 17, 9, 12), window=4), "cpu")
    together.geometry = replace(together.geometry, feeds_codes=True)
    backend = together.backend(VanillaAttention)
    output = together.run(backend)
    for request in range(4):
        alone = together.only(request, 1).run(backend)
        assert torch.equal(alone[0], output[together.rows_of(request)][-1])


@pytest.mark.parametrize("slack", [0, 9])
@torch.inference_mode()
def test_nan_in_other_requests_and_in_recycled_pages_does_not_spread(slack: int) -> None:
    forward = Forward(Batch(kv_lens=(9, 17, 6), window=2), "cpu")
    forward.poison()
    own, tables = forward.metadata, forward.metadata.block_tables
    forward.pool_data[:, :, tables[1].long()] = torch.nan
    forward.qkv[forward.rows_of(1)] = torch.nan
    tables[0, 3:], tables[2, 2:] = tables[1, 0], tables[1, 0]
    own.max_kv_len += slack
    backend = forward.backend(VanillaAttention)
    output, expected = forward.run(backend), forward.formula(backend.pool)
    assert output[forward.rows_of(1)].isnan().all()
    for rows in (forward.rows_of(0), forward.rows_of(2)):
        torch.testing.assert_close(output[rows], expected[rows], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_forward_writes_its_rows_and_nothing_else() -> None:
    forward = Forward(Batch(((0, 9),), (6,), window=3), "cpu")
    backend, expected = forward.backend(VanillaAttention), forward.pool().data
    forward.run(backend)
    rows = forward.heads()[:, HEADS:].unflatten(1, (2, -1))
    expected[LAYER].flatten(1, 2)[:, forward.metadata.kv_slots] = rows.transpose(0, 1)
    assert torch.equal(backend.pool.data, expected)


def test_pages_are_copied_in_all_layers() -> None:
    pool = new_pool()
    pool.data.normal_()
    before = pool.data.clone()
    pool.copy_page(3, 5)
    before[:, :, 5] = before[:, :, 3]
    assert torch.equal(pool.data, before)


def test_a_page_takes_the_bytes_that_planning_counts() -> None:
    pool = new_pool()
    num_bytes = KVPool.page_bytes(GEOMETRY, PAGE_SIZE, KVFormat(torch.float32))
    assert num_bytes * PAGES == pool.data.nbytes


NUM_PAGES, POOL_PAGE_SIZE = 1 << 14, 32
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * getpagesize()


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell what is resident")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_that_were_never_written_are_zeros_and_take_no_memory(dtype: torch.dtype) -> None:
    geometry = AttentionGeometry(2, 4, 4, 32, 1.0)
    before = resident_bytes()
    options = {"num_pages": NUM_PAGES, "page_size": POOL_PAGE_SIZE}
    pool = KVPool(geometry, **options, kv_format=KVFormat(dtype), device=torch.device("cpu"))
    num_bytes = pool.data.numel() * dtype.itemsize
    assert (
        num_bytes
        == NUM_PAGES * KVPool.page_bytes(geometry, POOL_PAGE_SIZE, KVFormat(dtype))
        >= 1 << 28
    )
    assert resident_bytes() - before < num_bytes // 8
    assert pool.data.dtype == dtype and pool.data.data_ptr() % 64 == 0
    pool.planes[:, 1] = 3.0
    pool.copy_page(1, NUM_PAGES - 1)
    places = torch.tensor([0, 2, NUM_PAGES // 2, NUM_PAGES - 2])
    assert not pool.planes[:, places].any()
    assert (pool.planes[:, NUM_PAGES - 1] == 3.0).all()
