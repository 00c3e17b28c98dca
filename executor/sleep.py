"""An engine's sleep: its weights and its KV cache give their memory back until it wakes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tllm_spec.executor.device.sleeping_memory import SleepingMemory
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.weight_swap import tensors_of

TARGET, DRAFT, ADAPTERS, KV = "target", "draft", "adapters", "kv_cache"
TAGS = {"weights": (TARGET, DRAFT, ADAPTERS), "kv_cache": (KV,)}
LEVELS = 1, 2
STAYS = "CUDA graphs' pools, workspaces, states of requests and memory that processes share"
LACKS_WEIGHTS = "sleep at level 2 has dropped the weights; update_weights brings new ones"
NOT_ENABLED = "sleep: this engine was started without enable_sleep_mode: true, which CUDA needs"


class Sleep:
    """memory: of weights and KV pools; None: the engine cannot sleep. placed: what is moved there
    when it first sleeps, by the memory's tag, the parts of others first; on CUDA it is there
    already. caches: whose pages the pools have."""

    def __init__(
        self,
        memory: SleepingMemory | None,
        placed: Mapping[str, object],
        caches: Sequence[PagedCache],
    ) -> None:
        self._memory, self._placed, self._caches = memory, placed, caches
        self._asleep: set[str] = set()  # keys of TAGS
        self._num_sleeps = 0
        self.lacks_weights = False  # those of the target are dropped
        self.holds_rounds = False  # whether no round can run
        self.refusal: str | None = None  # of requests; while it sleeps they wait

    @property
    def asleep(self) -> list[str]:
        """Keys of `TAGS`."""
        return sorted(self._asleep)

    def check_writable(self) -> None:
        """Raises ValueError if weights cannot be written."""
        if "weights" in self._asleep:
            raise ValueError("the weights are asleep; wake_up(tags=['weights']) comes before this")

    def note_target(self) -> None:
        """The target's weights are replaced."""
        self.lacks_weights = False
        self._settle()

    def _settle(self) -> None:
        self.holds_rounds = bool(self._asleep) or self.lacks_weights
        self.refusal = LACKS_WEIGHTS if self.lacks_weights and not self._asleep else None

    def begin(self, level: int, *, can_update: bool) -> dict[str, Any]:
        """Called between two rounds, with no request that runs. can_update: whether the target's
        weights can come from a checkpoint. level: 1 keeps the weights in host memory, 2 drops the
        target's and keeps those of the draft network and of adapters. Returns the bytes that are
        free now, those in host memory and what stays."""
        if level not in LEVELS:
            raise ValueError(f"level = {level}; it must be 1 or 2")
        if (memory := self._memory) is None:
            raise ValueError(NOT_ENABLED)
        if level == 2 and not can_update:
            raise ValueError("level = 2: this engine's weights cannot be updated; accepted: 1")
        for tag, owner in self._placed.items():
            memory.place(tag, tensors_of(owner, set()))
        self._placed = {}
        if "weights" not in self._asleep:
            for tag in (DRAFT, ADAPTERS):
                memory.release(tag, keep=True)
            memory.release(TARGET, keep=level == 1)
        elif level == 2:
            memory.forget(TARGET)
        self.lacks_weights |= level == 2
        if KV not in self._asleep:
            memory.release(KV, keep=False)
        self._asleep |= set(TAGS)
        self._num_sleeps += 1
        self._settle()
        for cache in self._caches:
            cache.start_version(f"sleep {self._num_sleeps}")
        return self.state() | {"stays": STAYS}

    def wake_up(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """tags: keys of `TAGS`; None: all. Called between two rounds. Raises ValueError for others,
        RuntimeError if the device has too little memory: what did not wake sleeps on."""
        if unknown := sorted(set(tags or ()) - set(TAGS)):
            raise ValueError(f"tags = {unknown}; accepted are {', '.join(TAGS)}")
        for name in self.asleep[::-1] if tags is None else tags:  # weights first
            if name in self._asleep:
                assert self._memory is not None
                for tag in TAGS[name]:
                    self._memory.restore(tag)
                self._asleep.remove(name)
                self._settle()
        return self.state()

    def state(self) -> dict[str, Any]:
        """What sleeps, and bytes; on CUDA `device_bytes` is all that torch holds."""
        own: dict[str, Any] = {"asleep": self.asleep, "lacks_weights": self.lacks_weights}
        if (memory := self._memory) is not None:
            own["freed_bytes"] = sum(memory.num_bytes(*TAGS[name]) for name in self.asleep)
            own["host_bytes"] = memory.kept_bytes
        if torch.cuda.is_initialized():
            own["device_bytes"] = torch.cuda.memory_reserved()
        return own
