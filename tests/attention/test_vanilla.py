"""VANILLA attention, and the memory of its pool on a CPU."""

import math
from dataclasses import replace
from pathlib import Path
from resource import getpagesize

import pytest
import torch

from tests.kernels.row_counts import rows_of
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.rotary_write import Rotary

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 6, 2, 8, 4, 24
GEOMETRY = AttentionGeometry(LAYERS, HEADS, KV_HEADS, HEAD_DIM, 0.3)


def new_pool() -> KVPool:
    return KVPool(
        GEOMETRY,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        kv_format=KVFormat(torch.float32),
        device=torch.device("cpu"),
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query token `[Hq, D]` over `[L, Hkv, D]`, head by head: softmax(scale * q k) v."""
    outputs = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = [GEOMETRY.scale * float(q[head] @ key[group]) for key in keys]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        mixed = sum(weight * value[group] for weight, value in zip(weights, values, strict=True))
        outputs.append(mixed / sum(weights))
    return torch.cat(outputs)


def unrotated(num_rows: int) -> Rotary:
    """Position 0, whose rotation is the identity."""
    table = torch.stack((torch.ones(HEAD_DIM), torch.zeros(HEAD_DIM))).view(1, 2, 1, HEAD_DIM)
    return Rotary(table, torch.zeros(num_rows, dtype=torch.int64))


class Requests:
    """Random q, k and v of whole requests; their last tokens can be run as one batch."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q = [torch.randn(n, HEADS, HEAD_DIM, generator=generator) for n in lengths]
        self.kv = [torch.randn(n, 2, KV_HEADS, HEAD_DIM, generator=generator) for n in lengths]
        order = torch.randperm(PAGES - 1, generator=generator).add_(1).tolist()
        self.pages = [[order.pop() for _ in range(-(-n // PAGE_SIZE))] for n in lengths]

    def slots(self, request: int, start: int, end: int) -> list[int]:
        pages = self.pages[request]
        return [pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(start, end)]

    def run(
        self,
        backend: VanillaAttention,
        contexts: dict[int, int],
        windows: dict[int, int],
        *,
        layer: int = 0,
        slack: int = 0,
        padding: int = 0,
    ) -> dict[int, torch.Tensor]:
        """Runs the last tokens of requests, given how many; writes the tokens before into the
        pool."""
        counts = contexts | windows
        lengths = [len(self.q[request]) for request in counts]
        for (request, count), length in zip(counts.items(), lengths, strict=True):
            cached = torch.tensor(self.slots(request, 0, length - count), dtype=torch.int64)
            flat = backend.pool.data[layer].view(2, -1, KV_HEADS, HEAD_DIM)
            flat[:, cached] = self.kv[request][: length - count].transpose(0, 1)
        spans = [
            (request, len(self.q[request]) - count, len(self.q[request]))
            for request, count in counts.items()
        ]
        max_kv_len = max(lengths[len(contexts) :], default=0) + slack
        width = -(-max(*lengths, max_kv_len) // PAGE_SIZE)
        metadata = AttentionMetadata(
            context_lens=tuple(contexts.values()),
            context_kv_lens=tuple(lengths[: len(contexts)]),
            rows=rows_of(list(windows.values())),
            block_tables=torch.tensor(
                [(self.pages[request] + [padding] * width)[:width] for request in counts],
                dtype=torch.int32,
            ),
            kv_lens=torch.tensor(lengths, dtype=torch.int32),
            positions=torch.tensor([i for _, start, end in spans for i in range(start, end)]),
            kv_slots=torch.tensor([slot for span in spans for slot in self.slots(*span)]),
            max_kv_len=max_kv_len,
        )
        q = torch.cat([self.q[request][start:end] for request, start, end in spans])
        kv = torch.cat([self.kv[request][start:end] for request, start, end in spans])
        qkv = torch.cat((q, kv.flatten(1, 2)), dim=1)
        output = backend.run(layer, qkv, unrotated(len(qkv)), backend.plan(metadata))
        return dict(zip(counts, output.split(list(counts.values())), strict=True))

    def expected(self, request: int, count: int) -> torch.Tensor:
        length = len(self.q[request])
        rows = [
            attend(self.q[request][i], self.kv[request][: i + 1, 0], self.kv[request][: i + 1, 1])
            for i in range(length - count, length)
        ]
        return torch.stack(rows)


BATCHES = {
    "one token": ({}, {0: 1}),
    "one token each": ({}, {0: 1, 1: 1, 2: 1}),
    "windows": ({}, {0: 4, 1: 4, 2: 4}),
    "windows of their own": ({0: 9}, {1: 1, 2: 4, 3: 2}),
    "whole prompts": ({0: 9, 1: 17}, {}),
    "chunk after cached tokens": ({1: 5}, {}),
    "one-token chunk": ({1: 1}, {}),
    "everything": ({0: 9, 1: 5}, {2: 3, 3: 3}),
}


@pytest.mark.parametrize("slack", [0, 7])
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_every_kind_of_batch_equals_the_formula(name: str, slack: int) -> None:
    contexts, windows = BATCHES[name]
    requests = Requests([9, 17, 6, 12])
    backend = VanillaAttention(GEOMETRY, new_pool())
    for request, output in requests.run(backend, contexts, windows, layer=1, slack=slack).items():
        torch.testing.assert_close(
            output, requests.expected(request, len(output)), rtol=1e-4, atol=1e-5
        )


@torch.inference_mode()
def test_a_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    requests = Requests([9, 17, 6, 12])
    together = requests.run(VanillaAttention(GEOMETRY, new_pool()), {0: 9}, {2: 2, 3: 2, 1: 2})
    for request, output in together.items():
        alone = requests.run(
            VanillaAttention(GEOMETRY, new_pool()),
            *(({0: 9}, {}) if request == 0 else ({}, {request: 2})),
        )
        torch.testing.assert_close(output, alone[request], rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_what_becomes_codes_has_the_same_bits_in_any_batch_and_window() -> None:
    """A last bit would change a whole code."""
    requests = Requests([30, 17, 9, 12])
    geometry = replace(GEOMETRY, feeds_codes=True)
    together = requests.run(VanillaAttention(geometry, new_pool()), {}, {0: 4, 1: 4, 2: 4, 3: 4})
    for request, output in together.items():
        alone = requests.run(VanillaAttention(geometry, new_pool()), {}, {request: 1})
        assert torch.equal(output[-1:], alone[request])


@pytest.mark.parametrize("slack", [0, 9])
@torch.inference_mode()
def test_nan_in_other_requests_and_in_recycled_pages_does_not_spread(slack: int) -> None:
    requests = Requests([9, 17, 6])
    pool = new_pool()
    pool.data.fill_(torch.nan)
    requests.kv[1].fill_(torch.nan)
    outputs = requests.run(
        VanillaAttention(GEOMETRY, pool),
        {},
        {0: 2, 1: 2, 2: 2},
        slack=slack,
        padding=requests.pages[1][0],
    )
    assert outputs[1].isnan().all()
    for request in (0, 2):
        torch.testing.assert_close(
            outputs[request], requests.expected(request, 2), rtol=1e-4, atol=1e-5
        )


@torch.inference_mode()
def test_a_forward_writes_its_rows_and_nothing_else() -> None:
    requests = Requests([9, 6])
    backend = VanillaAttention(GEOMETRY, new_pool())
    requests.run(backend, {0: 9}, {1: 3}, layer=1)
    written = backend.pool.data[1].view(2, -1, KV_HEADS, HEAD_DIM)
    slots = requests.slots(0, 0, 9) + requests.slots(1, 0, 6)
    assert torch.equal(written[0, slots], torch.cat((requests.kv[0], requests.kv[1]))[:, 0])
    assert torch.equal(written[1, slots], torch.cat((requests.kv[0], requests.kv[1]))[:, 1])
    written[:, slots] = 0
    assert backend.pool.data.count_nonzero() == 0


def test_pages_are_copied_in_all_layers() -> None:
    pool = new_pool()
    pool.data.normal_()
    before = pool.data.clone()
    pool.copy_page(3, 5)
    before[:, :, 5] = before[:, :, 3]
    assert torch.equal(pool.data, before)


def test_a_page_takes_the_bytes_that_planning_counts() -> None:
    pool = new_pool()
    assert (
        KVPool.page_bytes(GEOMETRY, PAGE_SIZE, KVFormat(torch.float32)) * PAGES == pool.data.nbytes
    )


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
