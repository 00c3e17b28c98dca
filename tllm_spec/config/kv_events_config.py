"""The options of KV events, named as in vLLM."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.neighbours import KV_EVENTS_IGNORED, Ignored

NO_KV_EVENTS = "KV cache events are published by kv_cache_config.kv_events_config"
OWN_ADDRESS = re.compile(r"tcp://(\*|localhost|127\.[\d.]+|0\.0\.0\.0|\[::1?\]):\d+|ipc://.+")


class KVEventsConfig(ConfigModel):
    """Reports what enters and leaves the prefix cache over ZeroMQ, for routers. The events contain
    token ids of prompts."""

    enable_kv_cache_events: bool = True
    """false: as if the section were not there."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Where batches are published. `*`, a loopback address or `ipc://` is bound; any other address
    is connected to, as in vLLM. Engine i of `--dp_size` has the port plus i."""
    replay_endpoint: str | None = None
    """Where a subscriber asks for batches that it has missed; bound. null: nowhere."""
    buffer_steps: PositiveInt = 10_000
    """Batches that are kept for that."""
    topic: str = ""
    """First frame of each message, which subscribers may filter by."""
    data_parallel_rank: NonNegativeInt = 0
    """The engine's number in its batches."""
    publisher: Literal["zmq", "null"] = "zmq"
    """`null` publishes nothing: events go to the router of `--dp_size` only."""

    ignored: ClassVar[Ignored] = KV_EVENTS_IGNORED

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"tcp://.+:\d+|ipc://.+", endpoint):
            raise ValueError("tcp://ADDRESS:PORT or ipc://PATH is needed")
        return endpoint

    @property
    def binds(self) -> bool:
        return OWN_ADDRESS.fullmatch(self.endpoint) is not None

    def of_engine(self, number: int) -> KVEventsConfig:
        """The options of engine `number` of several."""
        replay = self.replay_endpoint
        changed = {
            "endpoint": _moved(self.endpoint, number),
            "replay_endpoint": None if replay is None else _moved(replay, number),
            "data_parallel_rank": self.data_parallel_rank + number,
        }
        return self.model_copy(update=changed)


def _moved(endpoint: str, number: int) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_{number}" if number else endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + number}"
