"""KV events as their readers decode them, and what a reader knows from them.

The classes have the fields and types that vLLM 0.26.0 publishes, which llm-d-kv-cache 0.9.0 and
Dynamo's KV router read."""

from dataclasses import dataclass
from typing import Any

import msgspec


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list["Stored | Removed | Cleared"]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


@dataclass
class Block:
    """salt: what stands for it. parent: None for a prompt's first block."""

    tokens: tuple[int, ...]
    parent: int | None
    salt: str | None


class Reader:
    """Rebuilds which prefixes an engine has cached."""

    def __init__(self) -> None:
        self.known: dict[int, Block] = {}  # all that were ever stored
        self.stored: set[int] = set()
        self.block_size = 0

    def read(self, payload: bytes) -> Batch:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                assert event.medium == "GPU"
                assert self.stored >= set(event.block_hashes), "a removed block was not stored"
                self.stored -= set(event.block_hashes)
            else:
                self.stored.clear()
        return batch

    def prefixes(self) -> set[tuple[str | None, tuple[int, ...]]]:
        """Each stored block's salt, and its tokens after all those before it."""
        return {(self.known[own].salt, self._path(own)) for own in self.stored}

    def _path(self, own: int) -> tuple[int, ...]:
        block = self.known[own]
        return (() if block.parent is None else self._path(block.parent)) + block.tokens

    def _store(self, event: Stored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        number = len(event.block_hashes)
        assert len(event.token_ids) == number * size and event.medium == "GPU"
        keys = event.extra_keys or [None] * number
        assert len(keys) == number
        for index, own in enumerate(event.block_hashes):
            assert own not in self.stored, "a stored block was stored already"
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            key = keys[index]
            block = Block(tokens, parent, key[0] if key else None)
            assert self.known.setdefault(own, block) == block, "two blocks have one hash"
            self.stored.add(own)
            parent = own
