"""Paged attention of context chunks with FlashInfer: the last rows of each request attend causally
to its whole context in the KV pool.

FlashInfer runs FlashAttention-3 on Hopper and its FA2 elsewhere. Its schedule is planned on the
host from lengths that the host knows, once for all layers of a forward; nothing waits for the
device. `plain_paged_prefill` is the plain-torch reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tllm_spec.kernels.attention.attention_sinks import add_sinks
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales

# A plan is copied to the device from pinned memory in stream order. With overlap the host is one
# forward ahead of the device, and must not overwrite memory that the previous copy still reads.
NUM_PLANS = 2
# Device memory of a FlashInfer wrapper: its plan (8 MiB) and the lengths in it.
PLAN_BYTES = (8 << 20) + 32768 * 4
# Major compute capability. Its kernels (FA3) read their whole schedule from the plan on the device.
HOPPER = 9


@dataclass(frozen=True)
class PrefillRows:
    """C chunks in order. All tensors but `pages` are on the host, pinned if there is CUDA."""

    query_starts: torch.Tensor
    """[C + 1] int32: each chunk's first row, then the total number of rows."""
    page_starts: torch.Tensor
    """[C + 1] int32: each chunk's first entry of `pages`, then the total number of entries."""
    last_page_lens: torch.Tensor
    """[C] int32: tokens in each request's last page, 1 to page_size."""
    kv_lens: torch.Tensor
    """[C] int32: tokens in the cache, including the chunk's."""
    pages: torch.Tensor
    """int32, on the device: the pages of all requests, one after another."""
    num_rows: int
    max_chunk_len: int

    @classmethod
    def build(
        cls,
        chunk_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: torch.Tensor,
        page_size: int,
    ) -> "PrefillRows":
        """block_tables: `[C or more, P]` int32, on the device; only pages that kv_lens need."""
        counts = [-(-length // page_size) for length in kv_lens]
        tables = block_tables[: len(counts)]
        pages = [table[:count] for table, count in zip(tables, counts, strict=True)]
        return cls.of_pages(
            chunk_lens, kv_lens, pages[0] if len(pages) == 1 else torch.cat(pages), page_size
        )

    @classmethod
    def of_pages(
        cls, chunk_lens: Sequence[int], kv_lens: Sequence[int], pages: torch.Tensor, page_size: int
    ) -> "PrefillRows":
        """pages: as the field, exactly those that kv_lens need."""
        counts = [-(-length // page_size) for length in kv_lens]
        last = [
            length - (count - 1) * page_size for length, count in zip(kv_lens, counts, strict=True)
        ]
        starts = [0, *accumulate(chunk_lens)], [0, *accumulate(counts)]
        numbers = [*starts, [*last, 0], [*kv_lens, 0]]
        host = torch.tensor(numbers, dtype=torch.int32, pin_memory=pages.is_cuda)
        queries, page_starts, last_page_lens, lens = host.unbind(0)
        assert starts[1][-1] == len(pages)
        return cls(
            queries,
            page_starts,
            last_page_lens[:-1],
            lens[:-1],
            pages,
            starts[0][-1],
            max(chunk_lens),
        )


@dataclass(frozen=True)
class PrefillLimits:
    """Limits of `PrefillInPlace`: rows of all chunks, chunks, and pages per chunk."""

    max_rows: int
    num_chunks: int
    max_pages: int


class PagedPrefill:
    """FlashInfer's kernels for one geometry. Raises RuntimeError or OSError if they are neither
    prebuilt nor can be compiled, and ImportError without FlashInfer."""

    def __init__(
        self, layer: torch.Tensor, num_heads: int, scale: float, window: int | None = None
    ) -> None:
        """layer: a layer of the pool, `[2, pages, page_size, Hkv, D]`; num_heads: query heads;
        window: how many keys a row sees, its own included; None: all up to its own."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        # The workspace for partial results of split keys. Keys are never split, so that a row's
        # result does not depend on the batch.
        self._workspace = torch.empty(16, dtype=torch.uint8, device=layer.device)
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="auto")
            for _ in range(NUM_PLANS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(NUM_PLANS)]
        self._next = 0
        self._layer, self._num_heads, self._scale = layer, num_heads, scale
        self._num_before = -1 if window is None else window - 1
        for _ in range(NUM_PLANS):
            self._try(self.plan(self._rows_of_page_0(1)))

    def plan(self, rows: PrefillRows) -> Any:
        """The plan of a forward, for `run`. It is valid until NUM_PLANS further plans are made. The
        host waits for the device only if it is that many plans ahead."""
        index, self._next = self._next, (self._next + 1) % NUM_PLANS
        self._fill(self._wrappers[index], rows, self._copied[index])
        return self._wrappers[index]

    def run(
        self,
        plan: Any,
        q: torch.Tensor,
        layer: torch.Tensor,
        out: torch.Tensor,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """q `[T, Hq, D]`, any stride between rows; out `[T, Hq, D]`, contiguous, overwritten.
        scales: of numbers that were codes. sinks: `[Hq]` float32, of each head."""
        own = {"out": out, "k_scale": scales.key, "v_scale": scales.value}
        if sinks is None:
            plan.run(q, (layer[0], layer[1]), **own)
        else:  # in powers of two
            log_sums = q.new_empty(q.shape[:2], dtype=torch.float32)
            plan.run(q, (layer[0], layer[1]), lse=log_sums, return_lse=True, **own)
            add_sinks(out, log_sums, sinks)

    def in_place(self, limits: PrefillLimits) -> "PrefillInPlace | None":
        """Plans for CUDA graphs; None if the kernels read a part of the plan on the host."""
        if torch.cuda.get_device_capability(self._layer.device)[0] != HOPPER:
            return None
        return PrefillInPlace(self, limits)

    def _fill(self, wrapper: Any, rows: PrefillRows, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        wrapper.plan(
            rows.query_starts,
            rows.page_starts,
            rows.pages,
            rows.last_page_lens,
            self._num_heads,
            self._layer.shape[3],
            self._layer.shape[4],
            self._layer.shape[2],
            causal=True,
            window_left=self._num_before,
            sm_scale=self._scale,
            q_data_type=self._layer.dtype,
            seq_lens=rows.kv_lens,
            max_token_per_sequence=rows.max_chunk_len,
            disable_split_kv=True,
        )
        copied.record(torch.cuda.current_stream(self._layer.device))

    def _rows_of_page_0(self, num_rows: int, num_chunks: int = 1) -> PrefillRows:
        page_size = self._layer.shape[2]
        table = torch.zeros(
            num_chunks, -(-num_rows // page_size), dtype=torch.int32, device=self._layer.device
        )
        lens = [num_rows] + [0] * (num_chunks - 1)
        return PrefillRows.build(lens, lens, table, page_size)

    def _try(self, plan: Any, num_rows: int = 1) -> None:
        """Loads or compiles the kernels now instead of with the first request."""
        q = self._layer.new_zeros(num_rows, self._num_heads, self._layer.shape[4])
        self.run(plan, q, self._layer, torch.empty_like(q))


class PrefillInPlace:
    """Plans for CUDA graphs: each plan overwrites the previous one, and captured calls of `run`
    follow the latest. A plan has `num_chunks` chunks, some of which may be empty, and at most
    `max_rows` rows."""

    def __init__(self, kernels: PagedPrefill, limits: PrefillLimits) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=kernels._layer.device)

        self._kernels = kernels
        self._copied = torch.cuda.Event()
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            kernels._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(limits.num_chunks + 1),
            paged_kv_indptr_buf=buffer(limits.num_chunks + 1),
            paged_kv_indices_buf=buffer(limits.num_chunks * limits.max_pages),
            paged_kv_last_page_len_buf=buffer(limits.num_chunks),
            backend="fa3",
        )
        # The first plan has the most rows: it fixes the memory layout of all later plans.
        kernels._try(
            self.plan(kernels._rows_of_page_0(limits.max_rows, limits.num_chunks)), limits.max_rows
        )

    def plan(self, rows: PrefillRows) -> Any:
        """The plan for `PagedPrefill.run`; always the same object."""
        self._kernels._fill(self._wrapper, rows, self._copied)
        return self._wrapper


def plain_paged_prefill(
    q: torch.Tensor,
    layer: torch.Tensor,
    rows: PrefillRows,
    scale: float,
    out: torch.Tensor,
    window: int | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> None:
    """Reference of `PagedPrefill`, computed in float32; same arguments."""
    page_size, kv_heads, head_dim = layer.shape[2:]
    chunks = zip(rows.query_starts.tolist(), rows.query_starts.tolist()[1:], strict=False)
    pages = zip(rows.page_starts.tolist(), rows.page_starts.tolist()[1:], strict=False)
    for (first, end), (page, last), left in zip(
        chunks, pages, rows.last_page_lens.tolist(), strict=True
    ):
        kv_len, device = (last - page - 1) * page_size + left, q.device
        cached = (
            layer[:, rows.pages[page:last].long()]
            .float()
            .view(2, -1, kv_heads, head_dim)[:, :kv_len]
        )
        keys, values = cached.transpose(1, 2).repeat_interleave(q.shape[1] // kv_heads, dim=1)
        positions = torch.arange(kv_len - (end - first), kv_len, device=device)
        keys_before = positions[:, None] - torch.arange(kv_len, device=device)
        hidden = keys_before < 0
        if window is not None:
            hidden |= keys_before >= window
        scores = (
            q[first:end].float().transpose(0, 1) @ keys.mT * (scale * scales.key)
        ).masked_fill(hidden, -torch.inf)
        mixed = (scores.softmax(-1) @ values * scales.value).transpose(0, 1)
        if sinks is not None:
            mixed = mixed.contiguous()
            log_sums = scores.logsumexp(-1).T / math.log(2)
            add_sinks.reference(mixed, log_sums, sinks)
        out[first:end] = mixed.to(q.dtype)
