"""The cache of compiled kernels on a disk that is full."""

import errno
import os
from pathlib import Path

import pytest

from tllm_spec.kernels.disk_cache import write_file


@pytest.mark.parametrize("place", ["mkdir", "write_bytes", "replace"])
def test_a_full_disk_is_logged_once_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os if place == "replace" else Path, place, full)
    for name in ("a", "b"):
        write_file(tmp_path / "cache" / name, b"compiled")
    (message,) = caplog.messages
    assert "No space left on device" in message and str(tmp_path) in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
