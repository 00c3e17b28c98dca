"""LoRA adapters of an engine: those that are loaded, in host memory, and which of them are in the
slots of the device.

A request keeps the version of its adapter that it began with. A version stays until it is neither
served under its name nor used by a request. A slot with running requests keeps its adapter; of the
others the least recently used one is given to an adapter that needs one."""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tllm_spec.adapters.adapted import AdapterTables
from tllm_spec.adapters.adapter_folder import DRAFT, Adapter, read_adapter
from tllm_spec.config.engine_config import LoraConfig
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.weight_swap import read_together
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.lora_request import AdapterInfo, UnknownAdapter, name_of_version, salt_of

logger = logging.getLogger(__name__)

NO_SLOT = -1
SlotRows = tuple[torch.Tensor, RoundRows]


@dataclass
class HostedAdapter:
    """One version. from_request: whether a request's path has loaded it. running: the ids of the
    requests that have its slot."""

    adapter: Adapter
    from_request: bool
    num_requests: int = 0  # that wait or run
    running: set[int] = field(default_factory=set)


def info_of(name: str, folder: str, adapter: Adapter) -> AdapterInfo:
    draft_rank = None if adapter.draft is None else adapter.draft.rank
    return AdapterInfo(name, adapter.content_hash, adapter.rank, folder, draft_rank)


