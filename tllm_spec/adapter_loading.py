"""Loads and unloads LoRA adapters of a running engine: `LLM.load_adapter`, `LLM.unload_adapter`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from threading import RLock
from typing import Any, TypeVar

from tllm_spec.adapters.adapter_folder import Adapter
from tllm_spec.config.option_checks import check_adapter_name, shown
from tllm_spec.executor.resources.adapter_slots import AdapterSlots, info_of
from tllm_spec.lora_request import AdapterInfo, LoRARequest, UnknownAdapter
from tllm_spec.rank_calls import RankCalls

Result = TypeVar("Result")
Staged = tuple[Adapter, str, str | None]  # with its folder and root

NOT_SERVED = "this engine serves no LoRA adapters; lora_config = {} serves them"


class AdapterLoading:
    """Adapters of one engine, from any thread but the executor's. Several engines `stage` in all
    of them, then `keep` in all, or in none if any fails."""

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls
        self._changing = RLock()
        self._staged: dict[str, Staged] = {}  # by name; not committed

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """What is served now."""
        slots = self._calls.executor.parts.adapters
        return () if slots is None else tuple(slots.infos.values())

    def load(
        self, name: str, folder: str, *, replace: bool = False, from_request: bool = False
    ) -> AdapterInfo:
        """As `LLM.load_adapter`. from_request: it may make room for others when it is not in
        use."""
        check_adapter_name(name)
        own = self._slots().read(folder), folder, None
        return self._commit(name, own, replace=replace, from_request=from_request)

    def stage(self, name: str, folder: str, root: str | None = None) -> dict[str, Any]:
        """Reads and checks an adapter while rounds run. root: the folder that its files must lie
        in, after links are followed; None: anywhere. Returns its `AdapterInfo`. Raises ValueError
        for one that cannot be served."""
        check_adapter_name(name)
        adapter = self._slots().read(folder, root)
        self._staged[name] = adapter, folder, root
        return asdict(info_of(name, folder, adapter))

    def _commit(self, name: str, staged: Staged, **options: bool) -> AdapterInfo:
        """Serves what is staged. options: those of `AdapterSlots.add`. Raises ValueError as it
        does."""
        slots, (adapter, folder, root) = self._slots(), staged
        add = partial(slots.add, name, folder, adapter, **options)
        change: Callable[[], AdapterInfo] = partial(self._calls.here, add)
        if self._calls.are_several:
            own = {"name": name, "folder": folder, "root": root}
            change = partial(self._calls, "load_adapter", **own, **options)
        return self._change(change)

    def keep(self, served: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
        """Loads what the engine lacks of these names, folders and content hashes, unloads all
        others, and drops what is staged and none of them. Raises ValueError for a folder that has
        something else than its hash says."""
        has = {info.name: info.content_hash for info in self.infos}
        for name in has.keys() - {name for name, _, _ in served}:
            self.unload(name)
        try:
            for name, folder, content_hash in served:
                if has.get(name) != content_hash:
                    staged = self._staged.get(name)
                    if staged is None or staged[0].content_hash != content_hash:
                        AdapterInfo(**self.stage(name, folder)).check_unchanged(content_hash)
                    self._commit(name, self._staged[name], replace=True)
        finally:
            self._staged.clear()
        return {}

    def idle(self) -> dict[str, Any]:
        """As `AdapterSlots.idle`, under `names`."""
        return {"names": self._change(partial(self._calls.here, self._slots().idle))}

    def unload(self, name: str) -> None:
        """As `LLM.unload_adapter`."""
        self._slots()
        self._change(partial(self._calls, "unload_adapter", name=name))

    def _change(self, change: Callable[[], Result]) -> Result:
        """Once requests that were submitted before have begun: they keep what was served then."""
        with self._changing:
            self._calls.here(lambda: None)
            return change()

    @contextmanager
    def chosen(self, request: LoRARequest) -> Iterator[str]:
        """The name of a request's adapter, which is loaded from the request's path at its first
        use. Until the block ends, which submits the request, it makes no room for others. Raises
        ValueError for what cannot be served, UnknownAdapter for a name that is not loaded."""
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request = {shown(request)}: a LoRARequest or None is needed")
        name, folder = request.lora_name, os.fspath(request.lora_path)
        slots = self._slots()
        if folder and name not in slots.infos:
            self.load(name, folder, from_request=True)
        with nullcontext() if self._calls.worker.is_current else self._changing:
            if folder and name not in slots.infos:  # another one has taken its place
                self.load(name, folder, from_request=True)
            if (info := slots.infos.get(name)) is None:
                raise UnknownAdapter(name)
            if folder and os.path.realpath(folder) != os.path.realpath(info.folder):
                raise ValueError(
                    f"lora_path = {folder!r}: {name!r} is loaded from {info.folder}; leave the "
                    "path out, or replace the adapter by load_adapter"
                )
            yield name

    def _slots(self) -> AdapterSlots:
        if (slots := self._calls.executor.parts.adapters) is None:
            raise ValueError(NOT_SERVED)
        return slots
