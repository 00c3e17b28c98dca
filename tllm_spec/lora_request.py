"""Which LoRA adapter a request uses, and what is known of a loaded one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from tllm_spec.config.option_checks import check_adapter_name, shown
from tllm_spec.request_errors import RequestError

NOT_LOADED = "no adapter with this name is loaded"


class UnknownAdapter(RequestError):
    """No adapter with this name is loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(f"lora_name = {name!r}: {NOT_LOADED}")


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter by its name, as in TensorRT-LLM and vLLM. Raises ValueError for a wrong name.

    lora_int_id: accepted and without effect; the name says which adapter it is. lora_path: the
    folder that it is loaded from at its first use; empty: it is loaded already."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        check_adapter_name(self.lora_name)
        if not isinstance(self.lora_path, (str, os.PathLike)):
            raise ValueError(f"lora_path = {shown(self.lora_path)}: a folder is needed")


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter. rank: the largest of its layers. folder: where it was read from.
    draft_rank: that of its part for the draft head; None: it has none."""

    name: str
    content_hash: str
    rank: int
    folder: str
    draft_rank: int | None = None

    @property
    def version(self) -> str:
        """Its identity, by which caches know it: name and content."""
        return f"{self.name}@{self.content_hash}"

    def check_unchanged(self, content_hash: str) -> None:
        """Raises ValueError where the folder does not have what was loaded from it before."""
        if self.content_hash != content_hash:
            raise ValueError(
                f"lora_name = {self.name!r}: {self.folder} has changed since it was loaded, and "
                "other engines serve what it had; bring it back, or load it again"
            )


def name_of_version(version: str) -> str:
    """The name in `AdapterInfo.version`."""
    return version.partition("@")[0]


def target_version(version: str) -> str:
    """The version without the part of it that acts on the draft head, which changes no text."""
    return version.partition("+")[0]


class AdapterSalt(NamedTuple):
    """The salt of requests with an adapter, which share cached text only with each other. own: the
    client's salt."""

    adapter: str  # `AdapterInfo.version`
    own: str | None


CacheSalt = str | AdapterSalt | None


def salt_of(own: str | None, adapter: str | None) -> CacheSalt:
    """The salt of a client's requests with this version of an adapter."""
    return own if adapter is None else AdapterSalt(adapter, own)
