"""Windows over MLA's latents with FlashInfer's `BatchMLAPagedAttentionWrapper`, planned on the host
from the windows' lengths: the host waits for the device in each plan. Chains only, since the
wrapper takes no mask. `plain_planned_latent` is the plain-torch reference."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tllm_spec.kernels.slots.round_rows import RoundRows

# What FlashInfer has kernels for.
LATENT_DIM, ROPE_DIM = 512, 64
DTYPES = (torch.bfloat16, torch.float16)
# Device memory of a wrapper: partial results of split keys, as FlashInfer recommends, and the plan.
WORKSPACE_BYTES = 128 << 20
PLAN_BYTES = 8 << 20


@dataclass(frozen=True)
class LatentRows:
    """B windows as the wrapper is planned with them. All tensors but the pages are on the host."""

    query_starts: torch.Tensor
    """[B + 1] int32: each window's first row, then the total number of rows."""
    page_starts: torch.Tensor
    """[B + 1] int32: each request's first entry of `pages`, then the total number of entries."""
    kv_lens: torch.Tensor
    """[B] int32: tokens in the cache, including the window's."""
    pages: torch.Tensor
    """int32, on the device: the pages of all requests, one after another."""
    is_causal: bool
    """Whether the last query sees the last key, the query before it one key less, and so on. A
    window of one token, which sees all keys, is planned without a mask."""

    @classmethod
    def of_windows(
        cls, kv_lens: torch.Tensor, rows: RoundRows, block_tables: torch.Tensor, page_size: int
    ) -> "LatentRows":
        """kv_lens `[B]` and block_tables `[B, P]`, both int32 on the device. Waits for it."""
        lens, device = kv_lens.cpu(), kv_lens.device
        counts = [-(-length // page_size) for length in lens.tolist()]
        starts = [0, *accumulate(counts)]
        page_starts = torch.tensor(starts, dtype=torch.int32)
        index = torch.arange(starts[-1], device=device)
        owner = torch.repeat_interleave(
            torch.arange(len(counts), device=device),
            -(-kv_lens // page_size),
            output_size=starts[-1],
        )
        pages = block_tables[owner, index - page_starts.to(device, torch.int64)[owner]]
        if rows.offsets is None:
            ends = torch.arange(0, 1 + rows.num_rows, rows.window, dtype=torch.int32)
        else:
            ends = rows.offsets.cpu()
        return cls(ends, page_starts, lens, pages, is_causal=rows.window > 1)


class PlannedLatent:
    """FlashInfer's kernels for one geometry. Raises RuntimeError or OSError if they are neither
    prebuilt nor can be compiled, and ImportError without FlashInfer. `wrapper` replaces
    FlashInfer's in tests."""

    def __init__(
        self,
        layer: torch.Tensor,
        num_heads: int,
        latent_dim: int,
        scale: float,
        wrapper: Any = None,
    ) -> None:
        """layer: a layer of the pool, `[pages, page_size, R + P]`; latent_dim: R."""
        if wrapper is None:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper

            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=layer.device)
            wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
        self._wrapper, self._num_heads, self._scale = wrapper, num_heads, scale
        self._page_size, self._dtype = layer.shape[1], layer.dtype
        self._dims = latent_dim, layer.shape[2] - latent_dim
        # Compiles the kernels, or raises why they cannot be.
        one = torch.ones(1, dtype=torch.int32, device=layer.device)
        rows = RoundRows.rectangle(1, 1)
        self.plan(LatentRows.of_windows(one, rows, one[:, None] - 1, self._page_size))

    def plan(self, rows: LatentRows) -> None:
        """Plans the runs of a forward."""
        self._wrapper.plan(
            rows.query_starts,
            rows.page_starts,
            rows.pages,
            rows.kv_lens,
            self._num_heads,
            *self._dims,
            self._page_size,
            rows.is_causal,
            self._scale,
            self._dtype,
            self._dtype,
        )

    def run(self, q_latent: torch.Tensor, q: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        """Weighted latents `[T, H, R]`, for q_latent `[T, H, R]` and the rotated parts q
        `[T, H, P]`, both of any strides but along the last dimension."""
        latents, shared = layer.split_with_sizes(self._dims, 2)
        output: torch.Tensor = self._wrapper.run(q_latent, q, latents, shared)
        return output


def plain_planned_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    latents: torch.Tensor,
    shared: torch.Tensor,
    rows: LatentRows,
    scale: float,
) -> torch.Tensor:
    """Reference of the wrapper's run, in float32. latents `[pages, page_size, R]`, shared
    `[pages, page_size, P]`."""
    outputs, starts = [], rows.query_starts.tolist()
    for index, length in enumerate(rows.kv_lens.tolist()):
        own = slice(starts[index], starts[index + 1])
        pages = rows.pages[rows.page_starts[index] : rows.page_starts[index + 1]].long()
        keys, ropes = (x[pages].flatten(0, 1)[:length].float() for x in (latents, shared))
        scores = torch.einsum("qhr,kr->hqk", q_latent[own].float(), keys)
        scores = (scores + torch.einsum("qhp,kp->hqk", q[own].float(), ropes)) * scale
        if rows.is_causal:
            num_queries = own.stop - own.start
            hidden = torch.ones(num_queries, length, device=q.device).triu(1 + length - num_queries)
            scores = scores.masked_fill(hidden.bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,kr->qhr", scores.softmax(-1), keys))
    return torch.cat(outputs).to(q.dtype)
