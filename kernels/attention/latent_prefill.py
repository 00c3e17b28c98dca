"""Attention of MLA's context chunks in the expanded form: keys and values of all heads are
projected from the latents, as in an ordinary multi-head layer.

A chunk's queries are multiplied with N + P elements per key instead of the R + P of the absorbed
form. What is expanded at a time is bounded; the parts are joined by their log-sums (as in Dao et
al., "Flash-Decoding for long-context inference", 2023)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F

from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales, times

# Keys and values are expanded for at most so many tokens at a time.
MAX_EXPANDED_TOKENS = 8192


@dataclass(frozen=True)
class ExpandedPart:
    """Chunks one after another, and the keys that they attend to in this part."""

    rows: slice
    """The query rows of the forward."""
    slots: torch.Tensor
    """int64, on the device: the pool's slots of the keys, request by request."""
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    is_causal: bool
    """Whether the last query sees the last key, the query before it one key less, and so on;
    otherwise all queries see all keys."""
    starts: torch.Tensor | None
    """[2, C + 1] int32, on the device: first rows of queries and keys; None: on a CPU."""

    @cached_property
    def owners(self) -> torch.Tensor:
        """`[L]` int64, on the device: of each key, the first row of the request's queries."""
        firsts = torch.tensor([self.rows.start, *self.query_lens[:-1]]).cumsum(0)
        return firsts.repeat_interleave(torch.tensor(self.key_lens)).to(self.slots.device)

    @classmethod
    def of(
        cls,
        rows: slice,
        slots: torch.Tensor,
        query_lens: tuple[int, ...],
        key_lens: tuple[int, ...],
        *,
        is_causal: bool,
    ) -> "ExpandedPart":
        starts = None
        if slots.is_cuda:
            numbers = [[0, *accumulate(query_lens)], [0, *accumulate(key_lens)]]
            host = torch.tensor(numbers, dtype=torch.int32, pin_memory=True)
            starts = host.to(slots.device, non_blocking=True)
        return cls(rows, slots, query_lens, key_lens, is_causal, starts)


Adds = Callable[[torch.Tensor, ExpandedPart, torch.Tensor], None]
"""Adds to keys and values of all heads, `[L, H * (N + V)]`, for the latents `[L, R]` of a part."""


def expand(
    entries: torch.Tensor, up: torch.Tensor, nope: int, part: ExpandedPart, adds: Adds | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[L, H, N + P]` and values `[L, H, V]` of latents and rotated keys `[L, R + P]`. `up`
    `[H, N + V, R]`: the projections of each head; `nope`: N."""
    heads, _, rank = up.shape
    expanded = entries[:, :rank].mm(up.flatten(0, 1).t())
    if adds is not None:
        adds(entries[:, :rank], part, expanded)
    expanded = expanded.view(len(entries), heads, -1)
    shared = entries[:, None, rank:].expand(-1, heads, -1)
    return torch.cat((expanded[..., :nope], shared), -1), expanded[..., nope:]


def expanded_attention(
    q: torch.Tensor, layer: torch.Tensor, up: torch.Tensor, parts: tuple[ExpandedPart, ...],
    scale: float, out: torch.Tensor, scales: KVScales = UNSCALED, adds: Adds | None = None,
) -> None:  # fmt: skip
    """Attention of context chunks whose latents are in the pool.

    Args:
        q: `[T, H, N + P]`, rotated.
        layer: `[pages, page_size, R + P]`, of q's dtype or CODES.
        up: `[H, N + V, R]`.
        parts: in order; several parts of the same rows have different keys.
        scale: factor of the scores before the softmax.
        out: `[T, H, V]`, any stride between rows; the rows of the parts are written.
        scales: of codes.
        adds: to what `up` projects; None: nothing.
    """
    scale *= scales.key
    flat, nope = layer.view(-1, layer.shape[-1]), q.shape[-1] - (layer.shape[-1] - up.shape[-1])
    before: torch.Tensor | None = None
    for index, part in enumerate(parts):
        is_joined = index > 0 and parts[index - 1].rows == part.rows
        goes_on = index + 1 < len(parts) and parts[index + 1].rows == part.rows
        entries = flat.index_select(0, part.slots).to(q.dtype)
        keys, values = expand(entries, up, nope, part, adds)
        own, log_sums = q[part.rows], None
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            result, log_sums = _flash_attention(own, keys, values, part, scale)
        else:
            result = plain_part(own, keys, values, part, scale)
            if is_joined or goes_on:
                log_sums = plain_log_sums(own, keys, part, scale)
        if is_joined:
            assert before is not None and log_sums is not None
            total = torch.logaddexp(before, log_sums)
            old, new = ((sums - total).exp().t()[..., None] for sums in (before, log_sums))
            result = out[part.rows] * old + result * new
            log_sums = total
        out[part.rows] = result if goes_on else times(result, scales.key)
        before = log_sums


def _flash_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: ExpandedPart, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's FlashAttention over all chunks in one launch. It has one head_dim, so the values are
    padded with zeros."""
    assert part.starts is not None
    padded = F.pad(values, (0, keys.shape[-1] - values.shape[-1]))
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, padded, part.starts[0], part.starts[1], max(part.query_lens),
        max(part.key_lens), 0.0, part.is_causal, False, scale=scale,
    )  # fmt: skip
    return output[..., : values.shape[-1]], log_sums


def plain_part(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: ExpandedPart, scale: float
) -> torch.Tensor:
    """Outputs `[T, H, V]`, request by request."""
    outputs = []
    for queries, own in _requests(part):
        heads = [x.transpose(0, 1)[None] for x in (q[queries], keys[own], values[own])]
        is_square = part.is_causal and heads[0].shape[2] == heads[1].shape[2]
        mask = None if is_square else _mask(q[queries], keys[own], part)
        output = F.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], mask, is_causal=is_square, scale=scale
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def plain_log_sums(
    q: torch.Tensor, keys: torch.Tensor, part: ExpandedPart, scale: float
) -> torch.Tensor:
    """Logarithms of the softmax's sums, `[H, T]` float32."""
    sums = []
    for queries, own in _requests(part):
        scores = (q[queries].transpose(0, 1) @ keys[own].permute(1, 2, 0)).float() * scale
        mask = _mask(q[queries], keys[own], part)
        sums.append((scores if mask is None else scores + mask).logsumexp(-1))
    return torch.cat(sums, 1)


def _requests(part: ExpandedPart) -> Iterator[tuple[slice, slice]]:
    """The rows of each request's queries and keys in the part."""
    query, key = 0, 0
    for query_len, key_len in zip(part.query_lens, part.key_lens, strict=True):
        yield slice(query, query + query_len), slice(key, key + key_len)
        query, key = query + query_len, key + key_len


def _mask(q: torch.Tensor, keys: torch.Tensor, part: ExpandedPart) -> torch.Tensor | None:
    """[n, L], added to the scores; None: all queries see all keys."""
    if not part.is_causal:
        return None
    key = torch.arange(len(keys), device=q.device)
    hidden = key > key[len(keys) - len(q) :, None]
    return torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
