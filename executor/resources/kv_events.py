"""Sends the KV events of the target's cache, a batch for each change of rounds."""

from __future__ import annotations

from collections.abc import Callable
from time import time  # noqa: TID251  # batches carry a date

import msgpack

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_event_log import Event, KVEventLog

Sink = Callable[[bytes], None]


class KVEvents(ResourceManager):
    """Packs what the log has and gives it to every sink: `[seconds since 1970, events, rank]` in
    msgpack. In the executor's thread."""

    def __init__(self, log: KVEventLog, data_parallel_rank: int = 0) -> None:
        self._log = log
        self._rank = data_parallel_rank
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        """Adds a sink, which first gets the events that make an empty cache the current one."""
        self.send()
        sink(self._pack(self._log.present()))
        self._sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        self._sinks.remove(sink)

    def send(self) -> None:
        if self._log.has_events:
            payload = self._pack(self._log.take())
            for sink in self._sinks:
                sink(payload)

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        self.send()

    def update_resources(self, batch: ScheduledBatch) -> None:
        self.send()

    def free_resources(self, request: LlmRequest) -> None:
        self.send()

    def _pack(self, events: list[Event]) -> bytes:
        packed: bytes = msgpack.packb([time(), events, self._rank])
        return packed
