"""Attention over pools of FP8 codes, and attention sinks over numbers and codes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.attention.plain_prefill import PlainPrefill
from tests.attention.test_triton import (
    BATCHES,
    GEOMETRY,
    HEADS,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    SLIDING_5,
    TREES,
    Batch,
    Forward,
    TreeForward,
    on_each_device,
)
from tllm_spec.attention import geometry as wide_pages
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.geometry import KVFormat, KVPool
from tllm_spec.attention.interface import AttentionPlan, HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.kv_codes import CODES, KVScales
from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate

KINDS = (VanillaAttention, TritonAttention, FlashInferAttention, BatchInvariantAttention)
# Of layer 1, which runs. Numbers above 448 times a scale saturate.
SCALES = (KVScales(), KVScales(0.0043, 0.013))
FORMAT = KVFormat(torch.float32, SCALES)
on_each_kind = pytest.mark.parametrize("kind", KINDS)


def code_of(number: torch.Tensor, scale: float) -> torch.Tensor:
    """The nearest of all 254 numbers of E4M3, ties to the even code, times `scale`."""
    codes = torch.arange(256, dtype=torch.uint8).view(CODES).float()
    codes = codes[codes.isfinite()]
    order = torch.argsort(codes, stable=True)
    codes = codes[order]
    scaled = number.flatten().cpu() * (1 / scale)
    above = torch.searchsorted(codes, scaled).clamp(1, len(codes) - 1)
    low, high = codes[above - 1], codes[above]
    low_is_even = order[above - 1] % 2 == 0
    takes_low = (scaled - low < high - scaled) | ((scaled - low == high - scaled) & low_is_even)
    return torch.where(takes_low, low, high).view(number.shape).to(number.device)


def with_codes(forward: Forward, kind: type[HeadsBackend]) -> HeadsBackend:
    pool = KVPool(
        GEOMETRY,
        num_pages=forward.num_pages,
        page_size=PAGE_SIZE,
        kv_format=FORMAT,
        device=forward.device,
    )
    scales = torch.tensor([[own.key, own.value] for own in SCALES]).view(LAYERS, 2, 1, 1, 1, 1)
    pool.data.copy_((forward.pool_data / scales).clamp(-448, 448).to(CODES))
    if kind is FlashInferAttention:
        return FlashInferAttention(forward.geometry, pool, PlainPrefill(forward.geometry))
    return kind(forward.geometry, pool)


def decoded(pool: KVPool) -> torch.Tensor:
    """Keys and values of layer 1, `[2, slots, Hkv, D]` float32."""
    keys, values = pool.data[1].float().flatten(1, 2)
    return torch.stack((keys * SCALES[1].key, values * SCALES[1].value))


def own_heads(forward: Forward) -> torch.Tensor:
    """`[T, Hq + 2 * Hkv, D]`: the heads of the forward's rows, rotated."""
    qkv = forward.qkv.clone()
    plain_rotate(qkv[:, :-KV_HEADS], Rotary(forward.table, forward.metadata.positions))
    return qkv


def seen_keys(forward: Forward) -> Iterator[tuple[int, list[int]]]:
    """For each row of a forward without trees its request and the keys that it sees."""
    own, span = forward.metadata, forward.geometry.span
    windows = torch.full((own.rows.num_requests,), 1) * torch.as_tensor(own.rows.counts).cpu()
    counts = [*own.context_lens, *windows.tolist()]
    for request, (count, kv_len) in enumerate(zip(counts, own.kv_lens.tolist(), strict=True)):
        for position in range(kv_len - count, kv_len):
            first = 0 if span is None else span.first_key(position)
            yield request, list(range(first, position + 1))


def attended(forward: Forward, pool: KVPool) -> torch.Tensor:
    """softmax(scale * q k) v, row by row, over what the pool holds."""
    rows, stored = [], decoded(pool)
    for q, (request, seen) in zip(own_heads(forward), seen_keys(forward), strict=True):
        table = forward.metadata.block_tables[request].tolist()
        slots = [table[key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE for key in seen]
        keys, values = stored[:, slots].repeat_interleave(HEADS // KV_HEADS, dim=2)
        scores = torch.einsum("hd,lhd->hl", q[:HEADS], keys) * GEOMETRY.scale
        rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values).flatten())
    return torch.stack(rows)


