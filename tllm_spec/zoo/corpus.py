"""The zoo's text: the Python sources of a CPython standard library, split into training and
held-out files.

The hash of a file's path in the library decides whether it is held out, so every CPython holds out
nearly the same files. Neither torch nor transformers is imported.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

HELD_OUT_ONE_IN = 20
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# encodings and pydoc_data are generated tables: easy to predict, they would improve every figure.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


def training_files(root: Path | None = None, tests: bool = False) -> list[Path]:
    """Sorted files for training; `tests` adds CPython's test suite if it is installed."""
    return [path for path, relative in _sources(root, tests) if not is_held_out(relative)]


def heldout_files(root: Path | None = None) -> list[Path]:
    """Sorted files that no model or tokenizer of the zoo was trained on, without the test suite."""
    return [path for path, relative in _sources(root, tests=False) if is_held_out(relative)]


def is_held_out(relative: PurePosixPath) -> bool:
    """`relative` is the path in the library, such as `asyncio/events.py`."""
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def read_source(path: Path) -> str:
    """The file's text with its own line ends, which `Path.read_text` would translate."""
    return path.read_bytes().decode("utf-8")


def _sources(root: Path | None, tests: bool) -> Iterator[tuple[Path, PurePosixPath]]:
    root = root or Path(sysconfig.get_path("stdlib"))
    skipped = SKIPPED_FOLDERS if tests else SKIPPED_FOLDERS | TEST_FOLDERS
    for path in sorted(root.rglob("*.py")):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        # Files that a CPython build writes have paths of the build machine.
        is_built = relative.parts[0].startswith(("config-", "_sysconfigdata"))
        if skipped.isdisjoint(relative.parts) and not is_built and _is_text(path):
            yield path, relative


def _is_text(path: Path) -> bool:
    try:
        return bool(read_source(path))
    except UnicodeDecodeError:
        return False
