"""The zoo's text: Python sources of a CPython standard library, split into training and held-out
files.

A file is held out by the hash of its path below the library's root, so every CPython holds out
(nearly) the same files. Knows nothing of tokens or models; needs neither torch nor transformers.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

HELD_OUT_ONE_IN = 20
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# encodings and pydoc_data are generated tables: easy to predict, they would flatter every figure.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


def training_files(root: Path | None = None, tests: bool = False) -> list[Path]:
    """Sorted files that a zoo model may be trained on; `tests` adds CPython's test suite where
    installed."""
    return [path for path, relative in _sources(root, tests) if not is_held_out(relative)]


def heldout_files(root: Path | None = None) -> list[Path]:
    """Sorted files that no zoo model or tokenizer was trained on; the test suite is not among
    them."""
    return [path for path, relative in _sources(root, tests=False) if is_held_out(relative)]


def is_held_out(relative: PurePosixPath) -> bool:
    """`relative` is the path below the library's root, as in `asyncio/events.py`."""
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def read_source(path: Path) -> str:
    """The file's text with its line ends as they are (`Path.read_text` would translate them)."""
    return path.read_bytes().decode("utf-8")


def _sources(root: Path | None, tests: bool) -> Iterator[tuple[Path, PurePosixPath]]:
    root = root or Path(sysconfig.get_path("stdlib"))
    skipped = SKIPPED_FOLDERS if tests else SKIPPED_FOLDERS | TEST_FOLDERS
    for path in sorted(root.rglob("*.py")):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if skipped.isdisjoint(relative.parts) and not _is_build_output(relative) and _is_text(path):
            yield path, relative


def _is_build_output(relative: PurePosixPath) -> bool:
    """Files that a CPython build writes: they hold paths of the machine that built it."""
    return relative.parts[0].startswith(("config-", "_sysconfigdata"))


def _is_text(path: Path) -> bool:
    try:
        return bool(read_source(path))
    except UnicodeDecodeError:
        return False