class AdapterSlots(ResourceManager):
    """num_request_slots: of requests, the dummy one included. draft_tables: of the draft head's
    adapters, in the same slots; None: it takes none. All ranks of the communicator call everything
    in the same order."""

    def __init__(
        self,
        tables: AdapterTables,
        config: LoraConfig,
        num_request_slots: int,
        device: torch.device,
        communicator: Communicator = SINGLE,
        draft_tables: AdapterTables | None = None,
    ) -> None:
        self.tables, self.draft_tables = tables, draft_tables
        self.infos: Mapping[str, AdapterInfo] = MappingProxyType({})  # by name; never changed
        self._config, self._communicator = config, communicator
        # By version, both with the least recently used one first: all, and the slots of some.
        self._hosted = OrderedDict[str, HostedAdapter]()
        self._slots = OrderedDict[str, int]()
        self._free = list(range(config.max_loras - 1, -1, -1))
        # What the device has: the version in each slot, and the slot of each request's slot.
        self._loaded: list[str | None] = [None] * config.max_loras
        self._of_request = [NO_SLOT] * num_request_slots
        self._device_of_request = torch.full(
            (num_request_slots,), NO_SLOT, dtype=torch.int32, device=device
        )
        # Versions that requests wait for, longest first; a slot that one has got stays its own
        # until a request of it joins.
        self._awaited: dict[str, None] = {}
        self.closed: set[str] = set()

    # What is loaded.

    def read(self, folder: str, root: str | None = None) -> Adapter:
        """In any thread. root: as of `read_adapter`. Raises ValueError for an adapter that cannot
        be served."""
        within = None if root is None else Path(root)
        adapter = read_adapter(Path(folder), self._config.max_lora_rank, within)
        self.tables.check(adapter)
        own = Path(folder) / DRAFT
        if not own.exists():
            return adapter
        if self.draft_tables is None:
            logger.info("%s is not used: lora_config.max_draft_lora_rank is null", own)
            return adapter
        most = self._config.max_draft_lora_rank
        assert most is not None
        draft = read_adapter(own, most, within, "max_draft_lora_rank")
        self.draft_tables.check(draft)
        both = f"{adapter.content_hash}+{draft.content_hash}"
        return dataclasses.replace(adapter, content_hash=both, draft=draft)

    def load_together(
        self, name: str, folder: str, root: str | None = None, **options: bool
    ) -> AdapterInfo:
        """Reads and adds on all ranks, between the same two rounds, or on none. Raises ValueError
        on every rank if one of them does, or their files differ."""
        adapter = read_together(self._communicator, lambda: self.read(folder, root))
        if len({*self._communicator.gather(adapter.content_hash)}) > 1:
            raise ValueError(f"{folder} does not have the same adapter on all hosts of the engine")
        return self.add(name, folder, adapter, **options)

    def add(
        self,
        name: str,
        folder: str,
        adapter: Adapter,
        *,
        replace: bool = False,
        from_request: bool = False,
    ) -> AdapterInfo:
        """Serves the adapter under the name, from the next request on. Raises ValueError for a name
        that is in use, and where there is no room."""
        info = info_of(name, folder, adapter)
        before = self.infos.get(name)
        if before is not None and not replace and before.version != info.version:
            raise ValueError(
                f"lora_name = {name!r} is the adapter of {before.folder}; unload it, or load with "
                "replace = True"
            )
        if info.version not in self._hosted:
            self._make_room(name)
            self._hosted[info.version] = HostedAdapter(adapter, from_request)
        self.infos = MappingProxyType({**self.infos, name: info})
        if before is not None and before.version != info.version:
            self._drop_if_unused(before.version)
        return info

    def remove(self, name: str) -> None:
        """Requests with the adapter go on; no more begin. Raises UnknownAdapter."""
        if (info := self.infos.get(name)) is None:
            raise UnknownAdapter(name)
        self.infos = MappingProxyType({key: own for key, own in self.infos.items() if key != name})
        self._drop_if_unused(info.version)

    def _make_room(self, name: str) -> None:
        """For one more name, if `name` is not served."""
        most = self._config.max_cpu_loras
        if most is None or len({*self.infos, name}) <= most:
            return
        for idle in self.idle():
            if self._hosted[self.infos[idle].version].from_request:
                self.remove(idle)
                return
        raise ValueError(f"max_cpu_loras = {most} adapters are loaded; unload one, or raise it")

    def idle(self) -> list[str]:
        """Adapters without a request that waits or runs, least recently used first."""
        return [
            name_of_version(version)
            for version, hosted in self._hosted.items()
            if not hosted.num_requests and self._is_served(version)
        ]

    def _is_served(self, version: str) -> bool:
        info = self.infos.get(name_of_version(version))
        return info is not None and info.version == version

    def _drop_if_unused(self, version: str) -> None:
        hosted = self._hosted[version]
        if hosted.num_requests or self._is_served(version):
            return
        if (slot := self._slots.pop(version, None)) is not None:
            self._free.append(slot)
        del self._hosted[version]

    # Requests.

    def arrive(self, request: LlmRequest) -> None:
        """Called once for each request: `adapter` is the version that is served under its name now,
        which it keeps. Raises UnknownAdapter."""
        if request.adapter is None:
            return
        if (info := self.infos.get(request.adapter)) is None:
            raise UnknownAdapter(request.adapter)
        request.adapter, request.salt = info.version, salt_of(request.cache_salt, info.version)
        self._hosted[info.version].num_requests += 1

    def find_closed(self) -> None:
        """Begins a round's admissions. `closed` are versions whose requests cannot join: those that
        find no slot, and for each of them one that has a slot and must leave it, so that none waits
        for ever. The one with the fewest running requests leaves. That number only falls, so its
        slot becomes free."""
        self.closed.clear()
        for version in self._awaited:
            if not self._has_slot(version):
                self._close(version)

    def may_join(self, request: LlmRequest) -> bool:
        """Whether the request has a slot with its adapter, or needs none. If not, `closed` has
        it."""
        version = request.adapter
        if version is None or self._has_slot(version):
            return True
        self._awaited[version] = None
        self._close(version)
        return False

    def join(self, request: LlmRequest) -> None:
        """The request begins to run."""
        if request.adapter is None:
            return
        self._hosted[request.adapter].running.add(request.request_id)
        self._hosted.move_to_end(request.adapter)
        self._slots.move_to_end(request.adapter)
        self._awaited.pop(request.adapter, None)

    def _has_slot(self, version: str) -> bool:
        """Takes a slot for the version if it has none and one is left."""
        if version in self._slots:
            return True
        if not self._free:
            # The least recently used one without requests that run.
            for other in self._slots:
                if not self._hosted[other].running and other not in self._awaited:
                    self._free.append(self._slots.pop(other))
                    break
        if self._free:
            self._slots[version] = self._free.pop()
        return version in self._slots

    def _close(self, version: str) -> None:
        self.closed.add(version)
        leaving = self.closed | self._awaited.keys()
        staying = [other for other in self._slots if other not in leaving]
        if staying:
            self.closed.add(min(staying, key=lambda other: len(self._hosted[other].running)))

    def free_resources(self, request: LlmRequest) -> None:
        if (version := request.adapter) is None:
            return
        hosted = self._hosted[version]
        hosted.running.discard(request.request_id)
        if request.is_finished:
            hosted.num_requests -= 1
            if not hosted.num_requests:
                self._awaited.pop(version, None)
            self._drop_if_unused(version)

    # The device.

    @property
    def _all_tables(self) -> list[AdapterTables]:
        return [each for each in (self.tables, self.draft_tables) if each is not None]

    def sum_bytes(self, num_rows: int) -> int:
        """What the adapters of one layer allocate at most in a forward of so many rows."""
        return max(tables.sum_bytes(num_rows) for tables in self._all_tables)

    def use(self, are_used: bool) -> None:
        """Says whether the next forwards have rows with adapters, of the target's and of the draft
        head's."""
        for tables in self._all_tables:
            tables.rows.is_active = are_used

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Loads what joining requests need. The device works in order, so rounds in flight still
        read what was in the slots before."""
        for request in batch.context_requests:
            slot = NO_SLOT
            if (version := request.adapter) is not None:
                slot = self._slots[version]
                if self._loaded[slot] != version:
                    self._load(slot, self._hosted[version].adapter)
                    self._loaded[slot] = version
            if self._of_request[request.slot] != slot:
                self._of_request[request.slot] = slot
                self._device_of_request[request.slot].fill_(slot)

    def _load(self, slot: int, adapter: Adapter) -> None:
        self.tables.load(slot, adapter)
        if self.draft_tables is not None:
            if adapter.draft is None:
                self.draft_tables.clear(slot)
            else:
                self.draft_tables.load(slot, adapter.draft)

    def write_rows(self, chunks: Sequence[tuple[int, int]], windows: SlotRows | None) -> None:
        """Says which adapter each row of the target's next forward has. chunks: slots of requests,
        each with its number of rows. windows: the slots `[B]` of the requests that follow, and
        their rows."""
        self._write(self.tables.rows.slots, chunks, windows)

    def begin_draft(
        self,
        chunks: Sequence[tuple[int, int]],
        windows: SlotRows | None,
        num_rows: int,
        wanted: torch.Tensor | None,
    ) -> None:
        """The same before a forward of the draft head. The others are as in
        `AdapterRows.begin`."""
        if self.draft_tables is not None and (rows := self.draft_tables.rows).is_active:
            self._write(rows.slots, chunks, windows)
            rows.begin(num_rows, wanted)

    def _write(
        self, slots: torch.Tensor, chunks: Sequence[tuple[int, int]], windows: SlotRows | None
    ) -> None:
        first = 0
        if chunks:
            numbers = array("i")
            for slot, length in chunks:
                numbers += array("i", [self._of_request[slot]]) * length
            first = len(numbers)
            to_device(torch.frombuffer(numbers, dtype=torch.int32), slots.device, slots[:first])
        if windows is not None:
            slot_ids, rows = windows
            own = rows.expand(self._device_of_request.index_select(0, slot_ids))
            slots[first : first + len(own)].copy_(own)

    def state(self) -> dict[str, Any]:
        """Plain values: how many adapters a round may have, which ones are loaded, and the names
        with requests that run, and that wait."""
        hosted = self._hosted.items()
        running = {name_of_version(version) for version, each in hosted if each.running}
        waiting = {
            name_of_version(version)
            for version, each in hosted
            if each.num_requests > len(each.running)
        }
        loaded = {name: asdict(info) for name, info in self.infos.items()}
        own = {"max": len(self._loaded), "loaded": loaded, "on_device": list(self._slots)}
        return own | {"running": sorted(running), "waiting": sorted(waiting)}

    def check_integrity(self) -> None:
        """Raises AssertionError for a slot that is lost or used twice, and for a version that
        nothing needs."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(len(self._loaded))), (
            f"{len(self._free)} free + {len(self._slots)} used adapter slots are not the "
            f"{len(self._loaded)}, each once"
        )
        assert self._slots.keys() <= self._hosted.keys(), "a dropped version has a slot"
        for version, each in self._hosted.items():
            assert each.num_requests or self._is_served(version), f"nothing needs {version}"
            assert len(each.running) <= each.num_requests, f"{version} runs more than it has"
            assert not each.running or version in self._slots, f"{version} runs without a slot"
        assert self._awaited.keys() <= self._hosted.keys(), "a dropped version is awaited"
