"""Attention sinks in every backend, over numbers and FP8 codes: each row equals the softmax with
one more score. Also under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

from dataclasses import replace

import pytest
import torch

from tests.attention.plain_prefill import PlainPrefill
from tests.attention.test_fp8_pool import KINDS, decoded, own_heads, seen_keys, with_codes
from tests.attention.test_triton import (
    GEOMETRY,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    SLIDING_5,
    Batch,
    Forward,
    on_each_device,
)
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.vanilla import VanillaAttention

BATCHES = {
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
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_row_has_one_more_score_without_a_value(
    kind: type[HeadsBackend], name: str, has_codes: bool, device: str
) -> None:
    forward = SinksForward(BATCHES[name], device)
    backend = forward.of(kind, has_codes=has_codes)
    output = forward.run(backend)
    pool = backend.pool
    stored = decoded(pool) if has_codes else pool.data[1].flatten(1, 2)
    torch.testing.assert_close(output, forward.expected(stored), rtol=1e-4, atol=1e-4)
