"""Attention of MLA's context chunks in the expanded form: keys and values of all heads are
projected from the latents, as in an ordinary multi-head layer.

A chunk's queries are multiplied with N + P elements per key instead of the R + P of the absorbed
form. What is expanded at a time is bounded; the parts are joined by their log-sums (as in Dao et
al., "Flash-Decoding for long-context inference", 2023)."""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

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


def expand(entries: torch.Tensor, up: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[L, H, N + P]` and values `[L, H, V]` of latents and rotated keys `[L, R + P]`. `up`
    `[H, N + V, R]`: the projections of each head; `nope`: N."""
    heads, _, rank = up.shape
    expanded = entries[:, :rank].mm(up.flatten(0, 1).t()).view(len(entries), heads, -1)
    shared = entries[:, None, rank:].expand(-1, heads, -1)
    return torch.cat((expanded[..., :nope], shared), -1), expanded[..., nope:]


def expanded_attention(
    q: torch.Tensor, layer: torch.Tensor, up: torch.Tensor, parts: tuple[ExpandedPart, ...],
    scale: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of context chunks whose latents are in the pool.

    Args:
        q: `[T, H, N + P]`, rotated.
        layer: `[pages, page_size, R + P]`.
        up: `[H, N + V, R]`.
        parts: in order; several parts of the same rows have different keys.
        scale: factor of the scores before the softmax.
        out: `[T, H, V]`, any stride between rows; the rows of the parts are written.
    """
    flat, nope = layer.view(-1, layer.shape[-1]), q.shape[-1] - (layer.shape[-1] - up.shape[-1])
    before: torch.Tensor | None = None
    for index, part in enumerate(parts):
        is_joined = index > 0 and parts[index - 1].rows == part.rows
        goes_on = index + 1 < len(parts) and parts[index + 1].rows == part.rows
        keys, values = expand(flat.index_select(0, part.slots), up, nope)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            result, log_sums = _flash_attention(q[part.rows], keys, values, part, scale)
        else:
            needs_sums = is_joined or goes_on
            result, log_sums = plain_part(q[part.rows], keys, values, part, scale, needs_sums)
        if is_joined:
            assert before is not None and log_sums is not None
            total = torch.logaddexp(before, log_sums)
            old, new = ((sums - total).exp().t()[..., None] for sums in (before, log_sums))
            result = out[part.rows] * old + result * new
            log_sums = total
        out[part.rows] = result
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
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: ExpandedPart,
    scale: float,
    needs_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs `[T, H, V]` and, if needed, log-sums `[H, T]`, request by request."""
    outputs, sums = [], []
    lens = part.query_lens, part.key_lens
    requests = zip(q.split(lens[0]), keys.split(lens[1]), values.split(lens[1]), strict=True)
    for own, own_keys, own_values in requests:
        heads, mask = [x.transpose(0, 1) for x in (own, own_keys, own_values)], None
        if part.is_causal and len(own) < len(own_keys):
            key = torch.arange(len(own_keys), device=q.device)
            hidden = key > key[len(own_keys) - len(own) :, None]
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        is_square = part.is_causal and mask is None
        output = F.scaled_dot_product_attention(
            *(x[None] for x in heads), mask, is_causal=is_square, scale=scale
        )
        outputs.append(output[0].transpose(0, 1))
        if needs_sums:
            scores = (heads[0] @ heads[1].mT).float() * scale
            if mask is not None:
                scores = scores + mask
            if is_square:
                hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1) if needs_sums else None
