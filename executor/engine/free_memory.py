"""How much memory a device has before anything is loaded."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 1 << 30
# Limit and use of a container's memory, of both versions of Linux's control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated. On a host the pages of files count as free, and a limit of the
    process or of its container counts as the memory's end."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return max(min(_host_limits()), 0)


def machine_bytes() -> int:
    """The host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_limits() -> Iterator[int]:
    yield _available()
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        yield soft - _mapped()
    for limit, used in _GROUPS:
        most, now = _number(Path(limit)), _number(Path(used))
        if most is not None and now is not None and most < machine_bytes():
            yield most - now + _file_pages(Path(limit).parent / "memory.stat")


def _available() -> int:
    """Linux's estimate; elsewhere all of the machine's memory."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return machine_bytes()


def _mapped() -> int:
    """The process's address space in use."""
    first = next(iter(_lines(Path("/proc/self/statm"))), "0")
    return int(first.split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _file_pages(stat: Path) -> int:
    """Bytes of pages of files, which a container gives back when it needs memory."""
    fields = dict(line.split()[:2] for line in _lines(stat))
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _number(file: Path) -> int | None:
    """None: there is no such file, or it has no number, as where there is no limit."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
