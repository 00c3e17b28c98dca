"""Random windows for the tests of window attention, and the formula in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tests.kernels.row_counts import ragged_rows
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales, encoded
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.attention.visible_keys import KeySpan, KeySpans
from tllm_spec.kernels.attention.window_attention import (
    WindowCall,
    WindowTables,
    plain_window_attention,
    window_attention,
)
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.slots.round_rows import RoundRows


@dataclass(frozen=True)
class Case:
    """`padding`: kv_lens of the rows of graph padding. `num_programs`: programs that fill the
    device; with more than there are tiles the keys are split. `spare_pages`: columns of the block
    table beyond the longest request. `span`: the keys that rows see. `scales`: of a pool of codes;
    UNSCALED: it has numbers. `has_sinks`: whether heads have sinks."""

    kv_lens: tuple[int, ...]
    window: int
    group: int
    head_dim: int
    page_size: int
    kv_heads: int = 2
    padding: tuple[int, ...] = ()
    num_programs: int = 1
    spare_pages: int = 0
    dtype: torch.dtype = torch.float32
    span: KeySpan | None = None
    scales: KVScales = UNSCALED
    has_sinks: bool = False

    def first_key(self, position: int) -> int:
        """The first key that a query sees."""
        return self.span.first_key(position) if self.span else 0


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Problem:
    """Requests with random queries, keys and values. Keys and values before the window are in
    shuffled pages of a pool. The rest of the pool is NaN: the window's slots, the rest of each last
    page, unused pages, and pages that the block table names after a request's own. Page 0 is for
    graph padding and finite if there is any. Heads are not rotated unless `rotate` is called."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 0) -> None:
        self.case, self.scale = case, 1.3 / math.sqrt(case.head_dim)
        self.generator = generator = torch.Generator().manual_seed(seed)
        heads, size = case.kv_heads * case.group, case.page_size
        rows, window = len(case.kv_lens) + len(case.padding), case.window
        counts = [-(-length // size) for length in case.kv_lens]
        width = max(counts) + case.spare_pages
        # The last page belongs to no request.
        order = (torch.randperm(sum(counts) + 1, generator=generator) + 1).tolist()
        tables = torch.full((rows, width + 2), order.pop())
        shape = (2, len(order) + 2, size, case.kv_heads, case.head_dim)
        layer = torch.full(shape, torch.nan, dtype=case.dtype)
        layer[:, 0] = 7 if case.padding else torch.nan
        all_heads = heads + 2 * case.kv_heads
        qkv = torch.randn(rows, window, all_heads, case.head_dim, generator=generator).to(
            case.dtype
        )
        kv_slots = torch.zeros(rows, window, dtype=torch.int64)
        self.kv = []
        for request, (length, count) in enumerate(zip(case.kv_lens, counts, strict=True)):
            pages = [order.pop() for _ in range(count)]
            tables[request, :count] = torch.tensor(pages)
            kv = torch.randn(2, length, case.kv_heads, case.head_dim, generator=generator).to(
                case.dtype
            )
            kv[:, length - window :] = qkv[request, :, heads:].unflatten(1, (2, -1)).transpose(0, 1)
            for token in range(length - window):
                layer[:, pages[token // size], token % size] = kv[:, token]
            for row, token in enumerate(range(length - window, length)):
                kv_slots[request, row] = pages[token // size] * size + token % size
            self.kv.append(self.as_stored(kv).double())
        tables[len(case.kv_lens) :, :width] = 0
        if case.scales != UNSCALED:
            keys, values = layer
            layer = torch.stack(
                (encoded(keys, case.scales.key), encoded(values, case.scales.value))
            )
        self.qkv, self.layer = qkv.to(device), layer.to(device)
        self.num_heads = heads
        self.tables = WindowTables(
            RoundRows.rectangle(rows, window),
            tables.to(device, torch.int32)[:, :width],
            torch.tensor(case.kv_lens + case.padding, dtype=torch.int32, device=device),
            kv_slots.flatten().to(device),
        )
        if case.span:
            positions = self.tables.kv_lens[:, None] + torch.arange(-window, 0, device=device)
            spans = KeySpans(case.span, positions.clamp_min(0).flatten())
            self.tables = replace(self.tables, spans=spans)
        self.cos_sin = torch.zeros(
            rows * window, 2, 1, case.head_dim, dtype=case.dtype, device=device
        )
        self.cos_sin[:, 0] = 1
        self.norm: HeadWeights | None = None
        self.sinks = torch.linspace(-2, 6, heads).to(device) if case.has_sinks else None

    def as_stored(self, kv: torch.Tensor) -> torch.Tensor:
        """Keys and values `[2, ...]`, rounded to what the pool holds."""
        scales = self.case.scales
        if scales == UNSCALED:
            return kv
        pairs = zip(kv, (scales.key, scales.value), strict=True)
        return torch.stack([encoded(own, scale).float() * scale for own, scale in pairs])

    def rotate(self, *, normed: bool, norms_values: bool = False) -> None:
        """From now on heads are rotated, and normed before if `normed`."""
        self.cos_sin.copy_(torch.randn(self.cos_sin.shape, generator=self.generator))
        if normed:
            shape = (self.num_heads + self.case.kv_heads, self.case.head_dim)
            weight = torch.randn(shape, generator=self.generator).to(self.qkv)
            self.norm = HeadWeights(weight, 1e-5, norms_values)

    def workspace(self) -> WindowWorkspace:
        own = WindowWorkspace.allocate(self.case.head_dim, self.qkv.device)
        for tensor in (own.outputs, own.log_sums):
            tensor.fill_(torch.nan)
        return replace(own, num_programs=self.case.num_programs)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        tables = self.tables
        positions = () if tables.spans is None else (tables.spans.positions,)
        return (
            self.qkv,
            self.layer,
            tables.block_tables,
            tables.kv_lens,
            tables.kv_slots,
            *positions,
        )

    def attend(self, workspace: WindowWorkspace | None = None) -> torch.Tensor:
        workspace = workspace or self.workspace()
        qkv = self.qkv.flatten(0, 1)
        own = self.tables, self.scale, workspace, self.norm, self.case.scales, self.sinks
        output = window_attention(WindowCall(qkv, self.cos_sin, self.layer, *own))
        return output.view(*self.qkv.shape[:2], -1)

    def attend_plainly(self) -> torch.Tensor:
        """Writes into the pool, and rotates the heads of `qkv` in place."""
        rotary = Rotary(self.cos_sin, torch.arange(len(self.cos_sin), device=self.qkv.device))
        rotary_write.reference(
            self.qkv.flatten(0, 1),
            rotary,
            self.tables.kv_slots,
            self.layer,
            self.norm,
            self.case.scales,
        )
        output = plain_window_attention(
            self.qkv[:, :, : self.num_heads].flatten(0, 1),
            self.layer,
            self.tables.rows,
            self.tables.block_tables,
            self.tables.kv_lens,
            self.scale,
            self.tables.tree,
            self.tables.spans,
            self.case.scales,
            self.sinks,
        )
        return output.view(*self.qkv.shape[:2], -1)

    def keep_last(self, counts: Sequence[int]) -> None:
        """The windows have only so many rows, the last ones. `qkv` is `[1, T, ...]` from now on."""
        window, device = self.case.window, self.qkv.device
        self.pad([window - count for count in counts])
        kept = [
            request * window + row
            for request, count in enumerate(counts)
            for row in range(window - count, window)
        ]
        index, spans = torch.tensor(kept, device=device), self.tables.spans
        if spans is not None:
            spans = KeySpans(spans.span, spans.positions[index])
        self.qkv, self.cos_sin = self.qkv.flatten(0, 1)[index][None], self.cos_sin[index]
        self.tables = replace(
            self.tables,
            rows=ragged_rows(counts, window, str(device)),
            kv_slots=self.tables.kv_slots[index],
            num_padding=None,
            spans=spans,
        )

    def check_last(self, output: torch.Tensor, counts: Sequence[int]) -> None:
        """After `keep_last`: the rows have the results that they have in full windows."""
        full, tolerance = Problem(self.case).expected(), TOLERANCE[self.case.dtype]
        ends = [own[len(own) - count :] for own, count in zip(full, counts, strict=True)]
        torch.testing.assert_close(
            output[0].cpu().double(), torch.cat(ends), rtol=tolerance, atol=tolerance
        )

    def weights(self, scores: torch.Tensor, head: int) -> torch.Tensor:
        """The softmax of scores `[N]` float64 and the head's sink, without the sink's weight."""
        if self.sinks is None:
            return scores.softmax(0)
        return torch.cat((scores, self.sinks[head, None].cpu().double())).softmax(0)[:-1]

    def expected(self) -> torch.Tensor:
        """softmax(scale * q k) v of the real requests, `[B, W, Hq * D]` float64, head by head and
        token by token."""
        results = []
        for q, (keys, values) in zip(self.qkv.cpu().double(), self.kv, strict=False):
            for token in range(self.case.window):
                end = keys.shape[0] - self.case.window + token + 1
                seen = slice(self.case.first_key(end - 1), end)
                for head, query in enumerate(q[token, : self.num_heads]):
                    kv_head = head // self.case.group
                    weights = self.weights(self.scale * keys[seen, kv_head] @ query, head)
                    results.append(weights @ values[seen, kv_head])
        return torch.stack(results).view(len(self.kv), self.case.window, -1)

    def check(self, output: torch.Tensor) -> None:
        """Real rows equal the formula. Padding rows are finite, and zeros for queries before the
        first token."""
        assert output.dtype == self.case.dtype and output.isfinite().all()
        tolerance, real = TOLERANCE[self.case.dtype], output[: len(self.kv)].cpu().double()
        torch.testing.assert_close(real, self.expected(), rtol=tolerance, atol=tolerance)
        for row, length in zip(output[len(self.kv) :], self.case.padding, strict=True):
            assert row[: max(0, self.case.window - length)].count_nonzero() == 0

    def pad(self, num_padding: list[int]) -> None:
        """The first rows of each window become padding; their keys and values are in the pool."""
        window, flat = self.case.window, self.layer.flatten(1, 2)
        for request, number in enumerate(num_padding):
            slots = self.tables.kv_slots.view(-1, window)[request]
            first = self.case.kv_lens[request] - window
            own = self.kv[request][:, first : first + number]
            if (scales := self.case.scales) != UNSCALED:
                own = torch.stack((encoded(own[0], scales.key), encoded(own[1], scales.value)))
            flat[:, slots[:number]] = own.to(flat)
            slots[:number] = 0
            self.qkv[request, :number] = torch.nan
        self.layer.copy_(flat.view_as(self.layer))
        self.tables = replace(
            self.tables, num_padding=torch.tensor(num_padding, device=self.qkv.device)
        )

    def check_real_rows(self, output: torch.Tensor) -> None:
        """Rows that are not padding have the results that they have in full windows."""
        assert self.tables.num_padding is not None
        expected, tolerance = Problem(self.case).expected(), TOLERANCE[self.case.dtype]
        for request, number in enumerate(self.tables.num_padding.tolist()):
            own = output[request, number:].cpu().double()
            torch.testing.assert_close(
                own, expected[request, number:], rtol=tolerance, atol=tolerance
            )
