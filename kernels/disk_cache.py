"""Cache files of compiled kernels and GEMM choices, for a faster next start. Without them
everything is compiled and measured again."""

import contextlib
import functools
import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Without a home directory: a path that can be neither read nor written."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tllm_spec"
    except RuntimeError:
        return Path(os.devnull) / "tllm_spec"


def write_file(path: Path, content: bytes) -> None:
    """Writes the file atomically: readers see the old file or the new one. A failure, as on a full
    disk, is logged once a folder."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        _warn(path.parent, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink()


@functools.cache  # a full disk fails for every file
def _warn(folder: Path, reason: str) -> None:
    logger.warning(
        "a file in %s was not written, so the next start compiles or measures again: %s",
        folder,
        reason,
    )
