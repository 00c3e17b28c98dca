"""Limits that the host sets for a process (`ulimit`), read before they are met."""

from __future__ import annotations

import resource

WANTED_FILES = 1 << 16
OTHER_FILES = 32  # open files of a front process that are no connections
MIN_FILES = OTHER_FILES + 32


def raise_file_limit() -> int:
    """Raises the limit of open files as far as the system allows, and returns it. Raises ValueError
    for a limit with which nothing can be served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    if limit < WANTED_FILES:
        limit = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < MIN_FILES:
        raise ValueError(
            f"a process may have {limit} open files, and a server needs {MIN_FILES}: raise the "
            "limit (ulimit -n)"
        )
    return limit


def memory_note() -> str:
    """What may explain that a process has ended or had too little memory; often nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"; a process may have {soft >> 20} MiB of address space (ulimit -v)"
