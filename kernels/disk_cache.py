"""Cache files of compiled kernels and GEMM choices, for a faster next start. Without them
everything is compiled and measured again."""

import contextlib
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
    """Writes the file atomically: readers see the old file or the new one. A failure is logged."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning(
            "%s was not written, so the next start compiles or measures again: %s", path, error
        )
        with contextlib.suppress(OSError):
            temporary.unlink()
