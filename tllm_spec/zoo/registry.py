"""Where models are: short names of those in the package, folders, and GGUF files."""

from importlib.util import find_spec
from pathlib import Path

ZOO_PREFIX = "zoo:"
GGUF = ".gguf"
MISSING = "a GGUF file needs the package gguf: pip install 'tllm_spec[gguf]'"
NAMES = ("llama", "llama-draft", "llama-eagle3", "llama-peagle", "deepseek")
_ZOO = Path(__file__).parent
_FOLDERS = {f"{ZOO_PREFIX}{name}": _ZOO / name for name in NAMES}


def resolve_file(path_or_name: str) -> Path:
    """A file in a folder of the zoo, such as `zoo:llama-draft/token_map.json`, or at a path. It
    need not exist."""
    name, _, file = path_or_name.partition("/")
    return _FOLDERS[name] / file if name in _FOLDERS else Path(path_or_name)


def resolve_model(path_or_name: str | Path) -> Path:
    """The local folder or GGUF file of a model, given by a zoo name such as `zoo:llama` or by its
    path.

    Raises ValueError for anything else, and for a GGUF file without the package gguf.
    """
    if isinstance(path_or_name, str) and path_or_name in _FOLDERS:
        return _FOLDERS[path_or_name]
    path = Path(path_or_name)
    if is_gguf(path) and find_spec("gguf") is None:
        raise ValueError(MISSING)
    if path_or_name != "" and (path.is_dir() or is_gguf(path)):
        return path
    raise ValueError(
        f"model {str(path_or_name)!r} is neither an existing local folder, nor a {GGUF} file, nor "
        f"a model of the zoo; the zoo has {', '.join(_FOLDERS)} (models are not downloaded: pass "
        "the folder of a checkpoint)"
    )


def is_gguf(path: Path) -> bool:
    """Whether a model is one file in the format GGUF, by its name."""
    return path.suffix == GGUF and path.is_file()