def check_codes(forward: Forward, pool: KVPool) -> None:
    """The rows' codes are those of the transcription; a key may have a neighbouring code where the
    rotation was rounded differently."""
    keys, values = own_heads(forward)[:, HEADS:].split(KV_HEADS, 1)
    found = pool.data[1].float().flatten(1, 2)[:, forward.metadata.kv_slots]
    expected = code_of(keys, SCALES[1].key)
    torch.testing.assert_close(found[0], expected, rtol=1 / 7, atol=2**-8)
    assert (found[0] != expected).sum() <= 0.01 * expected.numel()
    assert torch.equal(found[1], code_of(values, SCALES[1].value))


@on_each_device
@pytest.mark.parametrize(
    "name",
    [
        "chunks and such windows",
        "within chunks of 5",
        pytest.param("such sliding windows", marks=pytest.mark.slow),
        pytest.param("chunks and windows", marks=pytest.mark.slow),
        pytest.param("a sliding window of 70", marks=pytest.mark.slow),
    ],
)
@on_each_kind
@torch.inference_mode()
def test_every_row_attends_to_keys_and_values_as_stored(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    forward = Forward(BATCHES[name], device)
    if kind is FlashInferAttention and "within chunks" in name:
        pytest.skip("it has no kernels for them")
    backend = with_codes(forward, kind)
    output = forward.run(backend)
    check_codes(forward, backend.pool)
    torch.testing.assert_close(output, attended(forward, backend.pool), rtol=1e-4, atol=1e-4)


@on_each_device
@pytest.mark.parametrize(
    "name", ["chunks and trees", pytest.param("a whole tree", marks=pytest.mark.slow)]
)
@on_each_kind
@torch.inference_mode()
def test_rows_of_trees_attend_to_their_paths_as_stored(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    forward = TreeForward(*TREES[name], device)
    backend = with_codes(forward, kind)
    windows = forward.run(backend)[-forward.num_rows :]
    check_codes(forward, backend.pool)
    of_numbers = forward.backend(VanillaAttention)
    of_numbers.pool.data[1].copy_(decoded(backend.pool).view(of_numbers.pool.data[1].shape))
    torch.testing.assert_close(windows, forward.expected(of_numbers), rtol=1e-4, atol=1e-4)


@on_each_device
@on_each_kind
@torch.inference_mode()
def test_write_leaves_the_same_codes_as_run(kind: type[HeadsBackend], device: str) -> None:
    forward = Forward(BATCHES["chunks and such windows"], device)
    backend = with_codes(forward, kind)
    forward.write(backend)
    check_codes(forward, backend.pool)


@on_each_kind
@torch.inference_mode()
def test_a_prompt_in_chunks_of_1_and_7_leaves_the_codes_of_the_whole_prompt(
    kind: type[HeadsBackend],
) -> None:
    whole = Forward(Batch(chunks=((0, 21),)), "cpu")
    backend = with_codes(whole, kind)
    expected = whole.run(backend)
    for size in (1, 7):
        parts, own = [], with_codes(whole, kind)
        for start in range(0, 21, size):
            rows = slice(start, start + size)
            metadata = replace(
                whole.metadata,
                context_lens=(size,),
                context_kv_lens=(start + size,),
                kv_lens=torch.tensor([start + size], dtype=torch.int32),
                positions=whole.metadata.positions[rows],
                kv_slots=whole.metadata.kv_slots[rows],
            )
            rotary = Rotary(whole.table, metadata.positions)
            parts.append(own.run(1, whole.qkv[rows].clone(), rotary, own.plan(metadata)))
        assert torch.equal(own.pool.data.view(torch.uint8), backend.pool.data.view(torch.uint8))
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_chunks_with_more_pages_than_the_copy_has_run_as_in_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wide_pages, "MAX_TOKENS", 3 * PAGE_SIZE)
    for batch, is_copied in (((0, 12), True), ((1, 12), False)):
        forward = Forward(Batch(chunks=(batch,)), "cpu")
        backend = with_codes(forward, FlashInferAttention)
        assert (backend.plan(forward.metadata).prefill is not None) == is_copied
        output = forward.run(backend)
        expected = attended(forward, backend.pool)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_a_nan_stays_one_and_numbers_too_large_saturate() -> None:
    forward = Forward(Batch(chunks=((0, 2),)), "cpu")
    forward.qkv[0, -1, 0], forward.qkv[1, -1, 0] = torch.nan, -1e9
    backend = with_codes(forward, VanillaAttention)
    backend.write(
        1,
        forward.qkv,
        Rotary(forward.table, forward.metadata.positions),
        AttentionPlan(forward.metadata.kv_slots),
    )
    values = backend.pool.data[1, 1].flatten(0, 1)[forward.metadata.kv_slots][:, -1, 0].float()
    assert values[0].isnan() and values[1] == -448


def test_a_pool_of_codes_takes_a_quarter_of_float32_and_copies_pages() -> None:
    pool = KVPool(
        GEOMETRY, num_pages=3, page_size=PAGE_SIZE, kv_format=FORMAT, device=torch.device("cpu")
    )
    wide = KVPool.page_bytes(GEOMETRY, PAGE_SIZE, KVFormat(torch.float32))
    assert KVPool.page_bytes(GEOMETRY, PAGE_SIZE, FORMAT) == wide / 4 == pool.data.nbytes / 3
    pool.data[:, :, 1] = torch.ones_like(pool.data[:, :, 1], dtype=torch.float32).to(CODES)
    pool.copy_page(1, 2)
    assert pool.data.float().mean(dim=(0, 1, 3, 4, 5)).tolist() == [0, 1, 1]


SINKS_BATCHES = {
    "chunks and windows": Batch(((0, 9), (7, 5)), (6, 120, 33), counts=(3, 1, 1)),
    "single tokens that slide": Batch(((3, 9),), (6, 12, 300), span=SLIDING_5),
}


class SinksForward(Forward):
    def __init__(self, batch: Batch, device: str) -> None:
        super().__init__(batch, device)
        self.geometry = replace(self.geometry, has_sinks=True)
        self.sinks = torch.linspace(-1, 4, HEADS, device=device)

    def of(self, kind: type[HeadsBackend], *, has_codes: bool) -> HeadsBackend:
        if has_codes:
            return with_codes(self, kind)
        if kind is not FlashInferAttention:
            return self.backend(kind)
        pool = self.backend(VanillaAttention).pool
        return FlashInferAttention(self.geometry, pool, PlainPrefill(self.geometry))

    def expected(self, keys_and_values: torch.Tensor) -> torch.Tensor:
        """Row by row over the pool's content `[2, slots, Hkv, D]`."""
        assert self.sinks is not None
        rows, sinks = [], self.sinks[:, None]
        for q, (request, seen) in zip(own_heads(self), seen_keys(self), strict=True):
            table = self.metadata.block_tables[request].tolist()
            slots = [table[key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE for key in seen]
            keys, values = keys_and_values[:, slots].repeat_interleave(HEADS // KV_HEADS, dim=2)
            scores = torch.einsum("hd,lhd->hl", q[:HEADS], keys) * GEOMETRY.scale
            weights = torch.cat((scores, sinks), 1).softmax(1)[:, :-1]
            rows.append(torch.einsum("hl,lhd->hd", weights, values).flatten())
        return torch.stack(rows)


@on_each_device
@pytest.mark.parametrize("has_codes", [False, True], ids=["", "codes"])
@pytest.mark.parametrize("name", SINKS_BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_row_has_one_more_score_without_a_value(
    kind: type[HeadsBackend], name: str, has_codes: bool, device: str
) -> None:
    forward = SinksForward(SINKS_BATCHES[name], device)
    backend = forward.of(kind, has_codes=has_codes)
    output = forward.run(backend)
    pool = backend.pool
    stored = decoded(pool) if has_codes else pool.data[1].flatten(1, 2)
    torch.testing.assert_close(output, forward.expected(stored), rtol=1e-4, atol=1e-4)
