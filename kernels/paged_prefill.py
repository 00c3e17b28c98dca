"""Paged attention of context chunks: the last rows of each request attend causally to all that it
has in the pool.

The kernels are FlashInfer's: FlashAttention-3 on Hopper, its FA2 elsewhere. Their schedule is made
on the host from lengths that the host knows, once for all layers of a forward, and nothing waits
for the device. `plain_paged_prefill` is the reference in plain torch. Neither knows requests or
models: rows, pages and one layer of the pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

# A plan is copied to the device from pinned memory in stream order. With overlap the host is one
# forward ahead of the device: it must not write the memory that the copy of the forward before
# still reads.
NUM_PLANS = 2
# What a wrapper of FlashInfer allocates on the device for a plan (8 MiB) and for the lengths in it.
PLAN_BYTES = (8 << 20) + 32768 * 4
HOPPER = 9  # compute capability, of whose kernels (FA3) every launch of a graph takes its whole schedule from a plan


@dataclass(frozen=True)
class PrefillRows:
    """C chunks, one after another. All but `pages` lie on the host, pinned where there is a CUDA
    device to copy to."""

    query_starts: torch.Tensor
    """[C + 1] int32: each chunk's first row, then the number of all rows."""
    page_starts: torch.Tensor
    """[C + 1] int32: each chunk's first entry of `pages`, then the number of all entries."""
    last_page_lens: torch.Tensor
    """[C] int32: tokens in each request's last page, 1 to page_size."""
    kv_lens: torch.Tensor
    """[C] int32: tokens in the cache, the chunk's included."""
    pages: torch.Tensor
    """int32, on the device: the pages of the first request, then those of the second."""
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
        """block_tables: `[C or more, P]` int32, on the device; only the pages that kv_lens reach
        are taken."""
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
        """pages: as the field, those that kv_lens reach."""
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
    """Of plans in place: rows of all chunks together, chunks, and pages of a chunk's request."""

    max_rows: int
    num_chunks: int
    max_pages: int


class PagedPrefill:
    """FlashInfer's kernels for one geometry. Raises RuntimeError or OSError where they are neither
    prebuilt for it nor can be compiled, and ImportError without FlashInfer."""

    def __init__(self, layer: torch.Tensor, num_heads: int, scale: float) -> None:
        """layer: a layer of the pool, `[2, pages, page_size, Hkv, D]`; num_heads: of the
        queries."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        # Partial results of a split over keys would lie here. Without the split a row's result does
        # not depend on the batch around it. The FA3 kernels never split.
        self._workspace = torch.empty(16, dtype=torch.uint8, device=layer.device)
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="auto")
            for _ in range(NUM_PLANS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(NUM_PLANS)]  # type: ignore[no-untyped-call] # torch's
        self._turn = 0
        self._layer, self._num_heads, self._scale = layer, num_heads, scale
        for _ in range(NUM_PLANS):
            self._try(self.plan(self._rows_of_page_0(1)))

    def plan(self, rows: PrefillRows) -> Any:
        """What `run` needs of a forward. It lasts until `NUM_PLANS` further ones have been made,
        and the host waits for the device only when it is so many ahead."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_PLANS
        self._fill(self._wrappers[turn], rows, self._copied[turn])
        return self._wrappers[turn]

    def run(self, plan: Any, q: torch.Tensor, layer: torch.Tensor, out: torch.Tensor) -> None:
        """q `[T, Hq, D]`, any stride of rows; out `[T, Hq, D]`, contiguous, overwritten."""
        plan.run(q, (layer[0], layer[1]), out=out)

    def in_place(self, limits: PrefillLimits) -> "PrefillInPlace | None":
        """Plans that a CUDA graph can follow; None where not all of a plan is known to lie on the
        device."""
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
        """Kernels are loaded or compiled now, not when the first request waits for them."""
        q = self._layer.new_zeros(num_rows, self._num_heads, self._layer.shape[4])
        self.run(plan, q, self._layer, torch.empty_like(q))


class PrefillInPlace:
    """Every plan is written over the one before: graphs that hold a `run` of it do what the latest
    one says. Those of fewer rows can be made of it, too. Plans have `num_chunks` chunks, some of
    which may be empty."""

    def __init__(self, kernels: PagedPrefill, limits: PrefillLimits) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=kernels._layer.device)

        self._kernels = kernels
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
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
        # The first plan decides where on the device the parts of all plans stand: it has the most
        # rows.
        kernels._try(
            self.plan(kernels._rows_of_page_0(limits.max_rows, limits.num_chunks)), limits.max_rows
        )

    def plan(self, rows: PrefillRows) -> Any:
        """Always the same object, for `PagedPrefill.run`."""
        self._kernels._fill(self._wrapper, rows, self._copied)
        return self._wrapper


def plain_paged_prefill(
    q: torch.Tensor, layer: torch.Tensor, rows: PrefillRows, scale: float, out: torch.Tensor
) -> None:
    """The reference of `PagedPrefill`, in float32 from end to end; arguments as there."""
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
        hidden = torch.arange(kv_len, device=device) > positions[:, None]
        scores = (q[first:end].float().transpose(0, 1) @ keys.mT * scale).masked_fill(
            hidden, -torch.inf
        )
        out[first:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
