"""Attention over pools of FP8 codes, and attention sinks over numbers and codes."""

from dataclasses import replace

import pytest
import torch

from tests.attention.batches import (
    GEOMETRY,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    Batch,
    Forward,
    TreeForward,
    on_each_device,
)
from tests.attention.test_triton import BATCHES, SLIDING_5, TREES
from tllm_spec.attention import geometry as wide_pages
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.geometry import KVFormat, KVPool
from tllm_spec.attention.interface import HeadsBackend, HeadsInputs
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.kv_codes import CODES, KVScales
from tllm_spec.kernels.attention.rotary_write import Rotary

KINDS = (VanillaAttention, TritonAttention, FlashInferAttention, BatchInvariantAttention)
# Numbers above 448 times a scale saturate.
SCALES = KVScales(0.0043, 0.013)
FORMAT = KVFormat(torch.float32, (KVScales(), SCALES))
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


def check_codes(forward: Forward, pool: KVPool) -> None:
    """The rows' codes are those of the transcription; a key may have a neighbouring code where the
    rotation was rounded differently."""
    keys, values = forward.heads()[:, HEADS:].split(KV_HEADS, 1)
    found = pool.data[1].float().flatten(1, 2)[:, forward.metadata.kv_slots]
    expected = code_of(keys, SCALES.key)
    torch.testing.assert_close(found[0], expected, rtol=1 / 7, atol=2**-8)
    assert (found[0] != expected).sum() <= 0.01 * expected.numel()
    assert torch.equal(found[1], code_of(values, SCALES.value))


def with_codes(batch: Batch) -> Batch:
    return replace(batch, scales=SCALES)


# Batches of numbers or codes, and whether they are slow.
SINKS = Batch(((0, 9), (7, 5)), (6, 120, 33), counts=(3, 1, 1), has_sinks=True)
SLIDING_SINKS = Batch(((3, 9),), (6, 12, 300), span=SLIDING_5, has_sinks=True)
STORED = {
    "chunks and such windows": (with_codes(BATCHES["chunks and such windows"]), False),
    "within chunks of 5": (with_codes(BATCHES["within chunks of 5"]), False),
    "such sliding windows": (with_codes(BATCHES["such sliding windows"]), True),
    "chunks and windows": (with_codes(BATCHES["chunks and windows"]), True),
    "a sliding window of 70": (with_codes(BATCHES["a sliding window of 70"]), True),
    "sinks": (SINKS, False),
    "sinks of single tokens that slide": (SLIDING_SINKS, False),
    "sinks over codes": (with_codes(SINKS), False),
    "sinks of single tokens that slide over codes": (with_codes(SLIDING_SINKS), False),
}
on_each_batch = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if is_slow else ())
        for name, (_, is_slow) in STORED.items()
    ],
)


@on_each_device
@on_each_batch
@on_each_kind
@torch.inference_mode()
def test_every_row_attends_to_keys_and_values_as_stored_and_to_its_sinks(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    forward = Forward(STORED[name][0], device)
    if kind is FlashInferAttention and "within chunks" in name:
        pytest.skip("it has no kernels for them")
    backend = forward.backend(kind)
    output = forward.run(backend)
    if forward.scales is not None:
        check_codes(forward, backend.pool)
    torch.testing.assert_close(output, forward.formula(backend.pool), rtol=1e-4, atol=1e-4)


@on_each_device
@pytest.mark.parametrize(
    "name", ["chunks and trees", pytest.param("a whole tree", marks=pytest.mark.slow)]
)
@on_each_kind
@torch.inference_mode()
def test_rows_of_trees_attend_to_their_paths_as_stored(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    batch, offset = TREES[name]
    forward = TreeForward(with_codes(batch), offset, device)
    backend = forward.backend(kind)
    output = forward.run(backend)
    check_codes(forward, backend.pool)
    torch.testing.assert_close(output, forward.formula(backend.pool), rtol=1e-4, atol=1e-4)


@on_each_device
@on_each_kind
@torch.inference_mode()
def test_write_leaves_the_same_codes_as_run(kind: type[HeadsBackend], device: str) -> None:
    forward = Forward(with_codes(BATCHES["chunks and such windows"]), device)
    backend = forward.backend(kind)
    forward.write(backend)
    check_codes(forward, backend.pool)


@on_each_kind
@torch.inference_mode()
def test_a_prompt_in_chunks_of_1_and_7_leaves_the_codes_of_the_whole_prompt(
    kind: type[HeadsBackend],
) -> None:
    whole = Forward(Batch(((0, 21),), scales=SCALES), "cpu")
    backend = whole.backend(kind)
    expected = whole.run(backend)
    for size in (1, 7):
        parts, own = [], whole.backend(kind)
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
            inputs = HeadsInputs(whole.qkv[rows].clone())
            parts.append(own.run(1, inputs, rotary, own.plan(metadata)))
        assert torch.equal(own.pool.data.view(torch.uint8), backend.pool.data.view(torch.uint8))
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_chunks_with_more_pages_than_the_copy_has_run_as_in_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wide_pages, "MAX_TOKENS", 3 * PAGE_SIZE)
    for batch, is_copied in (((0, 12), True), ((1, 12), False)):
        forward = Forward(Batch((batch,), scales=SCALES), "cpu")
        backend = forward.backend(FlashInferAttention)
        assert (backend.plan(forward.metadata).prefill is not None) == is_copied
        output = forward.run(backend)
        expected = forward.formula(backend.pool)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_a_nan_stays_one_and_numbers_too_large_saturate() -> None:
    forward = Forward(Batch(((0, 2),), scales=SCALES), "cpu")
    forward.qkv[0, -1, 0], forward.qkv[1, -1, 0] = torch.nan, -1e9
    backend = forward.backend(VanillaAttention)
    forward.write(backend)
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
