"""What a draft network sees of long texts: the first tokens and the last ones, in whole pages.

Attention knows of it by its metadata only, so every backend serves it. The block tables lose the
pages in between, the lengths lose their tokens, and a prompt becomes chunks whose rows see the same
pages. Rotary positions, and where keys and values are written, stay as they are."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.executor.device.transfer import to_device


@dataclass(frozen=True)
class SinkWindow:
    """A row sees the pages of the first `sink` tokens and those of the last `size`, its own
    included. All rows of a round's window see the pages that its first row sees."""

    sink: int
    size: int

    def cut(self, metadata: AttentionMetadata, page_size: int) -> AttentionMetadata:
        """The same rows over shorter block tables, in which each row sees all keys up to its
        own."""
        num_sink = -(-self.sink // page_size)
        # A page is hidden from rows from this position on, and one more every page.
        start = (num_sink + 1) * page_size + self.size - 1
        if max((*metadata.context_kv_lens, metadata.max_kv_len)) <= start:
            return metadata
        num_chunks, tree = len(metadata.context_lens), metadata.tree
        num_rows = metadata.rows.window if tree is None else tree.length
        tables, ends = metadata.block_tables, metadata.kv_lens[num_chunks:]
        firsts = ends - (metadata.rows.counts if tree is None else num_rows)
        parts = list(_parts(metadata, start, page_size))
        if parts:
            sent = to_device(parts, tables.device).T
            tables = torch.cat((tables.index_select(0, sent[0]), tables[num_chunks:]))
            firsts, ends = torch.cat((sent[1], firsts)), torch.cat((sent[2], ends))
        hidden = (firsts - (start - page_size)).clamp_min_(0) // page_size
        num_pages = num_sink + 1 + -(-(self.size + num_rows) // page_size)
        pages = torch.arange(min(num_pages, tables.shape[1]), device=tables.device)
        pages = pages + (pages >= num_sink) * hidden.unsqueeze(1)
        return replace(
            metadata,
            context_lens=tuple(end - first for _, first, end in parts),
            context_kv_lens=tuple(
                end - max(0, first - (start - page_size)) // page_size * page_size
                for _, first, end in parts
            ),
            block_tables=tables.gather(1, pages.clamp_max_(tables.shape[1] - 1)),
            kv_lens=(ends - hidden * page_size).to(torch.int32),
            max_kv_len=min(metadata.max_kv_len, num_pages * page_size),
        )


def _parts(
    metadata: AttentionMetadata, start: int, page_size: int
) -> Iterator[tuple[int, int, int]]:
    """Chunks whose rows see the same pages: the number of the chunk that each is a part of, its
    first position and its end."""
    for chunk, (length, end) in enumerate(
        zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
    ):
        first = end - length
        while first < end:
            next_page = start + max(0, first - start + page_size) // page_size * page_size
            yield chunk, first, min(end, next_page)
            first = next_page
